"""Tiles of an attention map at every zoom, computed on request and cached.

Bins of all zooms begin at multiples of powers of two, so pooling the four child tiles at the next zoom gives exactly
the parent tile. Tiles at the `base` zoom (the deepest zoom at which the whole map has few pixels) and deeper are
computed from weights; tiles at lower zooms are pooled from their children. A view of the whole map is therefore one
pass over the weights, and a pass that was cancelled resumes from the tiles in the cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Generic, TypeVar

import torch
from cachetools import LRUCache
from jaxtyping import Float
from torch import Tensor

from qkv.engine import Call, RowState, at_least_float32
from qkv.errors import InputError
from qkv.statistics.maps import HeadMap, Picture, checked_slice, is_masked

V = TypeVar("V")
Stopped = Callable[[], bool]

POLL_SECONDS = 0.05  # a waiting thread checks at this interval whether its request was cancelled


class Cancelled(Exception):  # noqa: N818  (not an error: the caller cancelled the request)
    """Raised when the caller has cancelled the computation."""


def never() -> bool:
    """The default of `stopped`: the computation is not cancelled."""
    return False


class SingleFlightCache(Generic[V]):
    """An LRU cache of at most `max_bytes` in which a missing value is computed by one thread while others wait for it.

    The newest value is always kept, even if it alone is larger than `max_bytes`; all others are then evicted.

    Args:
        max_bytes: bound on the size of all values.
        size: bytes of a value.

    >>> squares = SingleFlightCache[int](100, size=lambda x: 40)
    >>> [squares.get_or_compute(n, lambda n=n: n * n) for n in (3, 4, 5)], squares.bytes
    ([9, 16, 25], 80)
    >>> squares.get(3) is None, squares.get(5)
    (True, 25)
    """

    def __init__(self, max_bytes: int, size: Callable[[V], int]) -> None:
        self.max_bytes = max(1, max_bytes)
        self._size = size
        # cachetools refuses a value that is larger than the cache: such a value counts as a full cache.
        self._values: LRUCache[Hashable, V] = LRUCache(self.max_bytes, lambda value: min(size(value), self.max_bytes))
        self._running: dict[Hashable, threading.Event] = {}
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes in use, at most `max_bytes`."""
        return int(self._values.currsize)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get_or_compute(self, key: Hashable, compute: Callable[[], V], stopped: Stopped = never) -> V:
        """The cached value of a key; if it is missing, one thread computes it while the others wait for the result.

        If the computation fails or is cancelled, one of the waiting threads starts it anew.
        """
        while True:
            with self._lock:
                if key in self._values:
                    return self._values[key]
                running = self._running.get(key)
                if running is None:
                    done = self._running[key] = threading.Event()
                    break
            while not running.wait(POLL_SECONDS):
                if stopped():
                    raise Cancelled
        try:
            value = compute()
            self.put(key, value)
            return value
        finally:
            with self._lock:
                del self._running[key]
            done.set()

    def get(self, key: Hashable) -> V | None:
        """The value of a key, or None if it is not cached."""
        with self._lock:
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Insert a value; the least recently used values are evicted until it fits."""
        with self._lock:
            self._values[key] = value

    def put_if_it_fits(self, key: Hashable, value: V) -> None:
        """Insert a value only if nothing has to be evicted for it."""
        with self._lock:
            if key not in self._values and self._values.currsize + self._size(value) <= self.max_bytes:
                self._values[key] = value


TILE = 256  # pixels a side
BASE_PIXELS = 2048 * 2048  # the whole map has at most so many pixels at the base zoom

OnProgress = Callable[[float], None]
TileIndex = tuple[int, int, int]  # zoom, i, j
TileCache = SingleFlightCache[Picture | None]  # None: all pairs of the tile are masked


def new_tile_cache(max_bytes: int) -> TileCache:
    """An LRU cache of tiles, bounded in bytes."""
    return SingleFlightCache(max_bytes, lambda tile: 512 + (0 if tile is None else tile.bytes))


def deepest(n_queries: int, n_keys: int) -> int:
    """The zoom at which a pixel of a map of this size is one query and one key.

    >>> deepest(256, 100), deepest(257, 100), deepest(16_384, 16_384)
    (0, 1, 6)
    """
    return max(0, (-(-max(n_queries, n_keys) // TILE) - 1).bit_length())


def base(n_queries: int, n_keys: int) -> int:
    """The base zoom of a map of this size: the deepest at which the whole map has at most `BASE_PIXELS` pixels.

    >>> base(256, 100), base(16_384, 16_384), base(100_000, 100_000)
    (0, 3, 3)
    """
    last = deepest(n_queries, n_keys)
    few = (z for z in range(last, 0, -1) if pixels(n_queries, last - z) * pixels(n_keys, last - z) <= BASE_PIXELS)
    return next(few, 0)


def pixels(tokens: int, steps: int) -> int:
    """Pixels along a side of `tokens` tokens, `steps` zooms above the deepest."""
    return -(-tokens // 2**steps)


def edges(zoom: int, i: int, j: int, lengths: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Edges of the bins of a tile, along the queries and along the keys, for a map of this size.

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
    """Tiles of the map of one head, or of a rectangle of it. Cheap to construct: the tiles are in `cache`.

    Args:
        call: an attention call with any normalizer, without gradients.
        known: the row state of the call, from `qkv.statistics.measure.row_state`.
        item: index in the batch.
        head: query head.
        cache: the tile cache, which pyramids may share.
        name: prefix of this pyramid's keys in the cache.
        queries: the queries of the call that the map shows; tiles count them from 0.
        keys: the keys of the call that the map shows.
    """

    def __init__(
        self,
        call: Call,
        known: RowState,
        item: int,
        head: int,
        cache: TileCache,
        name: Hashable,
        *,
        queries: slice = slice(None),
        keys: slice = slice(None),
    ) -> None:
        self.call, self.known, self.item, self.head = call, known, item, head
        self.cache, self.name = cache, name
        queries, keys = checked_slice("queries", queries, call.q.shape[2]), checked_slice("keys", keys, call.k.shape[2])
        self.starts = queries.start, keys.start
        self.lengths = queries.stop - queries.start, keys.stop - keys.start
        self.deepest = deepest(*self.lengths)
        """The zoom at which a pixel is one query and one key."""
        self.base = base(*self.lengths)

    def tile(
        self, zoom: int, i: int, j: int, *, stopped: Stopped = never, on_progress: OnProgress = lambda share: None
    ) -> Picture | None:
        """Tile in row `i` and column `j`; None if all of its pairs are masked.

        At zoom 0 one tile of 256 × 256 pixels shows the whole map; each further zoom halves the tokens that a pixel
        covers, 2^(`deepest` − zoom), down to one. Tiles at the edge of the map are smaller.

        Args:
            zoom: 0 to `deepest`.
            i: row of tiles.
            j: column of tiles.
            stopped: polled during the computation, from any thread; True cancels it.
            on_progress: progress callback with the finished share of the work, from 0 to 1; called from any thread.
        """
        edges(zoom, i, j, self.lengths)  # raises if the tile is out of range
        return self._tile((zoom, i, j), _Progress(stopped, on_progress), requested=True)

    def _tile(self, at: TileIndex, work: _Progress, *, requested: bool = False) -> Picture | None:
        def compute() -> Picture | None:
            if requested:  # the total is needed only if the tile is not cached
                work.total = sum(self._pairs(part) for part in self._missing(at))
            if self._is_masked(at):
                return None
            picture = self._pooled(at, work) if at[0] < self.base else self._from_weights(at, work)
            # Some masks are known pair by pair only. (`any` in NumPy does not wait for torch's threads.)
            return picture if picture.visible.cpu().numpy().any() else None

        return self.cache.get_or_compute((self.name, at), compute, work.stopped)

    @cached_property
    def _map(self) -> HeadMap:
        return HeadMap(replace(self.call, values=None), self.known, item=self.item, head=self.head)

    def _edges(self, at: TileIndex) -> list[list[int]]:
        """Edges of the bins of a tile, in the queries and keys of the call."""
        return [[start + x for x in side] for start, side in zip(self.starts, edges(*at, self.lengths), strict=True)]

    def _from_weights(self, at: TileIndex, work: _Progress) -> Picture:
        """Compute a tile from the attention weights."""
        work.check()
        down, across = self._edges(at)
        return self._map.binned(down, across, lambda n: work.add(n * (across[-1] - across[0])))

    def _pooled(self, at: TileIndex, work: _Progress) -> Picture:
        """Compute a tile from its children at the next zoom: 2 × 2 of their bins are one bin here."""
        device = self.call.q.device
        edges = [torch.tensor(side, device=device) for side in self._edges(at)]
        shape, dtype = [len(x) - 1 for x in edges], at_least_float32(self.call.q.dtype)
        maximum, mean, visible = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(3))
        for corner, index in self._children(at):
            part = self._tile(index, work)
            if part is None:
                continue
            widths = [x.diff().to(dtype) for x in (part.row_edges, part.column_edges)]
            first = [x * TILE // 2 for x in corner]
            here = tuple(slice(a, a + (len(w) + 1) // 2) for a, w in zip(first, widths, strict=True))
            maximum[here] = _pair_maxima(_pair_maxima(part.maximum).T).T
            mean[here], visible[here] = (
                _pair_means(_pair_means(x, widths[0]).T, widths[1]).T for x in (part.mean, part.visible)
            )
        return Picture(maximum, mean, visible, *edges)

    def _children(self, at: TileIndex) -> Iterator[tuple[tuple[int, int], TileIndex]]:
        """The tiles at the next zoom that cover the same part of the map: their corner and their index."""
        zoom, i, j = at
        for a, b in product((0, 1), repeat=2):
            part = (zoom + 1, 2 * i + a, 2 * j + b)
            step = 2 ** (self.deepest - zoom - 1)
            if all(n * TILE * step < length for n, length in zip(part[1:], self.lengths, strict=True)):
                yield (a, b), part

    def _missing(self, at: TileIndex) -> Iterator[TileIndex]:
        """Tiles that still have to be computed from weights for this one."""
        if (self.name, at) in self.cache or self._is_masked(at):
            return
        if at[0] >= self.base:
            yield at
            return
        for _, part in self._children(at):
            yield from self._missing(part)

    def _is_masked(self, at: TileIndex) -> bool:
        rows, columns = (slice(side[0], side[-1]) for side in self._edges(at))
        return is_masked(self.call, rows, columns, item=self.item, head=self.head)

    def _pairs(self, at: TileIndex) -> int:
        return math.prod(side[-1] - side[0] for side in self._edges(at))


class _Progress:
    """Progress of a computation, and whether it was cancelled."""

    def __init__(self, stopped: Stopped, on_progress: OnProgress) -> None:
        self.stopped, self.on_progress = stopped, on_progress
        self.done = self.total = 0

    def check(self) -> None:
        if self.stopped():
            raise Cancelled

    def add(self, pairs: int) -> None:
        """Count finished pairs. (Not locked: if a concurrent update is lost, the last share is a little below 1.)"""
        self.done += pairs
        self.on_progress(min(1.0, self.done / max(1, self.total)))
        self.check()


def _pair_maxima(x: Float[Tensor, "n m"]) -> Float[Tensor, "half m"]:
    """The maximum of every two rows; the last row of an odd number stays."""
    if len(x) % 2:
        x = torch.cat([x, x[-1:]])
    return torch.maximum(x[0::2], x[1::2])


def _pair_means(x: Float[Tensor, "n m"], widths: Float[Tensor, " n"]) -> Float[Tensor, "half m"]:
    """The mean of every two rows, weighted by their widths; the last row of an odd number stays."""
    if len(x) % 2:
        x, widths = torch.cat([x, x[-1:]]), torch.cat([widths, widths.new_zeros(1)])
    first, second = widths[0::2, None], widths[1::2, None]
    return torch.lerp(x[0::2], x[1::2], second / (first + second))
