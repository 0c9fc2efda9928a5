"""Failures of checks: one-sentence messages with the class, the method, the place, the result and the expectation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from qkv.errors import InputError


class CheckFailed(AssertionError):  # noqa: N818  (an AssertionError, whose name ends in Error already)
    """An object breaks the contract of its base class.

    The message is one sentence with the class, the method, the place, the expected result and the actual one.

    >>> issubclass(CheckFailed, AssertionError)
    True
    """


def fail(thing: object, method: str, message: str) -> NoReturn:
    """Raise `CheckFailed` about a method of an object."""
    raise CheckFailed(f"{type(thing).__name__}.{method}: {message}")


@contextmanager
def calling(thing: object, method: str, situation: str) -> Iterator[None]:
    """Turn any exception in the block into a `CheckFailed` about a method of an object."""
    try:
        yield
    except CheckFailed:
        raise
    except InputError as error:
        fail(thing, method, f"{situation}: {str(error).removeprefix(f'{type(thing).__name__}: ')}")
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckFailed(
            f"{type(thing).__name__}.{method}: {situation}: raised {type(error).__name__}: {reason}"
        ) from error


def shape_of(x: object) -> str:
    """A short description of a value that a method returned."""
    if isinstance(x, Tensor):
        return f"{x.dtype} of shape {tuple(x.shape)}"
    return f"the class {x.__name__}" if isinstance(x, type) else f"an object of class {type(x).__name__}"


def number(x: object) -> str:
    """A number as messages print it."""
    return f"{x:.8g}" if isinstance(x, float) else str(x)


@dataclass(frozen=True)
class Difference:
    """The largest difference of two tensors; its string is part of a sentence."""

    place: tuple[int, ...]
    got: float | bool
    want: float | bool

    def __str__(self) -> str:
        return f"got {number(self.got)} at {self.place}, expected {number(self.want)}"


def difference(got: Tensor, want: Tensor, tolerance: float = 0.0) -> Difference | None:
    """The largest difference above a tolerance, or None; NaN differs from everything but NaN."""
    got, want = torch.broadcast_tensors(got.detach(), want.detach())
    if want.dtype == torch.bool:
        off = (got != want).double()
    else:
        got, want = got.double(), want.double()
        same = (got == want) | (got.isnan() & want.isnan())
        off = torch.where(same, 0.0, (got - want).abs().nan_to_num(nan=torch.inf))
    if not bool((off > tolerance).any()):
        return None
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    return Difference(place, got[place].item(), want[place].item())


def check_returned(
    thing: object, method: str, made: object, shape: Sequence[int], dtype: torch.dtype | None, arguments: str
) -> Tensor:
    """The value that a method returned; fails unless it is a tensor of this shape and at least this precision."""
    if not isinstance(made, Tensor) or tuple(made.shape) != tuple(shape):
        fail(thing, method, f"returned {shape_of(made)} for {arguments}, expected a tensor of shape {tuple(shape)}")
    if dtype is not None and torch.promote_types(made.dtype, dtype) != made.dtype:
        fail(thing, method, f"returned {made.dtype} for {arguments}, expected {dtype}")
    return made
