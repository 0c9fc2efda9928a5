"""A mask cut into rectangular pieces, each of which a dense kernel can do.

Full rectangles need no mask tensor; a repeated pattern (a sliding window) is many tiles over strided views; a sparse
mask is many tiles of rows, each with the tiles of keys it sees gathered side by side. Results of pieces merge exactly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.biases import Bias, ByDistance
from qkv.call import Call, at_least_float32
from qkv.masks import EMPTY, FULL, PARTIAL, Grid, Mask, Or, Region, Tiles
from qkv.tiles import classes

TILE = 256  # rows and columns of a tile: small enough to skip much, large for the stock kernel's own blocks
CALL_ROWS = 2**15  # rows of all heads in one call of many tiles: its output is copied while still in cache
KEPT_MASKS = 8
KEPT_ELEMENTS = 2**25  # of mask tensors of one mask that is kept
SPARSE_TILE = 64  # of masks that show little of any row
SPARSE_SHARE = 1 / 3  # rows that see no more than this share of the keys have them gathered
SPARSE_KEYS = 1024  # with fewer keys it is not worth while
GATHERED = 2**14  # keys of all heads and tiles gathered at once: they should stay in cache
ALIGN = 16  # the stock kernel is slower when the number of keys is not a multiple of this
MASK_ELEMENTS = 2**22  # the largest mask tensor made at once when one tile of rows does not need more


@dataclass(frozen=True, eq=False)
class Part:
    """Queries `rows` against `keys`; or `count` such pieces, each `step` further along the diagonal."""

    rows: slice
    keys: slice
    batch: slice = field(default_factory=lambda: slice(None))
    causal: bool = False
    allowed: Bool[Tensor, "b h q k"] | None = None
    pattern: Float[Tensor, "1 h q k"] | None = None  # additive, and every row sees a key
    flipped: bool = False  # the pattern is for the rows in reverse
    count: int = 1
    step: int = 0

    def rows_of(self, x: Tensor) -> Tensor:
        """Its part of x (b, h, nq, …): (b, h, size, …), or as a batch of pieces (count, b·h, size, …)."""
        part = self._cut(x, self.rows)
        return part.flip(2) if self.flipped else part

    def keys_of(self, x: Tensor, room: Room | None = None) -> Tensor:
        """Its part of x (b, hkv, nk, …), shaped as by `rows_of`; a view that needs no room."""
        return self._cut(x, self.keys)

    def put(self, x: Tensor, value: Tensor) -> None:
        """Assign `value`, shaped as by `rows_of`, to the rows of x; pieces of rows never overlap."""
        span = self._span(x, self.rows)
        value = value.flip(2) if self.flipped else value
        span.copy_(value if self.count == 1 else value.transpose(0, 1).flatten(1, 2).view_as(span))

    def add_rows(self, x: Tensor, value: Tensor) -> None:
        """Add `value`, shaped as by `rows_of`, to the rows of x."""
        self._add(x, self.rows, value.flip(2) if self.flipped else value)

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """Add `value`, shaped as by `keys_of`, to the keys of x; where pieces overlap they add up."""
        self._add(x, self.keys, value)

    def bias(self, bias: Bias, dtype: torch.dtype) -> Tensor:
        """What an additive bias adds to its scores."""
        return bias.tile(Region(self.rows, self.keys, self.batch)).to(dtype)

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys of one piece."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

    def covers(self, batch: int) -> int:
        """How many of all queries in the batch it has."""
        return len(range(*self.batch.indices(batch))) * self.count * self.size[0]

    @functools.cached_property
    def hidden_rows(self) -> Bool[Tensor, "b h q"] | None:
        """The rows that its mask hides entirely, or None."""
        hidden = None if self.allowed is None else ~self.allowed.any(-1)
        return hidden if hidden is not None and hidden.any() else None

    def _span(self, x: Tensor, where: slice) -> Tensor:
        return x[self.batch][:, :, where.start : where.stop + (self.count - 1) * self.step]

    def _cut(self, x: Tensor, where: slice) -> Tensor:
        span = self._span(x, where)
        if self.count == 1:
            return span
        tiles = span.flatten(0, 1).unfold(1, where.stop - where.start, self.step)
        return tiles.movedim(-1, 2).transpose(0, 1)

    def _add(self, x: Tensor, where: slice, value: Tensor) -> None:
        span = self._span(x, where)
        if self.count == 1:
            span.add_(value)
            return
        value = value.transpose(0, 1).unflatten(0, span.shape[:2])  # (b, h, count, size, d)
        for start in range(0, value.shape[3], self.step):  # the same piece of every tile: no two overlap
            piece = value[:, :, :, start : start + self.step]
            size = piece.shape[3]
            stop = start + (self.count - 1) * self.step + size
            span[:, :, start:stop].unfold(2, size, self.step).add_(piece.transpose(-1, -2))


class Room:
    """Memory for gathered rows that is used again and again: fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def of(self, rows: int, like: Tensor) -> Tensor:
        """Room for as many rows as those of `like`."""
        if self.kept is None or self.kept.numel() < rows * like.shape[1]:
            self.kept = like.new_empty(rows * like.shape[1])
        return self.kept[: rows * like.shape[1]].view(rows, -1)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Tiles of rows of one batch item, each with the tiles of keys it sees, gathered side by side."""

    item: int
    grid: Grid
    row_tiles: Int[Tensor, " tiles"]
    key_tiles: Int[Tensor, "tiles seen"]
    allowed: Bool[Tensor, "tiles h q k"] | None
    causal = False
    pattern = None

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys of one piece."""
        return SPARSE_TILE, SPARSE_TILE * self.key_tiles.shape[1]

    def rows_of(self, x: Tensor) -> Tensor:
        """Its part of x (b, h, nq, …): (tiles, h, size, …)."""
        tiled = self._tiled(x)
        if len(self._runs) == 1:
            return tiled[:, self._runs[0][0]].transpose(0, 1)
        return torch.cat([tiled[:, tiles] for tiles, _ in self._runs], 1).transpose(0, 1)

    def keys_of(self, x: Tensor, room: Room | None = None) -> Tensor:
        """Its part of x (b, hkv, nk, d): (tiles, hkv, size, d), made in `room` if given. Fast if x is contiguous."""
        flat, index = self._flat(_whole_tiles(x))
        seen = torch.index_select(flat, 0, index, out=None if room is None else room.of(len(index), flat))
        return seen.view(x.shape[1], len(self.key_tiles), -1, x.shape[3]).transpose(0, 1)

    def put(self, x: Tensor, value: Tensor) -> None:
        """Assign `value`, shaped as by `rows_of`, to its rows of x."""
        tiled, value = self._tiled(x), value.transpose(0, 1)
        for tiles, at in self._runs:
            tiled[:, tiles] = value[:, at]

    def add_rows(self, x: Tensor, value: Tensor) -> None:
        """Add `value`, shaped as by `rows_of`, to its rows of x."""
        tiled, value = self._tiled(x), value.transpose(0, 1)
        for tiles, at in self._runs:
            tiled[:, tiles] += value[:, at]

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """Add `value`, shaped as by `keys_of`, to its keys of x; many tiles may see one key."""
        spare = -x.shape[2] % SPARSE_TILE
        total = x if not spare else x.new_zeros(*x.shape[:2], x.shape[2] + spare, x.shape[3])
        flat, index = self._flat(total)
        flat.index_add_(0, index, value.transpose(0, 1).reshape(len(index), -1).to(x.dtype))
        if spare:
            x[self.item] += total[self.item, :, : x.shape[2]]

    def bias(self, bias: Bias, dtype: torch.dtype) -> Tensor:
        """What an additive bias adds to its scores."""
        rows, keys = _positions(self.row_tiles[:, None]), _positions(self.key_tiles)
        heads = torch.arange(self.grid.heads)[:, None, None]
        keys = keys.clamp(max=self.grid.n_keys - 1)[:, None, None]
        return bias.at(torch.zeros((), dtype=dtype), torch.tensor(self.item), heads, rows[:, None, :, None], keys)

    def covers(self, batch: int) -> int:
        """How many of all queries in the batch it has."""
        return len(self.row_tiles) * SPARSE_TILE

    @functools.cached_property
    def hidden_rows(self) -> Bool[Tensor, "b h q"] | None:
        """The rows that its mask hides entirely, or None."""
        hidden = None if self.allowed is None else ~self.allowed.any(-1)
        return hidden if hidden is not None and hidden.any() else None

    @functools.cached_property
    def _runs(self) -> list[tuple[slice, slice]]:
        """Consecutive row tiles: where they are in the whole, and here."""
        breaks = ((self.row_tiles[1:] - self.row_tiles[:-1]) != 1).nonzero()[:, 0] + 1
        edges = [0, *breaks.tolist(), len(self.row_tiles)]
        first = self.row_tiles.tolist()
        return [(slice(first[a], first[a] + b - a), slice(a, b)) for a, b in itertools.pairwise(edges)]

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tiles of all heads of x (b, hkv, n, d) as rows, a view if x is contiguous, and which of them are seen.

        Whole rows of one matrix are copied ten times as fast as slices of a dimension in the middle.
        """
        heads, tiles = x.shape[1], x.shape[2] // SPARSE_TILE
        index = (torch.arange(heads)[:, None] * tiles + self.key_tiles.flatten()).flatten()
        return x[self.item].reshape(heads * tiles, -1), index

    def _tiled(self, x: Tensor) -> Tensor:
        """x (b, h, n, …) of its item as (h, n / size, size, …), without the last tile if that is short."""
        whole = x.shape[2] // SPARSE_TILE
        return x[self.item, :, : whole * SPARSE_TILE].unflatten(1, (whole, SPARSE_TILE))


def _whole_tiles(x: Tensor) -> Tensor:
    spare = -x.shape[2] % SPARSE_TILE
    return torch.nn.functional.pad(x, (0, 0, 0, spare)) if spare else x


def _positions(tiles: Int[Tensor, "*n"]) -> Int[Tensor, "*m"]:
    """Indices in tiles: one dimension of tiles becomes one of their tokens."""
    return (tiles[..., None] * SPARSE_TILE + torch.arange(SPARSE_TILE)).flatten(-2)


Block = Sequence[Part | Gathered]  # parts that share their rows; their results merge
Cover = Iterable[Block]  # blocks of rows that do not overlap; results of several covers merge


def covers(call: Call, *, training: bool) -> list[Cover]:
    """The calls of a dense kernel that cover what the mask of a call shows."""
    mask, grid = call.mask, call.grid
    band = (-math.inf, math.inf) if mask is None else mask.band
    if band is None:
        assert mask is not None
        near = None if call.biases or grid.n_keys < SPARSE_KEYS else _near(mask, grid)
        if near is not None:  # a sliding window and something else: the window has no need of gathering
            return [_band_blocks(near[0], call, training=training), _kept(near[1], grid)]
        return [_kept(mask, grid)]
    if call.biases:
        by_distance = _by_distance(call)
        if by_distance is None:
            return [_tile_blocks(mask, grid, 0, grid.n_queries)]
        return [_biased_band_blocks(by_distance, band, mask, call, training=training)]
    if mask is None or band == (-math.inf, math.inf):
        return [[[Part(slice(0, grid.n_queries), slice(0, grid.n_keys))]]]
    if band[0] == 0 and band[1] >= grid.n_keys - 1:
        return [[_causal_block(grid.n_queries, grid.offset)]]
    if math.isfinite(band[0]) and math.isfinite(band[1]):
        return [_band_blocks(mask, call, training=training)]
    return [_tile_blocks(mask, grid, 0, grid.n_queries)]


def _near(mask: Mask, grid: Grid) -> tuple[Mask, Mask] | None:
    """A union as its narrow band and the rest, if it has one."""
    if not isinstance(mask, Or):
        return None
    for window, other in ((mask.left, mask.right), (mask.right, mask.left)):
        band = window.band
        if band is not None and band[1] - band[0] < grid.n_keys * SPARSE_SHARE:
            return window, other & ~window
    return None


_KEPT: OrderedDict[tuple[Mask, Grid], list[Block]] = OrderedDict()  # what the last few masks were cut into


def _kept(mask: Mask, grid: Grid) -> Iterable[Block]:
    """`_sparse_blocks`, kept for the next call if the mask is the same whenever it looks the same, and is not large."""
    if not mask.by_value:
        return _sparse_blocks(mask, grid)
    key = (mask, grid)
    if key not in _KEPT:
        cut = list(_sparse_blocks(mask, grid))
        if sum(part.allowed.numel() for block in cut for part in block if part.allowed is not None) > KEPT_ELEMENTS:
            return cut
        _KEPT[key] = cut
        while len(_KEPT) > KEPT_MASKS:
            _KEPT.popitem(last=False)
    return _KEPT.get(key) or _sparse_blocks(mask, grid)


def _by_distance(call: Call) -> Float[Tensor, "h distances"] | None:
    """All biases as one number a head and distance, over the temperature, if that is what they are and it is finite."""
    if not all(isinstance(bias, ByDistance) for bias in call.biases):
        return None
    tensors = [bias.tensor for bias in call.biases if bias.tensor is not None]
    total = sum(tensors[1:], tensors[0]).detach().to(at_least_float32(call.q.dtype)) / call.normalizer.temperature
    return total if total.isfinite().all() else None


def _causal_block(n_queries: int, offset: int) -> Block:
    """Causal over the first `n_queries`: keys before query 0 are a full rectangle, the rest the kernel's own square."""
    rows = slice(max(0, -offset), n_queries)
    if rows.stop - rows.start == 1:  # decoding: the last query sees everything
        return [Part(rows, slice(0, n_queries + offset))]
    lead = max(0, offset)
    square = Part(rows, slice(lead, n_queries + offset), causal=True)
    return [Part(rows, slice(0, lead)), square] if lead else [square]


def _band_blocks(
    mask: Mask, call: Call, bias: Float[Tensor, "h distances"] | None = None, *, training: bool
) -> Iterator[Block]:
    """Few calls for all the tiles of rows whose band lies inside the matrix, and few for the edges."""
    assert mask.band is not None
    grid, shares, dtype = call.grid, 4 if training else 8, at_least_float32(call.q.dtype)
    low, high = map(int, mask.band)
    # A short step wastes little on the band's corners; a long one reads each key less often, which the backward minds
    # more: an eighth of the band was fastest forward, a quarter both ways.
    step = min(TILE, max(TILE // shares, 2 ** round(math.log2(max(1, (high - low) / shares)))))
    spare = -(step + high - low) % ALIGN  # hidden keys at the end of each tile
    first = max(0, high - grid.offset)  # queries before it would see keys before key 0
    last = min(grid.n_queries, grid.n_keys - grid.offset + min(low, 0))
    count = (min(last, grid.n_keys - grid.offset + low - spare) - first) // step
    rest = last - first - count * step
    if count < 2:
        yield from _tile_blocks(mask, grid, 0, grid.n_queries)
        return
    if low == 0 and bias is None:
        if first > max(0, -grid.offset):
            yield _causal_block(first, grid.offset)
    else:
        yield from _tile_blocks(mask, grid, 0, first)
    together = max(1, CALL_ROWS // (grid.batch * grid.heads * step))
    calls = [(first + t * step, step, min(together, count - t), spare) for t in range(0, count, together)]
    for start, size, repeats, more in (*calls, (last - rest, rest, 1, 0)):
        if size:
            keys = slice(start + grid.offset - high, start + grid.offset + size - low + more)
            pattern = _band_pattern(low, high, size, keys.stop - keys.start, dtype)
            if bias is not None:
                added = ByDistance(bias, grid.n_keys).tile(Region(slice(start, start + size), keys))
                pattern = (pattern + added).repeat(1, grid.batch if repeats > 1 and len(bias) > 1 else 1, 1, 1)
            yield [Part(slice(start, start + size), keys, pattern=pattern, count=repeats, step=step)]
    yield from _tile_blocks(mask, grid, last, grid.n_queries)


@functools.lru_cache(maxsize=16)
def _band_pattern(low: int, high: int, queries: int, keys: int, dtype: torch.dtype) -> Float[Tensor, "1 1 q k"]:
    """0 where low ≤ q − k ≤ high and −inf elsewhere; the first query stands `high` keys after the first key."""
    back = high + torch.arange(queries)[:, None] - torch.arange(keys)
    return torch.zeros(back.shape, dtype=dtype).masked_fill_((back < low) | (back > high), -torch.inf)[None, None]


def _biased_band_blocks(
    bias: Float[Tensor, "h distances"], band: tuple[float, float], mask: Mask | None, call: Call, *, training: bool
) -> Iterator[Block]:
    """Rows of tiles whose bias is a view of one vector a head: what depends on i − j needs no matrix.

    With the rows in reverse the bias of row i and key j stands at i + j of the reversed vector, and a view with both
    strides 1 is that matrix. A band mask is −inf in the vector.
    """
    low, high = band
    if math.isfinite(low) and math.isfinite(high):
        assert mask is not None
        yield from _band_blocks(mask, call, bias, training=training)
        return
    grid = call.grid
    back = torch.arange(bias.shape[1]) - (grid.n_keys - 1) + grid.offset
    vector = bias.masked_fill((back < low) | (back > high), -torch.inf).flip(-1)
    first = 0 if math.isinf(low) else max(0, int(low) - grid.offset)  # rows before it see nothing, nor those after last
    last = grid.n_queries if math.isinf(high) else min(grid.n_queries, grid.n_keys + int(high) - grid.offset)
    size = min(4, max(1, grid.n_queries // (8 * TILE))) * TILE
    for start in range(first, last, size):
        stop = min(start + size, last)
        left = 0 if math.isinf(high) else max(0, start + grid.offset - int(high))
        right = grid.n_keys if math.isinf(low) else min(grid.n_keys, stop + grid.offset - int(low))
        shape, stride = (1, len(vector), stop - start, right - left), vector.stride(0)
        view = vector.as_strided(shape, (0, stride, 1, 1), vector.storage_offset() + grid.n_queries - stop + left)
        yield [Part(slice(start, stop), slice(left, right), pattern=view, flipped=True)]


def _sparse_blocks(mask: Mask, grid: Grid) -> Iterator[Block]:
    """Rows that see few tiles of keys with those tiles gathered, the others by `_tile_blocks`."""
    if grid.n_keys < SPARSE_KEYS or grid.n_keys > SPARSE_TILE * 2**12:
        yield from _tile_blocks(mask, grid, 0, grid.n_queries)
        return
    kinds = classes(mask, Tiles.of(grid, SPARSE_TILE, SPARSE_TILE), grid)
    low, high = kinds.amin(1), kinds.amax(1)
    kinds = torch.where(low == high, low, PARTIAL)  # over heads: (b, rows, columns)
    shared = _shared_keys(kinds)
    if shared is not None:
        yield from _shared_blocks(mask, grid, kinds, shared)
        return
    kinds = kinds.expand(grid.batch, -1, -1)
    seen = (kinds != EMPTY).sum(-1)
    sparse = seen * SPARSE_TILE <= grid.n_keys * SPARSE_SHARE
    sparse[:, grid.n_queries // SPARSE_TILE :] = False  # a last short tile
    if sparse.double().mean() < 0.5:
        yield from _tile_blocks(mask, grid, 0, grid.n_queries)
        return
    whole = ~sparse.all(0)
    for start, stop in _stretches(whole.tolist()):
        yield from _tile_blocks(mask, grid, start * SPARSE_TILE, min(stop * SPARSE_TILE, grid.n_queries))
    partial = (kinds == PARTIAL).any(-1)
    pattern = 2 * seen + partial
    for item in range(grid.batch):
        for key in sorted(set(pattern[item, ~whole].tolist()) - {0, 1}):
            rows = ((pattern[item] == key) & ~whole).nonzero()[:, 0]
            together = max(1, GATHERED // (SPARSE_TILE * (key // 2) * grid.heads))
            for some in rows.split(together):
                columns = (kinds[item, some] != EMPTY).nonzero()[:, 1].view(len(some), -1)
                allowed = _gathered_mask(mask, grid, item, some, columns) if key % 2 else None
                yield [Gathered(item, grid, some, columns, allowed)]


def _shared_keys(kinds: Tensor) -> slice | None:
    """The keys of one or two neighbouring tiles, if half of the rows or more see no others."""
    row = kinds[0, len(kinds[0]) // 2] != EMPTY
    columns = row.nonzero()[:, 0]
    if not 1 <= len(columns) <= 2 or columns[-1] - columns[0] != len(columns) - 1:
        return None
    alike = ((kinds != EMPTY) <= row).all(-1).all(0)
    if alike.double().mean() < 0.5:
        return None
    return slice(int(columns[0]) * SPARSE_TILE, (int(columns[-1]) + 1) * SPARSE_TILE)


def _shared_blocks(mask: Mask, grid: Grid, kinds: Tensor, keys: slice) -> Iterator[Block]:
    """Rows that all look at the same few keys (sinks, global tokens), and the others by `_tile_blocks`."""
    row = torch.zeros(kinds.shape[2], dtype=torch.bool)
    row[keys.start // SPARSE_TILE : keys.stop // SPARSE_TILE] = True
    alike = ((kinds != EMPTY) <= row).all(-1).all(0)
    at = 0
    for same, group in itertools.groupby(alike.tolist()):
        start, at = at, min(at + len(list(group)) * SPARSE_TILE, grid.n_queries)
        if not same:
            yield from _tile_blocks(mask, grid, start, at)
            continue
        rows, columns = slice(start, at), slice(keys.start, min(keys.stop, grid.n_keys))
        allowed = mask.allowed(Region(rows, columns), grid)
        some = allowed.any(2).any(1).any(0).nonzero()[:, 0]
        if len(some):
            first = columns.start + int(some[0]) // ALIGN * ALIGN
            last = min(columns.start + int(some[-1]) // ALIGN * ALIGN + ALIGN, columns.stop)
            inside = slice(first - columns.start, last - columns.start)
            yield [Part(rows, slice(first, last), allowed=allowed[..., inside].contiguous())]


def _stretches(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """Runs of True: where each starts and ends."""
    at = 0
    for flag, group in itertools.groupby(flags):
        size = len(list(group))
        if flag:
            yield at, at + size
        at += size


def _gathered_mask(mask: Mask, grid: Grid, item: int, rows: Tensor, columns: Tensor) -> Bool[Tensor, "tiles h q k"]:
    keys = _positions(columns)[:, None, None]
    inside = keys < grid.n_keys
    heads = torch.arange(grid.heads)[:, None, None]
    queries = _positions(rows[:, None])[:, None, :, None] + grid.offset
    seen = mask.sees(torch.tensor(item), heads, queries, keys.clamp(max=grid.n_keys - 1), grid) & inside
    return seen.expand(len(rows), *seen.shape[1:])


def _tile_blocks(mask: Mask | None, grid: Grid, start: int, stop: int) -> Iterator[Block]:
    """Queries `start` to `stop` of any mask: runs of full and of partial tiles, equal rows of tiles together."""
    if start >= stop:
        return
    size = max(TILE, 2 ** math.ceil(math.log2(grid.n_keys / 1024)))  # keeps the table of classes small
    kinds = classes(mask, Tiles.of(grid, size, size, start, stop), grid)
    low, high = kinds.amin(1), kinds.amax(1)
    kinds = torch.where(low == high, low, PARTIAL)  # over heads: (b, rows, columns)
    for item, table in enumerate(kinds.tolist()):
        batch = slice(None) if len(kinds) == 1 else slice(item, item + 1)
        row = 0
        while row < len(table):
            most = max(1, MASK_ELEMENTS // max(1, table[row].count(PARTIAL) * size * size))
            end = row + 1
            while end < len(table) and table[end] == table[row] and end - row < most:
                end += 1
            rows = slice(start + row * size, min(start + end * size, stop))
            parts = list(_runs(mask, grid, table[row], rows, size, batch))
            if parts:
                yield parts
            row = end


def _runs(mask: Mask | None, grid: Grid, kinds: list[int], rows: slice, size: int, batch: slice) -> Iterator[Part]:
    """Consecutive tiles of one class are one part; a partial one carries its mask unless it proves full or empty."""
    column = 0
    for kind, group in itertools.groupby(kinds):
        first, column = column, column + len(list(group))
        keys = slice(first * size, min(column * size, grid.n_keys))
        if kind == FULL:
            yield Part(rows, keys, batch)
        elif kind == PARTIAL:
            assert mask is not None
            seen = mask.allowed(Region(rows, keys, batch), grid)
            if seen.all():
                yield Part(rows, keys, batch)
            elif seen.any():
                yield Part(rows, keys, batch, allowed=seen)
