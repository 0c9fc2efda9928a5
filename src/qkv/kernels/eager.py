"""Attention with its weights formed: quadratic memory, every composition, every gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.masks import Region
from qkv.partial import Partial
from qkv.tiles import Call, ScoreTiles, without_unseen


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call: it serves all."""
    return None


def run(call: Call) -> tuple[Partial, Float[Tensor, "b h nq nk"]]:
    """Attention and its weights, after dropout as they met the values; dtype of the inputs."""
    tiles = ScoreTiles(call)
    rows, columns = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    v = call.v
    allowed = None if call.mask is None else call.mask.allowed(Region(rows, columns), call.grid)
    if allowed is not None:
        tiles.k = without_unseen(tiles.k.view(call.k.shape), allowed).flatten(0, 1)
        v = without_unseen(v, allowed)
    scores = tiles.scores(rows, columns)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if call.sink is not None:  # one more column, owned by no key
        column = call.sink[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    powers = torch.exp(scores - top)
    total = powers.sum(-1, keepdim=True)
    seen = total != 0  # a query with nothing visible: weights 0, lse −inf, no NaN (but a NaN query stays NaN)
    safe = torch.where(seen, total, 1.0)
    lse = torch.where(seen, top + torch.log(safe), -torch.inf)[..., 0]
    weights = (powers / safe)[..., : call.k.shape[2]]
    if call.dropout_p:
        weights = torch.nn.functional.dropout(weights, call.dropout_p)
    out = tiles.weigh(weights, v.to(tiles.dtype).flatten(0, 1))
    return Partial(out.to(call.q.dtype), lse), weights.to(call.q.dtype)
