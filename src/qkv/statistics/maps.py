"""Attention maps of one head: exact weights pooled over bins of queries × keys, without forming the whole matrix.

The log-sum-exp of every query is known, so each tile of final weights can be computed alone, pooled and discarded. Time
is proportional to the pairs shown; memory holds the pixels and one tile. Used by the viewer, the CLI and the figures.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.engine.call import Call, RowState, at_least_float32, detached
from qkv.engine.sizes import sizes
from qkv.engine.tiles import Tile, block_status
from qkv.errors import InputError
from qkv.masks import EMPTY, Region, Tiles
from qkv.statistics.base import check_queries


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


class HeadMap:
    """The attention map of one head of a call, for any number of pictures. No gradients.

    `rows` is `qkv.statistics.measure.row_state(call)`; `real` is True at queries that count, and the rest (padding)
    have weights of 0.

    >>> import torch
    >>> from qkv.masks import Causal
    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> call = Call.of(q, k, k, Causal())
    >>> picture = HeadMap(call, row_state(call)).pooled(size=(2, 2))
    >>> picture.maximum.tolist()
    [[1.0, 0.0], [0.3333333432674408, 0.3333333432674408]]
    >>> picture.mean[0].tolist(), picture.visible[0].tolist()
    ([0.5, 0.0], [0.75, 0.0])
    """

    def __init__(
        self, call: Call, rows: RowState, *, item: int = 0, head: int = 0, real: Bool[Tensor, "b nq"] | None = None
    ) -> None:
        _check_indices(call, item, head)
        if real is not None:
            check_queries(real, call.q, "real")
        self.grid = call.grid
        self._call, self._rows = detached(call), rows
        self._item, self._head = slice(item, item + 1), slice(head, head + 1)
        self._real = None if real is None or bool(real[item].all()) else real

    def pooled(
        self,
        queries: slice = slice(None),
        keys: slice = slice(None),
        size: tuple[int, int] = (1024, 1024),
        on_rows: Callable[[int], None] = lambda rows: None,
    ) -> Picture:
        """Pool the weights of these queries and keys into at most `size` bins down and across. Thread-safe.

        With n queries in B bins, bin b covers queries ⌊b n / B⌋ to ⌊(b + 1) n / B⌋ − 1, and keys likewise, so the sizes
        of bins differ by at most one token. With fewer tokens than bins, every token gets a bin of its own.
        `on_rows(n)` is a progress callback: n more queries are done.
        """
        if min(size) < 1:
            raise InputError(f"size is {size}, expected at least 1 bin down and across")
        down = even_edges(checked_slice("queries", queries, self.grid.n_queries), size[0])
        across = even_edges(checked_slice("keys", keys, self.grid.n_keys), size[1])
        return self.binned(down, across, on_rows)

    @torch.no_grad()
    def binned(
        self, row_edges: Sequence[int], column_edges: Sequence[int], on_rows: Callable[[int], None] = lambda rows: None
    ) -> Picture:
        """Return a picture with bins between arbitrary increasing edges."""
        device = self.grid.device
        down, across = (
            _pieces(edges, limit, device)
            for edges, limit in zip((row_edges, column_edges), sizes(device).picture, strict=True)
        )
        spans, columns = ([piece.span for piece in pieces] for pieces in (down, across))
        every = block_status(self._call.mask, Tiles.of_spans(spans, columns, self.grid), self.grid)
        every = Region(slice(None), slice(None), self._item, self._head).of(every)
        shape = len(row_edges) - 1, len(column_edges) - 1
        like = self._call.q.new_empty(0, dtype=at_least_float32(self._call.q.dtype))
        sums, visible = (like.new_zeros(shape, dtype=torch.float64) for _ in range(2))
        maximum = like.new_full(shape, -torch.inf)
        for rows, of_row in zip(down, every[0, 0].tolist(), strict=True):
            for cols, status in zip(across, of_row, strict=True):
                at = rows.bins, cols.bins
                if status == EMPTY:  # weights of 0
                    maximum[at].clamp_(min=0)
                    continue
                tile = Tile(self._call, self._item, self._head, rows.span, cols.span, status)
                weights = tile.weights(self._rows, self._real)[0][0, 0]
                sums[at] += cols.sums(rows.sums(weights).T).T
                masked = tile.masked_for(self._real)
                pairs = rows.widths[:, None] * cols.widths
                visible[at] += pairs if masked is None else cols.sums(rows.sums((~masked[0, 0]).to(weights)).T).T
                maximum[at] = torch.maximum(maximum[at], cols.maxima(rows.maxima(weights).T).T)
            on_rows(rows.span.stop - rows.span.start)
        at_rows, at_columns = (torch.tensor(x, device=device) for x in (row_edges, column_edges))
        pairs = at_rows.diff()[:, None] * at_columns.diff()
        return Picture(maximum, (sums / pairs).to(like), (visible / pairs).to(like), at_rows, at_columns)


@torch.no_grad()
def rectangle(
    call: Call, rows: RowState, queries: slice, keys: slice, *, item: int = 0, head: int | None = None
) -> Float[Tensor, "h q k"]:
    """Return the weights of a small rectangle of the matrix, not pooled, of one query head or of all. No gradients.

    `rows` is `qkv.statistics.measure.row_state(call)`. Time and memory are proportional to the size of the rectangle: a
    row or a column of the matrix costs one matrix-vector product. The weights are float32, or float64 as the inputs.

    >>> import torch
    >>> from qkv.masks import Causal
    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 2, 4, 8)
    >>> call = Call.of(q, k, k, Causal())
    >>> rectangle(call, row_state(call), slice(1, 2), slice(None))[:, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]
    """
    _, h, n_queries, _ = call.q.shape
    _check_indices(call, item, 0 if head is None else head)
    queries, keys = checked_slice("queries", queries, n_queries), checked_slice("keys", keys, call.k.shape[2])
    heads = slice(0, h) if head is None else slice(head, head + 1)
    tile = Tile(detached(call), slice(item, item + 1), heads, queries, keys)
    return tile.weights(rows)[0][0]


def is_masked(call: Call, queries: slice, keys: slice, *, item: int = 0, head: int = 0) -> bool:
    """Return whether a rectangle is known to be fully masked for a head, from its block status and not pair by pair.

    >>> from qkv.masks import Causal
    >>> q = torch.zeros(1, 1, 9, 4)
    >>> call = Call.of(q, q, q, Causal())
    >>> is_masked(call, slice(0, 3), slice(3, 9)), is_masked(call, slice(0, 4), slice(3, 9))
    (True, False)
    """
    status = block_status(call.mask, Tiles.of_spans([queries], [keys], call.grid), call.grid)
    whole = slice(None)
    return Region(whole, whole, slice(item, item + 1), slice(head, head + 1)).of(status).item() == EMPTY


def _check_indices(call: Call, item: int, head: int) -> None:
    for name, index, n in (("item", item, call.q.shape[0]), ("head", head, call.q.shape[1])):
        if not 0 <= index < n:
            raise InputError(f"{name} is {index}, expected 0" + (f"..{n - 1}" if n > 1 else ""))


def checked_slice(name: str, part: slice, length: int) -> slice:
    """Return the slice with explicit ends; `InputError` naming `name` unless it is not empty and within `length`.

    >>> checked_slice("keys", slice(3, None), 7)
    slice(3, 7, None)
    """
    start, stop = (default if x is None else x for x, default in ((part.start, 0), (part.stop, length)))
    if part.step not in (None, 1) or not 0 <= start < stop <= length:
        raise InputError(f"{name} is {start}:{stop}, expected a:b with 0 ≤ a < b ≤ {length}")
    return slice(start, stop)


def even_edges(within: slice, bins: int) -> list[int]:
    """Return edges of at most `bins` bins over a slice, whose widths differ by at most one token.

    >>> even_edges(slice(10, 17), 3)
    [10, 12, 14, 17]
    """
    length = within.stop - within.start
    bins = min(bins, length)
    return [within.start + b * length // bins for b in range(bins + 1)]


@dataclass(frozen=True, eq=False)
class _Piece:
    """The tokens along one side of a tile, and the bins that hold them."""

    span: slice
    bins: slice
    place: Int[Tensor, " n"]
    """The bin of each token, counted from the first in `bins`."""
    widths: Int[Tensor, " bins"]
    """How many of the tokens each bin holds."""

    def sums(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "bins m"]:
        """Return sums over the tokens of each bin."""
        whole = len(self.widths) == len(self.place)
        return x if whole else x.new_zeros(len(self.widths), x.shape[1]).index_add_(0, self.place, x.contiguous())

    def maxima(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "bins m"]:
        """Return maxima over the tokens of each bin."""
        if len(self.widths) == len(self.place):
            return x
        none = x.new_full((len(self.widths), x.shape[1]), -torch.inf)
        return none.scatter_reduce_(0, self.place[:, None].expand_as(x), x.contiguous(), "amax")


def _pieces(edges: Sequence[int], limit: int, device: torch.device) -> list[_Piece]:
    """Return the tokens between the first and last of the `edges` of bins, at most `limit` at a time."""
    pieces = []
    for start in range(edges[0], edges[-1], limit):
        stop = min(start + limit, edges[-1])
        bins = slice(bisect_right(edges, start) - 1, bisect_left(edges, stop))
        widths = torch.tensor([start, *edges[bins.start + 1 : bins.stop], stop]).diff()
        place = torch.repeat_interleave(torch.arange(len(widths)), widths)
        pieces.append(_Piece(slice(start, stop), bins, place.to(device), widths.to(device)))
    return pieces
