"""Forms of inputs: fewer dimensions, NumPy arrays, and the arguments of torch's functions.

Inputs are tensors or NumPy arrays of shape (batch, heads, length, head_dim), (batch, length, head_dim) or
(length, head_dim); fewer dimensions mean one head. Under autocast, calls are computed in its dtype, as in torch's SDPA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qkv._engine.call import as_biases, as_mask
from qkv._names import OTHER_NAMES
from qkv.biases import Bias, Dense
from qkv.errors import InputError, nearest
from qkv.masks import Mask, from_sdpa
from qkv.scores import Dot, Score

A = TypeVar("A", Tensor, np.ndarray)
T = TypeVar("T")


def refuse_unknown(function: Callable[..., object], unknown: Mapping[str, object]) -> None:
    """Raise `InputError` for unknown arguments; for the names of other libraries it says what to pass instead."""
    known = [x.name for x in inspect.signature(function).parameters.values() if x.kind is x.KEYWORD_ONLY]
    for name in unknown:
        if name in OTHER_NAMES:
            raise InputError(f"{function.__name__}: {name} is not an argument; pass {OTHER_NAMES[name]}")
        raise InputError(
            f"{function.__name__}: {name} is not an argument, expected one of {', '.join(known)}{nearest(name, known)}"
        )


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

    def returned(self, x: Any) -> Any:
        """A tensor or a dataclass of tensors in the form of the inputs."""
        return self.back(x) if isinstance(x, Tensor) else self.all_back(x)

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


def from_torch_names(
    lengths: tuple[int, int], mask: Mask | Tensor | None, bias: Bias | Sequence[Bias] | None, score: Score | None,
    attn_mask: Tensor | None, is_causal: bool, scale: float | None,
) -> tuple[Mask | Tensor | None, Bias | Sequence[Bias] | None, Score | None]:  # fmt: skip
    """Mask, bias and score with torch's arguments added; `lengths` are the numbers of queries and keys.

    >>> from_torch_names((3, 3), None, None, None, None, True, 0.5)
    (Causal(), None, Dot(scale=0.5))
    """
    if scale is not None:
        if score is not None:
            raise InputError(f"scale is {scale} with score={type(score).__name__}, expected one of them")
        score = Dot(scale)
    if isinstance(attn_mask, Tensor) and attn_mask.dtype.is_floating_point:
        bias = (*as_biases(bias), Dense(attn_mask))
        attn_mask = None
    if attn_mask is not None or is_causal:
        if attn_mask is not None and mask is not None:
            raise InputError("attn_mask is passed with a mask, expected one of them: True means may attend in both")
        if attn_mask is not None and is_causal:
            raise InputError("attn_mask is passed with is_causal=True, expected one of them, as in torch")
        n_queries, n_keys = lengths
        visible = from_sdpa(attn_mask, is_causal=is_causal, n_queries=n_queries, n_keys=n_keys)
        own = as_mask(mask)
        mask = visible if own is None else own & visible
    return mask, bias, score
