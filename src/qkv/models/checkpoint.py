"""Saving and loading models: a folder with config.json and model.safetensors, and the models that come with qkv.

What a safetensors file declares is compared with the model before its weights are read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv._files import write_atomically
from qkv._packages import LAB, explain, from_lab, lab_is_missing
from qkv._untrusted import Budget, SizeError, check_version, load_json
from qkv.errors import InputError, first_line, refusing
from qkv.models import config as configs
from qkv.models.decoder import DecoderConfig, DecoderLM

M = TypeVar("M", bound=nn.Module)
Weights = Mapping[str, Tensor]
NAMES = {
    "qkv-mini": "a causal language model of Python code",
    "qkv-reversal": "reverses six symbols: its heads look at the mirrored position",
    "qkv-translation": "English to French with Bahdanau's attention, in a small grammar",
    "qkv-caption": "captions of small scenes, each word found by looking at the image",
}


def folder_of(name: str) -> Path | None:
    """The folder of a model that comes with qkv or qkv-lab, or that of a run of `qkv train`; None for any other name.

    Raises:
        InputError: if the model is in qkv-lab, which is not installed.

    >>> folder_of("gpt2") is None
    True
    """
    if name not in NAMES:
        inside = os.path.join(name, "model")  # takes names of any length
        found = os.path.exists(os.path.join(inside, CONFIG)) and not os.path.exists(os.path.join(name, CONFIG))
        return Path(inside) if found else None
    if name == "qkv-mini":
        return Path(str(files("qkv.models") / "trained" / name))
    if importlib.util.find_spec(LAB) is None:
        raise InputError(lab_is_missing(f"model {name!r}"))
    return Path(str(files("qkv_lab.models") / "trained" / name))


CONFIG, WEIGHTS = "config.json", "model.safetensors"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHOWN = 20  # tensors of one problem that a message lists
VERSION = 1
"""The version of the format; increase it when an older qkv could misread a folder that this version writes."""
KINDS = ("DecoderLM", "EncoderDecoder", "RNNSeq2Seq", "Captioner", "Classifier")
"""The classes whose checkpoints `load` reads; all but the first are in the distribution qkv-lab."""


def class_of(kind: str) -> tuple[type[Any], type[nn.Module]]:
    """The configuration and the class of a kind of model."""
    if kind == "DecoderLM":
        return DecoderConfig, DecoderLM
    try:
        config, model = (from_lab(f"qkv.models.{kind}", "qkv_lab.models", name) for name in (f"{kind}Config", kind))
    except ModuleNotFoundError as error:
        raise explain(f"model: {kind}", error) or error from error
    return config, model


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
    import safetensors.torch

    kind = type(model).__name__
    if kind not in KINDS or not isinstance(model, class_of(kind)[1]):
        raise InputError(f"model is {kind}, expected one of {', '.join(KINDS)}")
    described = {"format_version": VERSION, "model": kind, "config": configs.to_dict(model.config)}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: x.contiguous() for name, x in _unique_tensors(model).items()}
    write_atomically(folder / WEIGHTS, safetensors.torch.save(weights))
    write_atomically(folder / CONFIG, json.dumps(described, indent=1) + "\n")
    return folder


def load(folder: str | Path) -> nn.Module:
    """Load a model that `save` wrote, or one that comes with qkv: see `qkv.models.load`."""
    own = str(folder) in NAMES
    folder = folder_of(str(folder)) or Path(folder)
    described = read_config(folder)
    kind, entries = described.get("model"), described.get("config")
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(entries, dict):
        raise InputError(f"{CONFIG} in {folder} has model {kind!r}, expected one of {', '.join(KINDS)} with its config")
    config_class, model_class = class_of(kind)
    unreadable = f"{WEIGHTS} in {folder} cannot be read ({{}}), expected weights as safetensors"
    with refusing(unreadable, OSError, ValueError):
        declared = declared_tensors(folder / WEIGHTS)
        stored = (folder / WEIGHTS).stat().st_size
    with valid_config(folder):
        check_version(described, VERSION)
        config = configs.from_dict(config_class, entries)
        empty = build_without_memory(lambda: model_class(config), len(declared), stored)
    check_fit(empty, declared)  # before its weights are read
    with valid_config(folder):
        model = model_class(config)
    with refusing(unreadable, OSError, ValueError):
        fill(model, read_tensors(folder / WEIGHTS))
    return (model.float() if own else model).eval()


def valid_config(folder: Path) -> AbstractContextManager[None]:
    """Inside, any error means that the entries of a configuration are invalid: they can have any type and size."""
    return refusing(f"{CONFIG} in {folder} is not a valid configuration ({{}})")


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json."""
    absent = refusing(f"model: no {CONFIG} in {folder} ({{}})", OSError)
    with absent, refusing(f"{CONFIG} in {folder} cannot be read as JSON ({{}})", ValueError):
        found = load_json(folder / CONFIG)
    if not isinstance(found, dict):
        raise InputError(f"{CONFIG} in {folder} is a {type(found).__name__}, expected a JSON object")
    return found


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's parameters by name, with the dtypes of the tensors."""
    check_fit(model, weights)
    kept = model.state_dict(keep_vars=True)
    for name, x in _unique_tensors(model).items():
        kept[name].data = weights[name].to(x.device, copy=True, memory_format=torch.contiguous_format)


def check_fit(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Check tensors against the model's parameters; both may be on torch's meta device."""
    own = _unique_tensors(model)
    both = [(name, x, weights[name]) for name, x in own.items() if name in weights]
    missing = sorted(set(own) - set(weights))
    unexpected = sorted(set(weights) - set(own))
    shapes = [f"{name} is {tuple(y.shape)}, expected {tuple(x.shape)}" for name, x, y in both if x.shape != y.shape]
    dtypes = [
        f"{name} is {y.dtype}, expected {', '.join(map(str, FLOATS)) if x.is_floating_point() else x.dtype}"
        for name, x, y in both
        if (y.dtype not in FLOATS if x.is_floating_point() else y.dtype != x.dtype)
    ]
    problems = [
        f"{what}: {', '.join(names[:SHOWN])}" + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for what, names in (
            ("missing", missing), ("unexpected", unexpected), ("wrong shape", shapes), ("wrong dtype", dtypes),
        )
        if names
    ]  # fmt: skip
    if problems:
        raise InputError(f"checkpoint does not fit {type(model).__name__}, nothing was loaded: {'; '.join(problems)}")


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared tensor appears once, under its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        first.setdefault(id(x), (name, x.detach()))
    return dict(first.values())


# --- safetensors ------------------------------------------------------------------------------------------------------


HEADER = 16 * 2**20
"""Bytes of the header of a file, enough for 100,000 tensors."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
RANDOM = (nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_)
SPARE_PARAMETERS = 1000
"""Parameters that a model may have beside two for each tensor of its file, such as tied and new ones."""


def declared_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file without their data, on torch's meta device; ValueError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    stored = path.stat().st_size
    Budget(stored).take(stored)
    with path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") > HEADER:
            raise ValueError("it is not a safetensors file, or its header is too long")
    try:
        with safe_open(path, "pt") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            kinds = {name: DTYPES.get(x.get_dtype()) for name, x in found.items()}
            if None in kinds.values():
                raise ValueError(f"a tensor has another dtype than {', '.join(DTYPES)}")
            return {name: torch.empty(x.get_shape(), dtype=kinds[name], device="meta") for name, x in found.items()}
    except (SafetensorError, RuntimeError, TypeError) as error:  # of torch: for numbers of more than 63 bits
        raise ValueError(first_line(error)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors.torch import load_file

    declared_tensors(path)
    return dict(load_file(path))


def build_without_memory(build: Callable[[], M], tensors: int, stored: int) -> M:
    """Build a model, whose file has so many tensors and bytes, on torch's meta device, which allocates nothing."""
    try:
        with torch.device("meta"), _NotInitialised(), _few_parameters(2 * tensors + SPARE_PARAMETERS):
            model = build()
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise SizeError("the configuration asks for tensors of more than 2⁶³ bytes") from error
    budget = Budget(stored)
    for x in (*model.parameters(), *model.buffers()):
        budget.take(x.numel() * x.element_size())
    return model


class _NotInitialised(TorchFunctionMode):
    """Inside, random initial values are not drawn: on the meta device that would import large parts of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in RANDOM:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


@contextmanager
def _few_parameters(most: int) -> Iterator[None]:
    """Inside, this thread may register only so many parameters: a configuration can ask for 2⁴⁰ layers."""
    count, thread = 0, threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > most:
            raise SizeError(f"the configuration asks for more than {most:,} parameters")

    hook = nn.modules.module.register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def files_of(folder: Path, weights: str) -> list[str]:
    """The names of the safetensors files of a model: those in its index, or `weights` if it has none."""
    index = folder / f"{weights}.index.json"
    if not index.exists():
        return [weights]
    try:
        names = sorted(set(load_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index.name} in {folder} is not an index of safetensors files") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index.name} in {folder} names {name!r}, expected a file in the same folder")
    return names
