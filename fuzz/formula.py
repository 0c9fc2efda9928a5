"""Attention as one dense float64 formula, with gradients by autograd.

It shares no code with the package. Built-in objects are read, their parameters and nothing else; of a user's own object
the one method that defines it is called, with all heads at once. Query i stands at position p = i + nk − nq.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzz.level import Rows, Weigh, level_of
from fuzz.rounding import EXACT, Rounding
from fuzz.visible import Place
from qkv import biases, normalizers, scores


@dataclass(frozen=True, eq=False)
class Found:
    """What the formula finds; rows of queries are (b, h, nq)."""

    out: Tensor
    lse: Tensor | None
    """Of a softmax."""
    weights: Tensor
    sink_weight: Tensor | None
    final: Tensor
    """Final scores, −inf where hidden."""
    level: Tensor | None
    """Level of rows that sum to one, before it is rounded."""
    total: Tensor | None
    """What weights are divided by, if it is their sum."""
    anchor: Tensor | None
    """Whose gradient is what a backward keeps for each row: the level, or the logarithm of the sum."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Sequence[Any], score: Any, normalizer: Any,
    rounding: Rounding = EXACT, near: Tensor | None = None,
) -> Found:  # fmt: skip
    """Attention of float64 tensors; `allowed` (b, h, nq, nk) is the mask, and `near` almost the level of each row."""
    heads, key_heads = q.shape[1], k.shape[1]
    group = heads // key_heads
    shown = allowed.any(2).unflatten(1, (key_heads, group)).any(2)[..., None]
    k, v = (torch.where(shown, x, 0.0) for x in (k, v))  # what no query sees may be anything
    q = torch.where(allowed.any(3)[..., None] | q.isfinite(), q, 0.0)
    q, k = project(score, q, k, rounding)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    final = compare(score, rounding.used(q), rounding.used(k), rounding)
    final = rounding.product(final)
    for one in bias:
        final = rounding.scores(biased(one, final, rounding.used(q), factor(score, q.shape[-1]), rounding))
    final = final / normalizer.temperature
    final = torch.where(allowed, final, -torch.inf)
    visible = allowed.sum(-1, keepdim=True).clamp(min=1).to(final)
    sink = sink_logit(score, normalizer, rounding.used(q), key_heads, rounding)
    found = weigh(normalizer, final, visible, sink, rounding, near)
    weights = rounding.weights(found.weights)
    out = weights @ rounding.used(v)
    for one in bias:
        if isinstance(one, biases.RelativePosition) and one.values is not None:
            table = _by_head(one.values, 2)
            out = out + (weights[..., None] * table[:, _clipped(final, table.shape[-2] // 2)]).sum(-2)
    return Found(out, *found.rest)


# --- scores -----------------------------------------------------------------------------------------------------------


def _is_own(thing: object) -> bool:
    return not type(thing).__module__.startswith("qkv.")


def _by_head(x: Any, ndim: int) -> Tensor:
    """A parameter of `ndim` dimensions, with one more in front for the heads if it has none."""
    x = torch.as_tensor(x, dtype=torch.float64)
    return x if x.ndim > ndim else x[None]


def project(score: Any, q: Tensor, k: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Queries and keys where they are compared."""
    match score:
        case scores.Dot():
            return q, k
        case scores.General(weight):
            return rounding.stored(q @ _by_head(weight, 2)), k
        case scores.Cosine(scale):
            q, k = _unit(q, rounding) * _by_head(scale, 0)[:, None, None], _unit(k, rounding)
        case scores.Additive(_, w_q, w_k, bias):
            q = q if w_q is None else rounding.stored(q @ _by_head(w_q, 2).mT)
            k = k if w_k is None else rounding.stored(k @ _by_head(w_k, 2).mT)
            return (q if bias is None else rounding.stored(q + bias)), k
        case scores.Features(feature_map):
            q, k = feature_map(q), feature_map(k)
        case scores.Pairwise():
            return q, k  # own ones here define their scores alone
        case _:
            q, k = score.project(q, k)
    return rounding.stored(q), rounding.stored(k)


def _unit(x: Tensor, rounding: Rounding) -> Tensor:
    squares = x.square().sum(-1, keepdim=True)
    length = torch.where(squares > 0, squares, 1.0).sqrt()
    # A step along the vector changes nothing: its derivative is a difference, 0 in one dimension.
    return torch.where(squares > 0, rounding.cancelling(x / length, x, 1 / length.detach()), 0.0)


def factor(score: Any, size: int) -> float:
    """What a product of `size` entries is multiplied by."""
    match score:
        case scores.Dot(None):
            return 1 / math.sqrt(size)
        case scores.Dot(scale) | scores.General(_, scale):
            return float(scale)
    return 1.0


def compare(score: Any, q: Tensor, k: Tensor, rounding: Rounding) -> Tensor:
    """Scores of projected queries and keys, before biases."""
    if isinstance(score, scores.Additive):
        inside = q[..., :, None, :] + k[..., None, :, :]
        squashed = rounding.cancelling(torch.tanh(inside), inside)
        return (squashed * _by_head(score.vector, 1)[:, None, None]).sum(-1)
    if isinstance(score, scores.Pairwise):
        made: Tensor = score.scores(q, k)
        return made
    return factor(score, q.shape[-1]) * (q @ k.mT)


def sink_logit(score: Any, normalizer: Any, q: Tensor, key_heads: int, rounding: Rounding) -> Tensor | None:
    """Logit of the part of the weights that no key owns, (…, h, …, 1): a sink, or the score of a learned key."""
    sink, key = getattr(normalizer, "sink", None), getattr(normalizer, "key", None)
    if key is not None:
        keys = key.unflatten(0, (key_heads, -1))[None]
        keys = project(score, q[:, :, :1].new_zeros(1, len(key), 1, _query_size(score, keys)), keys, rounding)[1]
        keys = keys.flatten(1, 2)[:, :, None].expand(len(q), -1, -1, -1)
        return rounding.product(compare(score, q, keys, rounding)) / normalizer.temperature
    if sink is None:
        return None
    sink = torch.as_tensor(sink, dtype=torch.float64)
    sink = sink[..., None] if sink.ndim == 3 else sink.reshape(1, -1, 1, 1)
    return sink.expand(*q.shape[:3], 1)


def _query_size(score: Any, keys: Tensor) -> int:
    """Entries of a query that goes with such keys."""
    if isinstance(score, scores.General):
        return score.weight.shape[-2]
    if isinstance(score, scores.Additive) and score.w_q is not None:
        return score.w_q.shape[-1]
    if isinstance(score, scores.Additive):
        return score.vector.shape[-1]
    return keys.shape[-1]


# --- biases -----------------------------------------------------------------------------------------------------------


def biased(bias: Any, s: Tensor, q: Tensor, scale: float, rounding: Rounding) -> Tensor:
    """All scores (b, h, nq, nk) after a bias; q are projected queries."""
    if _is_own(bias):
        place = Place(*s.shape[-2:])
        return s + bias.tile(place) if isinstance(bias, biases.Additive) else bias.apply(s, place)
    rows, keys = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])
    back = rows + s.shape[3] - s.shape[2] - keys
    match bias:
        case biases.SoftCap(cap):
            return cap * rounding.cancelling(torch.tanh(s / cap), s / cap)
        case biases.Dense(tensor):
            return s + tensor
        case biases.ByDistance(tensor):
            return s + tensor[:, rows - keys + s.shape[3] - 1]
        case biases.ALiBi(slopes):
            slopes = torch.tensor(alibi_slopes(s.shape[1]), dtype=s.dtype) if slopes is None else slopes
            return s - slopes[:, None, None] * back.abs()
        case biases.T5Bias(table, both, most):
            buckets = [[t5_bucket(x, len(table), most, both) for x in row] for row in back.tolist()]
            return s + table[torch.tensor(buckets)].movedim(-1, 0)
        case biases.RelativePosition(vectors, _):
            table = _by_head(vectors, 2)
            index = _clipped(s, table.shape[-2] // 2)
            met = scale * (q @ table.mT)
            return s + met.gather(-1, index.expand(*s.shape))
    raise TypeError(f"no formula for {type(bias).__name__}")


def _clipped(s: Tensor, reach: int) -> Tensor:
    """Row of a table of distances key − position, of each pair."""
    n_queries, n_keys = s.shape[-2:]
    ahead = torch.arange(n_keys) - (torch.arange(n_queries)[:, None] + n_keys - n_queries)
    return ahead.clamp(-reach, reach) + reach


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8 (i + 1) / H) for H a power of two; else those of the power below, then every other one of the next."""
    power = 1 << (heads.bit_length() - 1)
    whole = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    finer = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(2 * power)]
    return whole + finer[0 : 2 * (heads - power) : 2]


@functools.cache
def t5_bucket(back: int, buckets: int, most: int, both: bool) -> int:
    """The bucket of a distance, in whole numbers: bucket e + t begins at e (most / e)^(t / (n − e))."""
    if both:
        half = buckets // 2
        return t5_bucket(abs(back), half, most, False) + (half if back < 0 else 0)
    back, exact = max(back, 0), buckets // 2
    if back < exact:
        return back
    steps = buckets - exact
    t = max((t for t in range(steps) if back**steps * exact**t >= most**t * exact**steps), default=0)
    return exact + t


# --- normalizers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Weighed:
    weights: Tensor
    lse: Tensor | None
    sink_weight: Tensor | None
    final: Tensor
    level: Tensor | None = None
    total: Tensor | None = None
    anchor: Tensor | None = None

    @property
    def rest(self) -> tuple[Any, ...]:
        return self.lse, self.weights, self.sink_weight, self.final, self.level, self.total, self.anchor


def weigh(
    normalizer: Any, final: Tensor, visible: Tensor, sink: Tensor | None, rounding: Rounding, near: Tensor | None
) -> Weighed:
    """Weights of final scores, which are −inf where hidden; `visible` counts the keys that the mask shows."""
    hidden = final == -torch.inf
    if isinstance(normalizer, normalizers.Pointwise):
        return _pointwise(normalizer, final, hidden, visible, rounding)
    if isinstance(normalizer, normalizers.Softmax | normalizers.Hard):
        together = final if sink is None else torch.cat([final, sink], -1)
        empty = (together == -torch.inf).all(-1, keepdim=True)
        exact = torch.logsumexp(torch.where(empty, 0.0, together), -1, keepdim=True)
        level = rounding.level(exact, None)
        weights = torch.exp(torch.where(hidden, -torch.inf, rounding.from_level(final, level) - level))
        sink_weight = None if sink is None else torch.exp(sink - level)[..., 0]
        if isinstance(normalizer, normalizers.Hard):
            return Weighed(_one_key(final, weights), None, None, final, exact[..., 0], None, level[..., 0])
        lse = torch.where(empty, -torch.inf, level)[..., 0]
        return Weighed(weights, lse, sink_weight, final, exact[..., 0], None, level[..., 0])
    rows = Rows(_function(normalizer), torch.where(hidden, 0.0, final), hidden, sink)
    exact, per_sum = level_of(rows, near)
    level = rounding.level(exact, per_sum)
    rows = Rows(rows.weigh, rounding.from_level(rows.scores, level), hidden, sink)
    own = rows.sink_weight(level)
    return Weighed(
        rows.weights(level), None, None if own is None else own[..., 0], final, exact[..., 0], None, level[..., 0]
    )


def _function(normalizer: Any) -> Weigh:
    """Weight of a score at a level, of weights that sum to one."""
    if _is_own(normalizer):
        own: Weigh = normalizer.weight
        return own
    if isinstance(normalizer, normalizers.Entmax):
        alpha = normalizer.alpha

        def powers(s: Tensor, level: Tensor) -> Tensor:
            x = (alpha - 1) * (s - level)
            return torch.where(x > 0, torch.where(x > 0, x, 1.0) ** (1 / (alpha - 1)), 0.0)

        return powers
    raise TypeError(f"no formula for {type(normalizer).__name__}")


def _one_key(final: Tensor, soft: Tensor) -> Tensor:
    """All weight on the best key, with the gradient of soft weights."""
    best = torch.zeros_like(soft).scatter(-1, final.detach().argmax(-1, keepdim=True), 1.0)
    best = best.masked_fill((final == -torch.inf).all(-1, keepdim=True), 0)
    return best + (soft - soft.detach())


def _pointwise(normalizer: Any, final: Tensor, hidden: Tensor, visible: Tensor, rounding: Rounding) -> Weighed:
    s = torch.where(hidden, 0.0, final)
    match normalizer:
        case normalizers.Sigmoid(bias):
            shift = -torch.log(visible) if bias is None else _by_head(bias, 0)[:, None, None]
            s = rounding.scores(s + shift)
            weights = rounding.cancelling(torch.sigmoid(s), s)
        case normalizers.EluPlusOne("sum"):
            # Divided by their sum, e^s far below 0 is a softmax: its logarithms underflow nowhere.
            logs = torch.where(hidden, -torch.inf, torch.log1p(torch.relu(s)) + s.clamp(max=0))
            empty = hidden.all(-1, keepdim=True)
            level = rounding.level(torch.logsumexp(torch.where(empty, 0.0, logs), -1, keepdim=True), None)
            weights = torch.exp(torch.where(hidden, -torch.inf, rounding.from_level(logs, level) - level))
            return Weighed(weights, None, None, final, None, None, level[..., 0])
        case normalizers.EluPlusOne():
            weights = torch.where(s > 0, s + 1, torch.exp(s.clamp(max=0)))
        case normalizers.ReLU():
            weights = torch.relu(s)
        case normalizers.Identity():
            weights = s
        case _:
            weights = normalizer.weight(s)
    weights = weights.masked_fill(hidden, 0)
    divide = getattr(normalizer, "divide", None)
    if divide == "keys":
        return Weighed(weights / visible, None, None, final)
    if divide == "sum":
        weights = rounding.weights(weights)
        total = weights.sum(-1, keepdim=True)
        total = torch.where(total == 0, 1.0, total)
        return Weighed(weights / total, None, None, final, None, total[..., 0], total.abs().log()[..., 0])
    return Weighed(weights, None, None, final)
