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
from qkv_lab.check import worksheet
from qkv_lab.check.hints import numbers_of
from qkv_lab.lessons.exercises import exercises

Answer = Callable[..., Any]
EXERCISES = sorted(exercises())


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, dim: int = -1
           ) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(dim)
    return weights @ v, weights


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


# --- answers with one mistake, which the comment names ----------------------------------------------------------------


def unscaled() -> Any:
    q, k, v = check.numbers()
    weights = (q @ k.mT).softmax(-1)
    return weights.tolist(), (weights @ v).tolist()


def half_rotary(x: Tensor, at: Tensor, base: float = 1e4) -> Tensor:
    angles = at[:, None] * base ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def multi_head(x: Any, q: Any, k: Any, v: Any, o: Any, heads: int, mask: Any = None) -> Any:
    out, weights = attend(*(split(x @ w, heads) for w in (q, k, v)), mask, x.shape[-1] ** -0.5)  # not of a head
    return merge(out) @ o, weights


def cross_attention(x: Any, context: Any, q: Any, k: Any, v: Any, o: Any, heads: int) -> Any:
    out, weights = attend(*(split(x @ w, heads) for w in (q, k, v)))  # context has no part in it
    return merge(out) @ o, weights


def dropout(q: Tensor, k: Tensor, v: Tensor, p: float, training: bool) -> Any:
    weights = F.dropout(attend(q, k, v)[1], p)  # also in evaluation
    return weights @ v, weights


def key_bias(q: Tensor, k: Tensor, v: Tensor, key: Tensor, mask: Tensor | None = None) -> Any:
    scores, extra = q @ k.mT / q.shape[-1] ** 0.5, (q @ key)[..., None] / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    whole = torch.cat([scores, extra], -1).softmax(-1)
    return whole[..., :-1] @ v + whole[..., -1:] * key, whole[..., :-1]  # the value of the key is not 0


class Added(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.token  # and not before it


def online_softmax(blocks: Any) -> Any:
    top, total, sums = -np.inf, 0.0, 0.0
    for scores, values in blocks:
        new = max(top, scores.max())
        if new == -np.inf:
            continue
        parts, kept = np.exp(scores - new), np.exp(top - new)
        total, sums, top = total * kept + parts.sum(), sums * kept + parts @ values, new
    return sums / total, np.log(total)  # without the largest score


def alignment_accuracy(weights: Any, truth: Any) -> Any:
    rows = zip(weights, truth, strict=True)
    return np.mean([int(row.argmax()) == places[0] for row, places in rows if places])  # of several places, the first


def einsum_attention(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, mask: Any) -> Any:
    out, weights = attend(*(torch.einsum("bnm,mhd->bhnd", x, w) for w in (w_q, w_k, w_v)), mask)
    return torch.einsum("bhqd,hdm->bhqm", out, w_o), weights  # no sum over heads


def softpick(scores: Tensor) -> Tensor:
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    powers = (scores - top).exp() - (-top).exp()
    return powers.relu() / powers.abs().sum(-1, keepdim=True)  # masked keys have a part in the sum


def forgetting(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
    total = log_f.cumsum(-1)
    scores = q @ k.mT / q.shape[-1] ** 0.5 + (total[:, :, None] - total[:, None] + log_f[:, None])  # from j on
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf).softmax(-1) @ v


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor) -> Tensor:
    state, outs = k.new_zeros(len(k), k.shape[-1], v.shape[-1]), []
    for t in range(k.shape[1]):
        state = state + beta[:, t, None, None] * k[:, t, :, None] * (v[:, t, None] - k[:, t, None] @ state)
        outs.append((q[:, t, None] @ state)[:, 0])
        state = log_a[:, t, None, None].exp() * state  # after the token, not before
    return torch.stack(outs, 1)


def reversal_score(weights: Any, length: int) -> Any:
    place = torch.arange(length)
    place = place[length + 1 + place < weights.shape[2]]  # queries begin one too late
    return (weights[:, :, length + 1 + place].argmax(-1) == length - 1 - place).double().mean((0, 2))


WRONG: dict[str, tuple[str, Answer]] = {  # for each exercise a part of the hint, and the answer
    "attention": ("each column", lambda q, k, v, mask=None: attend(q, k, v, mask, dim=1)),
    "entropy": ("makes NaN", lambda w: -(w * w.log()).sum(-1)),
    "temperature": ("multiplied by it", lambda q, k, v, temperature=1.0: attend(q * temperature, k, v)),
    "by_hand": ("not scaled", unscaled),
    "rotary": ("half the width away", half_rotary),
    "grouped_queries": (
        "take turns",
        lambda q, k, v: F.scaled_dot_product_attention(
            q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v)), is_causal=True
        ),
    ),
    "kv_cache": (
        "attends to itself alone",
        lambda q, k, v, keys, values: (v.clone(), torch.cat([keys, k], 2), torch.cat([values, v], 2)),
    ),
    "linear_state": ("not divided", lambda q, k, v: ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril() @ v),
    "softpick": ("masked keys are in the sum", softpick),
    "forget_gates": ("begin at j + 1", forgetting),
    "delta_rule": ("expected before", delta_rule),
    "attention_over_depth": ("not normalised", lambda q, x: ((x @ q).softmax(0)[..., None] * x).sum(0)),
    "sink_curve": ("first query is included", lambda w: w.cumsum(-1)[..., 1:] / np.arange(2, w.shape[-1] + 1)),
    "compare_models": ("not 1/n", lambda w, causal: (w[..., 1:].mean(-1), 1 / w.shape[-1])),
    "causal_mask": ("lower triangle", lambda n: torch.ones(n, n).triu().bool()),
    "multi_head": ("√d_model", multi_head),
    "dropout": ("in evaluation, too", dropout),
    "cross_attention": ("self-attention", cross_attention),
    "first_token": ("first query is", lambda w: w[..., 0].mean((1, 2))),
    "sink_rate": ("every weight", lambda w, t=0.3: (w[..., 0] > t).float().mean().item()),
    "key_bias": ("the key itself", key_bias),
    "off_by_one": ("plain softmax", lambda s: s.softmax(-1)),
    "parameter_count": ("too few", lambda vocab, d, layers, d_ff, n: vocab * d),
    "sink_token": ("not added", Added),
    "stable_softmax": ("overflows", lambda s: np.exp(s) / np.exp(s).sum(-1, keepdims=True)),
    "soft_lookup": ("matrix product", lambda q, k, v: q @ k),
    "online_softmax": ("lacks the largest", online_softmax),
    "additive_score": ("no tanh", lambda q, k, w_q, w_k, v: ((q @ w_q.T)[:, :, None] + (k @ w_k.T)[:, None]) @ v),
    "alignment_accuracy": ("first counterpart", alignment_accuracy),
    "einsum_attention": ("are not summed", einsum_attention),
    "reversal_score": ("one too late", reversal_score),
}


def judged(name: str, answer: Answer, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a check prints. All but the last have passed, and the last says what the check returns."""
    verdict = getattr(check, name)(answer)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["✓ "] * (len(lines) - 1) + ["✓ " if verdict else "✗ "]
    return lines


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_passes_and_draws_nothing_from_the_global_generators(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1]
    lines = judged(name, answer.solution(name), capsys)
    assert lines[-1].startswith("✓ "), lines
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize("student", ["Ada", "Bo Chen", "Çelik 17"])
def test_each_student_has_numbers_of_their_own(student: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On these all solutions and mistakes are judged as on those of the labs; tables of another student are wrong."""
    labs = tuple(x.tolist() for x in answer.solution("by_hand")())
    with numbers_of(student):
        own = tuple(x.round(2).tolist() for x in answer.solution("by_hand")())
        for name in EXERCISES:
            assert judged(name, answer.solution(name), capsys)[-1].startswith("✓ "), name
            assert judged(name, WRONG[name][1], capsys)[-1].startswith("✗ "), name
        assert check.by_hand(lambda: own)
        assert not check.by_hand(lambda: labs)
        first = worksheet.sheet(student)
    with numbers_of(f" {student.upper()}"):
        assert check.by_hand(lambda: own)
    assert worksheet.sheet(student) == first
    assert not check.by_hand(lambda: own)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_mistake_fails_with_its_own_hint(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    hint, answer = WRONG[name]
    last = judged(name, answer, capsys)[-1]
    assert last.startswith("✗ ")
    assert hint in last


@pytest.mark.parametrize("name", EXERCISES)
def test_answers_that_return_none_or_raise_fail_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(*_: object) -> None:
        raise KeyError("no such thing")

    assert len(judged(name, lambda *_: None, capsys)) == 1
    (line,) = judged(name, breaks, capsys)
    assert line.startswith("✗ ")
    assert "KeyError" in line
    with refused("answer"):
        getattr(check, name)(torch.zeros(3))
