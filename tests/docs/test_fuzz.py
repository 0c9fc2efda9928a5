"""The differential fuzzer: some of its cases, its formula against the reference, and its detection of planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import close, oracle, rand, triple, unchecked
from fuzz.cases import case
from fuzz.compare import check
from fuzz.formula import attention
from fuzz.parts import Shape
from fuzz.visible import dense
from qkv import biases, masks, normalizers, scores
from qkv.kernels.flash import kernel as flash

CASES, AT_ONCE = 200, 50


def failures(seed: int, numbers: range) -> list[str]:
    """The mismatches of each failed case, after the command that reproduces it."""
    found = []
    with unchecked():  # many small calls
        for number in numbers:
            mismatches = check(seed, number).mismatches
            if mismatches:
                found.append(f"python -m fuzz --seed {seed} --case {number}\n  " + "\n  ".join(map(str, mismatches)))
    return found


@pytest.mark.parametrize("start", range(0, CASES, AT_ONCE))
def test_kernels_agree_with_the_formula(start: int) -> None:
    found = failures(0, range(start, start + AT_ONCE))
    assert not found, "\n".join(found)


def test_a_case_depends_on_its_seed_and_number_alone() -> None:
    first, again = case(3, 14), case(3, 14)
    assert first.text == again.text
    for name, x in first.tensors().items():
        torch.testing.assert_close(x, again.tensors()[name], rtol=0, atol=0, equal_nan=True)
    assert case(3, 15).text != first.text != case(4, 14).text


# --- it finds bugs ----------------------------------------------------------------------------------------------------


def _wrong_slope(self: normalizers.Sigmoid, weights: Tensor) -> Tensor:
    return weights * (1 - weights) * 1.001


def _sees_too_much(self: masks.Mask, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
    return k <= q + 1


def _stock_with_wrong_scale(*tensors: Tensor, scale: float, **named: Any) -> tuple[Tensor, Tensor]:
    return STOCK(*tensors, scale=scale * 1.0001, **named)


STOCK = flash._stock
PLANTED: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a slope of sigmoid": (normalizers.Sigmoid, "slope_from_weights", _wrong_slope, "tiled: gradient"),
    "causal by one": (masks.Causal, "sees", _sees_too_much, "eager: out"),
    "the scale of flash": (flash, "_stock", _stock_with_wrong_scale, "flash: out"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_fuzzer_finds_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, mismatch = PLANTED[bug]
    for number in range(400):
        one = range(number, number + 1)
        with monkeypatch.context() as patched:
            patched.setattr(where, name, wrong)
            found = failures(1, one)
        if any(mismatch in text for text in found) and not failures(1, one):
            return
    raise AssertionError(f"no case shows {mismatch!r}")


# --- the formula ------------------------------------------------------------------------------------------------------

SHAPE = Shape(b=2, h=6, hkv=2, nq=11, nk=13, dq=3, dk=3, dv=5)
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, ALiBi": {"mask": masks.Causal(), "bias": (biases.ALiBi(),)},
    "window, T5": {"mask": masks.Window(3, ahead=2), "bias": (biases.T5Bias(rand(8, 6, seed=101)),)},
    "padding, cap": {"mask": masks.Padding([4, 9], "left"), "bias": (biases.SoftCap(0.7),)},
    "documents, relative": {
        "mask": masks.Document(torch.arange(13) // 4),
        "bias": (biases.RelativePosition(rand(5, 3, seed=102), rand(6, 5, 5, seed=103)),),
    },
    "blocks, cosine": {"mask": masks.bigbird(3, 0), "score": scores.Cosine(4.0)},
    "general": {"mask": ~masks.Strided(3), "score": scores.General(rand(6, 3, 3, seed=104))},
    "additive": {"mask": masks.Dilated(2, 3, 1), "score": scores.Additive(rand(6, 3, seed=105))},
    "sink": {"mask": masks.Global([0, -1]), "normalizer": normalizers.Softmax(0.7, sink=rand(6, seed=106))},
    "key": {"normalizer": normalizers.Softmax(key=rand(6, 3, seed=107))},
    "entmax": {"mask": masks.Prefix(5), "normalizer": normalizers.Entmax(1.3)},
    "sparsemax": {"mask": masks.Causal(), "normalizer": normalizers.Sparsemax()},
    "hard": {"normalizer": normalizers.Hard()},
    "sigmoid": {"mask": masks.Causal() & masks.Window(2), "normalizer": normalizers.Sigmoid()},
    "elu + 1": {"mask": masks.Causal() | masks.Prefix(3), "normalizer": normalizers.EluPlusOne("sum")},
    "relu": {"mask": masks.Shifted(masks.Causal(), 1), "normalizer": normalizers.ReLU()},
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_formula_equals_the_reference(name: str) -> None:
    composition, tensors = COMPOSITIONS[name], triple()
    visible = dense(composition.get("mask"), SHAPE.b, SHAPE.h, SHAPE.nq, SHAPE.nk)
    parts = {"bias": (), "score": scores.Dot(), "normalizer": normalizers.Softmax()}
    found = attention(*tensors, visible, **(parts | {n: x for n, x in composition.items() if n != "mask"}))
    out, lse, weights = oracle(*tensors, **composition)
    close(found.out, out)
    close(found.weights, weights)
    assert (found.lse is None) == (lse is None)
    if found.lse is not None and lse is not None:
        close(found.lse, lse)
