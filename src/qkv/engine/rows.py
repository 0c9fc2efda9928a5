"""Attention of whole rows of the score matrix: a block of queries at a time, over all keys that any of them may see.

A block has so few queries that its scores fit into a fixed memory, so memory is linear in the sequence. From the scores
of whole rows, every normalizer gives its weights at once. For gradients a block is computed again, and autograd runs
through it: what is kept for the backward is one number for each query, its *level* (the log-sum-exp of a softmax, the
threshold of an entmax), as in FlashAttention. The eager kernel is one such block; gradients of statistics are found
through the same blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.biases import clipped
from qkv.engine.call import Call, RowState, at_least_float32
from qkv.engine.level import solved_weights
from qkv.engine.sizes import sizes
from qkv.engine.tiles import (
    MASKED_SCORE,
    Leaves,
    Tile,
    gumbel,
    head_groups,
    overwrites,
    spans,
    status_of_tiles,
    uniform,
)
from qkv.masks import EMPTY, PARTIAL, Tiles
from qkv.normalizers import LOG2_E, SumToOne, checked_shape, weights_of


@dataclass(eq=False, kw_only=True)
class Rows(RowState):
    """Attention of some rows: output, row state and weights; differentiable where the scores are."""

    out: Tensor
    """(b, h, nq, dv), in float32 or better."""
    numerators: Sequence[Tensor]
    """The weights of each tile before any division, and before dropout."""
    dropout: Sequence[Tensor] | None
    """The factor of each weight: 0, or 1 / (1 − p)."""
    divisor: Tensor | None
    """The divisor of the weights of each query."""
    sink_weight: Tensor | None
    """The weight of the sink."""

    def weights(self) -> list[Tensor]:
        """Return the final weights of each tile, before dropout."""
        return [x if self.divisor is None else x / self.divisor[..., None] for x in self.numerators]


def attend_rows(tiles: Sequence[Tile], level: Tensor | None = None, lse: Tensor | None = None) -> Rows:
    """Compute attention of the queries of `tiles`, which are all tiles of their rows that are not empty.

    `level` (b, h, nq) is that of a normalizer whose level is found by search, if it is known. `lse` is that of a
    softmax over more keys, a sink included: a constant, at which the weights are those of the whole rows.
    """
    call, first = tiles[0].call, tiles[0]
    normalizer, sink = call.normalizer, first.part("sink")
    shape, total, sum_of_weights, chosen, sink_weight = first.shape[:3], None, None, None, None
    scores = [tile.masked_scores() for tile in tiles]
    if lse is not None:
        level = lse.masked_fill(lse == -torch.inf, -MASKED_SCORE)
        numerators = [_exponential(x, level) for x in scores]
    elif normalizer.has_lse:
        tops = [x.detach().amax(-1) for x in scores]
        top = functools.reduce(torch.maximum, tops if sink is None else [*tops, sink.detach()])
        top = top.clamp(min=torch.finfo(top.dtype).min)  # −inf − −inf would be NaN
        numerators = [_exponential(x, top) for x in scores]
        total = _sum(x.sum(-1) for x in numerators)
        if sink is not None:
            sink_weight = torch.exp(sink - top)
            total = total + sink_weight
        visible = total != 0  # True for NaN: it must propagate
        total = torch.where(visible, total, 1.0)
        level = torch.where(visible, top + torch.log(total), -torch.inf)
        sink_weight = None if sink_weight is None else sink_weight / total
    elif isinstance(normalizer, SumToOne):
        row = torch.cat(scores if sink is None else [*scores, sink.expand(shape)[..., None]], -1)
        weights, level = solved_weights(normalizer, row, normalizer.tensors(), level)
        if normalizer.one_key:
            weights, chosen = _one_key(tiles, row, weights)
        numerators = weights.split([x.shape[3] for x in scores] + [1] * (sink is not None), -1)
        if sink is not None:
            *numerators, column = numerators
            sink_weight = column[..., 0]
    else:
        numerators = [_pointwise(tile, x) for tile, x in zip(tiles, scores, strict=True)]
        if normalizer.divide == "sum":
            total = _sum(x.sum(-1) for x in numerators)
            total = sum_of_weights = torch.where(total.abs() < torch.finfo(total.dtype).tiny, 1.0, total)
        elif (n_visible := first.part("divisor")) is not None:
            total = n_visible.expand(shape)
    kept, dropout = numerators, None
    if call.dropout_p:
        stays = (uniform(call.seed, tile.region, call.grid) >= call.dropout_p for tile in tiles)
        dropout = [x.to(first.dtype) / (1 - call.dropout_p) for x in stays]
        kept = [x * by for x, by in zip(numerators, dropout, strict=True)]
    out = _weighed(tiles, kept)
    if call.values is not None:
        out = out + _by_distance(tiles, kept, call.values)
    out = out if total is None else out / total[..., None]
    return Rows(
        level, sum_of_weights, chosen, out=out, numerators=numerators, dropout=dropout, divisor=total,
        sink_weight=sink_weight,
    )  # fmt: skip


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _weighed(tiles: Sequence[Tile], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of the values times their weights."""
    return _sum(tile.weigh(x) for tile, x in zip(tiles, weights, strict=True))


def _exponential(scores: Tensor, level: Tensor) -> Tensor:
    """Return exp(scores − level), in place if nothing records it; in base 2, because torch's exp may be slow on CPU."""
    if overwrites():
        return scores.sub_(level[..., None]).mul_(LOG2_E).exp2_()
    return torch.exp2((scores - level[..., None]) * LOG2_E)


def _pointwise(tile: Tile, scores: Tensor) -> Tensor:
    """Return pointwise weights of the scores of a tile, before any division."""
    normalizer, none_masked = tile.call.normalizer, tile.masked is None and not tile.call.biases
    if not (normalizer.zero_at_minus_infinity or none_masked):
        return weights_of(normalizer, scores, None)
    return checked_shape(normalizer, normalizer.weigh(scores, None), scores)


def _one_key(tiles: Sequence[Tile], scores: Tensor, soft: Tensor) -> tuple[Tensor, Tensor]:
    """Return one-hot weights with the gradient of the softmax weights (straight-through), and the keys, −1 for none."""
    call, noisy = tiles[0].call, scores
    if call.normalizer.sample:
        noisy = scores + torch.cat([gumbel(call.seed, tile.region, call.grid) for tile in tiles], -1).to(scores)
    best, empty = noisy.argmax(-1, keepdim=True), (scores == -torch.inf).all(-1, keepdim=True)
    one = torch.zeros_like(soft).scatter_(-1, best, 1.0).masked_fill(empty, 0)
    keys = torch.cat([tile.region.keys for tile in tiles])
    return one + (soft - soft.detach()), keys[best[..., 0]].masked_fill(empty[..., 0], -1)


def _by_distance(tiles: Sequence[Tile], weights: Sequence[Tensor], table: Tensor) -> Tensor:
    """Return what vectors by distance add to the output: the weights by clipped distance, times the table."""
    mass, first = weights[0].new_zeros(*weights[0].shape[:3], table.shape[1]), tiles[0]
    for tile, x in zip(tiles, weights, strict=True):
        index = clipped(tile.region.queries, tile.region.keys, table.shape[1] // 2)
        mass = mass.scatter_add(3, index.expand(*mass.shape[:3], -1), x)
    return mass @ (table[first.at[1]] if len(table) > 1 else table).to(mass)


def row_blocks(call: Call, leaves: Leaves | None = None, *, batched: bool = True) -> Iterator[list[Tile]]:
    """Yield the tiles of every block of whole rows of a call; adjacent tiles are one, and an empty row has one tile.

    With `leaves`, they are those of its call; `batched` as of `head_groups`.
    """
    call = call if leaves is None else leaves.call
    table, n_queries, n_keys, size = sizes(call.q.device), call.q.shape[2], call.k.shape[2], tile_size(call)
    most = table.panel if call.pairwise is None else max(1, min(table.panel, table.pairs // call.q.shape[3]))
    every = status_of_tiles(call, slice(0, call.q.shape[0]), slice(0, call.q.shape[1]), size)
    widest = max(1, *(len(row) - row.count(EMPTY) for row in every)) * size
    for batch, heads in head_groups(call, min(n_queries, size) * min(n_keys, widest), most, batched=batched):
        for r, status in enumerate(status_of_tiles(call, batch, heads, size)):
            runs = list(_runs(status, size, n_keys)) or [(slice(0, min(size, n_keys)), PARTIAL)]
            width = sum(columns.stop - columns.start for columns, _ in runs)
            height = max(1, most // ((batch.stop - batch.start) * (heads.stop - heads.start) * width))
            for rows in spans(min((r + 1) * size, n_queries), height, r * size):
                yield [Tile(call, batch, heads, rows, columns, one, leaves) for columns, one in runs]


def _runs(status: Sequence[int], size: int, n_keys: int) -> Iterator[tuple[slice, int]]:
    """Yield the columns of adjacent tiles with one block status, other than EMPTY."""
    for one, columns in itertools.groupby(range(len(status)), status.__getitem__):
        first, *more = columns
        if one != EMPTY:
            yield slice(first * size, min((first + len(more) + 1) * size, n_keys)), one


def tile_size(call: Call) -> int:
    """Return the size of the tiles of which a row may skip some: the table's, or less if that skips many more pairs."""
    size, mask = sizes(call.q.device).tile, call.mask
    if mask is None or call.q.shape[2] < 4 * size:
        return size
    small = max(1, size // 4)
    status = (mask.classify(Tiles.of(call.grid, n, n), call.grid) for n in (size, small))
    computed, of_small = (float((x != EMPTY).double().mean()) for x in status)
    return small if of_small < 0.6 * computed else size


@torch.no_grad()
def attend(call: Call) -> tuple[Tensor, RowState]:
    """Return the output of a call without gradients, in float32 or better, and the state of its rows."""
    shape, state = call.q.shape[:3], RowState()
    out = call.q.new_empty(*shape, call.v.shape[3], dtype=at_least_float32(call.q.dtype))
    for tiles in row_blocks(call):
        rows, at = attend_rows(tiles), tiles[0].at
        out[at] = rows.out
        for name in ("level", "total", "chosen"):
            if (x := getattr(rows, name)) is not None:
                if getattr(state, name) is None:
                    setattr(state, name, x.new_empty(shape))
                getattr(state, name)[at] = x
    return out, state
