"""The specification: every mechanism by its definition, in NumPy float64 and plain loops.

To know what qkv computes, read `qkv.reference.parts`, then this module. Queries are processed one at a time:

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from qkv import biases, masks, normalizers, scores
from qkv.errors import InputError
from qkv.reference.parts import (
    apply_bias,
    array,
    compare,
    factor,
    is_visible,
    log_sum_exp,
    normalize,
    of_head,
    query_of,
    vector_of,
)

Array = np.ndarray
__all__ = ["Reference", "attention", "compare"]
__dir__ = __all__.copy


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
    """Class name of the first mask, bias, score or normalizer that the specification does not define, or None.

    Masks inside other masks are checked, too. Subclasses are not defined, because they may override the definition.

    >>> class Mine(normalizers.Softmax): ...
    >>> first_undefined(scores.Dot(), Mine())
    'Mine'
    """
    for part in parts:
        if part is None:
            continue
        if type(part) not in DEFINED:
            return type(part).__name__
        inside = first_undefined(*(x for x in vars(part).values() if isinstance(x, masks.Mask)))
        if inside is not None:
            return inside
    return None


DEFINED = frozenset((
    scores.Dot, scores.General, scores.Cosine, scores.Additive, scores.Features,
    biases.SoftCap, biases.TensorBias, biases.ByDistance, biases.ALiBi, biases.T5Bias, biases.RelativePosition,
    masks.Causal, masks.Window, masks.Dilated, masks.Strided, masks.Prefix, masks.Global, masks.RandomKeys,
    masks.Padding, masks.Document, masks.Dense, masks.Predicate, masks.Blockwise, masks.Shifted, masks.And, masks.Or,
    masks.Not,
    normalizers.Softmax, normalizers.Entmax, normalizers.Hard, normalizers.Sigmoid, normalizers.EluPlusOne,
    normalizers.ReLU, normalizers.Identity,
))  # fmt: skip


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
    """Attention of q (b, h, nq, dq) over k (b, hkv, nk, dk) and v (b, hkv, nk, dv), tensors or arrays.

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
    for b, h, i in np.ndindex(batch, heads, n_queries):
        g = h // (heads // key_heads)
        query = query_of(score, q[b, h, i], h)
        visible = [j for j in range(n_keys) if is_visible(mask, b, h, i, j, n_queries, n_keys)]
        final = {}
        for j in visible:
            s = compare(score, q[b, h, i], k[b, g, j], h, g)
            for one in bias:
                s = apply_bias(
                    one, s, b, h, i, j, n_queries=n_queries, n_keys=n_keys, heads=heads, query=query,
                    scale=factor(score, len(query)),
                )  # fmt: skip
            final[j] = s / normalizer.temperature
        keys = [j for j in visible if final[j] != -math.inf]  # a bias of −∞ also masks a pair
        sink = _sink(normalizer, score, q[b, h, i], b, h, i, g)
        row = np.array([final[j] for j in keys])
        lse[b, h, i] = log_sum_exp(row, sink)
        weights[b, h, i, keys] = normalize(normalizer, row, h, len(visible), sink)
        for j in keys:
            out[b, h, i] += weights[b, h, i, j] * (v[b, g, j] + _value(bias, h, i + n_keys - n_queries - j))
    return Reference(out, lse if isinstance(normalizer, normalizers.Softmax) else None, weights)


def _sink(
    normalizer: normalizers.Normalizer, score: scores.Score, q: Array, b: int, h: int, i: int, g: int
) -> float | None:
    """The logit of the attention sink: a number per head or per query, or the score of a learned key with value 0.

    The temperature divides the score of a learned key, but not a sink; biases and masks apply to neither (Gu et al.
    2025, arXiv:2410.10781).
    """
    if not isinstance(normalizer, normalizers.Softmax | normalizers.Entmax):
        return None
    if normalizer.key is not None:
        return compare(score, q, array(normalizer.key)[h], h, g) / normalizer.temperature
    if normalizer.sink is None:
        return None
    sink = array(normalizer.sink)
    return float(sink[b, h, i] if sink.ndim == 3 else of_head(sink, h, 0))


def _value(bias: Sequence[biases.Bias], h: int, back: int) -> Array | float:
    """The vector that relative positions add to the value of a key at distance `back` (Shaw et al. 2018, eq. 3)."""
    for one in bias:
        if isinstance(one, biases.RelativePosition) and one.values is not None:
            return vector_of(one.values, h, back)
    return 0.0


# --- 6. Statistics of weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReferenceStatistics:
    """Statistics of one weight matrix (…, nq, nk); definitions in `statistics`."""

    entropy: Array
    received: Array
    distance: Array
    spread: Array
    effective_keys: Array


def statistics(weights: Float64[Array, "*n nq nk"], offset: int | None = None) -> ReferenceStatistics:
    """The results expected of `qkv.measure`, computed from materialised weights.

    With M_i = Σ_j A_ij the mass on keys (1 unless a sink takes some) and a_ij = A_ij / M_i:
    entropy −Σ_j a ln a (nats), received Σ_i A_ij, distance Σ_j a |p_i − j| (tokens), spread the standard deviation of j
    under a, effective_keys 1 / Σ_j a². Query i has position p_i = i + offset. A query with M = 0 gives 0 everywhere.

    >>> statistics(np.full((1, 4), 0.25)).effective_keys.tolist()
    [4.0]
    """
    weights = np.asarray(weights, dtype=np.float64)
    n_queries, n_keys = weights.shape[-2:]
    position = np.arange(n_queries)[:, None] + (n_keys - n_queries if offset is None else offset)
    key = np.arange(n_keys)[None, :]
    mass = weights.sum(-1, keepdims=True)
    a = np.divide(weights, mass, out=np.zeros_like(weights), where=mass > 0)
    logs = np.log(a, out=np.zeros_like(a), where=a > 0)
    mean = (a * key).sum(-1, keepdims=True)
    squares = (a * a).sum(-1)
    return ReferenceStatistics(
        entropy=-(a * logs).sum(-1),
        received=weights.sum(-2),
        distance=(a * np.abs(position - key)).sum(-1),
        spread=np.sqrt((a * (key - mean) ** 2).sum(-1)),
        effective_keys=np.divide(1, squares, out=np.zeros_like(squares), where=squares > 0),
    )
