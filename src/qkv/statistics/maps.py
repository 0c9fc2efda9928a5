"""The weights of one head as a picture: pooled over bins of queries × keys, exactly, and never formed as a whole.

The log-sum-exp of every query is known, so a tile of final weights can be made alone, pooled and forgotten: what a
picture costs is the pairs it shows, and what it holds is its pixels and a tile.
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

from qkv._engine.call import Call, detached
from qkv._engine.row_state import RowState
from qkv._engine.sizes import sizes
from qkv._engine.sweep import Block, Group, Reducer, Tile, reduce_tiles
from qkv._engine.tiles import ScoreTiles, classes
from qkv._engine.weight_tiles import WeightTiles
from qkv._engine.workspace import Workspace
from qkv.biases import Bias
from qkv.errors import InputError
from qkv.masks import EMPTY, PARTIAL, Region, Tiles
from qkv.masks.base import Placed

SERIAL_PAIRS = 2**19  # pairs that are not worth starting threads for


@dataclass(frozen=True, eq=False)
class Picture:
    """The weights of one head pooled over r × c bins.

    Bin (i, j) is queries ``row_edges[i]`` to ``row_edges[i + 1] − 1`` and keys ``column_edges[j]`` to
    ``column_edges[j + 1] − 1`` of the call.
    """

    maximum: Float[Tensor, "r c"]
    """The largest weight in the bin; pairs the mask hides have weight 0."""
    mean: Float[Tensor, "r c"]
    """The average weight over all pairs of the bin, hidden ones too, so that mean × pairs is the mass in the bin."""
    visible: Float[Tensor, "r c"]
    """The share of the bin's pairs that the mask shows: mean / visible is the average over those."""
    row_edges: Int[Tensor, " r+1"]
    column_edges: Int[Tensor, " c+1"]

    def __repr__(self) -> str:
        (top, bottom), (left, right) = self.row_edges[[0, -1]].tolist(), self.column_edges[[0, -1]].tolist()
        h, w = self.mean.shape
        return f"Picture({h} × {w} bins of queries {top}:{bottom} and keys {left}:{right})"

    @property
    def bytes(self) -> int:
        """What its numbers take in memory."""
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

    Of n queries in B bins, bin b covers ⌊b n / B⌋ to ⌊(b + 1) n / B⌋ − 1 of them, and keys likewise: bins differ by one
    token at most. Where there are fewer tokens than bins asked for, every token has a bin of its own.

    Args:
        call: of any normalizer.
        rows: `qkv.statistics.measure.row_state` of it.
        item: of the batch.
        head: query head.
        queries: which to show; all by default.
        keys: which to show; all by default.
        size: bins down and across, at most.
        real: True at queries that count; others (padding) see nothing.

    Returns:
        `Picture`, float32 (float64 for float64 inputs), on the device of the call.

    Raises:
        InputError: for an item, a head, queries or keys that are not there, or a size below 1.

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
    """One head of a call, ready for any number of pictures; arguments as in `pooled`."""

    def __init__(
        self, call: Call, rows: RowState, *, item: int = 0, head: int = 0, real: Bool[Tensor, "b nq"] | None = None
    ) -> None:
        b, h, n_queries, _ = call.q.shape
        for name, given, n in (("item", item, b), ("head", head, h)):
            if not 0 <= given < n:
                raise InputError(
                    f"{name} is {given}, expected 0..{n - 1}" if n > 1 else f"{name} is {given}, expected 0"
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
        """The picture of `pooled`; `on_rows` hears how many more queries are done, from any thread."""
        if min(size) < 1:
            raise InputError(f"size is {size}, expected at least 1 bin down and across")
        down = even_edges(checked_slice("queries", queries, self.grid.n_queries), size[0])
        across = even_edges(checked_slice("keys", keys, self.grid.n_keys), size[1])
        return self.binned(down, across, on_rows)

    def binned(
        self, row_edges: Sequence[int], column_edges: Sequence[int], on_rows: Callable[[int], None] = lambda rows: None
    ) -> Picture:
        """The picture with bins between any increasing edges."""
        device = self.grid.device
        rows, columns = sizes(device).picture
        down, across = _strips(row_edges, rows, device), _strips(column_edges, columns, device)
        shape, dtype = (len(row_edges) - 1, len(column_edges) - 1), self._tiles.dtype
        maximum, mean, visible = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(3))
        edges = (torch.tensor(x, device=device) for x in (row_edges, column_edges))
        picture = Picture(maximum, mean, visible, *edges)
        few = (row_edges[-1] - row_edges[0]) * (column_edges[-1] - column_edges[0]) <= SERIAL_PAIRS
        paint = _Paint(picture, self._weights, self._uncounted, down, across, on_rows)
        reduce_tiles([self._group(down, across)], paint, device, little=few)
        return picture

    def _group(self, down: Sequence[_Strip], across: Sequence[_Strip]) -> Group:
        """The tiles of the picture; a thread does a strip of queries at a time."""
        rows, columns = ([piece.span for strip in strips for piece in strip.pieces] for strips in (down, across))
        q, k = (torch.tensor([(x.start, x.stop - 1) for x in spans]).T.contiguous() for spans in (rows, columns))
        tiles = Tiles(q[0] + self.grid.offset, q[1] + self.grid.offset, k[0], k[1])
        every = classes(self._tiles.call.mask, tiles, self.grid)
        kinds: list[list[int]] = self._tiles.region(slice(None), slice(None)).of(every)[0, 0].tolist()
        # Under a causal mask the last strips are the longest: they come first, so that the threads end together.
        return Group(self._tiles, rows, columns, kinds, [[x.index for x in strip.pieces] for strip in down[::-1]])


@dataclass(eq=False)
class _Bins:
    """The bins where two strips cross: sums of weights, numbers of visible pairs, largest weights."""

    sums: Tensor
    visible: Tensor
    tops: Tensor
    tiles: int = 1
    """How many tiles have been added."""


@dataclass(eq=False)
class _Drawing:
    """A strip of queries: the bins so far by the number of the strip of keys, and the piece that is worked on."""

    strip: _Strip
    bins: dict[int, _Bins] = field(default_factory=dict)
    piece: _Piece | None = None


class _Paint(Reducer[_Drawing, _Drawing]):
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

    def start(self, group: Group, shared: None, rows: Sequence[int]) -> _Drawing:
        return _Drawing(self.rows[rows[0]][0])

    def begin(self, job: _Drawing, block: Block) -> _Drawing:
        job.piece = self.rows[block.index][1]
        return job

    def tile(self, drawing: _Drawing, tile: Tile) -> None:
        number, cols = self.columns[tile.index]
        assert drawing.piece is not None
        found = self._pooled(drawing.piece, cols, tile)
        known = drawing.bins.get(number)
        if known is not None:  # of a wide bin: float64, so that many parts add up without loss
            sums, visible = known.sums.double() + found.sums, known.visible.double() + found.visible
            found = _Bins(sums, visible, torch.maximum(known.tops, found.tops), known.tiles + 1)
        if len(drawing.strip.pieces) == len(self.across[number].pieces) == 1:
            self._draw(drawing.strip, self.across[number], found)
        else:
            drawing.bins[number] = found

    def end(self, drawing: _Drawing, space: Workspace) -> None:
        assert drawing.piece is not None
        if drawing.piece is drawing.strip.pieces[-1]:
            for number, found in drawing.bins.items():
                self._draw(drawing.strip, self.across[number], found)
        self.on_rows(drawing.piece.length)

    def _draw(self, down: _Strip, across: _Strip, found: _Bins) -> None:
        at, pairs = (down.bins, across.bins), down.widths[:, None] * across.widths
        torch.div(found.sums, pairs, out=self.picture.mean[at])
        torch.div(found.visible, pairs, out=self.picture.visible[at])
        empty = found.tiles < len(down.pieces) * len(across.pieces)
        self.picture.maximum[at] = found.tops.clamp(min=0) if empty else found.tops

    def _pooled(self, rows: _Piece, cols: _Piece, tile: Tile) -> _Bins:
        """The bins of one tile."""
        masked, weights = self._masked(tile), tile.buffer("weights")
        self.weights.fill(rows.span, cols.span, masked, weights, weights)  # nobody wants their logarithms
        sums, tops = rows.pool(weights[0, 0])
        if masked is None:
            visible = rows.widths[:, None] * cols.widths
        else:
            visible = cols.sums(rows.sums((~masked[0, 0]).to(weights)).T).T
        return _Bins(cols.sums(sums.T).T, visible, cols.tops(tops.T).T)

    def _masked(self, tile: Tile) -> Bool[Tensor, "1 1 q k"] | None:
        """Which pairs do not count; not `Tile.masked`, which keeps a pattern for every place."""
        masked, call = None, tile.group.tiles.call
        if tile.kind == PARTIAL:
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
    """The weights of a small rectangle as they are: of one query head, or of all if None. No gradients.

    Takes time and memory in proportion to the rectangle and to its queries and keys alone: a row or a column of the
    matrix costs no more than one product.

    Args:
        call: of any normalizer.
        rows: `qkv.statistics.measure.row_state` of it.
        queries: which.
        keys: which.
        item: of the batch.
        head: query head.

    Returns:
        float32 (float64 for float64 inputs), on the device of the call.

    Raises:
        InputError: for an item, a head, queries or keys that are not there.

    >>> import torch
    >>> from qkv.masks import Causal
    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 2, 4, 8)
    >>> call = Call.of(q, k, k, Causal())
    >>> rectangle(call, row_state(call), slice(1, 2), slice(None))[:, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]
    """
    b, h, n_queries, _ = call.q.shape
    for name, given, n in (("item", item, b), ("head", 0 if head is None else head, h)):
        if not 0 <= given < n:
            raise InputError(f"{name} is {given}, expected 0..{n - 1}")
    queries, keys = checked_slice("queries", queries, n_queries), checked_slice("keys", keys, call.k.shape[2])
    part, known = slice_call(detached(call), rows, queries, keys)
    whole, group = Region(slice(0, part.q.shape[2]), slice(0, part.k.shape[2])), h // call.k.shape[1]
    found = []
    for key_head in range(call.k.shape[1]) if head is None else [head // group]:
        tiles = ScoreTiles(part, slice(item, item + 1), slice(key_head, key_head + 1))
        if head is not None:
            tiles = tiles.of_head(head % group)
        hidden = None
        if part.mask is not None:
            hidden = ~part.mask.visible(tiles.region(whole.rows, whole.columns), part.grid)
        out = tiles.q.new_empty(*tiles.shape, part.q.shape[2], part.k.shape[2])
        WeightTiles(tiles, known).fill(whole.rows, whole.columns, hidden, out, out)
        found.append(out[0])
    return torch.cat(found)


def slice_call(call: Call, rows: RowState, queries: slice, keys: slice) -> tuple[Call, RowState]:
    """The call of some queries and keys alone, and what its rows know: of all keys, not only of these.

    Pictures of it are those of a rectangle of the whole. No query or key is copied.
    """

    def along(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[2] == 1 else x[:, :, queries]

    q, k, v = call.q[:, :, queries], call.k[:, :, keys], call.v[:, :, keys]
    small = replace(call, q=q, k=k, v=v, shift=along(call.shift), divisor=along(call.divisor))
    if call.mask is not None:
        down = queries.start + call.grid.offset - small.grid.offset
        small = replace(small, mask=Placed(call.mask, call.grid, down, keys.start))
    small = replace(
        small, biases=tuple(_Moved(bias, queries.start, keys.start, call.grid.offset) for bias in call.biases)
    )
    chosen = None if rows.chosen is None else rows.chosen[:, :, queries] - keys.start
    return small, RowState(along(rows.level), along(rows.total), chosen)


def is_masked(call: Call, queries: slice, keys: slice, *, item: int = 0, head: int = 0) -> bool:
    """Whether the mask is known to hide all of a rectangle from a head; no pair of it is looked at.

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
    kind = Region(whole, whole, slice(item, item + 1), slice(head, head + 1)).of(classes(call.mask, tiles, grid))
    return kind.item() == EMPTY


@dataclass(frozen=True, eq=False)
class _Moved(Bias):
    """A bound bias as a rectangle of its call sees it, whose first query and key are these."""

    bias: Bias
    down: int
    right: int
    offset: int
    """Of the whole: the position of its first query among its keys."""

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


def checked_slice(name: str, given: slice, length: int) -> slice:
    """A slice with its ends, known to lie within a length.

    >>> checked_slice("keys", slice(3, None), 7)
    slice(3, 7, None)
    """
    start, stop = (default if x is None else x for x, default in ((given.start, 0), (given.stop, length)))
    if given.step not in (None, 1) or not 0 <= start < stop <= length:
        raise InputError(f"{name} is {start}:{stop}, expected a:b with 0 ≤ a < b ≤ {length}")
    return slice(start, stop)


def even_edges(within: slice, bins: int) -> list[int]:
    """Edges of at most so many bins over a slice, as even as whole tokens allow.

    >>> even_edges(slice(10, 17), 3)
    [10, 12, 14, 17]
    """
    length = within.stop - within.start
    bins = min(bins, length)
    return [within.start + b * length // bins for b in range(bins + 1)]


class _Piece:
    """Some tokens of a side of a tile, and the bins they belong to: whole ones, or a part of one that is wide."""

    def __init__(self, index: int, edges: Sequence[int], device: torch.device) -> None:
        self.index = index
        self.span, self.length = slice(edges[0], edges[-1]), edges[-1] - edges[0]
        widths = [b - a for a, b in pairwise(edges)]
        self.widest = max(widths)
        self.widths = torch.tensor(widths, dtype=torch.float32, device=device)  # few enough to be exact
        self.chosen: Tensor | None = None
        if min(widths) < self.widest:  # lay the bins out as wide as the widest: short ones repeat their last token
            step = torch.arange(self.widest)
            width = torch.tensor(widths)[:, None]
            first = torch.tensor(edges[:-1])[:, None] - edges[0]
            self.chosen = (first + torch.minimum(step, width - 1)).flatten().to(device)
            self.repeated = (step >= width).flatten().nonzero()[:, 0].to(device)

    def pool(self, x: Float[Tensor, "n m"]) -> tuple[Float[Tensor, "bins m"], Float[Tensor, "bins m"]]:
        """Sums and maxima over the tokens of each bin."""
        if self.widest == 1:
            return x, x
        x = self._laid(x)
        tops = x.amax(1)
        return self._summed(x), tops

    def sums(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "bins m"]:
        return x if self.widest == 1 else self._summed(self._laid(x))

    def tops(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "bins m"]:
        return x if self.widest == 1 else self._laid(x).amax(1)

    def _laid(self, x: Tensor) -> Float[Tensor, "bins widest m"]:
        if self.chosen is not None:
            x = x.contiguous().index_select(0, self.chosen)  # of rows that lie together: much faster
        return x.unflatten(0, (-1, self.widest))

    def _summed(self, laid: Float[Tensor, "bins widest m"]) -> Float[Tensor, "bins m"]:
        if self.chosen is not None:
            laid.flatten(0, 1).index_fill_(0, self.repeated, 0)  # a copy: it may be spoilt
        return laid.sum(1)


class _Strip(NamedTuple):
    """Some bins of a side of the picture: several in one piece, or one wide one in several pieces."""

    bins: slice
    widths: Float[Tensor, " bins"]
    pieces: list[_Piece]


def _strips(edges: Sequence[int], limit: int, device: torch.device) -> list[_Strip]:
    """Strips in pieces of at most `limit` tokens."""
    strips: list[_Strip] = []
    index = first = 0
    while first < len(edges) - 1:
        last = max(first + 1, bisect_right(edges, edges[first] + limit) - 1)
        cuts = [edges[first : last + 1]]
        if edges[last] - edges[first] > limit:  # one wide bin
            stops = [*range(edges[first], edges[last], limit), edges[last]]
            cuts = [[a, b] for a, b in pairwise(stops)]
        widths = torch.tensor(edges[first : last + 1]).diff().to(device, torch.float64)
        pieces = [_Piece(index + i, cut, device) for i, cut in enumerate(cuts)]
        strips.append(_Strip(slice(first, last), widths, pieces))
        index, first = index + len(cuts), last
    return strips
