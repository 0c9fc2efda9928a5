"""Numerical errors that were fixed: cancellation, underflow, NaN in masked entries, precision of constants."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv
from conftest import close, rand, triple
from own_objects import HEADS, Manhattan, Square
from qkv import attend, biases, features, measure, normalizers, scores
from qkv._contract import learned_tensors
from qkv.masks import Causal, Dense, Document, Padding, Window


def of_scores(values: list[float], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A query and keys whose scores under Dot(1) are `values`."""
    return torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor(values, dtype=dtype)[None, None, :, None]


class Exponential(normalizers.Pointwise):
    """e^(rate · s), with a learned rate for each head, and its logarithm."""

    divide = "sum"

    def __init__(self, rate: Tensor) -> None:
        self.rate = rate

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(self.rate * scores)

    def log_weight(self, scores: Tensor) -> Tensor:
        return self.rate * scores


BY_THEIR_SUM = {
    "elu": normalizers.EluPlusOne("sum"),
    "sigmoid": normalizers.Sigmoid(divide="sum"),
    "learned sigmoid at another temperature": normalizers.Sigmoid(
        torch.tensor([-0.25], requires_grad=True), divide="sum"
    ).with_temperature(0.5),
    "own": Exponential(torch.ones(1, 1, 1, requires_grad=True)),
}


@pytest.mark.parametrize("normalizer", BY_THEIR_SUM.values(), ids=BY_THEIR_SUM)
@pytest.mark.parametrize("low", [-17.0, -60.0, -100.0, -200.0])
def test_weights_divided_by_their_sum_neither_cancel_nor_underflow(
    low: float, normalizer: normalizers.Pointwise
) -> None:
    temperature = normalizer.temperature
    q, k = (x.requires_grad_() for x in of_scores([low * temperature, (low - 1) * temperature]))
    v, share = torch.tensor([1.0, 0.0])[None, None, :, None], 1 / (1 + math.exp(-1))
    asked: dict[str, Any] = {"score": scores.Dot(1.0), "normalizer": normalizer}
    learned = list(learned_tensors(normalizer).values())
    for kernel in ("eager", "tiled"):
        out = attend(q, k, v, kernel=kernel, **asked)
        assert out.item() == pytest.approx(share, rel=2e-5)
        slope, *of_learned = torch.autograd.grad(out, [k, *learned])
        want = share * (1 - share)
        assert (temperature * slope).flatten().tolist() == pytest.approx([want, -want], rel=2e-5)
        if isinstance(normalizer, Exponential):
            assert of_learned[0].item() == pytest.approx(want, rel=1e-3)
    found = measure(q, k, **asked)
    assert found.effective_keys.item() == pytest.approx(1 / (share**2 + (1 - share) ** 2), rel=1e-5)
    assert found.lse is None


@pytest.mark.parametrize(("kernel", "divide"), [("native", None), ("native", "sum"), ("tiled", "sum")])
def test_the_gradient_of_a_sigmoid_near_1_cancels(kernel: str, divide: str | None) -> None:
    q, k = (x.requires_grad_() for x in of_scores([30.0, 25.0]))
    v = torch.tensor([1.0, -1.0])[None, None, :, None]
    attend(q, k, v, score=scores.Dot(1.0), normalizer=normalizers.Sigmoid(0.0, divide), kernel=kernel).sum().backward()
    rest, half = torch.tensor([-30.0, -25.0], dtype=torch.float64).exp(), 1 if divide is None else 2
    assert k.grad is not None
    torch.testing.assert_close(k.grad[0, 0, :, 0].double(), rest * v[0, 0, :, 0] / half, rtol=1e-5, atol=0)


def test_fully_masked_rows_of_weights_divided_by_their_sum_are_0() -> None:
    q, k = of_scores([-200.0, -201.0])
    asked: dict[str, Any] = {"mask": Dense(torch.zeros(1, 2, dtype=torch.bool)), "score": scores.Dot(1.0)}
    for kernel in ("eager", "tiled"):
        for normalizer in BY_THEIR_SUM.values():
            assert attend(q, k, k, kernel=kernel, normalizer=normalizer, **asked).item() == 0


def test_elu_plus_one_keeps_the_digits_of_small_weights() -> None:
    at = torch.tensor([-30.0, -17.0, -1.0, 0.0, 2.0])
    want = [math.exp(x) if x < 0 else x + 1 for x in at.tolist()]
    assert normalizers.EluPlusOne().weight(at).tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("low", [-20.0, -44.0, -60.0, -80.0])
def test_effective_keys_of_tiny_weights(low: float) -> None:
    q, k = of_scores([low] * 6)
    asked: dict[str, Any] = {"score": scores.Dot(1.0), "normalizer": normalizers.Softmax(sink=0.0)}
    found = measure(q, k, **asked)
    assert found.effective_keys.item() == pytest.approx(6, rel=1e-5)
    assert found.entropy.item() == pytest.approx(math.log(6), rel=1e-5)
    assert measure(q, k * 4, **asked).effective_keys.isfinite().all()


def test_alibi_slopes_are_float64_in_a_float64_call() -> None:
    q, k = torch.zeros(1, 12, 1, 4, dtype=torch.float64), torch.zeros(1, 12, 30, 4, dtype=torch.float64)
    lse = attend(q, k, k, bias=biases.ALiBi(), return_lse=True)[1][0, :, 0]
    exponents = [*range(1, 9), 0.5, 1.5, 2.5, 3.5]  # of 8 heads, then every other of 16
    slopes = torch.tensor([2.0**-x for x in exponents], dtype=torch.float64)
    close(lse, torch.logsumexp(-slopes[:, None] * torch.arange(30, dtype=torch.float64), 1), eps=8)


POISONED: dict[str, dict[str, Any]] = {
    "dot, sink": {"normalizer": normalizers.Softmax(sink=0.3)},
    "cosine": {"score": scores.Cosine(4.0)},
    "general": {"score": scores.General(rand(6, 6, seed=1))},
    "additive": {"score": scores.Additive(rand(4, seed=2), rand(4, 6, seed=3), rand(4, 6, seed=4))},
    "additive, not projected": {"score": scores.Additive(rand(6, seed=2))},
    "features": {"score": scores.Features(features.elu_plus_one), "normalizer": normalizers.Identity("sum")},
    "user's pairwise": {"score": Manhattan()},
    "user's pointwise": {"normalizer": Square()},
    "cap": {"bias": biases.SoftCap(2.0)},
    "relative": {"bias": biases.RelativePosition(rand(5, 6, seed=5))},
}
IDS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 2, [0] * 9 + [-1] * 2])
HIDING = [(Padding([9, 9]) & Causal(), "kv"), (Document(IDS), "qkv"), (Padding([9, 9]) & Window(3), "kv")]


@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for n, name in enumerate(POISONED) for bad in (math.nan, (-1) ** n * math.inf)]
)
def test_nan_in_masked_entries_changes_no_output_and_no_gradient(name: str, bad: float) -> None:
    """NaN or ∞ in padded keys and values, and in queries without visible keys."""
    asked, served = POISONED[name], set()
    for kernel, (mask, hit) in itertools.product(("auto", "tiled", "eager", "linear"), HIDING):
        found = []
        for which in ("", hit):
            tensors = dict(zip("qkv", (x.clone() for x in triple(2, HEADS, 2, 11, 11, 6, 5)), strict=True))
            for x in which:
                tensors[x][:, :, 9:] = bad
            leaves = [x.requires_grad_() for x in tensors.values()]
            learned = list(qkv._contract.learned_tensors(list(asked.values())).values())
            try:
                out = attend(*leaves, mask=mask, kernel=kernel, **asked)
            except qkv.InputError:
                break
            served.add(kernel)
            loss = (out[:, :, :9] * rand(2, HEADS, 9, 5, seed=9)).sum()
            found.append([out[:, :, :9].detach(), *torch.autograd.grad(loss, [*leaves, *learned])])
        for x, y in zip(*found, strict=True) if found else ():
            close(y, x, eps=256)
    assert served >= {"auto", "tiled", "eager"}


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
def test_nan_masked_for_one_group_of_heads_does_not_reach_it(kernel: str) -> None:
    q, k, v = triple(1, 4, 2, 7, 7, 6, 5)
    seen = torch.ones(1, 4, 7, 7, dtype=torch.bool)
    seen[:, 2:, :, 5:] = False  # of the second key head
    want = attend(q, k, v, mask=Dense(seen), kernel=kernel)
    k[:, 1, 5:] = v[:, 1, 5:] = math.nan
    close(attend(q, k, v, mask=Dense(seen), kernel=kernel), want)


def test_the_log_sum_exp_of_bfloat16_queries_and_biases_is_rounded() -> None:
    q, k, v = (x.bfloat16() for x in triple(1, 2, 2, 29, 29, 8, 8))
    mask = Document(torch.arange(29) * 7 % 5)
    added = (
        biases.TensorBias(rand(29, 29, seed=4).bfloat16()),
        biases.TensorBias(torch.full((1, 1), -200.0).bfloat16()),
    )
    lse = attend(q, k, v, mask=mask, bias=added, score=scores.Dot(-0.7), return_lse=True)[1]
    exact = (x.double() for x in (q, k, v))
    want = attend(*exact, mask=mask, bias=added, score=scores.Dot(-0.7), kernel="eager", return_lse=True)[1]
    assert (lse - want).abs().max() < 2e-3


def test_the_search_finds_the_level_of_a_steep_weight() -> None:
    """Its rounding error is larger than the tolerance, and all steps of the search come from the same side."""

    class Steep(normalizers.SumToOne):
        def weight(self, scores: Tensor, level: Tensor) -> Tensor:
            return torch.exp(30 * (scores - level))

    q, k = of_scores([1.0] * 700, torch.float64)
    for kernel in ("eager", "tiled"):
        close(attend(q, k, k, score=scores.Dot(1.0), normalizer=Steep(), kernel=kernel), q)
