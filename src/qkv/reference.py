"""The specification: every mechanism by its definition, in NumPy float64 and plain loops.

To know what qkv computes, read this module. Queries are processed one at a time:

1. `compare`: the score function gives the score of the query and a key;
2. `apply_bias`: biases change the score, one after another; then the temperature divides it;
3. `is_visible`: the mask decides whether the query may attend to the key;
4. `normalize`: the normalizer turns the scores of the visible keys into weights;
5. `attention`: the output is the sum of the values times their weights.

It shares no code with the kernels, forms all matrices, and is slow. The only code it takes from elsewhere are functions
that a user passes and the keys that `RandomKeys` drew. It has no dropout, no sampling and no gradients, and it covers
only the objects of this package; a user-defined object is specified by its one method (`qkv.testing` checks that).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxtyping import Float64

from qkv import biases, masks, normalizers, scores
from qkv.errors import InputError

__all__ = ["Reference", "attention", "compare"]
__dir__ = __all__.copy
Array = np.ndarray


def array(x: Any) -> Array:
    """Return a torch tensor, or anything else that NumPy accepts, as a float64 array."""
    return np.asarray(x.detach().cpu().double() if hasattr(x, "detach") else x, dtype=np.float64)


# --- 1. Scores ----------------------------------------------------------------------------------------------------
#
# A score compares the vectors of one query and one key: it projects both and, in most cases, takes their product. The
# dot product grows with the number of dimensions, which 1/√d compensates (Vaswani et al. 2017, eq. 1). General (Luong
# et al. 2015, §3.1) is bilinear, q · W k. Cosine ignores the norms (Henry et al. 2020, eq. 4). Features are those of
# linear attention, φ(q) · φ(k) (Katharopoulos et al. 2020, eq. 4). Additive is the oldest score and the only one that
# is not a product: v · tanh(W q + U k) (Bahdanau et al. 2015, app. A.1.2); the concatenation of Luong et al.,
# v · tanh(W [q; k]), is the same with W split in two.


def compare(score: scores.Score, q: Array, k: Array, head: int, key_head: int) -> float:
    """Return the score of a query (dq,) and a key (dk,), before biases.

    >>> compare(scores.Dot(), np.array([1.0, 2.0, 2.0, 1.0]), np.array([1.0, 1.0, 1.0, 2.0]), 0, 0)
    3.5
    >>> compare(scores.Cosine(10.0), np.array([3.0, 4.0]), np.array([6.0, 8.0]), 0, 0)
    10.0
    """
    query, key = query_of(score, q, head), key_of(score, k, key_head)
    if isinstance(score, scores.Additive):
        return float(of_head(score.vector, head, 1) @ np.tanh(query + key))
    return factor(score, len(query)) * float(query @ key)


def query_of(score: scores.Score, q: Array, head: int) -> Array:
    """Return the projected query."""
    match score:
        case scores.Dot() | scores.SSMax():
            return q
        case scores.General(weight):
            return q @ of_head(weight, head, 2)
        case scores.Cosine(scale):
            return unit(q) * float(of_head(scale, head, 0))
        case scores.Additive(_, weight, _, bias):
            projected = q if weight is None else of_head(weight, head, 2) @ q
            return projected if bias is None else projected + array(bias)
        case scores.Features(feature_map):
            return mapped(getattr(feature_map, "of_queries", feature_map), q)
    raise TypeError(f"the reference has no definition of {type(score).__name__}")


def key_of(score: scores.Score, k: Array, key_head: int) -> Array:
    """Return the projected key."""
    match score:
        case scores.Dot() | scores.General() | scores.SSMax():
            return k
        case scores.Cosine():
            return unit(k)
        case scores.Additive(_, _, weight, _):
            return k if weight is None else of_head(weight, key_head, 2) @ k
        case scores.Features(feature_map):
            return mapped(feature_map, k)
    raise TypeError(f"the reference has no definition of {type(score).__name__}")


def factor(score: scores.Score, size: int) -> float:
    """Return the factor of the product of query and key, which have `size` dimensions after projection."""
    match score:
        case scores.Dot(scale):
            return 1 / math.sqrt(size) if scale is None else scale
        case scores.General(_, scale):
            return float(scale)
        case scores.SSMax():
            return 1 / math.sqrt(size)
    return 1.0


def row_factor(score: scores.Score, head: int, visible: int) -> float:
    """Return the factor of all scores of a query that sees this many keys."""
    return float(of_head(score.scale, head, 0)) * math.log(max(visible, 1)) if isinstance(score, scores.SSMax) else 1.0


def of_head(x: Any, head: int, ndim: int) -> Array:
    """Return the parameter of a head: x itself if it has `ndim` dimensions and all heads share it, else x[head]."""
    x = array(x)
    return array(x[head]) if x.ndim > ndim else x


def unit(x: Array) -> Array:
    """Return x divided by its norm; 0 stays 0."""
    length = math.sqrt(float(x @ x))
    return x / length if length > 0 else x


def mapped(feature_map: Callable[..., Any], x: Array) -> Array:
    """Return the features of one vector; feature maps are functions of torch tensors (b, h, n, d)."""
    import torch

    return array(feature_map(torch.tensor(x)[None, None, None]))[0, 0, 0]


# --- 2. Biases ----------------------------------------------------------------------------------------------------
#
# A bias is a function of a score. Several biases apply in the order in which they are passed. SoftCap bounds the score
# smoothly. The other biases are additive: Dense by pair (−∞ masks the pair), ByDistance by the distance p − j of query
# position and key. ALiBi adds −m |p − j|, with a slope m per head (Press et al. 2022), T5 a learned number per head
# and bucket of distances (Raffel et al. 2020), Shaw et al. 2018 the product of the query with a learned vector per
# distance, as if it were added to the key: scale · q · (k + a); a second table is added to the values, in `attention`.
# Forget adds the logarithms of the forget gates between key and query (Lin et al. 2025).
#
# Query i of nq has position p = i + nk − nq: the last query is aligned with the last key.


def apply_bias(
    bias: biases.Bias, score: float, b: int, h: int, i: int, j: int, *,
    n_queries: int, n_keys: int, heads: int = 1, query: Array | None = None, scale: float = 1.0,
) -> float:  # fmt: skip
    """Return the score of query i and key j after `bias`; `query` is the projected query.

    >>> apply_bias(biases.SoftCap(2.0), 1e9, 0, 0, 0, 0, n_queries=1, n_keys=1)
    2.0
    >>> apply_bias(biases.ALiBi(), 1.0, 0, 0, 3, 1, n_queries=4, n_keys=4, heads=8)
    0.0
    """
    back = i + n_keys - n_queries - j  # p − j: how far back the key is
    match bias:
        case biases.SoftCap(cap):
            return cap * math.tanh(score / cap)
        case biases.TensorBias(tensor):
            pairs = tensor.detach()[(None,) * (4 - tensor.ndim)]
            where = tuple(x if size > 1 else 0 for x, size in zip((b, h, i, j), pairs.shape, strict=True))
            return score + float(pairs[where])
        case biases.ByDistance(tensor):
            return score + float(tensor.detach()[h if len(tensor) > 1 else 0, i - j + n_keys - 1])
        case biases.ALiBi(slopes):
            slope = alibi_slopes(heads)[h] if slopes is None else float(slopes.detach()[h])
            return score - slope * abs(back)
        case biases.T5Bias(table, bidirectional, max_distance):
            return score + float(table.detach()[t5_bucket(back, len(table), max_distance, bidirectional), h])
        case biases.Forget(log_f):  # the gates of the tokens after the key, up to the query
            gates = array(log_f if log_f.ndim == 3 else log_f[None])
            gates = gates[b if len(gates) > 1 else 0, h if gates.shape[1] > 1 else 0]
            between = gates[j + 1 : j + back + 1].sum() if back >= 0 else -gates[j + back + 1 : j + 1].sum()
            return score + float(between)
        case biases.RelativePosition(keys, _):
            assert query is not None
            return score + scale * float(query @ vector_of(keys, h, back))
    raise TypeError(f"the reference has no definition of {type(bias).__name__}")


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes: for H a power of two, 2^(−8/H) and its powers; otherwise those of the next lower power,
    then every other one of twice that power (Press et al. 2022, §3 and code).

    >>> alibi_slopes(2), alibi_slopes(3)
    ([0.0625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    below = 1
    while 2 * below <= heads:
        below *= 2
    if below == heads:
        ratio = 2 ** (-8 / heads)
        return [ratio ** (n + 1) for n in range(heads)]
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def t5_bucket(back: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Return the bucket of a distance (Raffel et al. 2020, §2.1).

    If bidirectional, the first half of the buckets is for keys at or before the query and the second half for later
    keys; otherwise later keys count as distance 0. Of the n buckets of one direction, the first e = n // 2 hold one
    distance each; bucket e + t starts at distance e · (max / e)^(t / (n − e)), and the last one is unbounded.

    >>> [t5_bucket(x, 32, 128, True) for x in (0, 3, 8, 50, 500, -3)]
    [0, 3, 8, 13, 15, 19]
    """
    if bidirectional:
        buckets //= 2
        if back < 0:
            return buckets + t5_bucket(-back, buckets, max_distance, False)
    back = max(back, 0)
    exact = buckets // 2
    if back < exact:
        return back
    more, t = buckets - exact, 0
    # back ≥ e (max / e)^((t + 1) / more), in integers to avoid rounding.
    while t + 1 < more and back**more * exact ** (t + 1) >= max_distance ** (t + 1) * exact**more:
        t += 1
    return exact + t


def vector_of(table: Any, h: int, back: int) -> Array:
    """Return the vector of a distance, clipped to ±reach; entry 0 is for keys `reach` or more before the query."""
    table = of_head(table, h, 2)
    reach = len(table) // 2
    return table[min(max(-back, -reach), reach) + reach]


# --- 3. Masks -----------------------------------------------------------------------------------------------------
#
# A mask decides for each pair whether the query may attend to the key: True where it may. Patterns use the query's
# position p among the keys, so that decoding one token gives the same mask as the whole sequence. Masks compose by and,
# or and not.


def is_visible(mask: masks.Mask | None, b: int, h: int, i: int, j: int, n_queries: int, n_keys: int) -> bool:
    """Return whether `mask` lets query i attend to key j.

    >>> [is_visible(masks.Window(2), 0, 0, 1, j, 3, 3) for j in range(3)]
    [True, True, False]
    """
    return mask is None or _is_visible(mask, b, h, i + n_keys - n_queries, i, j, n_keys)


def _is_visible(mask: masks.Mask, b: int, h: int, p: int, i: int, j: int, n_keys: int) -> bool:
    """Return the same for query i standing at position p among the keys."""
    match mask:
        case masks.Causal():  # itself and what comes before
            return j <= p
        case masks.Window(size, ahead):  # `size` keys ending with its own, and `ahead` later ones
            return p - size < j <= p + ahead
        case masks.Dilated(size, step, ahead):  # the same with gaps: keys p − step · n
            return any(j == p - step * n for n in range(-ahead, size))
        case masks.Strided(step):  # every step-th key, counted from its own (Child et al. 2019)
            return (p - j) % step == 0
        case masks.Prefix(length):  # the first keys, for all
            return j < length
        case masks.Global(indices):  # global tokens attend to all and are visible to all; −1 is the last key
            chosen = [index if index >= 0 else n_keys + index for index in indices]
            return p in chosen or j in chosen
        case masks.RandomKeys(size, seed, besides):  # defined by the table of drawn keys, one row per position
            from qkv.masks.built_in import _draw

            return j in _draw(size, seed, besides, n_keys)[p].tolist()
        case masks.Padding(lengths, side):  # real keys, at the start or at the end
            length = int(lengths[b if len(lengths) > 1 else 0])
            return j < length if side == "right" else j >= n_keys - length
        case masks.Document(ids):  # keys of the same document; negative ids are masked
            row = np.asarray(ids)[b if len(ids) > 1 else 0]
            return bool(row[p] >= 0 and row[p] == row[j])
        case masks.Dense(tensor):  # the entry of query i and key j
            where = tuple(x if size > 1 else 0 for x, size in zip((b, h, i, j), tensor.shape, strict=True))
            return bool(tensor[where])
        case masks.TopKeys():  # the keys, or blocks of keys, that were selected by scores of their own
            selected = mask.selected[b if len(mask.selected) > 1 else 0]
            return j // mask.block in selected[h if len(selected) > 1 else 0, i].tolist()
        case masks.Predicate(function):  # the function of position p and key j
            import torch

            return bool(function(*(torch.tensor([[[[x]]]]) for x in (b, h, p, j))).item())
        case masks.Blockwise(inner, size):  # a mask over blocks of tokens: rows are those of the queries' blocks
            first = (p - i) // size  # the block of query 0
            return _is_visible(inner, b, h, p // size, p // size - first, j // size, math.ceil(n_keys / size))
        case masks.Shifted(inner, offset):  # query 0 has position `offset` instead
            return _is_visible(inner, b, h, i + offset, i, j, n_keys)
        case masks.And(left, right):
            return _is_visible(left, b, h, p, i, j, n_keys) and _is_visible(right, b, h, p, i, j, n_keys)
        case masks.Or(left, right):
            return _is_visible(left, b, h, p, i, j, n_keys) or _is_visible(right, b, h, p, i, j, n_keys)
        case masks.Not(inner):
            return not _is_visible(inner, b, h, p, i, j, n_keys)
    raise TypeError(f"the reference has no definition of {type(mask).__name__}")


# --- 4. Normalizers -----------------------------------------------------------------------------------------------
#
# A normalizer turns the scores of the visible keys into weights. Softmax, exp(s) over the sum of exp(s), is a
# distribution; a sink is an additional term of that sum without a key, so that a query may attend to nothing (gpt-oss,
# arXiv:2508.10925). Entmax (Peters et al. 2019, eq. 10) gives low scores zero weight; α = 2 is sparsemax, the
# distribution nearest to the scores (Martins & Astudillo 2016). Softpick is max(e^s − 1, 0) over the sum of |e^s − 1|
# (Zuhri et al. 2025). Hard attention takes the best key (Xu et al. 2015).
# Pointwise normalizers use each score alone: sigmoid σ(s + b) (Ramapuram et al. 2024, eq. 3), elu(s) + 1, max(s, 0)
# (Wortsman et al. 2023), or the score itself; their results may be divided by their sum, or by the number of visible
# keys.


def normalize(normalizer: normalizers.Normalizer, s: Array, h: int, visible: int, sink: float | None = None) -> Array:
    """Return weights (n,) of the final scores (n,) of one query of head h, all finite; the mask leaves `visible` keys.

    >>> normalize(normalizers.Softmax(), np.log([1.0, 3.0]), 0, 2).round(3).tolist()
    [0.25, 0.75]
    >>> normalize(normalizers.Softmax(), np.log([1.0, 3.0]), 0, 2, sink=math.log(4)).round(3).tolist()
    [0.125, 0.375]
    >>> normalize(normalizers.ReLU(), np.array([-1.0, 6.0, 2.0]), 0, 4).tolist()
    [0.0, 1.5, 0.5]
    """
    if len(s) == 0:
        return s  # a fully masked query
    match normalizer:
        case normalizers.Softmax():
            return np.exp(s - log_sum_exp(s, sink))
        case normalizers.Entmax(alpha):
            terms = s if sink is None else np.append(s, sink)
            return (sparsemax(terms) if alpha == 2 else entmax(terms, alpha))[: len(s)]
        case normalizers.Softpick():
            terms = s if sink is None else np.append(s, sink)
            powers = np.array([math.expm1(x) for x in terms])
            total = float(np.abs(powers).sum())
            return np.maximum(powers[: len(s)], 0) / (total if total > 0 else 1.0)
        case normalizers.Hard():
            best = max(range(len(s)), key=lambda j: s[j])  # the first of equals
            return np.array([float(j == best) for j in range(len(s))])
        case normalizers.Sigmoid(bias, divide):
            shift = -math.log(visible) if bias is None else float(of_head(bias, h, 0))
            w = np.array([sigmoid(x + shift) for x in s])
        case normalizers.EluPlusOne(divide):
            w = np.array([x + 1 if x > 0 else math.exp(x) for x in s])
        case normalizers.ReLU(divide):
            w = np.array([max(x, 0.0) for x in s])
        case normalizers.Identity(divide):
            w = s
        case _:
            raise TypeError(f"the reference has no definition of {type(normalizer).__name__}")
    if divide == "keys":
        return w / visible
    total = float(w.sum())
    if divide == "sum" and total < 1e-290 and isinstance(normalizer, normalizers.Sigmoid | normalizers.EluPlusOne):
        return np.exp(s - log_sum_exp(s))  # of scores this low both weights are e^s, and their sum underflows
    return w / total if divide == "sum" and total != 0 else w


def log_sum_exp(s: Array, sink: float | None = None) -> float:
    """Return ln Σ exp(s), with a sink; −∞ without terms. The maximum is factored out so that exp cannot overflow."""
    terms = [*s.tolist(), *([] if sink is None else [sink])]
    top = max(terms, default=-math.inf)
    return top if math.isinf(top) else top + math.log(sum(math.exp(x - top) for x in terms))


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^(−x)), in the form that does not overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def sparsemax(s: Array) -> Array:
    """Return [s − τ]₊ with τ such that it sums to one: exact, by sorting (Martins & Astudillo 2016, alg. 1).

    >>> sparsemax(np.array([1.0, 0.5, -1.0])).tolist()
    [0.75, 0.25, 0.0]
    """
    tau, total = 0.0, 0.0
    for n, x in enumerate(sorted(s.tolist(), reverse=True), 1):
        total += x
        if 1 + n * x > total:  # the n largest scores have positive weight
            tau = (total - 1) / n
    return np.maximum(s - tau, 0)


def entmax(s: Array, alpha: float) -> Array:
    """Return [(α − 1) s − τ]₊^(1/(α−1)) with τ such that it sums to one, by bisection (Peters et al. 2019, alg. 1).

    At τ = max − 1 the largest score alone has weight one, at τ = max all weights are 0; the sum decreases in between.

    >>> entmax(np.array([0.0, 0.0]), 1.5).round(6).tolist()
    [0.5, 0.5]
    """
    z = (alpha - 1) * (s - s.max())  # weights do not change under a constant shift of the scores
    low, high = -1.0, 0.0
    for _ in range(200):
        tau = (low + high) / 2
        low, high = (tau, high) if _powers(z - tau, alpha).sum() > 1 else (low, tau)
    return _powers(z - low, alpha)


def _powers(x: Array, alpha: float) -> Array:
    return np.maximum(x, 0) ** (1 / (alpha - 1))


# --- 5. Attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reference:
    """Result of the specification: output, log-sum-exp of the scores (softmax only), and weights.

    Batch and head dimensions are present only if q has them.

    >>> x = np.ones((2, 4))
    >>> attention(x, x, x).weights.round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    out: Float64[Array, "*bh nq dv"]
    lse: Float64[Array, "*bh nq"] | None
    weights: Float64[Array, "*bh nq nk"]


def first_undefined(*parts: Any) -> str | None:
    """Return the class name of the first mask, bias, score or normalizer that is not defined here, or None.

    Masks inside other masks are checked, too. Subclasses are not defined, because they may override the definition.

    >>> class Mine(normalizers.Softmax): ...
    >>> first_undefined(scores.Dot(), Mine())
    'Mine'
    """
    for part in parts:
        if part is None:
            continue
        if type(part).__module__ not in DEFINED:
            return type(part).__name__
        inside = first_undefined(*(x for x in vars(part).values() if isinstance(x, masks.Mask)))
        if inside is not None:
            return inside
    return None


DEFINED = ("qkv.scores", "qkv.biases", "qkv.masks.base", "qkv.masks.built_in", "qkv.masks.top_keys", "qkv.normalizers")
"""The modules whose classes the specification defines."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: masks.Mask | None = None,
    bias: Sequence[biases.Bias] = (),
    score: scores.Score | None = None,
    normalizer: normalizers.Normalizer | None = None,
) -> Reference:
    """Compute attention of q (b, h, nq, dq) over k (b, hkv, nk, dk) and v (b, hkv, nk, dv), tensors or arrays.

    Query head h uses key head h // (heads / key heads). A fully masked query has output 0, weights 0 and lse −∞.
    q, k and v may also be (b, n, d) or (n, d), for one head; the results then have the same number of dimensions.

    >>> x = np.ones((1, 1, 2, 4))
    >>> attention(x, x, x, mask=masks.Causal()).weights[0, 0].round(3).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    q, k, v = array(q), array(k), array(v)
    ndim = q.ndim
    score = scores.Dot() if score is None else score
    normalizer = normalizers.Softmax() if normalizer is None else normalizer
    if (unknown := first_undefined(mask, *bias, score, normalizer)) is not None:
        raise InputError(f"the reference has no definition of {unknown}; expected objects of this package alone")
    if q.ndim < 4:
        q, k, v = (x[:, None] if q.ndim == 3 else x[None, None] for x in (q, k, v))
        result = attention(q, k, v, mask=mask, bias=bias, score=score, normalizer=normalizer)
        at = (slice(None), 0) if ndim == 3 else (0, 0)
        return Reference(result.out[at], None if result.lse is None else result.lse[at], result.weights[at])
    batch, heads, n_queries, _ = q.shape
    _, key_heads, n_keys, dv = v.shape
    out = np.zeros((batch, heads, n_queries, dv))
    lse = np.full((batch, heads, n_queries), -np.inf)
    weights = np.zeros((batch, heads, n_queries, n_keys))
    tables = [one.values for one in bias if isinstance(one, biases.RelativePosition) and one.values is not None]
    for b, h, i in np.ndindex(batch, heads, n_queries):
        g = h // (heads // key_heads)
        query = query_of(score, q[b, h, i], h)
        visible = [j for j in range(n_keys) if is_visible(mask, b, h, i, j, n_queries, n_keys)]
        by_row, final = row_factor(score, h, len(visible)), {}
        query = query * by_row
        for j in visible:
            s = by_row * compare(score, q[b, h, i], k[b, g, j], h, g)
            for one in bias:
                s = apply_bias(
                    one, s, b, h, i, j, n_queries=n_queries, n_keys=n_keys, heads=heads, query=query,
                    scale=factor(score, len(query)),
                )  # fmt: skip
            final[j] = s / normalizer.temperature
        keys = [j for j in visible if final[j] != -math.inf]  # a bias of −∞ also masks a pair
        sink = _sink(normalizer, score, q[b, h, i], b, h, i, g, by_row)
        row = np.array([final[j] for j in keys])
        lse[b, h, i] = log_sum_exp(row, sink)
        weights[b, h, i, keys] = normalize(normalizer, row, h, len(visible), sink)
        for j in keys:
            value = v[b, g, j]
            for table in tables:  # relative positions also add a vector to the value (Shaw et al., eq. 3)
                value = value + vector_of(table, h, i + n_keys - n_queries - j)
            out[b, h, i] += weights[b, h, i, j] * value
    return Reference(out, lse if isinstance(normalizer, normalizers.Softmax) else None, weights)


def _sink(
    normalizer: normalizers.Normalizer, score: scores.Score, q: Array, b: int, h: int, i: int, g: int, by_row: float
) -> float | None:
    """Return the sink's logit: a number per head or per query, or the score of a learned key with value 0.

    The temperature divides the score of a learned key, but not a sink; biases and masks apply to neither (Gu et al.
    2025, arXiv:2410.10781).
    """
    if not isinstance(normalizer, normalizers.Softmax | normalizers.Entmax | normalizers.Softpick):
        return None
    if normalizer.key is not None:
        return by_row * compare(score, q, array(normalizer.key)[h], h, g) / normalizer.temperature
    if normalizer.sink is None:
        return None
    sink = array(normalizer.sink)
    return float(sink[b, h, i] if sink.ndim == 3 else of_head(sink, h, 0))


# --- 6. Statistics of weights -------------------------------------------------------------------------------------


def statistics(weights: Float64[Array, "*n nq nk"]) -> SimpleNamespace:
    """Return the results expected of `qkv.measure`, computed from materialised weights.

    With M_i = Σ_j A_ij the mass on keys (1 unless a sink takes some) and a_ij = A_ij / M_i:
    entropy −Σ_j a ln a (nats), received Σ_i A_ij, distance Σ_j a |p_i − j| (tokens), spread the standard deviation of j
    under a, effective_keys 1 / Σ_j a². Query i has position p_i = i + nk − nq. A query with M = 0 gives 0 everywhere.

    >>> statistics(np.full((1, 4), 0.25)).effective_keys.tolist()
    [4.0]
    """
    weights = np.asarray(weights, dtype=np.float64)
    n_queries, n_keys = weights.shape[-2:]
    position = np.arange(n_queries)[:, None] + n_keys - n_queries
    key = np.arange(n_keys)[None, :]
    mass = weights.sum(-1, keepdims=True)
    a = np.divide(weights, mass, out=np.zeros_like(weights), where=mass > 0)
    logs = np.log(a, out=np.zeros_like(a), where=a > 0)
    mean = (a * key).sum(-1, keepdims=True)
    squares = (a * a).sum(-1)
    return SimpleNamespace(
        entropy=-(a * logs).sum(-1),
        received=weights.sum(-2),
        distance=(a * np.abs(position - key)).sum(-1),
        spread=np.sqrt((a * (key - mean) ** 2).sum(-1)),
        effective_keys=np.divide(1, squares, out=np.zeros_like(squares), where=squares > 0),
    )
