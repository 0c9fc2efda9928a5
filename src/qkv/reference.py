"""The oracle: attention as its definition says, in NumPy float64 and plain loops.

Read this to know what qkv computes. It shares no code with anything fast, forms everything, and is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from qkv import biases, masks

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Reference:
    """What one attention call means: output, log-sum-exp of the scores, and weights."""

    out: Float64[Array, "b h nq dv"]
    lse: Float64[Array, "b h nq"]
    weights: Float64[Array, "b h nq nk"]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    visible: Callable[[int, int, int, int], bool] = lambda b, h, i, j: True,
    bend: Callable[[float, int, int, int, int], float] = lambda s, b, h, i, j: s,
    scale: float | None = None,
    temperature: float = 1.0,
    sink: Array | None = None,
) -> Reference:
    """Attention of q (b, h, nq, d) over k (b, hkv, nk, d) and v (b, hkv, nk, dv).

    `visible(b, h, i, j)` says whether query i may attend to key j; `bend(score, b, h, i, j)` is the bias.
    Query head h uses key head h // (h_q // h_kv).

    >>> x = np.ones((1, 1, 2, 4))
    >>> attention(x, x, x, visible=lambda b, h, i, j: j <= i).weights[0, 0].round(3).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    batch, heads, n_queries, d = q.shape
    _, key_heads, n_keys, dv = v.shape
    factor = 1 / math.sqrt(d) if scale is None else scale
    out = np.zeros((batch, heads, n_queries, dv))
    lse = np.full((batch, heads, n_queries), -np.inf)
    weights = np.zeros((batch, heads, n_queries, n_keys))
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // key_heads)
            for i in range(n_queries):
                keys = [j for j in range(n_keys) if visible(b, h, i, j)]
                scores = [bend(factor * float(q[b, h, i] @ k[b, g, j]), b, h, i, j) / temperature for j in keys]
                logits = scores if sink is None else [*scores, float(sink[h])]
                top = max(logits, default=-math.inf)
                if top == -math.inf:  # nothing to attend to: output 0, weights 0
                    continue
                total = sum(math.exp(s - top) for s in logits)
                lse[b, h, i] = top + math.log(total)
                for j, s in zip(keys, scores, strict=True):
                    weights[b, h, i, j] = math.exp(s - lse[b, h, i])
                    out[b, h, i] += weights[b, h, i, j] * v[b, g, j]
    return Reference(out, lse, weights)


def sees(mask: masks.Mask | None, b: int, h: int, i: int, j: int, n_queries: int, n_keys: int) -> bool:
    """Whether `mask` lets query i attend to key j, from the definition of each mask."""
    return mask is None or _sees(mask, b, h, i + n_keys - n_queries, i, j, n_keys)


def _sees(mask: masks.Mask, b: int, h: int, p: int, i: int, j: int, n_keys: int) -> bool:
    """The same for query i standing at position p among the keys."""
    match mask:
        case masks.Causal():
            return j <= p
        case masks.Window(size, ahead):
            return p - size < j <= p + ahead
        case masks.Prefix(length):
            return j < length
        case masks.Padding(lengths, side):
            length = int(lengths[b if len(lengths) > 1 else 0])
            return j < length if side == "right" else j >= n_keys - length
        case masks.Document(ids):
            row = np.asarray(ids)[b if len(ids) > 1 else 0]
            return bool(row[p] >= 0 and row[p] == row[j])
        case masks.Dense(tensor):
            at = [x if size > 1 else 0 for x, size in zip((b, h, i, j), tensor.shape, strict=True)]
            return bool(np.asarray(tensor)[tuple(at)])
        case masks.Predicate(function):
            import torch

            return bool(function(*(torch.tensor([[[[x]]]]) for x in (b, h, p, j))).item())
        case masks.Shifted(inner, offset):
            return _sees(inner, b, h, i + offset, i, j, n_keys)
        case masks.And(left, right):
            return _sees(left, b, h, p, i, j, n_keys) and _sees(right, b, h, p, i, j, n_keys)
        case masks.Or(left, right):
            return _sees(left, b, h, p, i, j, n_keys) or _sees(right, b, h, p, i, j, n_keys)
        case masks.Not(inner):
            return not _sees(inner, b, h, p, i, j, n_keys)
    raise TypeError(f"the reference has no definition of {type(mask).__name__}")


def bends(bias: biases.Bias, score: float, b: int, h: int, i: int, j: int) -> float:
    """The score after `bias`, from the definition of each bias."""
    match bias:
        case biases.SoftCap(cap):
            return cap * math.tanh(score / cap)
        case biases.Dense(tensor):
            at = [x if size > 1 else 0 for x, size in zip((b, h, i, j), tensor.shape, strict=True)]
            return score + float(tensor.detach()[tuple(at)])
    raise TypeError(f"the reference has no definition of {type(bias).__name__}")


@dataclass(frozen=True, eq=False)
class ReferenceStatistics:
    """Statistics of one weight matrix (…, nq, nk); definitions in `statistics`."""

    entropy: Array
    received: Array
    distance: Array
    spread: Array
    participation: Array


def statistics(weights: Float64[Array, "*n nq nk"], offset: int | None = None) -> ReferenceStatistics:
    """What `qkv.measure` must give, from materialised weights.

    With M_i = Σ_j A_ij the mass on keys (1 unless a sink takes some) and a_ij = A_ij / M_i:
    entropy −Σ_j a ln a (nats), received Σ_i A_ij, distance Σ_j a |p_i − j| (tokens), spread the standard deviation of j
    under a, participation 1 / Σ_j a². Query i stands at p_i = i + offset. A query with M = 0 gives 0 everywhere.

    >>> statistics(np.full((1, 4), 0.25)).participation.tolist()
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
        participation=np.divide(1, squares, out=np.zeros_like(squares), where=squares > 0),
    )
