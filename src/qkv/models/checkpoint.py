"""Models on disk: a folder with config.json and model.safetensors."""

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
    """Write a model of `qkv.models`: its configuration as JSON, its weights as safetensors, each whole or not at all.

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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.contiguous() for name, x in _own(model).items()}
    unfinished = folder / f".{WEIGHTS}.part"
    save_file(tensors, unfinished)
    described = {"model": kind, "config": configs.to_dict(model.config)}
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
    """The model that `save` wrote, in evaluation mode and the dtypes it was saved in; or one that comes with qkv.

    >>> type(load("qkv-reversal")).__name__
    'DecoderLM'

    Raises:
        InputError: for a folder that holds none, an unknown kind or configuration key, and weights that do not fit:
            all of them are listed, and nothing is loaded.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = bundled.folder_of(str(folder)) or Path(folder)
    described = read_config(folder)
    kind, entries = described.get("model"), described.get("config")
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(entries, dict):
        raise InputError(f"{folder / CONFIG}: model is {kind!r}, expected one of {', '.join(KINDS)} and its config")
    config_class, model_class = KINDS[kind]
    model = _made(folder, config_class, model_class, entries)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / WEIGHTS}: cannot be read ({error})") from error
    fill(model, tensors)
    return model.eval()


def _made(folder: Path, config_class: type[Any], model_class: type[nn.Module], entries: dict[str, Any]) -> nn.Module:
    """The model of a configuration; `InputError` for entries that no model can be made of."""
    try:
        return model_class(configs.from_dict(config_class, entries))
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{folder / CONFIG}: no model can be made of it ({error})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: no {CONFIG} in {folder} ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{folder / CONFIG}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"{folder / CONFIG}: expected a JSON object, got {type(found).__name__}")
    return found


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's parameters by name, in the dtypes of the tensors. If any is missing, unexpected or
    of another shape, list them and copy none.
    """
    own = _own(model)
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
        raise InputError(f"checkpoint does not fit {type(model).__name__}; nothing was loaded; {'; '.join(problems)}")
    kept = model.state_dict(keep_vars=True)
    for name, x in own.items():
        kept[name].data = tensors[name].to(x.device, copy=True, memory_format=torch.contiguous_format)


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and kept buffers by name, each once: what is shared has the name it has first."""
    seen: set[int] = set()
    out = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if id(x) not in seen:
            seen.add(id(x))
            out[name] = x
    return {name: x.detach() for name, x in out.items()}
