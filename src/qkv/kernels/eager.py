"""The eager kernel: forms the weight matrix. Quadratic memory, any composition, all derivatives by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.biases import ByQuery
from qkv.engine.call import Call, Result
from qkv.engine.level import differentiable_level
from qkv.engine.tiles import ScoreTiles, cached_for_mask, gumbel, uniform, zero_masked_keys
from qkv.engine.transforms import NEEDS, Need, mapped, transformed
from qkv.masks import Region
from qkv.normalizers import Normalizer, SumToOne, log_sum_exp, weights_of

OFFERS: tuple[Need, ...] = tuple(NEEDS)


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    if mapped(call):
        return "torch.func.vmap maps it; put the mapped dimension into the batch or the heads"
    solved = isinstance(call.normalizer, SumToOne) and not call.normalizer.has_lse
    if transformed(call) and solved:
        return (
            f"{type(call.normalizer).__name__} has no derivatives in torch.func transforms and in forward mode, "
            "because the level of its rows is found by search; expected Softmax or a Pointwise normalizer"
        )
    return None


def forward(call: Call) -> Result:
    """Compute attention, and its weights after dropout; both in the dtype of the inputs."""
    tiles = ScoreTiles(call)
    rows, columns = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    whole = Region(rows, columns)
    v = call.v
    visible, mask = None, call.mask
    if mask is not None:
        visible = cached_for_mask(mask, call.grid, "visible", lambda: mask.visible(whole, call.grid), Tensor.numel)
    if visible is not None:
        tiles.k = zero_masked_keys(tiles.k.view(call.k.shape), visible).flatten(0, 1)
        v = zero_masked_keys(v, visible)
    scores = tiles.scores(rows, columns)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights, lse = _weights(call, scores)
    if call.dropout_p:
        stays = uniform(call.seed, whole, call.grid) >= call.dropout_p
        weights = weights * stays / (1 - call.dropout_p)
    out = tiles.weigh(weights, v.to(tiles.dtype).flatten(0, 1))
    if call.values is not None:  # relative positions with values
        mass = ByQuery(weights.new_zeros(*weights.shape[:3], call.values.shape[1]), call.grid.offset)
        mass.add_gradient(mass.tensor, whole, weights)
        out = out + mass.tensor @ call.values.to(weights)
    return Result(out.to(call.v.dtype), lse, weights.to(call.v.dtype))


def _weights(call: Call, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return weights, and the log-sum-exp if the normalizer has one."""
    normalizer = call.normalizer
    if isinstance(normalizer, SumToOne):
        with_sink = scores
        if call.sink is not None:  # one more column, which belongs to no key
            with_sink = torch.cat([scores, call.sink[..., None].expand(*scores.shape[:3], 1)], -1)
        if normalizer.has_lse:
            lse = log_sum_exp(with_sink)
            return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]), lse
        level = differentiable_level(normalizer, with_sink, normalizer.tensors())
        weights = weights_of(normalizer, scores, level)
        return (_one_key(call, normalizer, scores, weights) if normalizer.one_key else weights), None
    weights = weights_of(normalizer, scores, None)
    if normalizer.divide == "sum":
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total.abs() < torch.finfo(total.dtype).tiny, 1.0, total)
    if call.divisor is not None:
        weights = weights / call.divisor[..., None]
    return weights, None


def _one_key(call: Call, normalizer: Normalizer, scores: Tensor, soft: Tensor) -> Tensor:
    """Return one-hot weights with the gradient of the softmax weights (straight-through)."""
    noisy = scores
    if normalizer.sample:
        whole = Region(slice(0, scores.shape[2]), slice(0, scores.shape[3]))
        noisy = scores + gumbel(call.seed, whole, call.grid).to(scores)
    one = torch.zeros_like(soft).scatter_(-1, noisy.argmax(-1, keepdim=True), 1.0)
    one = one.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    return one + (soft - soft.detach())
