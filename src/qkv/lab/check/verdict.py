"""How a check of an exercise speaks: a line for each thing tried, a hint at the first that fails, True or False."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qkv.errors import InputError


class Wrong(Exception):  # noqa: N818  # what is said of an answer, not an error of the program
    """An answer fails a trial: the message says what was expected, what came, and where to look."""


def judge(candidate: object, trials: dict[str, Callable[[], None]]) -> bool:
    """Try a learner's answer: print a ✓ or ✗ for each trial, stop at the first ✗ with its hint. True if all hold.

    A trial is a function that raises `Wrong` with a hint. What else an answer raises is its failure, told in a line.
    """
    if not callable(candidate):
        raise InputError(f"the answer is {type(candidate).__name__}, expected a function or class")
    for name, trial in trials.items():
        try:
            trial()
        except Wrong as hint:
            print(f"✗ {name}: {hint}")
            return False
        except Exception as error:
            print(f"✗ {name}: it raises {type(error).__name__}: {error}")
            return False
        print(f"✓ {name}")
    return True


def near(got: object, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Raise `Wrong` unless a tensor has the shape and values expected."""
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is {type(got).__name__}, expected a tensor")
    if got.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = (got.detach() - expected).abs().max().item() if expected.numel() else 0.0
    if not difference <= tolerance:
        raise Wrong(f"{what} is off by {difference:.3g}")
