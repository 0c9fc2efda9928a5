"""Attention with its weights formed: quadratic memory, every composition, every gradient by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv import noise
from qkv.biases import clipped
from qkv.call import Call, Result
from qkv.masks import Region
from qkv.normalizers import Hard, Pointwise, Softmax
from qkv.tiles import ScoreTiles, without_unseen
from qkv.weights import level, log_sum_exp, weigh


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call: it serves all."""
    return None


def run(call: Call) -> Result:
    """Attention and its weights, after dropout as they met the values; dtype of the inputs."""
    tiles = ScoreTiles(call)
    rows, columns = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    whole = Region(rows, columns)
    v = call.v
    allowed = None if call.mask is None else call.mask.allowed(whole, call.grid)
    if allowed is not None:
        tiles.k = without_unseen(tiles.k.view(call.k.shape), allowed).flatten(0, 1)
        v = without_unseen(v, allowed)
    scores = tiles.scores(rows, columns)
    if call.shift is not None:
        scores = scores + call.shift[..., None]
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights, lse = _weights(call, scores)
    if call.dropout_p:
        kept = noise.uniform(call.seed, whole, call.grid) >= call.dropout_p
        weights = weights * kept / (1 - call.dropout_p)
    out = tiles.weigh(weights, v.to(tiles.dtype).flatten(0, 1))
    if call.values is not None:
        out = out + _relative(call, weights)
    return Result(out.to(call.v.dtype), lse, weights.to(call.v.dtype))


def _weights(call: Call, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights, and the log-sum-exp where there is one."""
    normalizer = call.normalizer
    if isinstance(normalizer, Softmax):
        if call.sink is None:
            lse = log_sum_exp(scores)
        else:  # one more column, owned by no key
            column = call.sink[..., None].expand(*scores.shape[:3], 1)
            lse = log_sum_exp(torch.cat([scores, column], -1))
        return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]), lse
    if isinstance(normalizer, Hard):
        return _hard(call, normalizer, scores), None
    weights = weigh(normalizer, scores, level(normalizer, scores))
    if isinstance(normalizer, Pointwise) and normalizer.divide == "sum":
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
    if call.divisor is not None:
        weights = weights / call.divisor[..., None]
    return weights, None


def _hard(call: Call, normalizer: Hard, scores: Tensor) -> Tensor:
    """One-hot weights with the gradient of a softmax."""
    lse = log_sum_exp(scores)
    soft = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    chances = scores
    if normalizer.sample:
        whole = Region(slice(0, scores.shape[2]), slice(0, scores.shape[3]))
        chances = scores + noise.gumbel(call.seed, whole, call.grid).to(scores)
    one = torch.zeros_like(soft).scatter_(-1, chances.argmax(-1, keepdim=True), 1.0)
    one = one.masked_fill((lse == -torch.inf)[..., None], 0)
    return one + (soft - soft.detach())


def _relative(call: Call, weights: Tensor) -> Tensor:
    """Σ_j A_ij values[clip(j − p_i)]."""
    assert call.values is not None
    grid, reach = call.grid, call.values.shape[-2] // 2
    index = clipped(grid.rows(0, grid.n_queries)[:, None], grid.columns(0, grid.n_keys), reach)
    mass = weights.new_zeros(*weights.shape[:3], 2 * reach + 1)
    return mass.scatter_add(3, index.expand_as(weights), weights) @ call.values.to(weights)
