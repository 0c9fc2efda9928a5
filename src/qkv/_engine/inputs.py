"""Input forms of q, k and v: conversion to 4-dimensional tensors, and of results back to the form of the inputs.

Inputs are tensors or NumPy arrays of shape (batch, heads, length, head_dim), (batch, length, head_dim) or
(length, head_dim); fewer dimensions mean one head. Under autocast, calls are computed in its dtype, as in torch's SDPA.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qkv._names import OTHER_NAMES
from qkv.errors import InputError, nearest

A = TypeVar("A", Tensor, np.ndarray)
T = TypeVar("T")


def refuse_unknown(function: str, unknown: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise `InputError` for unknown arguments; for the names of other libraries it says what to pass instead."""
    for name in unknown:
        if name in OTHER_NAMES:
            raise InputError(f"{function}: {name} is not an argument; pass {OTHER_NAMES[name]}")
        raise InputError(
            f"{function}: {name} is not an argument, expected one of {', '.join(known)}{nearest(name, known)}"
        )


@dataclass(frozen=True)
class Form:
    """Form of the inputs of a call: their number of dimensions, and whether they are NumPy arrays."""

    ndim: int
    array: bool

    @staticmethod
    def of(*given: Any) -> tuple[Form, list[Tensor]]:
        """The common form of the inputs, and the inputs as tensors (batch, heads, length, head_dim)."""
        arrays = [isinstance(x, np.ndarray) for x in given]
        if any(arrays) and not all(arrays):
            raise InputError("q, k and v mix tensors and NumPy arrays, expected all of one type")
        tensors = [torch.from_numpy(x) if array else x for x, array in zip(given, arrays, strict=True)]
        sizes = {x.ndim if isinstance(x, Tensor) else 4 for x in tensors}
        ndim = sizes.pop() if len(sizes) == 1 else 4  # `Call.of` rejects mixed shapes
        if ndim == 3:
            tensors = [x[:, None] for x in tensors]
        elif ndim == 2:
            tensors = [x[None, None] for x in tensors]
        return Form(ndim, arrays[0]), tensors

    def back(self, x: Tensor) -> Any:
        """A result (batch, heads, …) in the form of the inputs."""
        x = x[0, 0] if self.ndim == 2 else x[:, 0] if self.ndim == 3 else x
        return x.detach().numpy() if self.array else x

    def all_back(self, found: T) -> T:
        """A dataclass with all tensors in it, including nested ones, in the form of the inputs."""
        if self.ndim == 4 and not self.array:
            return found
        made = copy(found)
        for one in fields(found):  # type: ignore[arg-type]
            value = getattr(found, one.name)
            if isinstance(value, Tensor):
                value = self.back(value)
            elif isinstance(value, Mapping):
                value = {name: self.back(x) for name, x in value.items()}
            elif is_dataclass(value):
                value = self.all_back(value)
            object.__setattr__(made, one.name, value)
        return made


def autocast_dtype(q: Any) -> torch.dtype | None:
    """The dtype of autocast on the device of q, or None if autocast is off or q is float64."""
    if (
        not isinstance(q, Tensor)
        or q.dtype == torch.float64
        or q.is_meta
        or not torch.is_autocast_enabled(q.device.type)
    ):
        return None
    return torch.get_autocast_dtype(q.device.type)
