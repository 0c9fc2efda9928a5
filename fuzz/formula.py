"""Attention as one dense float64 formula, with gradients by autograd.

It shares no code with the package. Of built-in objects it only reads the parameters; of user-defined objects it calls
the one method that defines them, with all heads at once. Query i has position p = i + nk − nq.
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
class Result:
    """Results of the formula; values per query are (b, h, nq)."""

    out: Tensor
    lse: Tensor | None
    """Log-sum-exp, for softmax."""
    weights: Tensor
    sink_weight: Tensor | None
    final: Tensor
    """Final scores, −inf where masked."""
    level: Tensor | None
    """Level of rows whose weights sum to one, before rounding."""
    total: Tensor | None
    """Sum of the weights, if they are divided by it."""
    anchor: Tensor | None
    """The level, or the logarithm of the sum; a backward computes its gradient as one number per row."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Sequence[Any], score: Any, normalizer: Any,
    rounding: Rounding = EXACT, near: Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention of float64 tensors; `visible` (b, h, nq, nk) is the mask, `near` an estimate of the level."""
    heads, key_heads = q.shape[1], k.shape[1]
    group = heads // key_heads
    used = visible.any(2).unflatten(1, (key_heads, group)).any(2)[..., None]
    k, v = (torch.where(used, x, 0.0) for x in (k, v))  # fully masked keys may be NaN
    q = torch.where(visible.any(3)[..., None] | q.isfinite(), q, 0.0)
    q, k = project(score, q, k, rounding)
    n_visible = visible.sum(-1, keepdim=True).clamp(min=1).to(q)
    if isinstance(score, scores.SSMax):
        q = rounding.stored(q * rounding.stored(n_visible.log() * _by_head(score.scale, 0)[:, None, None]))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    final = compare(score, rounding.used(q), rounding.used(k), rounding)
    final = rounding.product(final)
    for one in bias:
        final = rounding.scores(biased(one, final, rounding.used(q), factor(score, q.shape[-1]), rounding))
    final = final / normalizer.temperature
    final = torch.where(visible, final, -torch.inf)
    sink = sink_logit(score, normalizer, rounding.used(q), key_heads, rounding)
    found = normalize(normalizer, final, n_visible, sink, rounding, near)
    weights = rounding.weights(found.weights)
    out = weights @ rounding.used(v)
    for one in bias:
        if isinstance(one, biases.RelativePosition) and one.values is not None:
            table = _by_head(one.values, 2)
            out = out + (weights[..., None] * table[:, _clipped(final, table.shape[-2] // 2)]).sum(-2)
    return Result(out, *found.rest)


# --- scores -----------------------------------------------------------------------------------------------------------


def _user_defined(thing: object) -> bool:
    return not type(thing).__module__.startswith("qkv.")


def _by_head(x: Any, ndim: int) -> Tensor:
    """A parameter of `ndim` dimensions per head, with a leading head dimension added if it has none."""
    x = torch.as_tensor(x, dtype=torch.float64)
    return x if x.ndim > ndim else x[None]


def project(score: Any, q: Tensor, k: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Projected queries and keys."""
    match score:
        case scores.Dot() | scores.SSMax():
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
            return q, k  # user-defined scores here have no projection
        case _:
            q, k = score.project(q, k)
    return rounding.stored(q), rounding.stored(k)


def _unit(x: Tensor, rounding: Rounding) -> Tensor:
    squares = x.square().sum(-1, keepdim=True)
    length = torch.where(squares > 0, squares, 1.0).sqrt()
    # A step along the vector changes nothing: the derivative is a difference, 0 in one dimension.
    return torch.where(squares > 0, rounding.cancelling(x / length, x, 1 / length.detach()), 0.0)


def factor(score: Any, size: int) -> float:
    """Factor of a product of `size` entries."""
    match score:
        case scores.Dot(None) | scores.SSMax():
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
    """Logit of the attention sink, (…, h, …, 1): a given logit, or the score of a learned key."""
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
    """Number of entries of a query for such keys."""
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
    if _user_defined(bias):
        place = Place(*s.shape[-2:])
        return s + bias.tile(place) if isinstance(bias, biases.AdditiveBias) else bias.apply(s, place)
    rows, keys = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])
    back = rows + s.shape[3] - s.shape[2] - keys
    match bias:
        case biases.SoftCap(cap):
            return cap * rounding.cancelling(torch.tanh(s / cap), s / cap)
        case biases.TensorBias(tensor):
            return s + tensor
        case biases.ByDistance(tensor):
            return s + tensor[:, rows - keys + s.shape[3] - 1]
        case biases.ALiBi(slopes):
            slopes = torch.tensor(alibi_slopes(s.shape[1]), dtype=s.dtype) if slopes is None else slopes
            return s - slopes[:, None, None] * back.abs()
        case biases.T5Bias(table, both, most):
            buckets = [[t5_bucket(x, len(table), most, both) for x in row] for row in back.tolist()]
            # A product, whose gradient adds thousands of pairs in blocks: one after another, rounding errors add up.
            chosen = torch.nn.functional.one_hot(torch.tensor(buckets), len(table)).to(table)
            return s + (chosen @ table).movedim(-1, 0)
        case biases.Forget(log_f):  # of the tokens after the key, up to the query
            total = log_f[(None,) * (3 - log_f.ndim)].cumsum(-1)
            return s + total[..., s.shape[3] - s.shape[2] :, None] - total[..., None, :]
        case biases.RelativePosition(vectors, _):
            table = _by_head(vectors, 2)
            index = _clipped(s, table.shape[-2] // 2)
            met = scale * (q @ table.mT)
            return s + met.gather(-1, index.expand(*s.shape))
    raise TypeError(f"no formula for {type(bias).__name__}")


def _clipped(s: Tensor, reach: int) -> Tensor:
    """Index of each pair in a table of clipped distances key − position."""
    n_queries, n_keys = s.shape[-2:]
    ahead = torch.arange(n_keys) - (torch.arange(n_queries)[:, None] + n_keys - n_queries)
    return ahead.clamp(-reach, reach) + reach


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8 (i + 1) / H) for H a power of two; else the slopes of the power below, then every other one of the next."""
    power = 1 << (heads.bit_length() - 1)
    whole = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    finer = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(2 * power)]
    return whole + finer[0 : 2 * (heads - power) : 2]


@functools.cache
def t5_bucket(back: int, buckets: int, most: int, both: bool) -> int:
    """The bucket of a distance, in integers: bucket e + t starts at e (most / e)^(t / (n − e))."""
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
class Normalized:
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


def normalize(
    normalizer: Any, final: Tensor, n_visible: Tensor, sink: Tensor | None, rounding: Rounding, near: Tensor | None
) -> Normalized:
    """Weights of final scores, which are −inf where masked; `n_visible` is the number of visible keys."""
    masked = final == -torch.inf
    if isinstance(normalizer, normalizers.Pointwise):
        return _pointwise(normalizer, final, masked, n_visible, rounding)
    if isinstance(normalizer, normalizers.Softmax | normalizers.Hard):
        with_sink = final if sink is None else torch.cat([final, sink], -1)
        empty = (with_sink == -torch.inf).all(-1, keepdim=True)
        exact = torch.logsumexp(torch.where(empty, 0.0, with_sink), -1, keepdim=True)
        level = rounding.level(exact, None)
        weights = torch.exp(torch.where(masked, -torch.inf, rounding.from_level(final, level) - level))
        sink_weight = None if sink is None else torch.exp(sink - level)[..., 0]
        if isinstance(normalizer, normalizers.Hard):
            return Normalized(_one_key(final, weights), None, None, final, exact[..., 0], None, level[..., 0])
        lse = torch.where(empty, -torch.inf, level)[..., 0]
        return Normalized(weights, lse, sink_weight, final, exact[..., 0], None, level[..., 0])
    if isinstance(normalizer, normalizers.Softpick):
        return _softpick(final, masked, sink, rounding)
    rows = Rows(_function(normalizer), torch.where(masked, 0.0, final), masked, sink)
    exact, per_sum = level_of(rows, near)
    level = rounding.level(exact, per_sum)
    rows = Rows(rows.weigh, rounding.from_level(rows.scores, level), masked, sink)
    own = rows.sink_weight(level)
    weights = rounding.sums_to_one(rows.weights(level), rows.total(level).detach())
    return Normalized(weights, None, None if own is None else own[..., 0], final, exact[..., 0], None, level[..., 0])


def _softpick(final: Tensor, masked: Tensor, sink: Tensor | None, rounding: Rounding) -> Normalized:
    """max(e^s − 1, 0) over the sum of |e^s − 1|, each divided by the largest e^s, or 1."""
    s = torch.where(masked, 0.0, final)  # whose term is 0
    terms = s if sink is None else torch.cat([s, sink], -1)
    above = torch.relu(terms)
    largest = above.detach().amax(-1, keepdim=True)
    total = (torch.exp(above - largest) * -torch.expm1(-terms.abs())).sum(-1, keepdim=True)
    level = rounding.level(torch.where(total == 0, 1.0, total).log() + largest, None)
    weights = torch.exp(rounding.from_level(above, level) - level) * -torch.expm1(-above)
    n, own = s.shape[-1], None if sink is None else weights[..., -1]
    return Normalized(weights[..., :n], None, own, final, None, total[..., 0], level[..., 0])


def _function(normalizer: Any) -> Weigh:
    """The weight function of score and level, for normalizers whose weights sum to one."""
    if _user_defined(normalizer):
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
    """All weight on the best key, with the gradient of softmax weights."""
    best = torch.zeros_like(soft).scatter(-1, final.detach().argmax(-1, keepdim=True), 1.0)
    best = best.masked_fill((final == -torch.inf).all(-1, keepdim=True), 0)
    return best + (soft - soft.detach())


def _softmax_of(logs: Tensor, final: Tensor, masked: Tensor, rounding: Rounding) -> Normalized:
    """Weights divided by their sum, as a softmax of their logarithms, which do not underflow."""
    logs = torch.where(masked, -torch.inf, logs)
    empty = masked.all(-1, keepdim=True)
    level = rounding.level(torch.logsumexp(torch.where(empty, 0.0, logs), -1, keepdim=True), None)
    weights = torch.exp(torch.where(masked, -torch.inf, rounding.from_level(logs, level) - level))
    return Normalized(weights, None, None, final, None, None, level[..., 0])


def _pointwise(normalizer: Any, final: Tensor, masked: Tensor, n_visible: Tensor, rounding: Rounding) -> Normalized:
    s = torch.where(masked, 0.0, final)
    match normalizer:
        case normalizers.Sigmoid(bias):
            shift = -torch.log(n_visible) if bias is None else _by_head(bias, 0)[:, None, None]
            s = rounding.scores(s + shift)
            if normalizer.divide == "sum":
                return _softmax_of(torch.nn.functional.logsigmoid(s), final, masked, rounding)
            weights = rounding.cancelling(torch.sigmoid(s), s)
        case normalizers.EluPlusOne("sum"):
            return _softmax_of(torch.log1p(torch.relu(s)) + s.clamp(max=0), final, masked, rounding)
        case normalizers.EluPlusOne():
            weights = torch.where(s > 0, s + 1, torch.exp(s.clamp(max=0)))
        case normalizers.ReLU():
            weights = torch.relu(s)
        case normalizers.Identity():
            weights = s
        case _:
            weights = normalizer.weight(s)
    weights = weights.masked_fill(masked, 0)
    divide = getattr(normalizer, "divide", None)
    if divide == "keys":
        return Normalized(weights / n_visible, None, None, final)
    if divide == "sum":
        weights = rounding.weights(weights)
        largest = weights.detach().abs().amax(-1, keepdim=True)
        largest = torch.where(largest == 0, 1.0, largest)  # without it, the square of a small sum would underflow
        total = (weights / largest).sum(-1, keepdim=True)
        total = torch.where(total == 0, 1.0, total)
        anchor = (total.abs().log() + largest.log())[..., 0]
        return Normalized(weights / largest / total, None, None, final, None, (total * largest)[..., 0], anchor)
    return Normalized(weights, None, None, final)
