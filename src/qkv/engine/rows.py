"""Attention of whole rows of the score matrix: a block of queries at a time, over all keys that any of them may see.

A block has so few queries that its scores fit into a fixed memory, so memory is linear in the sequence. From the scores
of whole rows, every normalizer gives its weights at once; pointwise weights, and those of a softmax at a known
log-sum-exp, need no whole rows. For gradients a block is computed again. Autograd differentiates its weights in its
scores; the matrix products before and after are differentiated by hand. Kept for the backward is one number for each
query, its *level* (the log-sum-exp of a softmax, the threshold of an entmax), as in FlashAttention. The eager kernel is
one such block; gradients of statistics are found through the same blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.biases import clipped
from qkv.engine.call import Call, RowState, at_least_float32
from qkv.engine.level import by_parts, solved_weights
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
from qkv.masks import EMPTY, PARTIAL
from qkv.normalizers import LOG2_E, SumToOne, checked_shape, weights_of


@dataclass(eq=False, kw_only=True)
class Rows(RowState):
    """The weights of some rows and their state; differentiable where the scores are."""

    numerators: Sequence[Tensor]
    """The weights of each tile before any division, and before dropout."""
    kept: Sequence[Tensor]
    """The same after dropout."""
    dropout: Sequence[Tensor] | None
    """The factor of each weight: 0, or 1 / (1 − p)."""
    divisor: Tensor | None
    """The divisor of the weights of each query."""
    sink_weight: Tensor | None
    """The weight of the sink."""
    by_distance: Tensor | None
    """What vectors by distance add to the output, before any division."""

    def weights(self) -> list[Tensor]:
        """Return the final weights of each tile, before dropout."""
        return [x if self.divisor is None else x / self.divisor[..., None] for x in self.numerators]

    def products(self, products: Tensor) -> Tensor:
        """Return the output before any division (b, h, nq, dv), given the values times the weights that are kept."""
        return products if self.by_distance is None else products + self.by_distance

    def out(self, products: Tensor) -> Tensor:
        """Return the output (b, h, nq, dv), in float32 or better, given the values times the weights that are kept."""
        out = self.products(products)
        return out if self.divisor is None else out / self.divisor[..., None]


class Scratch:
    """Memory that one block of rows after another uses, because new memory costs more than what is computed in it."""

    def __init__(self, like: Tensor) -> None:
        self._buffers = [like.new_empty(0, dtype=at_least_float32(like.dtype)) for _ in range(2)]

    def take(self, number: int, shape: Sequence[int]) -> Tensor:
        """Return buffer 0 or 1 in a shape, with its old numbers."""
        n = math.prod(shape)
        if len(self._buffers[number]) < n:
            self._buffers[number] = self._buffers[number].new_empty(n)
        return self._buffers[number][:n].view(shape)

    def rows(self, number: int, tiles: Sequence[Tile], more: int = 0) -> Tensor:
        """Return a buffer as the whole rows of a block, and further columns."""
        return self.take(number, (*tiles[0].shape[:3], sum(tile.shape[3] for tile in tiles) + more))

    def split(self, number: int, tiles: Sequence[Tile], more: int = 0) -> list[Tensor]:
        """Return the part of each tile in `rows`."""
        widths = [tile.shape[3] for tile in tiles]
        return [*self.rows(number, tiles, more)[..., : sum(widths)].split(widths, -1)]

    def give(self, tiles: Sequence[Tile], more: int = 0) -> None:
        """Let the tiles of a block put their products into the first buffer, beside further columns."""
        for tile, x in zip(tiles, self.split(0, tiles, more), strict=True):
            tile.space = x.data  # autograd counts changes of each alone: a bias may save its scores


def attend_rows(tiles: Sequence[Tile]) -> tuple[Tensor, Rows]:
    """Return the output and the weights of the queries of `tiles`; see `row_weights`."""
    rows = row_weights(tiles)
    return rows.out(_weighed(tiles, rows.kept)), rows


def row_weights(
    tiles: Sequence[Tile], level: Tensor | None = None, lse: Tensor | None = None, scratch: Scratch | None = None
) -> Rows:
    """Compute the weights of the queries of `tiles`, which are all tiles of their rows that are not empty.

    `level` (b, h, nq) is that of a normalizer whose level is found by search, if it is known. `lse` is that of a
    softmax over more keys, a sink included: a constant, at which the weights are those of the whole rows. A search uses
    the second buffer of `scratch`.
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
        columns = scores if sink is None else [*scores, sink.expand(shape)[..., None]]
        if scratch is None:
            row = torch.cat(columns, -1)
        else:  # where plain products are already
            row = scratch.rows(0, tiles, len(columns) - len(scores))
            spaces = row.split([x.shape[3] for x in columns], -1)
            for i in range(len(scores) if first.linear else 0, len(columns)):
                spaces[i].copy_(columns[i])
        space = None if scratch is None else scratch.take(1, row.shape)
        weights, level = solved_weights(normalizer, row, normalizer.tensors(), level, space, _cut(tiles, columns))
        if normalizer.one_key:
            weights, chosen = _one_key(tiles, row, weights)
        numerators = weights.split([x.shape[3] for x in scores] + [1] * (sink is not None), -1)
        if sink is not None:
            *numerators, column = numerators
            sink_weight = column[..., 0]
    else:
        numerators = [_pointwise(tile, x) for tile, x in zip(tiles, scores, strict=True)]
        if normalizer.divide == "sum":
            sum_of_weights = _sum(x.sum(-1) for x in numerators)
            total = safe_divisor(sum_of_weights)
        elif (n_visible := first.part("divisor")) is not None:
            total = n_visible.expand(shape)
    kept, dropout = numerators, None
    if call.dropout_p:
        stays = (uniform(call.seed, tile.region, call.grid) >= call.dropout_p for tile in tiles)
        dropout = [x.to(first.dtype) / (1 - call.dropout_p) for x in stays]
        kept = [x * by for x, by in zip(numerators, dropout, strict=True)]
    by_distance = None if call.values is None else _by_distance(tiles, kept, call.values)
    return Rows(
        level, sum_of_weights, chosen, numerators=numerators, kept=kept, dropout=dropout, divisor=total,
        sink_weight=sink_weight, by_distance=by_distance,
    )  # fmt: skip


def _cut(tiles: Sequence[Tile], columns: Sequence[Tensor]) -> slice:
    """Return the columns of whole rows, those of the tiles and of a sink, in which a score may be masked."""
    edges = [0, *itertools.accumulate(x.shape[3] for x in columns)]
    cut = [i for i in range(len(columns)) if i == len(tiles) or tiles[i].masked is not None or not tiles[i].linear]
    return slice(edges[cut[0]], edges[cut[-1] + 1]) if cut else slice(0, 0)


def safe_divisor(total: Tensor) -> Tensor:
    """Return sums of pointwise weights as divisors: 1 in place of 0."""
    return torch.where(total.abs() < torch.finfo(total.dtype).tiny, 1.0, total)


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
    if overwrites():
        return by_parts(normalizer, normalizer.weigh, scores, None, scores)
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


def row_blocks(
    call: Call, leaves: Leaves | None = None, *, batched: bool = True, whole: bool = True
) -> Iterator[list[Tile]]:
    """Yield the tiles of every block of whole rows of a call; adjacent tiles are one, and an empty row has one tile.

    With `leaves`, they are those of its call; `batched` as of `head_groups`. Blocks that are not of `whole` rows have
    one tile, of few keys.
    """
    call = call if leaves is None else leaves.call
    table, n_queries, n_keys = sizes(call.q.device), call.q.shape[2], call.k.shape[2]
    recorded = call.pairwise is not None and leaves is not None  # autograd keeps the intermediates of all scores
    most = max(1, min(table.panel, table.pairs // call.q.shape[3])) if recorded else table.panel
    every = status_of_tiles(call, slice(0, call.q.shape[0]), slice(0, call.q.shape[1]), table.tile, table.tile)
    widest = max(1, *(len(row) - row.count(EMPTY) for row in every)) * table.tile
    widest = min(n_keys, widest if whole else table.tile)
    fine = max(1, table.tile // 4)  # so that few pairs are in tiles with masked ones
    for batch, heads in head_groups(call, min(n_queries, fine) * widest, most, batched=batched):
        height = most // ((batch.stop - batch.start) * (heads.stop - heads.start) * widest)
        size = next((n for n in (table.tile, 2 * fine) if n <= height), fine)
        for r, status in enumerate(status_of_tiles(call, batch, heads, size, fine)):
            runs = list(_runs(status, fine, n_keys)) or [(slice(0, min(fine, n_keys)), PARTIAL)]
            if not whole:
                runs = [(some, one) for x, one in runs for some in spans(x.stop, table.tile, x.start)]
            for some in [runs] if whole else [[run] for run in runs]:
                width = sum(columns.stop - columns.start for columns, _ in some)
                height = max(1, most // ((batch.stop - batch.start) * (heads.stop - heads.start) * width))
                for rows in spans(min((r + 1) * size, n_queries), height, r * size):
                    yield [Tile(call, batch, heads, rows, columns, one, leaves) for columns, one in some]


def _runs(status: Sequence[int], size: int, n_keys: int) -> Iterator[tuple[slice, int]]:
    """Yield the columns of adjacent tiles with one block status, other than EMPTY."""
    for one, columns in itertools.groupby(range(len(status)), status.__getitem__):
        first, *more = columns
        if one != EMPTY:
            yield slice(first * size, min((first + len(more) + 1) * size, n_keys)), one


@torch.no_grad()
def attend(call: Call) -> tuple[Tensor, RowState]:
    """Return the output of a call without gradients, in float32 or better, and the state of its rows."""
    shape, state, scratch = call.q.shape[:3], RowState(), Scratch(call.q)
    whole = isinstance(call.normalizer, SumToOne)
    column = int(call.sink is not None and not call.normalizer.has_lse)  # of the sink, in the rows of a search
    out = call.q.new_zeros(*shape, call.v.shape[3], dtype=at_least_float32(call.q.dtype))
    for tiles in row_blocks(call, whole=whole):
        at = tiles[0].at
        scratch.give(tiles, column)
        rows = row_weights(tiles, scratch=scratch)
        out[at] += rows.out(_weighed(tiles, rows.kept)) if whole else rows.products(_weighed(tiles, rows.kept))
        for name in ("level", "total", "chosen"):
            if (x := getattr(rows, name)) is not None:
                if getattr(state, name) is None:
                    setattr(state, name, x.new_zeros(shape))
                getattr(state, name)[at] += x
    if state.total is not None:
        state.total = safe_divisor(state.total)
    if not whole and (divisor := call.divisor if state.total is None else state.total) is not None:
        out /= divisor[..., None]
    return out, state


def add_gradients(
    leaves: Leaves, grad: Tensor, of_sums: Tensor | None = None, *, level: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the gradients of the tensors of a call to their sums; a block of rows is computed again.

    Args:
        leaves: the sums.
        grad: the gradient of the values times the weights, (b, h, nq, dv): of the output, over the divisor of the row.
        of_sums: the gradient of the sum of the weights of each row, where it matters.
        level: as in `row_weights`.
        lse: as in `row_weights`.
    """
    call, scratch = leaves.call, Scratch(leaves.call.q)
    grad = grad.to(at_least_float32(grad.dtype))
    for tiles in row_blocks(call, leaves, whole=lse is None and isinstance(call.normalizer, SumToOne)):
        at = tiles[0].at
        scratch.give(tiles)
        with torch.enable_grad():
            rows = row_weights(tiles, None if level is None else level[at], None if lse is None else lse[at])
            sums = [] if of_sums is None else [(x.sum(-1), of_sums[at]) for x in rows.numerators]
        spaces = scratch.split(1, tiles)
        of_kept = [
            tile.value_gradients(x, grad[at], space) for tile, x, space in zip(tiles, rows.kept, spaces, strict=True)
        ]
        leaves.backward(*zip(rows.kept, of_kept, strict=True), (rows.by_distance, grad[at]), *sums)
