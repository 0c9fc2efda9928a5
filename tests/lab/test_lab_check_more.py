"""Checks of the NumPy, Bahdanau and reversal labs: correct answers pass, each typical mistake gets its own hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conftest import unchecked
from qkv_lab import check


def _softmax(x: Any, axis: int = -1) -> Any:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _in_place(scores: Any) -> Any:
    scores -= scores.max(-1, keepdims=True)
    return _softmax(scores)


def _lookup(scale: Callable[[Any, Any, Any], float], axis: int = -1) -> Callable[[Any, Any, Any], Any]:
    return lambda q, k, v: _softmax(q @ k.T * scale(q, k, v), axis) @ v


def _plain_lookup(q: Any, k: Any, v: Any) -> Any:
    powers = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
    return powers / powers.sum(-1, keepdims=True) @ v


def _online(
    *, total: bool = True, out: bool = True, lse: Callable[[Any, Any], Any] = lambda top, s: top + np.log(s),
    skip: bool = True, follow: bool = True,
) -> Callable[[Any], Any]:  # fmt: skip
    """An online softmax; arguments that are False leave out a step."""

    def answer(blocks: Any) -> Any:
        top, powers_sum, sums = -np.inf, 0.0, 0.0
        for scores, values in blocks:
            new = max(top, scores.max()) if follow or top == -np.inf else top
            if skip and new == -np.inf:
                continue
            powers, kept = np.exp(scores - new), np.exp(top - new)
            powers_sum = powers_sum * (kept if total else 1.0) + powers.sum()
            sums = sums * (kept if out else 1.0) + powers @ values
            top = new
        return sums / powers_sum, lse(top, powers_sum)

    return answer


def _averaged(blocks: Any) -> Any:
    means = [_softmax(s) @ v for s, v in blocks]
    return np.mean(means, 0), _online()(iter([]))[1] if not means else 0.0


def _additive(query: Any, keys: Any, w_q: Any, w_k: Any, vector: Any) -> Any:
    return torch.tanh(_sum(query, keys, w_q, w_k)) @ vector


def _sum(query: Any, keys: Any, w_q: Any, w_k: Any) -> Any:
    return (query @ w_q.T)[:, :, None] + (keys @ w_k.T)[:, None]


def _accuracy(weights: Any, truth: Any) -> Any:
    found = [int(row.argmax()) in places for row, places in zip(weights, truth, strict=True) if places]
    return np.mean(found) if found else 0.0


def _einsum(
    *, scale: Callable[[Any, Any], float] = lambda w_q, x: w_q.shape[-1] ** 0.5,
    mask_of: Callable[[Any], Any] = lambda mask: mask, fill: float = -torch.inf, axis: int = -1, after: bool = False,
    last: str = "bhqk,bhkd,hdm->bqm",
) -> Callable[..., Any]:  # fmt: skip
    """Multi-head attention; each argument introduces one mistake."""

    def answer(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, mask: Any) -> Any:
        q, k, v = (torch.einsum("bnm,mhd->bhnd", x, w) for w in (w_q, w_k, w_v))
        scores = q @ k.mT / scale(w_q, x)
        visible = None if mask is None else mask_of(mask)
        if visible is not None and not after:
            scores = scores.masked_fill(~visible, fill)
        weights = scores.softmax(axis)
        if visible is not None and after:
            weights = weights.masked_fill(~visible, 0)
        return torch.einsum(last, weights, v, w_o), weights

    return answer


def _unprojected(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, mask: Any) -> Any:
    weights = _einsum()(x, w_q, w_k, w_v, w_o, mask)[1]
    return torch.einsum("bhqk,bkm,mhd->bqhd", weights, x, w_v), weights


def _mirrored(weights: Any, length: int, late: int = 0) -> Any:
    place = torch.arange(length)
    place = place[length + late + place < weights.shape[2]]
    return (weights[:, :, length + late + place].argmax(-1) == length - 1 - place).double()


def _lesson(weights: Any, length: int) -> Any:
    """The lesson's count, which uses one query too late and divides by all positions."""
    counts = torch.zeros(weights.shape[1])
    for p in range(length):
        if length + 1 + p < weights.shape[2]:
            counts += (weights[:, :, length + 1 + p].argmax(-1) == length - 1 - p).sum(0)
    return counts / (len(weights) * length)


RIGHT: list[tuple[Any, Any]] = [
    (check.stable_softmax, _softmax),
    (check.soft_lookup, _lookup(lambda q, k, v: q.shape[-1] ** -0.5)),
    (check.online_softmax, _online()),
    (check.additive_score, _additive),
    (check.alignment_accuracy, _accuracy),
    (check.einsum_attention, _einsum()),
    (check.einsum_attention, _einsum(fill=-1e9)),
    (check.reversal_score, lambda weights, length: _mirrored(weights, length).mean((0, 2))),
    (check.reversal_score, lambda weights, length: _mirrored(weights, length).float().mean((0, 2))),
]

WRONG: list[tuple[Any, Any, str | None]] = [
    (check.stable_softmax, lambda s: np.exp(s) / np.exp(s).sum(-1, keepdims=True), "overflows"),
    (check.stable_softmax, lambda s: _softmax(s, 0), "first axis"),
    (check.stable_softmax, lambda s: _softmax(s, -2), "down the columns"),
    (check.stable_softmax, lambda s: np.exp(s) / np.exp(s).sum(), "all weights together"),
    (check.stable_softmax, lambda s: np.exp(s - s.max(-1, keepdims=True)), "divided by its sum"),
    (check.stable_softmax, lambda s: np.exp(s - s.max()) / np.exp(s - s.max()).sum(-1, keepdims=True), "is NaN"),
    (check.stable_softmax, _in_place, "changes the scores"),
    (check.stable_softmax, lambda s: None, "NoneType, expected an array"),
    (check.soft_lookup, _lookup(lambda q, k, v: 1.0), "not scaled"),
    (check.soft_lookup, _lookup(lambda q, k, v: 1 / q.shape[-1]), "divided by d"),
    (check.soft_lookup, _lookup(lambda q, k, v: v.shape[-1] ** -0.5), "a value's size"),
    (check.soft_lookup, _lookup(lambda q, k, v: len(k) ** -0.5), "number of keys"),
    (check.soft_lookup, _lookup(lambda q, k, v: q.shape[-1] ** -0.5, 0), "over the queries"),
    (check.soft_lookup, lambda q, k, v: q @ k.T / 2 @ v, "used as weights"),
    (check.soft_lookup, lambda q, k, v: _softmax(q @ k.T / 2), "these are the weights"),
    (check.soft_lookup, _plain_lookup, "overflow"),
    (check.online_softmax, _online(out=False), "sum of values must be rescaled"),
    (check.online_softmax, _online(total=False), "sum of powers is not"),
    (check.online_softmax, _online(total=False, out=False), "added without rescaling"),
    (check.online_softmax, _averaged, "log-sum-exp is off"),
    (check.online_softmax, _online(lse=lambda top, s: np.log(s)), "lacks the largest score"),
    (check.online_softmax, _online(lse=lambda top, s: s), "expected its logarithm plus the largest score"),
    (check.online_softmax, _online(skip=False), "skip such a block"),
    (check.online_softmax, _online(follow=False), "update it as it rises"),
    (check.online_softmax, lambda blocks: _online()(blocks)[0], "two results"),
    (check.additive_score, lambda q, k, a, b, v: _sum(q, k, a, b) @ v, "no tanh"),
    (check.additive_score, lambda q, k, a, b, v: torch.tanh(_sum(q, k, a, b) @ v), "before the product with v"),
    (check.additive_score, lambda q, k, a, b, v: torch.tanh(_sum(q, k, a, b)).sum(-1), "v weights them"),
    (check.additive_score, lambda *x: _additive(*x).softmax(-1), "before the softmax"),
    (check.additive_score, lambda q, k, a, b, v: _additive(k, q, b, a, v), "queries are rows"),
    (check.additive_score, lambda *x: _additive(*x) / len(x[-1]) ** 0.5, "no such factor"),
    (
        check.additive_score,
        lambda q, k, a, b, v: torch.tanh((q @ a.T)[:, :, None] * (k @ b.T)[:, None]) @ v,
        "this is the additive score",
    ),
    (check.additive_score, lambda q, k, a, b, v: _additive(q, k, b, a, v), "raises RuntimeError"),
    (check.alignment_accuracy, lambda w, t: _accuracy(w, t) * len(w), "the number of correct words"),
    (
        check.alignment_accuracy,
        lambda w, t: sum(int(i) in p for i, p in zip(w.argmax(0), t, strict=False)) / len(t),
        "strongest target word",
    ),
    (
        check.alignment_accuracy,
        lambda w, t: sum(int(r.argmax()) == p[0] for r, p in zip(w, t, strict=True) if p) / len(t),
        "only the first counterpart",
    ),
    (
        check.alignment_accuracy,
        lambda w, t: sum(int(r.argmax()) in p for r, p in zip(w, t, strict=True)) / len(t),
        "counted as wrong",
    ),
    (
        check.alignment_accuracy,
        lambda w, t: sum(not p or int(r.argmax()) in p for r, p in zip(w, t, strict=True)) / len(t),
        "counted as right",
    ),
    (
        check.alignment_accuracy,
        lambda w, t: float(np.mean([r[list(p)].sum() for r, p in zip(w, t, strict=True)])),
        "mean weight",
    ),
    (check.alignment_accuracy, lambda w, t: w, "expected one number"),
    (check.einsum_attention, _einsum(scale=lambda w_q, x: 1.0), "not scaled"),
    (check.einsum_attention, _einsum(scale=lambda w_q, x: x.shape[-1] ** 0.5), "divided by √m"),
    (check.einsum_attention, _einsum(axis=-2), "over the queries"),
    (check.einsum_attention, _einsum(mask_of=lambda mask: None), "ignored"),
    (check.einsum_attention, _einsum(mask_of=lambda mask: ~mask), "the wrong way round"),
    (check.einsum_attention, _einsum(mask_of=lambda mask: mask | mask.mT & ~mask), "the mask is ignored"),
    (check.einsum_attention, _einsum(fill=0.0), "is not 0"),
    (check.einsum_attention, _einsum(after=True), "after the softmax"),
    (check.einsum_attention, _einsum(last="bhqk,bhkd,hdm->bhqm"), "the heads are not summed"),
    (check.einsum_attention, _unprojected, "project them by w_o, and sum over h and d"),
    (check.einsum_attention, lambda *x: _einsum()(*x)[0], "pair"),
    (check.reversal_score, _lesson, "one too late"),
    (check.reversal_score, lambda w, n: _mirrored(w, n, late=1).mean((0, 2)), "one too late"),
    (check.reversal_score, lambda w, n: _mirrored(w.mT, n).mean((0, 2)), None),
    (check.reversal_score, lambda w, n: _mirrored(w, n).sum((0, 2)), "counts"),
    (check.reversal_score, lambda w, n: _mirrored(w, n).sum((0, 2)) / n, "that of sequences, too"),
    (check.reversal_score, lambda w, n: _mirrored(w, n)[..., 1:].mean((0, 2)), "separator is left out"),
    (
        check.reversal_score,
        lambda w, n: w[:, :, n + torch.arange(n), n - 1 - torch.arange(n)].double().mean((0, 2)),
        "mean weight",
    ),
    (check.reversal_score, lambda w, n: _mirrored(w, n).mean(2), "each sequence"),
    (check.reversal_score, lambda w, n: _mirrored(w, n).mean((0, 1)), "each position"),
]


@pytest.fixture(autouse=True)
def without_shape_checks() -> Any:
    with unchecked():
        yield


@pytest.mark.parametrize(("judge", "answer"), RIGHT)
def test_correct_answers_pass(judge: Any, answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(answer)
    assert "✗" not in capsys.readouterr().out


@pytest.mark.parametrize(("judge", "answer", "hint"), WRONG)
def test_each_mistake_gets_its_own_hint(
    judge: Any, answer: Any, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not judge(answer)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("✗")
    assert all(line.startswith("✓") for line in lines[:-1])
    if hint is not None:
        assert hint in lines[-1]


def test_checks_do_not_change_the_global_random_state() -> None:
    before = torch.random.get_rng_state()
    for judge, answer in RIGHT:
        judge(answer)
    assert torch.equal(torch.random.get_rng_state(), before)
