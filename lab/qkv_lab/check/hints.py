"""Verdicts on an answer to an exercise: what is expected, and hints for wrong answers."""

from __future__ import annotations

import functools
import hashlib
import inspect
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

import qkv
from qkv.errors import InputError
from qkv.normalizers import Normalizer


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


_student: ContextVar[int] = ContextVar("student", default=0)


@contextmanager
def numbers_of(student: str) -> Iterator[None]:
    """Inside, checks draw the numbers of a student, which the name determines; "" stands for those of the labs.

    Names are equal whose letters differ in case alone, as on file systems.
    """
    name = unicodedata.normalize("NFC", student.strip()).casefold()
    token = _student.set(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") if name else 0)
    try:
        yield
    finally:
        _student.reset(token)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers from a seed, and from a student; torch's global generator is not used."""
    whole = 7919 * seed + sum(shape) + 1_000_003 * _student.get()
    return torch.randn(shape, generator=torch.Generator().manual_seed(whole))


def pair(got: object) -> tuple[Tensor, Tensor]:
    """The returned pair (out, weights); `Wrong` for anything else."""
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(x, Tensor) for x in got)):
        found = f"a tuple of {len(got)}" if isinstance(got, tuple) else type(got).__name__
        raise Wrong(f"it returns {found}, expected a pair of tensors: out, weights")
    return got


def array(got: object, what: str) -> Tensor:
    """The result of an answer as a tensor; `Wrong` if it is not an array of numbers."""
    try:
        if got is not None:
            return torch.tensor(np.asarray(got, dtype=np.float64))
    except (TypeError, ValueError):
        pass
    raise Wrong(f"{what} is {type(got).__name__}, expected an array of numbers")


def expect(
    got: object,
    expected: Tensor,
    what: str,
    mistakes: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
    *,
    finite: str = "",
) -> None:
    """Raise `Wrong` unless a tensor is the expected one.

    Args:
        got: what the answer returned.
        expected: the right result.
        what: its name in a sentence.
        mistakes: the results of known mistakes, by the hint for each.
        tolerance: the largest absolute difference.
        finite: the hint for numbers that are not finite.
    """
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is {type(got).__name__}, expected a tensor")
    if finite and not bool(got.isfinite().all()):
        raise Wrong(finite)
    if same(got, expected, tolerance):
        return
    for hint, wrong in (mistakes or {}).items():
        if same(got, wrong, tolerance):
            raise Wrong(hint)
    if got.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if bool(got.isnan().any()):
        raise Wrong(f"{what} contains NaN")
    raise Wrong(f"{what} is off by {(got.detach() - expected).abs().max().item():.3g}")


def expect_shape(got: object, expected: Tensor, what: str, mistakes: Mapping[str, Tensor]) -> None:
    """Raise `Wrong` unless a tensor has the shape of the expected one."""
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        expect(got, expected, what, mistakes)


def expect_pair(got: object, expected: tuple[Tensor, Tensor], mistakes: Mapping[str, Tensor] | None = None) -> None:
    """Raise `Wrong` unless an answer is the expected pair (out, weights); the mistakes are those of the weights."""
    out, weights = pair(got)
    expect(weights, expected[1], "weights", mistakes)
    expect(out, expected[0], "out")


def truth(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, normalizer: Normalizer | None = None
) -> tuple[Tensor, Tensor]:
    """The right output and weights of one head, in float64."""
    inputs = [x.detach().double()[:, None] for x in (q, k, v)]
    out, weights = qkv.attend(*inputs, mask=mask, normalizer=normalizer, return_weights=True)
    return out[:, 0], weights[:, 0]


def same(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """True if two tensors have the same shape and equal values within the tolerance; NaN equals NaN."""
    return a.shape == b.shape and torch.allclose(
        a.detach().double(), b.detach().double(), rtol=0, atol=tolerance, equal_nan=True
    )


SIZES = {
    "dv": "the size of a value", "nk": "the number of keys", "m": "the width of the model",
    "d_model": "the width of the model",
}  # fmt: skip


def scale_mistakes(raw: Tensor, d: int, mask: Tensor | None = None, **others: int) -> dict[str, Tensor]:
    """The weights of mistakes in the scale of scores, by hint.

    Args:
        raw: the scores q · k of queries of size d, without a scale.
        d: the size of a query.
        mask: True where a query may attend.
        **others: further sizes, by their names in `SIZES`, of which an answer may take the root instead.
    """
    factors = {
        "the scores are not scaled: divide q · k by √d, where d is the size of a query": 1.0,
        "the scores are divided by d, expected by its square root √d": 1 / d,
        "the scores are multiplied by √d, expected divided": d**0.5,
        "large scores get small weights: the sign of the scores is inverted": -(d**-0.5),
        **{f"the scores are divided by √{x}, the root of {SIZES[x]}; expected √d, where d is the size of a query":
           n**-0.5 for x, n in others.items()},
    }  # fmt: skip
    return {hint: _masked(factor * raw, mask).softmax(-1) for hint, factor in factors.items()}


def mask_mistakes(scores: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The weights of mistakes in the use of a mask, by hint; `scores` are those before the softmax."""
    found = {
        "the mask is the wrong way round: True is where a query may attend": _masked(scores, ~mask),
        "the mask is ignored": scores,
        "masked keys get the score 0, whose weight is not 0: e⁰ = 1; expected −inf": scores * mask,
        "the mask is added to the scores as 0 and 1; expected −inf for masked keys": scores + mask,
    }
    if mask.shape[0] == mask.shape[1]:
        found["the mask is transposed: its rows are queries"] = _masked(scores, mask.mT)
    late = "the mask comes after the softmax, and rows no longer sum to 1; mask the scores, before the softmax"
    return {late: scores.softmax(-1) * mask, **{hint: wrong.softmax(-1) for hint, wrong in found.items()}}


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)
