"""One head's map as a pyramid of tiles for viewers: each zoom shows it at twice the resolution of the one before.

Bins of all zooms begin at multiples of powers of two, so a tile is exactly what its four parts at the next zoom pool
to. The whole map costs the same from near and from far, so far zooms are never computed: from the `base` on, the
deepest zoom at which the whole map has few pixels, tiles are made of weights, and above it of the tiles below. That is
one pass over the map, and one that was cancelled goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.call import Call, at_least_float32
from qkv._engine.row_state import RowState
from qkv.errors import InputError
from qkv.profiler.explore.tile_cache import Cancelled, Kept, Stopped, never
from qkv.statistics.maps import HeadMap, Picture, checked_slice, is_masked, slice_call

TILE = 256  # pixels a side
FAR = 2048 * 2048  # pixels of the whole map at most, for which tiles are kept rather than made of weights

OnProgress = Callable[[float], None]
Place = tuple[int, int, int]  # zoom, i, j
Tiles = Kept[Picture | None]


def kept_tiles(room: int) -> Tiles:
    """A place to keep tiles in so many bytes; None stands for one that the mask hides."""
    return Kept(room, lambda tile: 512 + (0 if tile is None else tile.bytes))


def deepest(n_queries: int, n_keys: int) -> int:
    """The zoom at which a pixel is one query and one key, of a map of this size.

    >>> deepest(256, 100), deepest(257, 100), deepest(16_384, 16_384)
    (0, 1, 6)
    """
    return max(0, (-(-max(n_queries, n_keys) // TILE) - 1).bit_length())


def base(n_queries: int, n_keys: int) -> int:
    """The deepest zoom at which the whole map has few pixels: nearer zooms are made of weights, farther ones of it.

    >>> base(256, 100), base(16_384, 16_384), base(100_000, 100_000)
    (0, 3, 3)
    """
    last = deepest(n_queries, n_keys)
    few = (z for z in range(last, 0, -1) if pixels(n_queries, last - z) * pixels(n_keys, last - z) <= FAR)
    return next(few, 0)


def pixels(tokens: int, steps: int) -> int:
    """Of a side of the whole map, so many zooms before the deepest."""
    return -(-tokens // 2**steps)


def edges(zoom: int, i: int, j: int, lengths: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Where the bins of a tile of a map of this size begin and end, down and across.

    Raises:
        InputError: for a zoom or a tile that is not there.

    >>> edges(1, 1, 0, (1025, 9))
    ([1024, 1025], [0, 4, 8, 9])
    """
    last = deepest(*lengths)
    if not 0 <= zoom <= last:
        raise InputError(f"zoom is {zoom}, expected 0..{last}")
    step, sides = 2 ** (last - zoom), list[list[int]]()
    for name, at, n in (("i", i, lengths[0]), ("j", j, lengths[1])):
        most = (n - 1) // (TILE * step)
        if not 0 <= at <= most:
            raise InputError(f"{name} is {at}, expected 0..{most} at zoom {zoom}")
        stop = min((at + 1) * TILE * step, n)
        sides.append([*range(at * TILE * step, stop, step), stop])
    return sides[0], sides[1]


class Pyramid:
    """Tiles of the map of one head, or of a rectangle of it. Making one costs nothing: what lasts is in `kept`.

    Args:
        call: of any normalizer, without gradients.
        known: `qkv.statistics.measure.row_state` of it.
        item: of the batch.
        head: query head.
        kept: where its tiles are kept, beside those of others.
        name: tells its tiles from theirs.
        queries: those of the call it shows; tiles count them from 0.
        keys: likewise.
        real: True at queries that count; others (padding) see nothing.
    """

    def __init__(
        self,
        call: Call,
        known: RowState,
        item: int,
        head: int,
        kept: Tiles,
        name: Hashable,
        *,
        queries: slice = slice(None),
        keys: slice = slice(None),
        real: Bool[Tensor, "b nq"] | None = None,
    ) -> None:
        self.call, self.known, self.item, self.head, self.real = call, known, item, head, real
        self.kept, self.name = kept, name
        queries, keys = checked_slice("queries", queries, call.q.shape[2]), checked_slice("keys", keys, call.k.shape[2])
        self.starts = queries.start, keys.start
        self.lengths = queries.stop - queries.start, keys.stop - keys.start
        self.deepest = deepest(*self.lengths)
        """The zoom at which a pixel is one query and one key."""
        self.base = base(*self.lengths)

    def tile(
        self, zoom: int, i: int, j: int, *, stopped: Stopped = never, on_progress: OnProgress = lambda share: None
    ) -> Picture | None:
        """Tile (i, j), counted down and across; None if the mask hides all of it.

        At zoom 0 one tile of 256 × 256 pixels shows the whole map; each further zoom halves the tokens a pixel covers,
        2^(`deepest` − zoom), down to one. Tiles at the edge of the map have as many pixels as there are tokens for.

        Args:
            zoom: 0 to `deepest`.
            i: which row of tiles.
            j: which column of tiles.
            stopped: asked again and again while it is made, from any thread.
            on_progress: hears how much of the work is done, from 0 to 1, from any thread.

        Raises:
            InputError: for a zoom or a tile that is not there.
            Cancelled: when `stopped` says so; what is done by then is kept.
        """
        edges(zoom, i, j, self.lengths)  # it is there
        work = _Work(stopped, on_progress)
        return self._tile((zoom, i, j), work, first=True)

    def _tile(self, at: Place, work: _Work, *, first: bool = False) -> Picture | None:
        def make() -> Picture | None:
            if first:  # only now is it known that there is something to do
                work.total = sum(self._pairs(part) for part in self._of_weights(at))
            return self._made(at, work)

        return self.kept.get((self.name, at), make, work.stopped)

    def _made(self, at: Place, work: _Work) -> Picture | None:
        if self._hidden(at):
            return None
        picture = self._pooled(at, work) if at[0] < self.base else self._weighed(at, work)
        # Some masks know only pair by pair. (NumPy's looks need no second thread, which on a busy machine comes late.)
        return picture if picture.visible.cpu().numpy().any() else None

    def _weighed(self, at: Place, work: _Work) -> Picture:
        """A tile made of weights."""
        work.check()
        rows, columns = self._spans(at)
        call, known = slice_call(self.call, self.known, rows, columns)
        real = None if self.real is None else self.real[:, rows]
        head = HeadMap(call, known, item=self.item, head=self.head, real=real)
        step, width = 2 ** (self.deepest - at[0]), _length(columns)
        down, across = ([*range(0, _length(side), step), _length(side)] for side in (rows, columns))
        made = head.binned(down, across, lambda n: work.add(n * width))
        return replace(made, row_edges=made.row_edges + rows.start, column_edges=made.column_edges + columns.start)

    def _pooled(self, at: Place, work: _Work) -> Picture:
        """A tile made of its parts at the next zoom: two by two of their bins are one here."""
        step, device = 2 ** (self.deepest - at[0]), self.call.q.device
        edges = [torch.tensor([*range(x.start, x.stop, step), x.stop], device=device) for x in self._spans(at)]
        shape, dtype = [len(x) - 1 for x in edges], at_least_float32(self.call.q.dtype)
        maximum, mean, visible = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(3))
        for corner, place in self._parts(at):
            part = self._tile(place, work)
            if part is None:
                continue
            widths = [x.diff().to(dtype) for x in (part.row_edges, part.column_edges)]
            first = [x * TILE // 2 for x in corner]
            here = tuple(slice(a, a + (len(w) + 1) // 2) for a, w in zip(first, widths, strict=True))
            maximum[here] = _tops(_tops(part.maximum).T).T
            mean[here], visible[here] = (_means(_means(x, widths[0]).T, widths[1]).T for x in (part.mean, part.visible))
        return Picture(maximum, mean, visible, *edges)

    def _parts(self, at: Place) -> Iterator[tuple[tuple[int, int], Place]]:
        """The tiles at the next zoom that show the same: which corner, and where they are."""
        zoom, i, j = at
        for a, b in product((0, 1), repeat=2):
            part = (zoom + 1, 2 * i + a, 2 * j + b)
            if all(n * TILE < self._pixels(side, zoom + 1) for side, n in enumerate(part[1:])):
                yield (a, b), part

    def _of_weights(self, at: Place) -> Iterator[Place]:
        """Tiles that have still to be made of weights for this one."""
        if (self.name, at) in self.kept or self._hidden(at):
            return
        if at[0] >= self.base:
            yield at
            return
        for _, part in self._parts(at):
            yield from self._of_weights(part)

    def _hidden(self, at: Place) -> bool:
        rows, columns = self._spans(at)
        return is_masked(self.call, rows, columns, item=self.item, head=self.head)

    def _pairs(self, at: Place) -> int:
        rows, columns = self._spans(at)
        return _length(rows) * _length(columns)

    def _pixels(self, side: int, zoom: int) -> int:
        """Of the whole map at a zoom, down or across."""
        return pixels(self.lengths[side], self.deepest - zoom)

    def _spans(self, at: Place) -> tuple[slice, slice]:
        """Queries and keys of the call that a tile shows."""
        wide = TILE * 2 ** (self.deepest - at[0])
        rows, columns = (
            slice(start + n * wide, start + min((n + 1) * wide, length))
            for start, n, length in zip(self.starts, at[1:], self.lengths, strict=True)
        )
        return rows, columns


class _Work:
    """How much of what was asked for is done, and whether it is still wanted."""

    def __init__(self, stopped: Stopped, on_progress: OnProgress) -> None:
        self.stopped, self.on_progress = stopped, on_progress
        self.done = self.total = 0

    def check(self) -> None:
        if self.stopped():
            raise Cancelled

    def add(self, pairs: int) -> None:
        """So many pairs are done. (Threads may lose one another's: the last share is then a little less than 1.)"""
        self.done += pairs
        self.on_progress(min(1.0, self.done / max(1, self.total)))
        self.check()


def _length(of: slice) -> int:
    return int(of.stop - of.start)


def _tops(x: Float[Tensor, "n m"]) -> Float[Tensor, "half m"]:
    """The larger of every two rows; the last of an odd number stays."""
    if len(x) % 2:
        x = torch.cat([x, x[-1:]])
    return torch.maximum(x[0::2], x[1::2])


def _means(x: Float[Tensor, "n m"], widths: Float[Tensor, " n"]) -> Float[Tensor, "half m"]:
    """The mean of every two rows, each of which counts as much as it is wide; the last of an odd number stays."""
    if len(x) % 2:
        x, widths = torch.cat([x, x[-1:]]), torch.cat([widths, widths.new_zeros(1)])
    first, second = widths[0::2, None], widths[1::2, None]
    return torch.lerp(x[0::2], x[1::2], second / (first + second))
