"""Softmax attention of any score, tile by tile in plain tensor operations: linear memory, any device.

Online softmax over tiles of scores (Rabe & Staats 2021, arXiv:2112.05682). The backward makes each tile again rather
than keeping it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qkv.masks import EMPTY, PARTIAL
from qkv.partial import Partial, sink_gradient
from qkv.tiles import Call, ScoreTiles, detached, spans, without_unseen

TILE = 256


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    if call.dropout_p:
        return "dropout acts on weights, which it never forms"
    if torch.is_grad_enabled() and any(p.requires_grad for b in call.biases for p in b.parameters()):
        return "it has no gradient for a bias tensor, which is as large as the weights anyway"
    return None


def run(call: Call) -> Partial:
    """Attention in memory linear in the sequence, differentiable in q, k, v, the sink, and through the lse."""
    return Partial(*_Tiled.apply(call.q, call.k, call.v, call.sink, call))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        tiles = ScoreTiles(call)
        part = _fold(tiles, v.to(tiles.dtype).flatten(0, 1))
        part = part if sink is None else part.with_sink(sink[:, None])
        part = Partial(part.out.to(q.dtype), part.lse)
        ctx.save_for_backward(q, k, v, sink, part.out, part.lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return part.out, part.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return None, None, None, None, None
        grad = torch.zeros_like(out) if grad is None else grad
        call = detached(replace(ctx.call, q=q, k=k, v=v))  # a view of a leaf would pull it into the graph of a tile
        grads = _fold_backward(ScoreTiles(call), Partial(out, lse), grad, grad_lse)
        grad_sink = None if sink is None else sink_gradient(sink, Partial(out, lse), grad, grad_lse)
        return *grads, grad_sink, None


def _fold(tiles: ScoreTiles, v: Tensor) -> Partial:
    call = tiles.call
    b, h, nq, _ = call.q.shape
    out = v.new_zeros(b, h, nq, v.shape[2])
    lse = v.new_full((b, h, nq), -torch.inf)
    columns = list(spans(call.k.shape[2], TILE))
    for rows, kinds in zip(spans(nq, TILE), tiles.classes(call.mask, TILE), strict=True):
        size = rows.stop - rows.start
        top, total = v.new_full((b, h, size), -torch.inf), v.new_zeros(b, h, size)
        acc = v.new_zeros(b, h, size, v.shape[2])
        for cols, kind in zip(columns, kinds, strict=True):
            if kind == EMPTY:
                continue
            scores, values = tiles.scores(rows, cols), v[:, cols]
            if kind == PARTIAL:
                hidden = tiles.hidden(rows, cols)
                scores = scores.masked_fill(hidden, -torch.inf)
                values = _visible(values, hidden, b)
            new = torch.maximum(top, scores.amax(-1))
            safe = new.clamp(min=torch.finfo(v.dtype).min)  # −inf − −inf would be NaN
            weights, shrink = torch.exp(scores - safe[..., None]), torch.exp(top - safe)
            total = total * shrink + weights.sum(-1)
            acc = acc * shrink[..., None] + tiles.weigh(weights, values)
            top = new
        seen = total != 0  # NaN is not nothing
        out[:, :, rows] = acc / torch.where(seen, total, 1.0)[..., None]
        lse[:, :, rows] = torch.where(seen, top + torch.log(torch.where(seen, total, 1.0)), -torch.inf)
    return Partial(out, lse)


def _fold_backward(
    tiles: ScoreTiles, part: Partial, grad: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    call = tiles.call
    grad, out, v = (x.to(tiles.dtype) for x in (grad, part.out, call.v))
    v = v.flatten(0, 1)
    inner = (grad * out).sum(-1)
    inner = inner if grad_lse is None else inner - grad_lse
    lse = part.lse.masked_fill(part.lse == -torch.inf, 0)
    dq, dk, dv = v.new_zeros(call.q.shape), torch.zeros_like(tiles.k), torch.zeros_like(v)
    columns = list(spans(call.k.shape[2], TILE))
    for rows, kinds in zip(spans(call.q.shape[2], TILE), tiles.classes(call.mask, TILE), strict=True):
        for cols, kind in zip(columns, kinds, strict=True):
            if kind == EMPTY:
                continue
            with torch.enable_grad():  # only to go back through the biases
                product = tiles.product(rows, cols).requires_grad_(bool(call.biases))
                scores = tiles.biased(product, rows, cols)
            weights = torch.exp(scores.detach() - lse[:, :, rows, None])
            keys, values = tiles.k[:, cols], v[:, cols]
            if kind == PARTIAL:
                hidden = tiles.hidden(rows, cols)
                weights = weights.masked_fill(hidden, 0)
                keys, values = (_visible(x, hidden, call.q.shape[0]) for x in (keys, values))
            dv[:, cols] += tiles.weigh_back(weights, grad[:, :, rows])
            slope = weights * (tiles.weigh(grad[:, :, rows], values.transpose(1, 2)) - inner[:, :, rows, None])
            if call.biases:
                (slope,) = torch.autograd.grad(scores, product, slope)
                if kind == PARTIAL:
                    slope = slope.masked_fill(hidden, 0)
            dq[:, :, rows] += tiles.weigh(slope, keys) * call.scale
            q = tiles.q[:, :, rows].reshape(*slope.shape[:3], -1)
            dk[:, cols] += tiles.weigh_back(slope, q)  # tiles.q carries the scale
    return dq.to(call.q.dtype), dk.view(call.k.shape).to(call.k.dtype), dv.view(call.v.shape).to(call.v.dtype)


def _visible(x: Tensor, hidden: Tensor, batch: int) -> Tensor:
    """Keys or values (batch · key heads, k, d) of a tile, zero where no query of it may look."""
    return without_unseen(x.unflatten(0, (batch, -1)), ~hidden).flatten(0, 1)
