"""Verdicts on an answer to an exercise: what is expected, and hints for wrong answers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qkv.errors import InputError


class Wrong(Exception):  # noqa: N818  # a verdict on an answer, not an error of the program
    """An answer fails a trial; the message is the hint: the expected and the actual result, and the likely mistake."""


class Failed(Exception):  # noqa: N818
    """Ends a check after its first ✗; the message is the hint."""


def exercise(check: Callable[[Any], None]) -> Callable[[Any], bool]:
    """Make a check of a function that runs trials of an answer: it returns True if all pass, else False at the first ✗.

    The check raises `InputError` for an answer that is no function or class.
    """

    @functools.wraps(check)
    def judged(answer: Any) -> bool:
        if not callable(answer):
            raise InputError(f"answer is {type(answer).__name__}, expected a function or class")
        try:
            check(answer)
        except Failed:
            return False
        return True

    judged.__signature__ = inspect.signature(check).replace(return_annotation="bool")  # type: ignore[attr-defined]
    return judged


@contextmanager
def trial(name: str) -> Iterator[None]:
    """Print ✓ if the code inside passes, else ✗ with the hint of `Wrong`, or with any other exception in one line."""
    try:
        yield
    except Exception as error:
        hint = str(error) if isinstance(error, Wrong) else f"it raises {type(error).__name__}: {error}"
        print(f"✗ {name}: {hint}")
        raise Failed(hint) from None
    print(f"✓ {name}")


def near(got: object, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Raise `Wrong` unless a tensor has the expected shape and values."""
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is {type(got).__name__}, expected a tensor")
    if got.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = (got.detach() - expected).abs().max().item() if expected.numel() else 0.0
    if not difference <= tolerance:
        raise Wrong(f"{what} is off by {difference:.3g}")


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers from a seed; torch's global generator is not used."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7919 * seed + sum(shape)))


def pair(got: object) -> tuple[Tensor, Tensor]:
    """The returned pair (out, weights); `Wrong` for anything else."""
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(x, Tensor) for x in got)):
        found = f"a tuple of {len(got)}" if isinstance(got, tuple) else type(got).__name__
        raise Wrong(f"it returns {found}, expected a pair of tensors: out, weights")
    return got


def expect(
    got: object, expected: Tensor, what: str, mistakes: Mapping[str, Tensor] | None = None, tolerance: float = 1e-5
) -> None:
    """Raise `Wrong` unless a tensor is the expected one. If it equals the result of a known mistake, give its hint."""
    try:
        near(got, expected, what, tolerance)
    except Wrong:
        if not isinstance(got, Tensor):
            raise
        for hint, wrong in (mistakes or {}).items():
            if same(got, wrong, tolerance):
                raise Wrong(hint) from None
        if got.shape == expected.shape and bool(got.detach().isnan().any()):
            raise Wrong(f"{what} contains NaN") from None
        raise


def expect_pair(got: object, expected: tuple[Tensor, Tensor], mistakes: Mapping[str, Tensor] | None = None) -> None:
    """Raise `Wrong` unless an answer is the expected pair (out, weights); the mistakes are those of the weights."""
    out, weights = pair(got)
    expect(weights, expected[1], "weights", mistakes)
    expect(out, expected[0], "out")


def same(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """True if two tensors have the same shape and equal values within the tolerance; NaN equals NaN."""
    return a.shape == b.shape and torch.allclose(
        a.detach().double(), b.detach().double(), rtol=0, atol=tolerance, equal_nan=True
    )
