"""Lengths and directions of queries, keys and values, which explain sinks (Gu et al. 2025, arXiv:2410.10781, § 6).

The key of a sink is short but has the direction of all queries, and its value is small, so weight on it changes the
output little. The cost is linear in the text: no pairs of tokens are formed.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._engine.call import Call, at_least_float32
from qkv.normalizers import SumToOne

DIRECTIONS = 3  # number of principal directions of the keys whose share of the variance is reported


def geometry(
    call: Call,
    first: int | Int[Tensor, " b"],
    queries: Bool[Tensor, "b nq"] | None,
    keys: Bool[Tensor, "b nk"] | None,
) -> dict[str, Tensor]:
    """Lengths and directions of the vectors of a call, after projection and rotary positions.

    Args:
        call: the attention call.
        first: position of the first key of the text, or one position for each batch item.
        queries: True at real queries; all if None.
        keys: True at real keys; all if None.

    Returns:
        ``query_norm`` (b, h, nq), ``key_norm`` and ``value_norm`` (b, h, nk); (b, h): ``cosine_first``, mean cosine
        of the queries to the first key, ``cosine_others``, to all other keys, ``first_key_angle``, degrees between the
        first key and the mean of the others, and ``key_bias_cosine``, mean cosine of the queries to the learned key,
        where the normalizer has one; ``key_directions`` (b, h, 3), shares of the keys' variance in their first
        principal directions.
    """
    wide = at_least_float32(call.q.dtype)
    group = call.q.shape[1] // call.k.shape[1]
    b, _, n_keys, _ = call.k.shape
    real_q = _real(queries, call.q)
    real_k = _real(keys, call.k)
    q, k, v = (_without_padding(x.to(wide), real) for x, real in ((call.q, queries), (call.k, keys), (call.v, keys)))
    query_norm, key_norm, value_norm = (torch.linalg.vector_norm(x, dim=-1) for x in (q, k, v))
    at = torch.as_tensor(first, device=k.device).expand(b)
    is_first = torch.arange(n_keys, device=k.device) == at[:, None]
    other = (real_k & ~is_first[:, None]).to(wide)

    query = _mean(q, real_q.to(wide), query_norm)
    first_key = k.gather(2, at[:, None, None, None].expand(b, k.shape[1], 1, k.shape[3]))[:, :, 0]
    rest = _mean(k, other)
    found = {
        "query_norm": query_norm,
        "key_norm": _of_query_heads(key_norm, group),
        "value_norm": _of_query_heads(value_norm, group),
        "cosine_first": (query * _of_query_heads(_unit(first_key), group)).sum(-1),
        "cosine_others": (query * _of_query_heads(_mean(k, other, key_norm), group)).sum(-1),
        "first_key_angle": _of_query_heads(_angle(first_key, rest), group),
        "key_directions": _of_query_heads(_directions(k, real_k), group),
    }
    single = other.sum(2) == 0  # a text of one token has no other keys
    for name in ("cosine_others", "first_key_angle"):
        found[name] = found[name].masked_fill(single, torch.nan)
    if isinstance(call.normalizer, SumToOne) and call.normalizer.key is not None:
        learned = call.normalizer.key.detach().to(query)
        if learned.shape[-1] == query.shape[-1]:
            found["key_bias_cosine"] = (query * _unit(learned)).sum(-1)
    return found


def value_norms(call: Call, keys: Bool[Tensor, "b nk"] | None) -> Float[Tensor, "b h nk"]:
    """Euclidean norms of the values, 0 at padding; `keys` is True at real keys."""
    v = _without_padding(call.v.detach().to(at_least_float32(call.v.dtype)), keys)
    return _of_query_heads(torch.linalg.vector_norm(v, dim=-1), call.q.shape[1] // call.v.shape[1])


def _real(mask: Tensor | None, x: Tensor) -> Bool[Tensor, "b 1 n"]:
    if mask is None:
        return torch.ones(len(x), 1, x.shape[2], dtype=torch.bool, device=x.device)
    return mask[:, None]


def _without_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """Set padding to 0, because it may hold NaN."""
    return x if real is None else x.masked_fill(~real[:, None, :, None], 0)


def _mean(
    x: Float[Tensor, "b h n d"], weights: Float[Tensor, "b 1 n"], norm: Float[Tensor, "b h n"] | None = None
) -> Float[Tensor, "b h d"]:
    """The mean of the vectors whose weight is 1, or of their directions if `norm` has their lengths."""
    count = weights.sum(2).clamp(min=1)
    by = weights if norm is None else weights / norm.clamp(min=torch.finfo(x.dtype).tiny)
    return (by.expand(x.shape[:3])[:, :, None] @ x)[:, :, 0] / count[..., None]


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _of_query_heads(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, 1)


def _angle(a: Float[Tensor, "b h d"], b: Float[Tensor, "b h d"]) -> Float[Tensor, "b h"]:
    """Angle in degrees, as 2·atan2 of the norms of difference and sum: the arc cosine is inexact at small angles."""
    a, b = _unit(a), _unit(b)
    return torch.rad2deg(2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)))


def _directions(k: Float[Tensor, "b h n d"], real: Bool[Tensor, "b 1 n"]) -> Float[Tensor, "b h 3"]:
    """Shares of the variance of the keys along their first principal directions; 0 if there are fewer."""
    centred = k - _mean(k, real.to(k.dtype))[:, :, None]
    if not real.all():
        centred = centred * real[..., None]
    spread = torch.linalg.eigvalsh(centred.transpose(2, 3) @ centred).flip(-1).clamp(min=0)
    share = spread / spread.sum(-1, keepdim=True).clamp(min=torch.finfo(k.dtype).tiny)
    return torch.nn.functional.pad(share[..., :DIRECTIONS], (0, max(0, DIRECTIONS - share.shape[-1])))
