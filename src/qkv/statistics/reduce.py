"""Sums over the tiles of weights, along queries and keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from qkv._engine.call import Call, RowState
from qkv._engine.sizes import sizes
from qkv._engine.sweep import Block, Group, Reducer, Tile, Workspace, groups, reduce_tiles
from qkv._engine.tiles import MASKED_SCORE, WeightTiles, kept
from qkv.errors import InputError
from qkv.masks import FULL, PARTIAL, Mask
from qkv.masks.base import band_counts
from qkv.statistics.base import Statistic, WeightTile
from qkv.statistics.sums import RowSums, Sums

KEPT_PAIRS = 2**23  # most pairs of masks that are kept


class Patterns:
    """Tensors that depend only on a tile's offset from the diagonal and its shape, computed once for each offset."""

    def __init__(self) -> None:
        self._distances: dict[tuple[int, ...], Tensor] = {}
        self._inside: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._by_head: set[str] = set()  # masks that differ by head or batch item
        self._pairs = 0
        self._visible: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def distances(self, start: int, tile: Tile) -> Tensor:
        """Distances between the queries and keys of a tile, (q, k); `start` is the position of its first query."""
        key = _place(start, tile)
        if key not in self._distances:
            like = tile.group.tiles.q
            queries = torch.arange(start, start + tile.shape[2], device=like.device)
            keys = torch.arange(tile.columns.start, tile.columns.stop, device=like.device)
            self._distances[key] = (queries[:, None] - keys).abs().to(like.dtype)
        return self._distances[key]

    def inside(self, name: str, mask: Mask, tile: Tile, columns: slice) -> Tensor:
        """1 at the pairs of some columns of a tile inside `mask`, 0 elsewhere; `name` is that of the mask.

        Reused if the mask is a band, or is the same for all heads and batch items and not too large.
        """
        rows, tiles = tile.rows, tile.group.tiles
        lengths = (rows.stop - rows.start, columns.stop - columns.start)
        place = (rows.start - columns.start,) if mask.band is not None else (rows.start, columns.start)
        key = (name, (*place, *lengths))
        if key in self._inside:
            return self._inside[key]
        region, grid = tiles.region(rows, columns), tiles.call.grid
        if name in self._by_head or self._pairs + math.prod(lengths) > KEPT_PAIRS:
            return mask.visible(region, grid).to(tiles.dtype)
        inside = mask.visible(replace(region, batch=slice(None), heads=slice(None)), grid).to(tiles.dtype)
        if inside.shape[:2] != (1, 1):
            self._by_head.add(name)
            batch, heads = (
                slice(None) if n == 1 else x for n, x in zip(inside.shape, (tiles.batch, tiles.heads), strict=False)
            )
            return inside[batch, heads]
        self._inside[key] = inside
        self._pairs += inside.numel()
        return inside

    def visible(self, start: int, tile: Tile, masked: Tensor) -> tuple[Tensor, Tensor]:
        """The number of pairs of a tile that are not masked: of each query, and of each key."""
        key = _place(start, tile)
        if key in self._visible:
            return self._visible[key]
        visible = ~masked
        counts = visible.sum(-1), visible.sum(-2)
        mask = tile.group.tiles.call.mask
        if mask is not None and mask.band is not None:
            self._visible[key] = counts
        return counts


def _place(start: int, tile: Tile) -> tuple[int, ...]:
    return (start - tile.columns.start, *tile.shape[2:])


@dataclass(frozen=True, eq=False)
class Request:
    """The statistics to compute, in terms of the rows and keys of the call (with a group: of one shard)."""

    mass: Mapping[str, Mask]
    firsts: Sequence[int]
    """The first key of the text of each batch item; with a group it may lie outside this call's keys."""
    offset: int
    """Position of the first query, counted from the first key."""
    queries: Tensor | None = None
    prefix_keys: int | None = None
    bins: int | None = None
    statistics: Sequence[Statistic] = ()
    value_norms: Tensor | None = None
    """The norm of each value (b, h, nk), for `Statistics.first_contribution`."""
    patterns: Patterns = field(default_factory=Patterns, init=False)

    def sums(self, call: Call) -> Sums:
        """The sums of the call, empty."""
        sums = Sums(call, self.mass, self.prefix_keys, self.bins, self.statistics)
        if self.value_norms is not None:
            sums.contributions = torch.zeros_like(sums.total)
        return sums


def add_statistics(call: Call, rows: RowState, request: Request, sums: Sums) -> None:
    """Add the statistics of all rows of `call` to `sums`."""
    add_tiles(call, _Sweep(rows, request, sums))


def add_tiles(call: Call, reducer: StatisticsReducer) -> None:
    """Run a reducer over all tiles of `call`."""
    size = sizes(call.q.device).tile  # fixed, so that the edges of tiles and of the thumbnail's bins align
    batched = len(set(reducer.request.firsts)) == 1  # a group has one first key
    reducer.count_band(call)
    reduce_tiles(groups(call, size, batched=batched), reducer)


class _Heads:
    """Data that all tiles of a group share."""

    def __init__(self, group: Group, request: Request) -> None:
        tiles = group.tiles
        mask, grid, first = tiles.call.mask, tiles.call.grid, request.firsts[tiles.batch.start]
        prefix_keys = request.prefix_keys or 0
        self.group, self.first = group, first
        self.prefix_columns = slice(max(0, first), min(first + prefix_keys, grid.n_keys))
        self.prefix_rows = slice(max(0, first - request.offset), max(0, first + prefix_keys - request.offset))
        self.uncounted = None if request.queries is None else ~request.queries[tiles.batch, None]
        rows, columns = (max(x.stop - x.start for x in spans) for spans in (group.rows, group.columns))
        self.mass_status = {name: tiles.block_status(part, rows, columns) for name, part in request.mass.items()}
        self.backward = mask is not None and mask.band is not None and mask.band[0] >= 0
        self.weights: WeightTiles | None = None
        norms = tiles.of(request.value_norms)
        self.value_norms = None if norms is None else norms.to(tiles.dtype)[..., None]


class KeySums:
    """The sums of a group's keys, as views."""

    def __init__(self, heads: _Heads, sums: Sums) -> None:
        of = (heads.group.tiles.batch, heads.group.tiles.heads)
        self.heads, self.received, self.visible_queries = heads, sums.received[of], sums.visible_queries[of]
        self.prefix_sink_scores = None if sums.prefix_sink_scores is None else sums.prefix_sink_scores[:, *of]
        self.pooled = None if sums.pooled is None else sums.pooled[:, *of]
        self.user_statistics = {s: sums.of_heads(s, of) for s in sums.user_statistics if s.over == "key"}


@dataclass(eq=False)
class RowsState:
    """The state of one block of queries; `start` and `stop` are their positions, counted from the first key."""

    block: Block
    job: KeySums
    sums: RowSums
    start: int
    stop: int
    counted: Tensor | None
    n_counted: int | Tensor
    """Queries that count: one number, or one per batch item (b, 1, 1)."""


class StatisticsReducer(Reducer[KeySums, RowsState]):
    """Base of the reducers to statistics: adds tiles of final weights to the sums."""

    def __init__(self, request: Request, sums: Sums) -> None:
        self.request, self.sums = request, sums
        self.counted = False  # whether the sums have the numbers of visible pairs already

    def count_band(self, call: Call) -> None:
        """Count the visible pairs of the whole call if they follow from a band."""
        band = (-math.inf, math.inf) if call.mask is None else call.mask.band
        if band is not None and self.request.queries is None:
            counts = functools.partial(band_counts, band, call.grid)
            of_queries, of_keys = counts() if call.mask is None else kept(call.mask, call.grid, "counts", counts)
            self.sums.visible += of_queries
            self.sums.visible_queries += of_keys
            self.counted = True

    def start(self, group: Group) -> KeySums:
        return KeySums(_Heads(group, self.request), self.sums)

    def begin(self, job: KeySums, block: Block) -> RowsState:
        group, rows = block.group, block.rows
        if not self.counted:
            self.sums.visible[block.at] += sum(
                group.columns[c].stop - group.columns[c].start for c, status in block.status if status == FULL
            )
        uncounted, length = job.heads.uncounted, rows.stop - rows.start
        counted = None if uncounted is None else ~uncounted[..., rows, None]
        return RowsState(
            block,
            job,
            RowSums(block.shape, group.tiles.k),
            rows.start + self.request.offset,
            rows.stop + self.request.offset,
            counted,
            length if counted is None else counted.sum((2, 3)).unsqueeze(-1),
        )

    def add_visible(self, rows: RowsState, tile: Tile) -> None:
        """Count the visible pairs of a tile."""
        if self.counted:
            return
        job, masked, cols = rows.job, tile.masked(), tile.columns
        if masked is None:
            job.visible_queries[:, :, cols] += rows.n_counted
            return
        of_queries, of_keys = self.request.patterns.visible(rows.start, tile, masked)
        self.sums.visible[tile.block.at] += of_queries
        job.visible_queries[:, :, cols] += of_keys if rows.counted is None else (~masked & rows.counted).sum(-2)

    def add(self, rows: RowsState, tile: Tile, weights: Tensor, total: Tensor) -> None:
        """Add a tile of weights to all other sums; `total` are the totals of its rows."""
        job, heads, sums, at = rows.job, rows.job.heads, self.sums, tile.block.at
        cols, start, scratch = tile.columns, rows.start, tile.buffer("scores")
        job.received[:, :, cols] += self._pool(job, weights, tile)
        self._add_prefix(job, weights, tile.masked(), tile)
        if self.sign(rows, tile) == 0:
            distances = self.request.patterns.distances(start, tile)
            sums.distance[at] += torch.mul(weights, distances, out=scratch).sum(-1)
        if cols.start <= heads.first < cols.stop:
            sums.sink[at] += weights[..., heads.first - cols.start]
        if heads.value_norms is not None and sums.contributions is not None:
            sums.contributions[at] += (weights @ heads.value_norms[:, :, cols])[..., 0]
        for near, shift in ((sums.self_, 0), (sums.previous, -1), (sums.next_, 1)):
            _add_diagonal(near[at[:2]], weights, tile.rows, start + shift - cols.start)
        for name, inner in self.request.mass.items():
            status = heads.mass_status[name][tile.block.index][tile.index]
            if status == FULL:
                sums.mass[name][at] += total
            elif status == PARTIAL:
                inside = self.request.patterns.inside(name, inner, tile, cols)
                sums.mass[name][at] += (weights * inside).sum(-1)

    def add_final(self, rows: RowsState, tile: Tile, weights: Tensor, log2: Tensor) -> None:
        """Add a tile of final weights, and their base-2 logarithms, to all sums but the numbers of visible pairs."""
        if self.sums.user_statistics:
            self.add_user_statistics(rows.job, weights, log2, tile.masked(), tile)
        start = tile.columns.start - rows.start
        total = rows.sums.add(weights, log2, tile.buffer("scores"), start, self.sign(rows, tile))
        self.add(rows, tile, weights, total)

    def end(self, rows: RowsState, space: Workspace) -> None:
        rows.sums.put(self.sums, rows.block.at)

    @staticmethod
    def sign(rows: RowsState, tile: Tile) -> int:
        """The sign of the distance from query to key: −1 or 1 in the whole tile, or 0 if it differs."""
        if rows.job.heads.backward or rows.start >= tile.columns.stop - 1:
            return -1
        return 1 if rows.stop - 1 <= tile.columns.start else 0

    def add_user_statistics(
        self, job: KeySums, weights: Tensor, log2: Tensor, masked: Tensor | None, tile: Tile
    ) -> None:
        """Add a tile to the `Statistic` objects that the caller passed."""
        visible = None if masked is None else ~masked
        if (uncounted := job.heads.uncounted) is not None:
            counts = ~uncounted[..., tile.rows, None].expand(*tile.shape)
            visible = counts if visible is None else visible & counts
        grid, first = tile.group.tiles.call.grid, job.heads.first
        weight_tile = WeightTile(weights, tile.region, grid, visible, log2 * math.log(2), first)
        for s in self.sums.user_statistics:
            rows = self.sums.of_heads(s, tile.block.at[:2])
            into = rows[..., tile.rows] if s.over == "query" else job.user_statistics[s][..., tile.columns]
            into.copy_(s.merge(into, s.added(weight_tile)))

    def _pool(self, job: KeySums, weights: Tensor, tile: Tile) -> Tensor:
        """Add a tile to the thumbnail, if one is requested; returns the column sums of the tile."""
        bins = self.sums.bins
        if bins is None or job.pooled is None:
            return weights.sum(-2)
        query_bin, key_bin = (min(size, _power_of_two(n)) for size, n in zip(bins, weights.shape[-2:], strict=True))
        before = tile.columns.start % key_bin
        ragged = before, -(weights.shape[-1] + before) % key_bin, 0, -weights.shape[-2] % query_bin
        whole = nn.functional.pad(weights, ragged) if any(ragged) else weights
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
        return sums.sum(-2)[..., before : before + weights.shape[-1]]

    def _add_prefix(self, job: KeySums, weights: Tensor, masked: Tensor | None, tile: Tile) -> None:
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


class _Sweep(StatisticsReducer):
    """Statistics of weights whose normalizer is known for all rows."""

    def __init__(self, rows: RowState, request: Request, sums: Sums) -> None:
        super().__init__(request, sums)
        self.known = rows

    def start(self, group: Group) -> KeySums:
        job = super().start(group)
        job.heads.weights = WeightTiles(group.tiles, self.known, self.request.queries)
        return job

    def tile(self, rows: RowsState, tile: Tile) -> None:
        self.add_visible(rows, tile)
        known = rows.job.heads.weights
        assert known is not None
        weights, log2 = tile.weights(known)
        self.add_final(rows, tile, weights, _log2(weights, tile.group.tiles.call) if log2 is None else log2)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _log2(weights: Tensor, call: Call) -> Tensor:
    """Base-2 logarithms of the weights of a normalizer other than softmax."""
    if weights.min() < 0:
        raise InputError(
            f"measure: normalizer {type(call.given.normalizer).__name__} gives negative weights with these scores, "
            "which have no entropy; expected weights of 0 or more"
        )
    return log2_of(weights)


def log2_of(weights: Tensor) -> Tensor:
    """Base-2 logarithms of weights of 0 or more, finite where a weight is 0."""
    return torch.where(weights > 0, torch.log2(weights), MASKED_SCORE)


def _add_diagonal(near: Tensor, weights: Tensor, rows: slice, offset: int) -> None:
    """Add the diagonal column = row + offset of a tile to its queries."""
    if -weights.shape[2] < offset < weights.shape[3]:
        diagonal = torch.diagonal(weights, offset, -2, -1)
        first, length = max(0, -offset), diagonal.shape[-1]
        near[:, :, rows.start + first : rows.start + first + length] += diagonal
