"""Attention maps of one head: exact weights pooled over bins of queries × keys, without forming the whole matrix.

The log-sum-exp of every query is known, so each tile of final weights can be computed alone, pooled and discarded. Time
is proportional to the pairs shown; memory holds the pixels and one tile. Used by the viewer, the CLI and the figures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._engine.call import Call, RowState, detached
from qkv._engine.sizes import sizes
from qkv._engine.sweep import Block, Group, Reducer, Tile, Workspace, reduce_tiles
from qkv._engine.tiles import ScoreTiles, WeightTiles, block_status
from qkv.biases import Bias
from qkv.errors import InputError
from qkv.masks import EMPTY, PARTIAL, Region, Tiles
from qkv.masks.base import Submask


@dataclass(frozen=True, eq=False)
class Picture:
    """The weights of one head pooled over r × c bins.

    Bin (i, j) covers queries ``row_edges[i]`` to ``row_edges[i + 1] − 1`` and keys ``column_edges[j]`` to
    ``column_edges[j + 1] − 1`` of the call.
    """

    maximum: Float[Tensor, "r c"]
    """The largest weight in the bin; masked pairs have weight 0."""
    mean: Float[Tensor, "r c"]
    """The average weight over all pairs of the bin, masked ones included: mean × pairs is the mass in the bin."""
    visible: Float[Tensor, "r c"]
    """The share of the bin's pairs that are visible: mean / visible is the average over the visible pairs."""
    row_edges: Int[Tensor, " r+1"]
    column_edges: Int[Tensor, " c+1"]

    def __repr__(self) -> str:
        (top, bottom), (left, right) = self.row_edges[[0, -1]].tolist(), self.column_edges[[0, -1]].tolist()
        h, w = self.mean.shape
        return f"Picture({h} × {w} bins of queries {top}:{bottom} and keys {left}:{right})"

    @property
    def bytes(self) -> int:
        """The size of its tensors in bytes."""
        tensors = (self.maximum, self.mean, self.visible, self.row_edges, self.column_edges)
        return sum(x.numel() * x.element_size() for x in tensors)


def pooled(
    call: Call,
    rows: RowState,
    *,
    item: int = 0,
    head: int = 0,
    queries: slice = slice(None),
    keys: slice = slice(None),
    size: tuple[int, int] = (1024, 1024),
    real: Bool[Tensor, "b nq"] | None = None,
) -> Picture:
    """The weights of one head of a call as a picture of at most `size` bins. Linear memory; no gradients.

    With n queries in B bins, bin b covers queries ⌊b n / B⌋ to ⌊(b + 1) n / B⌋ − 1, and keys likewise, so the sizes of
    bins differ by at most one token. With fewer tokens than bins, every token gets a bin of its own.

    Args:
        call: the attention call, with any normalizer.
        rows: its normalizer state, `qkv.statistics.measure.row_state(call)`.
        item: batch item.
        head: query head.
        queries: the queries to show; all by default.
        keys: the keys to show; all by default.
        size: largest numbers of bins down and across.
        real: True at queries that count; the rest (padding) have weights of 0.

    Returns:
        `Picture`, float32 (float64 for float64 inputs), on the device of the call.

    >>> import torch
    >>> from qkv.masks import Causal
    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> call = Call.of(q, k, k, Causal())
    >>> picture = pooled(call, row_state(call), size=(2, 2))
    >>> picture.maximum.tolist()
    [[1.0, 0.0], [0.3333333432674408, 0.3333333432674408]]
    >>> picture.mean[0].tolist(), picture.visible[0].tolist()
    ([0.5, 0.0], [0.75, 0.0])
    """
    return HeadMap(call, rows, item=item, head=head, real=real).pooled(queries, keys, size)


class HeadMap:
    """The attention map of one head of a call, for any number of pictures; arguments as in `pooled`."""

    def __init__(
        self, call: Call, rows: RowState, *, item: int = 0, head: int = 0, real: Bool[Tensor, "b nq"] | None = None
    ) -> None:
        b, h, n_queries, _ = call.q.shape
        for name, index, n in (("item", item, b), ("head", head, h)):
            if not 0 <= index < n:
                raise InputError(
                    f"{name} is {index}, expected 0..{n - 1}" if n > 1 else f"{name} is {index}, expected 0"
                )
        if real is not None and (real.dtype != torch.bool or real.shape != (b, n_queries)):
            raise InputError(f"real is {real.dtype} of shape {tuple(real.shape)}, expected bool of {(b, n_queries)}")
        self.grid = call.grid
        key_head, within = divmod(head, h // call.k.shape[1])
        every = ScoreTiles(detached(call), slice(item, item + 1), slice(key_head, key_head + 1))
        self._tiles = every.of_head(within)
        self._weights = WeightTiles(self._tiles, rows)
        self._uncounted = None if real is None or bool(real[item].all()) else ~real[item]

    def pooled(
        self,
        queries: slice = slice(None),
        keys: slice = slice(None),
        size: tuple[int, int] = (1024, 1024),
        on_rows: Callable[[int], None] = lambda rows: None,
    ) -> Picture:
        """Like the function `pooled`; `on_rows(n)` is a progress callback: n more queries are done. Thread-safe."""
        if min(size) < 1:
            raise InputError(f"size is {size}, expected at least 1 bin down and across")
        down = even_edges(checked_slice("queries", queries, self.grid.n_queries), size[0])
        across = even_edges(checked_slice("keys", keys, self.grid.n_keys), size[1])
        return self.binned(down, across, on_rows)

    def binned(
        self, row_edges: Sequence[int], column_edges: Sequence[int], on_rows: Callable[[int], None] = lambda rows: None
    ) -> Picture:
        """A picture with bins between arbitrary increasing edges."""
        device = self.grid.device
        rows, columns = sizes(device).picture
        down, across = _strips(row_edges, rows, device), _strips(column_edges, columns, device)
        shape, dtype = (len(row_edges) - 1, len(column_edges) - 1), self._tiles.dtype
        maximum, mean, visible = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(3))
        edges = (torch.tensor(x, device=device) for x in (row_edges, column_edges))
        picture = Picture(maximum, mean, visible, *edges)
        reducer = _PictureReducer(picture, self._weights, self._uncounted, down, across, on_rows)
        reduce_tiles([self._group(down, across)], reducer)
        return picture

    def _group(self, down: Sequence[_Strip], across: Sequence[_Strip]) -> Group:
        """The tiles of the picture."""
        rows, columns = ([piece.span for strip in strips for piece in strip.pieces] for strips in (down, across))
        q, k = (torch.tensor([(x.start, x.stop - 1) for x in spans]).T.contiguous() for spans in (rows, columns))
        tiles = Tiles(q[0] + self.grid.offset, q[1] + self.grid.offset, k[0], k[1])
        every = block_status(self._tiles.call.mask, tiles, self.grid)
        statuses: list[list[int]] = self._tiles.region(slice(None), slice(None)).of(every)[0, 0].tolist()
        return Group(self._tiles, rows, columns, statuses)


@dataclass(eq=False)
class _Bins:
    """The bins where two strips cross: sums of weights, numbers of visible pairs, and largest weights."""

    sums: Tensor
    visible: Tensor
    maxima: Tensor
    tiles: int = 1
    """The number of tiles added so far."""


@dataclass(eq=False)
class _StripState:
    """The state of one strip of queries: its unfinished bins, by the number of the strip of keys, and the piece."""

    strip: _Strip
    bins: dict[int, _Bins] = field(default_factory=dict)
    piece: _Piece | None = None


class _PictureReducer(Reducer[None, _StripState]):
    """Draw all bins of a picture. It starts at zero, so empty tiles are skipped."""

    def __init__(
        self,
        picture: Picture,
        weights: WeightTiles,
        uncounted: Tensor | None,
        down: Sequence[_Strip],
        across: Sequence[_Strip],
        on_rows: Callable[[int], None],
    ) -> None:
        self.picture, self.weights, self.uncounted, self.on_rows = picture, weights, uncounted, on_rows
        self.rows = [(strip, piece) for strip in down for piece in strip.pieces]
        self.columns = [(number, piece) for number, strip in enumerate(across) for piece in strip.pieces]
        self.across = across

    def begin(self, job: None, block: Block) -> _StripState:
        strip, piece = self.rows[block.index]
        if piece is strip.pieces[0]:
            self.state = _StripState(strip)
        self.state.piece = piece
        return self.state

    def tile(self, state: _StripState, tile: Tile) -> None:
        number, cols = self.columns[tile.index]
        assert state.piece is not None
        bins = self._pooled(state.piece, cols, tile)
        before = state.bins.get(number)
        if before is not None:  # a wide bin of many tiles: float64, so that they add up without loss
            sums, visible = before.sums.double() + bins.sums, before.visible.double() + bins.visible
            bins = _Bins(sums, visible, torch.maximum(before.maxima, bins.maxima), before.tiles + 1)
        if len(state.strip.pieces) == len(self.across[number].pieces) == 1:
            self._draw(state.strip, self.across[number], bins)
        else:
            state.bins[number] = bins

    def end(self, state: _StripState, space: Workspace) -> None:
        assert state.piece is not None
        if state.piece is state.strip.pieces[-1]:
            for number, bins in state.bins.items():
                self._draw(state.strip, self.across[number], bins)
        self.on_rows(state.piece.length)

    def _draw(self, down: _Strip, across: _Strip, bins: _Bins) -> None:
        """Write finished bins to the picture."""
        at, pairs = (down.bins, across.bins), down.widths[:, None] * across.widths
        torch.div(bins.sums, pairs, out=self.picture.mean[at])
        torch.div(bins.visible, pairs, out=self.picture.visible[at])
        some_masked = bins.tiles < len(down.pieces) * len(across.pieces)  # empty tiles were skipped: weights of 0
        self.picture.maximum[at] = bins.maxima.clamp(min=0) if some_masked else bins.maxima

    def _pooled(self, rows: _Piece, cols: _Piece, tile: Tile) -> _Bins:
        """Pool the weights of one tile into bins."""
        masked, weights = self._masked(tile), tile.buffer("weights")
        self.weights.fill(rows.span, cols.span, masked, weights, weights)  # overwrites logarithms
        sums, maxima = rows.pool(weights[0, 0])
        if masked is None:
            visible = rows.widths[:, None] * cols.widths
        else:
            visible = cols.sums(rows.sums((~masked[0, 0]).to(weights)).T).T
        return _Bins(cols.sums(sums.T).T, visible, cols.maxima(maxima.T).T)

    def _masked(self, tile: Tile) -> Bool[Tensor, "1 1 q k"] | None:
        """True at masked pairs and uncounted queries. (`Tile.masked` would cache a pattern for every offset.)"""
        masked, call = None, tile.group.tiles.call
        if tile.status == PARTIAL:
            assert call.mask is not None
            masked = ~call.mask.visible(tile.region, call.grid)
        if self.uncounted is not None and self.uncounted[tile.rows].any():
            out = self.uncounted[None, None, tile.rows, None].expand(1, 1, -1, tile.shape[3])
            masked = out if masked is None else masked | out
        return masked


@torch.no_grad()
def rectangle(
    call: Call, rows: RowState, queries: slice, keys: slice, *, item: int = 0, head: int | None = None
) -> Float[Tensor, "h q k"]:
    """The weights of a small rectangle of the matrix, not pooled, of one query head or of all. No gradients.

    Time and memory are proportional to the size of the rectangle: a row or a column of the matrix costs one
    matrix-vector product.

    Args:
        call: the attention call, with any normalizer.
        rows: its normalizer state, `qkv.statistics.measure.row_state(call)`.
        queries: the queries of the rectangle.
        keys: the keys of the rectangle.
        item: batch item.
        head: query head; all heads if None.

    Returns:
        float32 (float64 for float64 inputs), on the device of the call.

    >>> import torch
    >>> from qkv.masks import Causal
    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 2, 4, 8)
    >>> call = Call.of(q, k, k, Causal())
    >>> rectangle(call, row_state(call), slice(1, 2), slice(None))[:, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]
    """
    b, h, n_queries, _ = call.q.shape
    for name, index, n in (("item", item, b), ("head", 0 if head is None else head, h)):
        if not 0 <= index < n:
            raise InputError(f"{name} is {index}, expected 0..{n - 1}")
    queries, keys = checked_slice("queries", queries, n_queries), checked_slice("keys", keys, call.k.shape[2])
    part, part_rows = slice_call(detached(call), rows, queries, keys)
    whole, group = Region(slice(0, part.q.shape[2]), slice(0, part.k.shape[2])), h // call.k.shape[1]
    weights = []
    for key_head in range(call.k.shape[1]) if head is None else [head // group]:
        tiles = ScoreTiles(part, slice(item, item + 1), slice(key_head, key_head + 1))
        if head is not None:
            tiles = tiles.of_head(head % group)
        masked = None
        if part.mask is not None:
            masked = ~part.mask.visible(tiles.region(whole.rows, whole.columns), part.grid)
        out = tiles.q.new_empty(*tiles.shape, part.q.shape[2], part.k.shape[2])
        WeightTiles(tiles, part_rows).fill(whole.rows, whole.columns, masked, out, out)
        weights.append(out[0])
    return torch.cat(weights)


def slice_call(call: Call, rows: RowState, queries: slice, keys: slice) -> tuple[Call, RowState]:
    """The call restricted to some queries and keys, with the normalizer state that its rows have over all keys.

    A picture of the restricted call shows a rectangle of the whole matrix. No query or key is copied.
    """

    def along(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[2] == 1 else x[:, :, queries]

    q, k, v = call.q[:, :, queries], call.k[:, :, keys], call.v[:, :, keys]
    small = replace(call, q=q, k=k, v=v, shift=along(call.shift), divisor=along(call.divisor))
    if call.mask is not None:
        down = queries.start + call.grid.offset - small.grid.offset
        small = replace(small, mask=Submask(call.mask, call.grid, down, keys.start))
    small = replace(
        small, biases=tuple(_ShiftedBias(bias, queries.start, keys.start, call.grid.offset) for bias in call.biases)
    )
    chosen = None if rows.chosen is None else rows.chosen[:, :, queries] - keys.start
    return small, RowState(along(rows.level), along(rows.total), chosen)


def is_masked(call: Call, queries: slice, keys: slice, *, item: int = 0, head: int = 0) -> bool:
    """Whether a rectangle is known to be fully masked for a head, from its block status and not pair by pair.

    >>> from qkv.masks import Causal
    >>> q = torch.zeros(1, 1, 9, 4)
    >>> call = Call.of(q, q, q, Causal())
    >>> is_masked(call, slice(0, 3), slice(3, 9)), is_masked(call, slice(0, 4), slice(3, 9))
    (True, False)
    """
    grid = call.grid
    ends = [torch.tensor([x]) for x in (queries.start, queries.stop - 1, keys.start, keys.stop - 1)]
    tiles = Tiles(ends[0] + grid.offset, ends[1] + grid.offset, ends[2], ends[3])
    whole = slice(None)
    status = Region(whole, whole, slice(item, item + 1), slice(head, head + 1)).of(block_status(call.mask, tiles, grid))
    return status.item() == EMPTY


@dataclass(frozen=True, eq=False)
class _ShiftedBias(Bias):
    """A bound bias of a whole call, applied to a rectangle that starts at query `down` and key `right`."""

    bias: Bias
    down: int
    right: int
    offset: int
    """Position of the first query of the whole call, counted from its first key."""

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        return self.bias.by_head

    def tensors(self) -> dict[str, Tensor]:
        return self.bias.tensors()

    def with_tensors(self, tensors: dict[str, Tensor]) -> Bias:
        return replace(self, bias=self.bias.with_tensors(tensors))

    def apply(self, scores: Tensor, region: Region) -> Tensor:
        rows, columns = (
            slice(x.start + by, x.stop + by) for x, by in ((region.rows, self.down), (region.columns, self.right))
        )
        return self.bias.apply(scores, replace(region, rows=rows, columns=columns, offset=self.offset))


def checked_slice(name: str, part: slice, length: int) -> slice:
    """The slice with explicit ends; `InputError` naming `name` unless it is not empty and within `length`.

    >>> checked_slice("keys", slice(3, None), 7)
    slice(3, 7, None)
    """
    start, stop = (default if x is None else x for x, default in ((part.start, 0), (part.stop, length)))
    if part.step not in (None, 1) or not 0 <= start < stop <= length:
        raise InputError(f"{name} is {start}:{stop}, expected a:b with 0 ≤ a < b ≤ {length}")
    return slice(start, stop)


def even_edges(within: slice, bins: int) -> list[int]:
    """Edges of at most `bins` bins over a slice, whose widths differ by at most one token.

    >>> even_edges(slice(10, 17), 3)
    [10, 12, 14, 17]
    """
    length = within.stop - within.start
    bins = min(bins, length)
    return [within.start + b * length // bins for b in range(bins + 1)]


class _Piece:
    """The tokens along one side of a tile and their bins: several whole bins, or a part of one wide bin."""

    def __init__(self, index: int, edges: Sequence[int], device: torch.device) -> None:
        self.index = index
        self.span, self.length = slice(edges[0], edges[-1]), edges[-1] - edges[0]
        widths = [b - a for a, b in pairwise(edges)]
        self.widest = max(widths)
        self.widths = torch.tensor(widths, dtype=torch.float32, device=device)  # few enough to be exact
        self.chosen: Tensor | None = None
        if min(widths) < self.widest:  # pad all bins to the widest: shorter ones repeat their last token
            step = torch.arange(self.widest)
            width = torch.tensor(widths)[:, None]
            first = torch.tensor(edges[:-1])[:, None] - edges[0]
            self.chosen = (first + torch.minimum(step, width - 1)).flatten().to(device)
            self.repeated = (step >= width).flatten().nonzero()[:, 0].to(device)

    def pool(self, x: Float[Tensor, "n m"]) -> tuple[Float[Tensor, "bins m"], Float[Tensor, "bins m"]]:
        """Sums and maxima over the tokens of each bin."""
        if self.widest == 1:
            return x, x
        x = self._by_bin(x)
        maxima = x.amax(1)
        return self._summed(x), maxima

    def sums(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "bins m"]:
        return x if self.widest == 1 else self._summed(self._by_bin(x))

    def maxima(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "bins m"]:
        return x if self.widest == 1 else self._by_bin(x).amax(1)

    def _by_bin(self, x: Tensor) -> Float[Tensor, "bins widest m"]:
        if self.chosen is not None:
            x = x.contiguous().index_select(0, self.chosen)  # contiguous rows: much faster
        return x.unflatten(0, (-1, self.widest))

    def _summed(self, by_bin: Float[Tensor, "bins widest m"]) -> Float[Tensor, "bins m"]:
        if self.chosen is not None:
            by_bin.flatten(0, 1).index_fill_(0, self.repeated, 0)  # `_by_bin` made a copy, so this may write to it
        return by_bin.sum(1)


class _Strip(NamedTuple):
    """Some bins along one side of the picture: several bins in one piece, or one wide bin in several pieces."""

    bins: slice
    widths: Float[Tensor, " bins"]
    pieces: list[_Piece]


def _strips(edges: Sequence[int], limit: int, device: torch.device) -> list[_Strip]:
    """The strips between `edges`, in pieces of at most `limit` tokens."""
    strips: list[_Strip] = []
    index = first = 0
    while first < len(edges) - 1:
        last = max(first + 1, bisect_right(edges, edges[first] + limit) - 1)
        parts = [edges[first : last + 1]]
        if edges[last] - edges[first] > limit:  # one wide bin
            stops = [*range(edges[first], edges[last], limit), edges[last]]
            parts = [[a, b] for a, b in pairwise(stops)]
        widths = torch.tensor(edges[first : last + 1]).diff().to(device, torch.float64)
        pieces = [_Piece(index + i, part, device) for i, part in enumerate(parts)]
        strips.append(_Strip(slice(first, last), widths, pieces))
        index, first = index + len(parts), last
    return strips
