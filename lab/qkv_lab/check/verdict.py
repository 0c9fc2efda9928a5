"""Runs the trials of an exercise: prints one line per trial, and a hint at the first that fails."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qkv.errors import InputError


class Wrong(Exception):  # noqa: N818  # a verdict on an answer, not an error of the program
    """An answer fails a trial; the message is the hint: the expected and the actual result, and the likely mistake."""


def judge(candidate: object, trials: dict[str, Callable[[], None]]) -> bool:
    """Run the trials of a learner's answer and return True if all pass.

    Prints ✓ or ✗ for each trial, and stops at the first ✗ with its hint. A trial raises `Wrong` to give a hint; any
    other exception also fails the trial and is printed in one line.
    """
    if not callable(candidate):
        raise InputError(f"answer is {type(candidate).__name__}, expected a function or class")
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
    """Raise `Wrong` unless a tensor has the expected shape and values."""
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is {type(got).__name__}, expected a tensor")
    if got.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = (got.detach() - expected).abs().max().item() if expected.numel() else 0.0
    if not difference <= tolerance:
        raise Wrong(f"{what} is off by {difference:.3g}")
