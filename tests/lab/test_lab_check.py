"""Checks of the labs' exercises: solutions pass, as do the answers in docstrings, and each mistake has its own hint."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import refused
from qkv_lab import check
from qkv_lab.answers import answer

Answer = Callable[..., Any]


def same(x: Any) -> Any:
    return x


# --- answers: the arguments of these functions make mistakes ----------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, dim: int = -1,
           fill: float = -math.inf) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = (scores if mask is None else scores.masked_fill(~mask, fill)).softmax(dim)
    return weights @ v, weights


def one_head(change: Answer = lambda out, weights: (out, weights), **mistake: Any) -> Answer:
    return lambda q, k, v, mask=None: change(*attend(q, k, v, mask, **mistake))


def tempered(scale: Callable[[float, float], float], softmax: Answer = lambda s: s.softmax(-1)) -> Answer:
    def answer(q: Tensor, k: Tensor, v: Tensor, temperature: float = 1.0) -> Any:
        weights = softmax(q @ k.mT * scale(q.shape[-1], temperature))
        return weights @ v, weights

    return answer


def powers(s: Any) -> Any:
    """A softmax that overflows."""
    return np.exp(s) / np.exp(s).sum(-1, keepdims=True)


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def multi(merged: Answer = merge, last: bool = True, whole: bool = False) -> Answer:
    def answer(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, mask: Tensor | None = None) -> Any:
        scale = (x.shape[-1] if whole else x.shape[-1] // heads) ** -0.5
        out, weights = attend(*(split(x @ w, heads) for w in (q, k, v)), mask, scale)
        return merged(out) @ o if last else merged(out), weights

    return answer


def crossed(keys: str = "c", values: str = "c") -> Answer:
    def answer(x: Tensor, context: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int) -> Any:
        made = {"x": x, "c": context}
        out, weights = attend(split(x @ q, heads), split(made[keys] @ k, heads), split(made[values] @ v, heads))
        return merge(out) @ o, weights

    return answer


def viewed(*shape: Callable[[Tensor], int]) -> Answer:
    """The context is taken to be as long, or as wide, as x."""
    return lambda x, context, *rest: crossed()(x, context.view(len(x), *(size(x) for size in shape)), *rest)


def dropped(drop: Callable[[Tensor, float, bool], Tensor]) -> Answer:
    def answer(q: Tensor, k: Tensor, v: Tensor, p: float, training: bool) -> Any:
        weights = drop(attend(q, k, v)[1], p, training)
        return weights @ v, weights

    return answer


def coins(w: Tensor, p: float) -> Tensor:
    return torch.rand(w.shape) >= p


def keyed(value: Answer = torch.zeros_like, masked: bool = True) -> Answer:
    def answer(q: Tensor, k: Tensor, v: Tensor, key: Tensor, mask: Tensor | None = None) -> Any:
        scores, extra = q @ k.mT / q.shape[-1] ** 0.5, (q @ key)[..., None] / q.shape[-1] ** 0.5
        if mask is not None and masked:
            scores = scores.masked_fill(~mask, -torch.inf)
        whole = torch.cat([scores, extra], -1).softmax(-1)
        return whole[..., :-1] @ v + whole[..., -1:] * value(key), whole[..., :-1]

    return answer


def one_more(low: Callable[[Tensor], Tensor], one: Callable[[Tensor], Any] = lambda top: (-top).exp()) -> Answer:
    """Softmax off by one with the largest score `low` subtracted; `one` is what the 1 becomes."""

    def answer(s: Tensor) -> Tensor:
        top = low(s.amax(-1, keepdim=True))
        parts = (s - top).exp()
        return parts / (one(top) + parts.sum(-1, keepdim=True))

    return answer


def counted(vocab: int, d: int, layers: int, d_ff: int, n: int, tied: bool = True, ff_bias: bool = True) -> int:
    block = 4 * d * d + 2 * d * d_ff + (d_ff + d) * ff_bias + 4 * d
    return vocab * d * (1 if tied else 2) + n * d + layers * block + 2 * d


def before(make: Callable[[int], Tensor] = torch.ones, forward: Answer | None = None) -> Answer:
    """A module that puts `make(d_model)` before every text."""

    class Module(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            self.token = nn.Parameter(make(d_model))

        def forward(self, x: Tensor) -> Tensor:
            return joined(self.token, x) if forward is None else forward(self.token, x)

    return Module


def joined(token: Tensor, x: Tensor) -> Tensor:
    return torch.cat([token.expand(3, 1, -1), x], 1)


def softmax(x: Any, axis: int = -1) -> Any:
    parts = np.exp(x - x.max(axis, keepdims=True))
    return parts / parts.sum(axis, keepdims=True)


def online(out: bool = True, lse: Answer = lambda top, s: top + np.log(s), skip: bool = True) -> Answer:
    """An online softmax; arguments that are False leave out a step."""

    def answer(blocks: Any) -> Any:
        top, total, sums = -np.inf, 0.0, 0.0
        for scores, values in blocks:
            new = max(top, scores.max())
            if skip and new == -np.inf:
                continue
            parts, kept = np.exp(scores - new), np.exp(top - new)
            total, sums, top = total * kept + parts.sum(), sums * (kept if out else 1.0) + parts @ values, new
        return sums / total, lse(top, total)

    return answer


def additive(q: Any, k: Any, w_q: Any, w_k: Any, v: Any, bend: Answer = torch.tanh) -> Any:
    return bend((q @ w_q.T)[:, :, None] + (k @ w_k.T)[:, None]) @ v


def accuracy(weights: Any, truth: Any, count: Answer = lambda at, places: at in places, all_of: bool = False) -> Any:
    rows = zip(weights, truth, strict=True)
    found = [count(int(row.argmax()), places) for row, places in rows if places or all_of]
    return np.mean(found) if found else 0.0


def einsum(scale: Answer = lambda w: w.shape[-1] ** -0.5, last: str = "bhqk,bhkd,hdm->bqm", masked: bool = True,
           fill: float = -1e9) -> Answer:  # fmt: skip
    def answer(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, mask: Any) -> Any:
        q, k, v = (torch.einsum("bnm,mhd->bhnd", x, w) for w in (w_q, w_k, w_v))
        _, weights = attend(q, k, v, mask if masked else None, scale(w_q), fill=fill)
        return torch.einsum(last, weights, v, w_o), weights

    return answer


def mirrored(weights: Any, length: int, late: int = 0) -> Any:
    place = torch.arange(length)
    place = place[length + late + place < weights.shape[2]]
    return (weights[:, :, length + late + place].argmax(-1) == length - 1 - place).double()


# --- wrong ------------------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str, Answer]] = [  # the exercise, a part of the hint, the answer
    ("attention", "expected a pair", one_head(lambda out, weights: out)),
    ("attention", "a row for each query", one_head(lambda out, weights: (out, weights.mT))),
    ("attention", "each column", one_head(dim=1)),
    ("entropy", "makes NaN", lambda w: -(w * w.log()).sum(-1)),
    ("entropy", "over queries", lambda w: -(w * w.log()).sum(-2)),
    ("entropy", "negative", lambda w: (w * w.log()).sum(-1)),
    ("temperature", "multiplied by it", tempered(lambda d, t: d**-0.5 * t)),
    ("temperature", "1/√d stays", tempered(lambda d, t: 1 / t)),
    ("temperature", "overflows", tempered(lambda d, t: d**-0.5 / t, lambda s: s.exp() / s.exp().sum(-1, keepdim=True))),
    ("causal_mask", "torch.float32", lambda n: torch.ones(n, n).tril()),
    ("causal_mask", "has shape", lambda n: torch.ones(1, 1, n, n).tril().bool()),
    ("causal_mask", "lower triangle", lambda n: torch.ones(n, n).triu().bool()),
    ("multi_head", "output matrix", multi(last=False)),
    ("multi_head", "√d_model", multi(whole=True)),
    ("multi_head", "moving them back", multi(lambda x: x.reshape(2, 5, 12))),
    ("dropout", "in evaluation, too", dropped(lambda w, p, t: F.dropout(w, p))),
    ("dropout", "in evaluation, too", dropped(lambda w, p, t: w * coins(w, p) if t else w * (1 - p))),
    ("dropout", "not scaled up", dropped(lambda w, p, t: w * coins(w, p) if t else w)),
    ("cross_attention", "self-attention", crossed("x", "x")),
    ("cross_attention", "values come from x", crossed("c", "x")),
    ("cross_attention", "7 tokens", viewed(lambda x: x.shape[1], lambda x: -1)),
    ("first_token", "first query is", lambda w: w[..., 0].mean((1, 2))),
    ("first_token", "for each head", lambda w: w[..., 1:, 0].mean(-1)),
    ("sink_rate", "every weight", lambda w, t=0.3: (w[..., 0] > t).float().mean().item()),
    ("sink_rate", "passed is ignored", lambda w, t=0.3: (w[..., 0].mean(-1) > 0.3).float().mean()),
    ("sink_rate", "for the model", lambda w, t=0.3: (w[..., 0].mean(-1) > t).float().mean(1)),
    ("key_bias", "takes no weight", lambda q, k, v, key, mask=None: attend(q, k, v, mask)),
    ("key_bias", "the key itself", keyed(same)),
    ("key_bias", "the mask is ignored", keyed(masked=False)),
    ("off_by_one", "plain softmax", lambda s: s.softmax(-1)),
    ("off_by_one", "overflows", lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True))),
    ("off_by_one", "the 1 is not", one_more(same, lambda top: 1)),
    ("parameter_count", "feed-forward layers", lambda *a: counted(*a, ff_bias=False)),
    ("parameter_count", "too many", lambda *a: counted(*a) + 1),
    ("parameter_count", "too few", lambda *a: counted(*a) - 1),
    ("sink_token", "comes after", before(forward=lambda token, x: joined(token, x).roll(-1, 1))),
    ("sink_token", "not added", before(forward=lambda token, x: x + token)),
    ("sink_token", "text is lost", before(forward=lambda token, x: joined(token, x)[:, :-1])),
    ("stable_softmax", "overflows", powers),
    ("stable_softmax", "down the columns", lambda s: softmax(s, -2)),
    ("stable_softmax", "all weights together", lambda s: np.exp(s) / np.exp(s).sum()),
    ("soft_lookup", "not scaled", lambda q, k, v: softmax(q @ k.T) @ v),
    ("soft_lookup", "matrix product", lambda q, k, v: q @ k),
    ("soft_lookup", "overflow", lambda q, k, v: powers(q @ k.T / q.shape[-1] ** 0.5) @ v),
    ("online_softmax", "sum of values must", online(out=False)),
    ("online_softmax", "lacks the largest", online(lse=lambda top, s: np.log(s))),
    ("online_softmax", "skip such a block", online(skip=False)),
    ("additive_score", "no tanh", lambda *x: additive(*x, bend=same)),
    ("additive_score", "raises RuntimeError", lambda q, k, a, b, v: additive(q, k, b, a, v)),
    ("alignment_accuracy", "of correct words", lambda w, t: accuracy(w, t) * len(w)),
    ("alignment_accuracy", "first counterpart", lambda w, t: accuracy(w, t, lambda at, places: at == places[0])),
    ("alignment_accuracy", "counted as wrong", lambda w, t: accuracy(w, t, all_of=True)),
    ("einsum_attention", "not scaled", einsum(lambda w: 1.0)),
    ("einsum_attention", "ignored", einsum(masked=False)),
    ("einsum_attention", "are not summed", einsum(last="bhqk,bhkd,hdm->bhqm")),
    ("reversal_score", "one too late", lambda w, n: mirrored(w, n, late=1).mean((0, 2))),
    ("reversal_score", "each sequence", lambda w, n: mirrored(w, n).mean(2)),
    ("reversal_score", "out of range", lambda w, n: w[:, :, 2 * n + 1]),
]  # fmt: skip


def judged(name: str, answer: Answer, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a check prints. All but the last have passed, and the last says what the check returns."""
    verdict = getattr(check, name)(answer)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["✓ "] * (len(lines) - 1) + ["✓ " if verdict else "✗ "]
    return lines


@pytest.mark.parametrize("name", check.__all__)
def test_solution_passes_and_draws_nothing_from_the_global_generators(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1]
    lines = judged(name, answer.solution(name), capsys)
    assert lines[-1].startswith("✓ "), lines
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize(("name", "hint", "answer"), WRONG, ids=[f"{name}: {hint}" for name, hint, _ in WRONG])
def test_each_mistake_fails_with_its_own_hint(
    name: str, hint: str, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    last = judged(name, answer, capsys)[-1]
    assert last.startswith("✗ ")
    assert hint in last


@pytest.mark.parametrize("name", check.__all__)
def test_answers_that_return_none_or_raise_fail_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(*_: object) -> None:
        raise KeyError("no such thing")

    assert len(judged(name, lambda *_: None, capsys)) == 1
    (line,) = judged(name, breaks, capsys)
    assert line.startswith("✗ ")
    assert "KeyError" in line
    with refused("answer"):
        getattr(check, name)(torch.zeros(3))
