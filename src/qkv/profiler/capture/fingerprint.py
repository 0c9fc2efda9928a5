"""Whether a model is still the one of an earlier call: its modules, their attributes, and every byte of its tensors."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Hashable
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def fingerprint(model: nn.Module) -> Hashable | None:
    """A key that differs whenever the model may compute something else, or None if that cannot be told.

    It covers the class of every module, all their attributes (so also the configuration and the training mode), the
    bytes of all parameters and buffers, and autocast. Version counters of tensors would not be enough, as a change
    through ``parameter.data`` does not count. A model with forward hooks, with a replaced ``forward``, or with an
    attribute that cannot be pickled gives None. It does not see a function that was replaced in a Python module, nor
    a new entry in a registry that the model reads.

    >>> layer = nn.Linear(2, 2)
    >>> before = fingerprint(layer)
    >>> fingerprint(layer) == before
    True
    >>> _ = layer.weight.data[0].mul_(2)
    >>> fingerprint(layer) == before
    False
    """
    modules = list(model.modules())
    if any(map(_hooked, modules)) or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    state = io.BytesIO()
    try:
        _StatePickler(state, modules).dump([_attributes(m) for m in modules])
    except Exception:  # pickling runs code of the attributes, which can raise anything
        return None
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
    return tuple((type(m), type(m).forward) for m in modules), autocast, xxhash.xxh3_128_digest(state.getvalue())


BOOKKEEPING = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}  # such as empty hooks


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if name not in BOOKKEEPING}


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


class _StatePickler(pickle.Pickler):
    """Pickles attributes of modules, with a module as its place in the model and a tensor as a hash of its bytes."""

    def __init__(self, file: io.BytesIO, modules: list[nn.Module]) -> None:
        super().__init__(file)
        self._places = {id(m): i for i, m in enumerate(modules)}

    def persistent_id(self, obj: Any) -> Hashable | None:
        if id(obj) in self._places:
            return self._places[id(obj)]
        return _hashed(obj) if isinstance(obj, Tensor) else None


def _hashed(x: Tensor) -> Hashable:
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta or x.is_quantized:
        raise TypeError(f"the values of a {type(x).__name__} cannot be read")
    values = x.detach().contiguous().reshape(-1).view(torch.uint8)
    digest = xxhash.xxh3_128_digest(values.numpy().data) if x.device.type == "cpu" else sums_of_bytes(values)
    return str(x.dtype), tuple(x.shape), str(x.device), digest


PART = 2**22  # numbers summed at a time: 32 MB


def sums_of_bytes(values: Tensor) -> tuple[int, ...]:
    """A hash of bytes that is computed where they are, as moving a model off a GPU would take seconds.

    The sum, modulo 2⁶⁴, of each four bytes times a random odd number: one changed number always changes it, and other
    changes with a probability of 1 − 2⁻⁶⁴.
    """
    numbers = nn.functional.pad(values, (0, -len(values) % 4)).view(torch.int32)
    factors = _factors(values.device)
    sums = [(part.long() * factors[: len(part)]).sum() for part in numbers.split(PART)]
    return tuple(torch.stack(sums).tolist()) if sums else ()


@functools.cache
def _factors(device: torch.device) -> Tensor:
    numbers = torch.randint(-(2**62), 2**62, (PART,), generator=torch.Generator().manual_seed(0))
    return (2 * numbers + 1).to(device)
