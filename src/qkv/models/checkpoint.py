"""Saving and loading models: a folder with config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models import bundled
from qkv.models import config as configs
from qkv.models.captioner import Captioner, CaptionerConfig
from qkv.models.classifier import Classifier, ClassifierConfig
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from qkv.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KINDS: dict[str, tuple[type[Any], type[nn.Module]]] = {
    "DecoderLM": (DecoderConfig, DecoderLM),
    "EncoderDecoder": (EncoderDecoderConfig, EncoderDecoder),
    "RNNSeq2Seq": (RNNSeq2SeqConfig, RNNSeq2Seq),
    "Captioner": (CaptionerConfig, Captioner),
    "Classifier": (ClassifierConfig, Classifier),
}


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a model of `qkv.models`: its configuration as JSON and its weights as safetensors, both as atomic writes.

    Raises:
        InputError: for another model, and for a composition with parts that have no form in JSON, such as a mask class
            of your own.

    >>> import tempfile
    >>> model = DecoderLM(DecoderConfig(vocab_size=10, d_model=8, layers=1, heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(sorted(p.name for p in save(model, folder).iterdir()))
    ['config.json', 'model.safetensors']
    """
    from safetensors.torch import save_file

    kind = type(model).__name__
    if kind not in KINDS or not isinstance(model, KINDS[kind][1]):
        raise InputError(f"model is {kind}, expected one of {', '.join(KINDS)}")
    described = {"model": kind, "config": configs.to_dict(model.config)}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.contiguous() for name, x in _unique_tensors(model).items()}
    unfinished = folder / f".{WEIGHTS}.part"
    save_file(tensors, unfinished)
    unfinished_config = folder / f".{CONFIG}.part"
    unfinished_config.write_text(json.dumps(described, indent=1) + "\n")
    unfinished.replace(folder / WEIGHTS)
    unfinished_config.replace(folder / CONFIG)
    return folder


@overload
def load(folder: Literal["qkv-mini", "qkv-reversal"]) -> DecoderLM: ...
@overload
def load(folder: Literal["qkv-translation"]) -> RNNSeq2Seq: ...
@overload
def load(folder: Literal["qkv-caption"]) -> Captioner: ...
@overload
def load(folder: str | Path) -> nn.Module: ...
def load(folder: str | Path) -> nn.Module:
    """Load a model that `save` wrote, in evaluation mode and with its saved dtypes, or a model that comes with qkv.

    Models that come with qkv have float32 weights once loaded; the file of qkv-mini holds them in float16.

    >>> type(load("qkv-reversal")).__name__
    'DecoderLM'

    Raises:
        InputError: if the folder has no model, the kind of model or a key of its configuration is unknown, or weights
            do not fit the model; the message lists all of them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    own = bundled.folder_of(str(folder))
    folder = own or Path(folder)
    described = read_config(folder)
    kind, entries = described.get("model"), described.get("config")
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(entries, dict):
        raise InputError(f"{CONFIG} in {folder} has model {kind!r}, expected one of {', '.join(KINDS)} with its config")
    config_class, model_class = KINDS[kind]
    model = _build(folder, config_class, model_class, entries)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{WEIGHTS} in {folder} cannot be read ({error})") from error
    fill(model, tensors)
    return (model.float() if own else model).eval()


def _build(folder: Path, config_class: type[Any], model_class: type[nn.Module], entries: dict[str, Any]) -> nn.Module:
    """Build the model of a configuration; raise `InputError` if its entries are invalid."""
    try:
        return model_class(configs.from_dict(config_class, entries))
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{CONFIG} in {folder} is not a valid configuration ({error})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: no {CONFIG} in {folder} ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{CONFIG} in {folder} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"{CONFIG} in {folder} is a {type(found).__name__}, expected a JSON object")
    return found


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's parameters by name, with the dtypes of the tensors.

    Raises:
        InputError: if any tensor is missing, unexpected or of another shape; all are listed, and none is copied.
    """
    own = _unique_tensors(model)
    missing = sorted(set(own) - set(tensors))
    unexpected = sorted(set(tensors) - set(own))
    shapes = [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(x.shape)}"
        for name, x in own.items()
        if name in tensors and tensors[name].shape != x.shape
    ]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", shapes))
        if names
    ]
    if problems:
        raise InputError(f"checkpoint does not fit {type(model).__name__}, nothing was loaded: {'; '.join(problems)}")
    kept = model.state_dict(keep_vars=True)
    for name, x in own.items():
        kept[name].data = tensors[name].to(x.device, copy=True, memory_format=torch.contiguous_format)


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared tensor appears once, under its first name."""
    seen: set[int] = set()
    out = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if id(x) not in seen:
            seen.add(id(x))
            out[name] = x
    return {name: x.detach() for name, x in out.items()}
