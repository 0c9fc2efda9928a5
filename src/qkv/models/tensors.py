"""Weights in safetensors files: declared sizes are checked before they are read; files of the hub."""

from __future__ import annotations

import functools
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv._untrusted import Budget, SizeError, first_line, load_json, parse_json
from qkv.errors import InputError, nearest

M = TypeVar("M", bound=nn.Module)
HEADER = 16 * 2**20
"""Bytes of the header of a file, enough for 100,000 tensors."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
RANDOM = (nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_)
SPARE_PARAMETERS = 1000
"""Parameters that a model may have beside two for each tensor of its file, such as tied and new ones."""


def header(path: Path) -> dict[str, Any]:
    """The entries of a safetensors file's header: the dtype, shape and place of each tensor by name."""
    with path.open("rb") as file:
        stored = path.stat().st_size
        Budget(stored).take(stored)
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(HEADER, stored - 8):
            raise ValueError("it is not a safetensors file, or is truncated")
        found = parse_json(file.read(size))
    if not isinstance(found, dict):
        raise ValueError("its header is not a JSON object")
    found.pop("__metadata__", None)
    end = max((_end(name, entry) for name, entry in found.items()), default=0)
    if 8 + size + end != stored:
        raise ValueError(f"it is {stored:,} bytes long, but declares {8 + size + end:,}: it is truncated or damaged")
    return found


def _end(name: str, entry: Any) -> int:
    """The offset at which a tensor ends; raises ValueError for an entry that is not of this form."""
    match entry:
        case {"dtype": str(), "shape": [*shape], "data_offsets": [int(), int(end)]} if all(
            type(n) is int and n >= 0 for n in shape
        ):
            return end
    raise ValueError(f"its header has a wrong entry for {name[:80]!r}")


def declared(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file without their data, on torch's meta device."""
    found = {}
    for name, entry in header(path).items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name[:80]!r} has the dtype {entry['dtype'][:20]}, expected one of {', '.join(DTYPES)}")
        try:
            found[name] = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
        except (RuntimeError, TypeError) as error:  # TypeError for numbers of more than 63 bits
            raise ValueError(f"{name[:80]!r} is too large ({first_line(error)})") from error
    return found


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors.torch import load_file

    header(path)
    try:
        return dict(load_file(path))
    except OSError:
        raise
    except Exception as error:  # errors of safetensors, and of torch for dtypes that it does not have
        raise ValueError(first_line(error)) from error


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


PATIENCE = 3.0  # seconds to wait for a connection
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def only_cached(name: str, known: tuple[str, ...]) -> bool:
    """True if a model of the hub has to come from the local cache, because the hub cannot be reached.

    Args:
        name: of a model on the hub, such as "gpt2" or "meta-llama/Llama-3.2-1B".
        known: names of models that need no hub, for the hint of an error.
    """
    expected = f"expected {', '.join(map(repr, known))}, a folder with a model, or a name on the Hugging Face hub"
    if not NAME.fullmatch(name):
        raise InputError(f"model is {name!r}, {expected}{nearest(name, known)}")
    from huggingface_hub import constants, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    if constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT):
        if not cached:
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
            raise InputError(
                f"model is {name!r}, which is not in the cache of the Hugging Face hub, and {why}; "
                f"{expected}{nearest(name, known)}"
            )
        return True
    return False


@functools.cache
def reachable(address: str) -> bool:
    """True if a connection to the host of a web address, or to the proxy for it, succeeds within seconds."""
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = parts.port or (80 if parts.scheme == "http" else 443)
    found = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), PATIENCE).close()
        except OSError:
            return
        found.set()

    # In a thread, because the look-up of a name has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found.is_set()
