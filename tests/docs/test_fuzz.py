"""The differential fuzzer: some of its cases, on all kernels and the reference, and its detection of planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import functions
from fuzz.cases import case
from fuzz.compare import check
from qkv import masks
from qkv.engine import Call
from qkv.kernels import native_call, tiled
from qkv.kernels.linear import gated
from qkv.kernels.native_call import Prepared, prepared
from qkv.partial import sink_gradient

CASES = 10


def failures(seed: int, numbers: range) -> list[str]:
    """The mismatches of each failed case, after the command that reproduces it."""
    found = []
    for number in numbers:
        mismatches = check(seed, number).mismatches
        if mismatches:
            found.append(f"python -m fuzz --seed {seed} --case {number}\n  " + "\n  ".join(map(str, mismatches)))
    return found


@pytest.mark.slow
def test_kernels_agree_with_the_formula() -> None:
    found = failures(0, range(CASES))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("number", range(18))
def test_functions_and_layers_agree_with_their_formulas(number: int) -> None:
    assert functions.mismatch(0, number) is None


def test_a_wrong_decay_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*of: Any, decay: Tensor | None, **named: Any) -> Any:
        return gated(*of, decay=None if decay is None else 0.9 * decay, **named)

    monkeypatch.setattr("qkv.linear.gated", wrong)
    found = [functions.mismatch(0, number) for number in range(0, 60, len(functions.KINDS))]
    assert any(text is not None and text.startswith("linear_attend: out") for text in found)


def test_a_case_depends_on_its_seed_and_number_alone() -> None:
    first, again = case(3, 14), case(3, 14)
    assert first.text == again.text
    for name, x in first.tensors().items():
        torch.testing.assert_close(x, again.tensors()[name], rtol=0, atol=0, equal_nan=True)
    assert case(3, 15).text != first.text != case(4, 14).text


# --- it finds bugs ----------------------------------------------------------------------------------------------------


def _sees_too_much(self: masks.Mask, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
    return k <= q + 1


def _with_wrong_scale(call: Call) -> Prepared:
    made = prepared(call)
    made.arguments.scale *= 1.001
    return made


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], str, str]] = {  # what it replaces, what cases name, what differs
    "the gradient of a sink": (tiled, "sink_gradient", lambda *of: 2 * sink_gradient(*of), "sink", "tiled: gradient"),
    "causal by one": (masks.Causal, "sees", _sees_too_much, "Causal", "eager: out"),
    "the scale of native": (native_call, "prepared", _with_wrong_scale, "float32", "native: out"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_fuzzer_finds_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, part, mismatch = PLANTED[bug]
    for number in range(400):
        if part not in case(2, number).text:
            continue
        one = range(number, number + 1)
        with monkeypatch.context() as patched:
            patched.setattr(where, name, wrong)
            found = failures(2, one)
        if any(mismatch in text for text in found) and not failures(2, one):
            return
    raise AssertionError(f"no case shows {mismatch!r}")
