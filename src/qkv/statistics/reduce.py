"""The reducer that adds each tile of weights of a call to the sums of all its statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qkv._engine.call import Call
from qkv._engine.row_state import RowState
from qkv._engine.sizes import sizes
from qkv._engine.sweep import Block, Group, Reducer, Tile, groups, reduce_tiles
from qkv._engine.tiles import MASKED_SCORE
from qkv._engine.weight_tiles import WeightTiles
from qkv._engine.workspace import Workspace
from qkv.errors import InputError
from qkv.masks import FULL, PARTIAL, Mask
from qkv.statistics.base import WeightTile
from qkv.statistics.patterns import Patterns
from qkv.statistics.sums import RowSums, Sums


@dataclass(frozen=True, eq=False)
class Request:
    """The statistics to compute, in terms of the rows and keys of the call (with a group: of one shard)."""

    mass: Mapping[str, Mask]
    firsts: Sequence[int]
    """The first key of the text of each batch item; with a group it may lie outside this call's keys."""
    prefix_keys: int
    queries: Tensor | None
    offset: int
    """Position of the first query, counted from the first key."""
    patterns: Patterns = field(default_factory=Patterns)


def add_statistics(call: Call, rows: RowState, request: Request, sums: Sums) -> None:
    """Add the statistics of all rows of `call` to `sums`."""
    size = sizes(call.q.device).tile  # fixed, so that the edges of tiles and of the thumbnail's bins align
    batched = len(set(request.firsts)) == 1  # a group has one first key
    reduce_tiles(groups(call, size, batched=batched), _Statistics(rows, request, sums, size), call.q.device)


class _Heads:
    """Data that all tiles of a group share."""

    def __init__(self, group: Group, rows: RowState, request: Request, size: int) -> None:
        tiles = group.tiles
        mask, grid, first = tiles.call.mask, tiles.call.grid, request.firsts[tiles.batch.start]
        self.group, self.first = group, first
        self.prefix_columns = slice(max(0, first), min(first + request.prefix_keys, grid.n_keys))
        self.prefix_rows = slice(max(0, first - request.offset), max(0, first + request.prefix_keys - request.offset))
        self.weights = WeightTiles(tiles, rows, request.queries)
        self.uncounted = self.weights.uncounted
        self.mass_status = {name: tiles.block_status(part, size) for name, part in request.mass.items()}
        self.backward = mask is not None and mask.band is not None and mask.band[0] >= 0


class _Job:
    """Partial sums over some queries of a group, for the statistics that each key has."""

    def __init__(self, heads: _Heads, sums: Sums) -> None:
        of = (heads.group.tiles.batch, heads.group.tiles.heads)
        self.heads = heads
        self.received, self.visible_queries = (
            torch.zeros_like(sums.received[of]),
            torch.zeros_like(sums.visible_queries[of]),
        )
        self.prefix_sink_scores = (
            None if sums.prefix_sink_scores is None else torch.zeros_like(sums.prefix_sink_scores[:, *of])
        )
        self.pooled = None if sums.pooled is None else torch.zeros_like(sums.pooled[:, *of])
        self.user_statistics = {
            s: torch.full_like(sums.of_heads(s, of), s.zero) for s in sums.user_statistics if s.over == "key"
        }

    def add_to(self, sums: Sums, of: tuple[slice, ...]) -> None:
        sums.received[of] += self.received
        sums.visible_queries[of] += self.visible_queries
        if sums.prefix_sink_scores is not None and self.prefix_sink_scores is not None:
            sums.prefix_sink_scores[:, *of] += self.prefix_sink_scores
        if sums.pooled is not None and self.pooled is not None:
            maximum, total = sums.pooled[:, *of]
            torch.maximum(maximum, self.pooled[0], out=maximum)
            total += self.pooled[1]
        for s, x in self.user_statistics.items():
            sums.of_heads(s, of).copy_(s.merge(sums.of_heads(s, of), x))


@dataclass(eq=False)
class _Rows:
    """The state of one block of queries; `start` and `stop` are their positions, counted from the first key."""

    block: Block
    job: _Job
    sums: RowSums
    start: int
    stop: int
    counted: Tensor | None
    n_counted: int | Tensor
    """Queries that count: one number, or one per batch item (b, 1, 1)."""


class _Statistics(Reducer[_Job, _Rows]):
    over_queries = True

    def __init__(self, rows: RowState, request: Request, sums: Sums, size: int) -> None:
        self.rows, self.request, self.sums, self.size = rows, request, sums, size

    def prepare(self, group: Group) -> _Heads:
        return _Heads(group, self.rows, self.request, self.size)

    def start(self, group: Group, shared: _Heads, rows: Sequence[int]) -> _Job:
        return _Job(shared, self.sums)

    def begin(self, job: _Job, block: Block) -> _Rows:
        group, rows, status = block.group, block.rows, block.status
        self.sums.visible[block.at] += sum(
            group.columns[c].stop - group.columns[c].start for c, s in status if s == FULL
        )
        uncounted, length = job.heads.uncounted, rows.stop - rows.start
        counted = None if uncounted is None else ~uncounted[..., rows, None]
        return _Rows(
            block,
            job,
            RowSums(group.tiles.k.new_empty(*block.shape, 0)),
            rows.start + self.request.offset,
            rows.stop + self.request.offset,
            counted,
            length if counted is None else counted.sum((2, 3)).unsqueeze(-1),
        )

    def tile(self, rows: _Rows, tile: Tile) -> None:
        job, heads, sums, at = rows.job, rows.job.heads, self.sums, tile.block.at
        tiles, cols, start = tile.group.tiles, tile.columns, rows.start
        masked = tile.masked()
        if masked is None:
            job.visible_queries[:, :, cols] += rows.n_counted
        else:
            visible = ~masked
            sums.visible[at] += visible.sum(-1)
            job.visible_queries[:, :, cols] += (visible if rows.counted is None else visible & rows.counted).sum(-2)
        weights, log2 = tile.weights(heads.weights)
        log2 = _log2(weights, tiles.call) if log2 is None else log2
        if sums.user_statistics:
            self._add_user_statistics(job, weights, log2, masked, tile)
        job.received[:, :, cols] += self._pool(job, weights, tile)
        self._add_prefix(job, weights, masked, tile)
        sign = -1 if heads.backward or start >= cols.stop - 1 else 1 if rows.stop - 1 <= cols.start else 0
        middle = cols.start + (cols.stop - cols.start) // 2 - start
        scratch = tile.buffer("scores")
        total = rows.sums.add(weights, log2, scratch, middle, sign)
        if sign == 0:
            distances = self.request.patterns.distances(start, tile)
            sums.distance[at] += torch.mul(weights, distances, out=scratch).sum(-1)
        if cols.start <= heads.first < cols.stop:
            sums.sink[at] += weights[..., heads.first - cols.start]
        for near, shift in ((sums.self_, 0), (sums.previous, -1), (sums.next_, 1)):
            _add_diagonal(near[at[:2]], weights, tile.rows, start + shift - cols.start)
        for name, inner in self.request.mass.items():
            status = heads.mass_status[name][tile.block.index][tile.index]
            if status == FULL:
                sums.mass[name][at] += total
            elif status == PARTIAL:
                inside = self.request.patterns.inside(name, inner, start, tile)
                sums.mass[name][at] += torch.mul(weights, inside, out=scratch).sum(-1)

    def end(self, rows: _Rows, space: Workspace) -> None:
        rows.sums.put(self.sums, rows.block.at)

    def finish(self, group: Group, job: _Job) -> None:
        job.add_to(self.sums, (group.tiles.batch, group.tiles.heads))

    def _add_user_statistics(self, job: _Job, weights: Tensor, log2: Tensor, masked: Tensor | None, tile: Tile) -> None:
        """Add a tile to the `Statistic` objects that the caller passed."""
        visible = None if masked is None else ~masked
        uncounted = job.heads.uncounted
        if uncounted is not None:
            counts = ~uncounted[..., tile.rows, None].expand(*tile.shape)
            visible = counts if visible is None else visible & counts
        grid, first = tile.group.tiles.call.grid, job.heads.first
        weight_tile = WeightTile(weights, tile.region, grid, visible, log2 * math.log(2), first)
        for s in self.sums.user_statistics:
            rows = self.sums.of_heads(s, tile.block.at[:2])
            into = rows[..., tile.rows] if s.over == "query" else job.user_statistics[s][..., tile.columns]
            into.copy_(s.merge(into, s.added(weight_tile)))

    def _pool(self, job: _Job, weights: Tensor, tile: Tile) -> Tensor:
        """Add a tile to the thumbnail, if one is requested; returns the column sums of the tile."""
        bins = self.sums.bins
        if bins is None or job.pooled is None:
            return weights.sum(-2)
        query_bin, key_bin = (min(size, self.size) for size in bins)
        ragged = -weights.shape[-1] % key_bin, -weights.shape[-2] % query_bin
        whole = nn.functional.pad(weights, (0, ragged[0], 0, ragged[1])) if any(ragged) else weights
        by_rows = whole.unflatten(-2, (-1, query_bin))
        sums = by_rows.sum(-2)
        top = by_rows.amax(-2).unflatten(-1, (-1, key_bin)).amax(-1)
        at = [
            slice(x.start // size, x.start // size + n)
            for x, size, n in zip((tile.rows, tile.columns), bins, top.shape[2:], strict=True)
        ]
        maximum, total = job.pooled[:, :, :, at[0], at[1]]
        torch.maximum(maximum, top, out=maximum)
        total += sums.unflatten(-1, (-1, key_bin)).sum(-1)
        return sums.sum(-2)[..., : weights.shape[-1]]

    def _add_prefix(self, job: _Job, weights: Tensor, masked: Tensor | None, tile: Tile) -> None:
        """Add a tile to the prefix sink scores, if it contains any of the text's first queries and keys."""
        heads, rows, cols = job.heads, tile.rows, tile.columns
        rs, cs = (
            slice(max(of.start, x.start), min(of.stop, x.stop))
            for of, x in ((heads.prefix_rows, rows), (heads.prefix_columns, cols))
        )
        if job.prefix_sink_scores is None or rs.start >= rs.stop or cs.start >= cs.stop:
            return
        inside = slice(rs.start - rows.start, rs.stop - rows.start), slice(cs.start - cols.start, cs.stop - cols.start)
        visible = torch.ones_like(weights[..., *inside], dtype=torch.bool) if masked is None else ~masked[..., *inside]
        if heads.uncounted is not None:
            visible = visible & ~heads.uncounted[..., rs, None]
        total, count = job.prefix_sink_scores[..., cs.start - heads.first : cs.stop - heads.first]
        total += weights[..., *inside].sum(-2)
        count += visible.sum(-2)


def _log2(weights: Tensor, call: Call) -> Tensor:
    """Base-2 logarithms of the weights of a normalizer other than softmax."""
    if weights.min() < 0:
        raise InputError(
            f"measure: normalizer {type(call.given.normalizer).__name__} gives negative weights with these scores, "
            "which have no entropy; expected weights of 0 or more"
        )
    return torch.where(weights > 0, torch.log2(weights), MASKED_SCORE)


def _add_diagonal(near: Tensor, weights: Tensor, rows: slice, offset: int) -> None:
    """Add the diagonal column = row + offset of a tile to its queries."""
    if -weights.shape[2] < offset < weights.shape[3]:
        diagonal = torch.diagonal(weights, offset, -2, -1)
        start = rows.start + max(0, -offset)
        near[:, :, start : start + diagonal.shape[-1]] += diagonal
