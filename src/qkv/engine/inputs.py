"""Forms of inputs: fewer dimensions, NumPy arrays, and autocast.

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

from qkv.engine.call import Result
from qkv.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """Form of the inputs of a call: their number of dimensions, and whether they are NumPy arrays."""

    ndim: int
    array: bool

    @staticmethod
    def of(*given: Any) -> tuple[Form, list[Tensor]]:
        """The common form of the inputs, and the inputs as tensors (batch, heads, length, head_dim)."""
        if all(isinstance(x, Tensor) and x.ndim == 4 for x in given):
            return TENSORS, list(given)
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
        if not self.array:
            return x
        return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()  # NumPy has no bfloat16

    def result(self, result: Result[Tensor], *, lse: bool, weights: bool) -> Result[Any]:
        """The requested parts of a result in the form of the inputs."""
        log_sums = self.back(result.lse) if lse and result.lse is not None else None
        formed = self.back(result.weights) if weights and result.weights is not None else None
        statistics = None if result.statistics is None else self.all_back(result.statistics)
        return Result(self.back(result.out), log_sums, formed, statistics)

    def all_back(self, found: T) -> T:
        """A dataclass with all tensors in it, including nested ones, in the form of the inputs."""
        if self.ndim == 4 and not self.array:
            return found
        converted = copy(found)
        for one in fields(found):  # type: ignore[arg-type]
            value = getattr(found, one.name)
            if isinstance(value, Tensor):
                value = self.back(value)
            elif isinstance(value, Mapping):
                value = {name: self.back(x) for name, x in value.items()}
            elif is_dataclass(value):
                value = self.all_back(value)
            object.__setattr__(converted, one.name, value)
        return converted


TENSORS = Form(4, array=False)


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
