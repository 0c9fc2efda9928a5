"""How queries, keys and values of a head lie: what makes a sink (Gu et al. 2025, arXiv:2410.10781, section 6).

A sink's key is short but points where all queries point, and its value is small: the softmax can leave weight there at
no cost. All of it is linear in the text: no pair of tokens is looked at by itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.call import Call, at_least_float32
from qkv.normalizers import Softmax

DIRECTIONS = 3  # principal directions of the keys whose share is told


def geometry(
    call: Call,
    first: int | Int[Tensor, " b"],
    queries: Bool[Tensor, "b nq"] | None,
    keys: Bool[Tensor, "b nk"] | None,
) -> dict[str, Tensor]:
    """Lengths and directions of the vectors of a call, as they are compared: after projection and rotary positions.

    Args:
        call: the attention call.
        first: the first key of the text, for each batch item if need be.
        queries: True at those that count; all if None.
        keys: likewise.

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
    q, k = (x.to(wide) * real for x, real in ((call.q, real_q), (call.k, real_k)))  # padding is 0 in every sum
    at = torch.as_tensor(first, device=k.device).expand(b)
    is_first = torch.arange(n_keys, device=k.device) == at[:, None]
    other = real_k * ~is_first[:, None, :, None]
    n_other = other.sum(2).clamp(min=1)

    query = _unit(q).sum(2) / real_q.sum(2).clamp(min=1)
    unit_keys = _unit(k)
    first_key = (k * is_first[:, None, :, None]).sum(2)
    rest = (k * other).sum(2) / n_other
    found = {
        "query_norm": q.norm(dim=-1),
        "key_norm": _of_query_heads(k.norm(dim=-1), group),
        "value_norm": _of_query_heads((call.v.to(wide) * real_k).norm(dim=-1), group),
        "cosine_first": (query * _of_query_heads(_unit(first_key), group)).sum(-1),
        "cosine_others": (query * _of_query_heads((unit_keys * other).sum(2) / n_other, group)).sum(-1),
        "first_key_angle": _of_query_heads(_angle(first_key, rest), group),
        "key_directions": _of_query_heads(_directions(k, real_k), group),
    }
    if isinstance(call.normalizer, Softmax) and call.normalizer.key is not None:
        learned = call.normalizer.key.detach().to(query)
        if learned.shape[-1] == query.shape[-1]:
            found["key_bias_cosine"] = (query * _unit(learned)).sum(-1)
    return found


def _real(mask: Tensor | None, x: Tensor) -> Tensor:
    if mask is None:
        return torch.ones(len(x), 1, x.shape[2], 1, dtype=torch.bool, device=x.device)
    return mask[:, None, :, None]


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _of_query_heads(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, 1)


def _angle(a: Float[Tensor, "b h d"], b: Float[Tensor, "b h d"]) -> Float[Tensor, "b h"]:
    """Degrees; 2·atan2 of the sum and difference of unit vectors, since an arc cosine loses small angles."""
    a, b = _unit(a), _unit(b)
    return torch.rad2deg(2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)))


def _directions(k: Float[Tensor, "b h n d"], real: Bool[Tensor, "b 1 n 1"]) -> Float[Tensor, "b h 3"]:
    """Shares of the variance of keys along their first principal directions; 0 beyond the last."""
    centred = (k - k.sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)) * real
    spread = torch.linalg.eigvalsh(centred.transpose(2, 3) @ centred).flip(-1).clamp(min=0)
    share = spread / spread.sum(-1, keepdim=True).clamp(min=torch.finfo(k.dtype).tiny)
    return torch.nn.functional.pad(share[..., :DIRECTIONS], (0, max(0, DIRECTIONS - share.shape[-1])))
