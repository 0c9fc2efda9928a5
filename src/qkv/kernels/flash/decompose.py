"""Block decomposition: turns a mask into blocks that a dense attention kernel can compute.

Full rectangles need no mask tensor. A repeated pattern (a sliding window) becomes a batch of tiles over strided views.
A sparse mask becomes tiles of rows with their visible tiles of keys gathered side by side. The partial results of
blocks that share rows merge exactly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._contract import overrides
from qkv._engine.call import Call, at_least_float32
from qkv._engine.sizes import BY_DEVICE, Sizes
from qkv._engine.tiles import block_status, kept
from qkv.biases import Bias, ByDistance
from qkv.kernels.flash.blocks import DenseBlock, GatheredBlock, positions
from qkv.masks import EMPTY, FULL, PARTIAL, Grid, Mask, Region, Tiles

CALL_ROWS = 2**15  # rows of all heads per batched call: its output is copied while still in cache
SPARSE_SHARE = 1 / 3  # rows with at most this share of visible keys have them gathered
GATHERED = 2**14  # keys of all heads and tiles gathered at once: they should fit in cache
ALIGN = 16  # the stock kernel is slower when the number of keys is not a multiple of this
MASK_ELEMENTS = 2**22  # largest mask tensor, unless a single tile of rows needs more

RowBlock = Sequence[DenseBlock | GatheredBlock]  # blocks that share their rows; their results merge
Decomposition = Iterable[RowBlock]  # non-overlapping rows; results of several decompositions merge


def _sizes() -> Sizes:
    """Tile sizes for CPU, the only device of the stock kernel."""
    return BY_DEVICE["cpu"]


def decompose(call: Call, *, training: bool) -> list[Decomposition]:
    """Decompose the mask of a call into blocks that a dense kernel computes one at a time."""
    mask, grid = call.mask, call.grid
    band = (-math.inf, math.inf) if mask is None else mask.band
    if band is None:
        assert mask is not None
        if not all(overrides(bias, Bias, "at") for bias in call.biases):  # gathered tiles call it
            return [_tile_blocks(mask, grid, 0, grid.n_queries)]
        near = None if call.biases or grid.n_keys < _sizes().sparse_keys else _split_window(mask, grid)
        if near is not None:  # a sliding window and another mask: the window needs no gathering
            return [_band_blocks(near[0], call, training=training), _kept_blocks(near[1], grid, _sparse_blocks)]
        return [_kept_blocks(mask, grid, _sparse_blocks)]
    if call.biases:
        by_distance = _by_distance(call)
        if by_distance is None:
            return [_tile_blocks(mask, grid, 0, grid.n_queries)]
        return [_biased_band_blocks(by_distance, band, mask, call, training=training)]
    if mask is None or band == (-math.inf, math.inf):
        return [[[DenseBlock(slice(0, grid.n_queries), slice(0, grid.n_keys))]]]
    if grid.n_queries == 1:  # decoding: the visible keys are next to one another
        first, last = max(0, grid.offset - band[1]), min(grid.n_keys - 1, grid.offset - band[0])
        keys = slice(math.ceil(first), math.floor(last) + 1)
        return [[[DenseBlock(slice(0, 1), keys)]] if keys.start < keys.stop else []]
    if band[0] == 0 and band[1] >= grid.n_keys - 1:
        return [[_causal_block(grid.n_queries, grid.offset)]]
    if math.isfinite(band[0]) and math.isfinite(band[1]) and grid.n_queries * grid.n_keys > _sizes().whole_mask:
        return [_band_blocks(mask, call, training=training)]
    return [_kept_blocks(mask, grid, _every_tile)]


def _split_window(mask: Mask, grid: Grid) -> tuple[Mask, Mask] | None:
    """Split a union of two masks into its narrow band and the rest; None if neither is a narrow band."""
    either = mask.alternatives()
    if len(either) != 2:
        return None
    for window, other in (either, either[::-1]):
        band = window.band
        if band is not None and band[1] - band[0] < grid.n_keys * SPARSE_SHARE:
            return window, other & ~window
    return None


def _kept_blocks(mask: Mask, grid: Grid, decomposed: Callable[[Mask, Grid], Iterator[RowBlock]]) -> Iterable[RowBlock]:
    """The blocks of a decomposition that depends on the mask and the grid alone, kept for the next call."""

    def nbytes(blocks: list[RowBlock]) -> int:
        return sum(part.visible.numel() for block in blocks for part in block if part.visible is not None)

    return kept(mask, grid, (decomposed, _sizes()), lambda: list(decomposed(mask, grid)), nbytes)


def _every_tile(mask: Mask, grid: Grid) -> Iterator[RowBlock]:
    return _tile_blocks(mask, grid, 0, grid.n_queries)


def _by_distance(call: Call) -> Float[Tensor, "h distances"] | None:
    """The sum of all biases by head and distance, over the temperature; None if they depend on more or are infinite."""
    tensors = [bias.by_distance for bias in call.biases]
    known = [tensor for tensor in tensors if tensor is not None]
    if len(known) < len(tensors):
        return None
    total = sum(known[1:], known[0]).detach().to(at_least_float32(call.q.dtype)) / call.normalizer.temperature
    return total if total.isfinite().all() else None


def _causal_block(n_queries: int, offset: int) -> RowBlock:
    """Causal mask of the first `n_queries`: keys before query 0 are a full rectangle, the rest is a causal square."""
    rows = slice(max(0, -offset), n_queries)
    if rows.stop - rows.start == 1:  # decoding: all keys are visible to the last query
        return [DenseBlock(rows, slice(0, n_queries + offset))]
    lead = max(0, offset)
    square = DenseBlock(rows, slice(lead, n_queries + offset), causal=True)
    return [DenseBlock(rows, slice(0, lead)), square] if lead else [square]


def _band_blocks(
    mask: Mask, call: Call, bias: Float[Tensor, "h distances"] | None = None, *, training: bool
) -> Iterator[RowBlock]:
    """Batched calls for all tiles of rows whose band lies inside the matrix, and `_tile_blocks` for the edges."""
    assert mask.band is not None
    grid, shares, dtype = call.grid, 4 if training else 8, at_least_float32(call.q.dtype)
    low, high = map(int, mask.band)
    # A short step wastes little on the band's corners; a long one reads each key less often, which matters more in the
    # backward: an eighth of the band was fastest for the forward, a quarter for forward and backward.
    step = min(_sizes().tile, max(_sizes().tile // shares, 2 ** round(math.log2(max(1, (high - low) / shares)))))
    spare = -(step + high - low) % ALIGN  # masked keys at the end of each tile
    first = max(0, high - grid.offset)  # the bands of earlier queries start before key 0
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
            yield [DenseBlock(slice(start, start + size), keys, pattern=pattern, count=repeats, step=step)]
    yield from _tile_blocks(mask, grid, last, grid.n_queries)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # cached tensors must serve training too
def _band_pattern(low: int, high: int, queries: int, keys: int, dtype: torch.dtype) -> Float[Tensor, "1 1 q k"]:
    """0 where low ≤ q − k ≤ high and −inf elsewhere; the first query stands `high` keys after the first key."""
    back = high + torch.arange(queries)[:, None] - torch.arange(keys)
    return torch.zeros(back.shape, dtype=dtype).masked_fill_((back < low) | (back > high), -torch.inf)[None, None]


def _biased_band_blocks(
    bias: Float[Tensor, "h distances"], band: tuple[float, float], mask: Mask | None, call: Call, *, training: bool
) -> Iterator[RowBlock]:
    """Rows of tiles whose bias is a strided view of one vector per head: a function of i − j needs no matrix.

    With rows in reverse order, the bias of row i and key j is entry i + j of the reversed vector, so the bias matrix is
    a view with both strides 1 (a Hankel matrix). A band mask is −inf in the vector.
    """
    low, high = band
    if math.isfinite(low) and math.isfinite(high):
        assert mask is not None
        yield from _band_blocks(mask, call, bias, training=training)
        return
    grid = call.grid
    back = torch.arange(bias.shape[1]) - (grid.n_keys - 1) + grid.offset
    vector = bias.masked_fill((back < low) | (back > high), -torch.inf).flip(-1)
    first = (
        0 if math.isinf(low) else max(0, int(low) - grid.offset)
    )  # rows before it, and after `last`, are fully masked
    last = grid.n_queries if math.isinf(high) else min(grid.n_queries, grid.n_keys + int(high) - grid.offset)
    size = min(4, max(1, grid.n_queries // (8 * _sizes().tile))) * _sizes().tile
    for start in range(first, last, size):
        stop = min(start + size, last)
        left = 0 if math.isinf(high) else max(0, start + grid.offset - int(high))
        right = grid.n_keys if math.isinf(low) else min(grid.n_keys, stop + grid.offset - int(low))
        shape, stride = (1, len(vector), stop - start, right - left), vector.stride(0)
        view = vector.as_strided(shape, (0, stride, 1, 1), vector.storage_offset() + grid.n_queries - stop + left)
        yield [DenseBlock(slice(start, stop), slice(left, right), pattern=view, flipped=True)]


def _sparse_blocks(mask: Mask, grid: Grid) -> Iterator[RowBlock]:
    """Gathered blocks for rows with few visible tiles of keys, and `_tile_blocks` for the other rows."""
    sizes = _sizes()
    size = sizes.sparse_tile
    if grid.n_queries * grid.n_keys <= _sizes().whole_mask:
        all_pairs = Region(slice(0, grid.n_queries), slice(0, grid.n_keys))
        yield [DenseBlock(all_pairs.rows, all_pairs.columns, visible=mask.visible(all_pairs, grid))]
        return
    if grid.n_keys < sizes.sparse_keys or grid.n_keys > size * 2**12 or not _seems_sparse(mask, grid):
        yield from _tile_blocks(mask, grid, 0, grid.n_queries)
        return
    status = block_status(mask, Tiles.of(grid, size, size), grid)
    low, high = status.amin(1), status.amax(1)
    status = torch.where(low == high, low, PARTIAL)  # over heads: (b, rows, columns)
    if (shared := _shared_keys(status)) is not None:
        yield from _shared_blocks(mask, grid, status, shared)
        return
    status = status.expand(grid.batch, -1, -1)
    n_visible = (status != EMPTY).sum(-1)
    sparse = n_visible * size <= grid.n_keys * SPARSE_SHARE
    sparse[:, grid.n_queries // size :] = False  # a last short tile
    if sparse.double().mean() < 0.5:
        yield from _tile_blocks(mask, grid, 0, grid.n_queries)
        return
    whole = ~sparse.all(0)
    for start, stop in _true_runs(whole.tolist()):
        yield from _tile_blocks(mask, grid, start * size, min(stop * size, grid.n_queries))
    partial = (status == PARTIAL).any(-1)
    pattern = 2 * n_visible + partial
    for item in range(grid.batch):
        for key in sorted(set(pattern[item, ~whole].tolist()) - {0, 1}):
            rows = ((pattern[item] == key) & ~whole).nonzero()[:, 0]
            together = max(1, GATHERED // (size * (key // 2) * grid.heads))
            for some in rows.split(together):
                columns = (status[item, some] != EMPTY).nonzero()[:, 1].view(len(some), -1)
                visible = _gathered_mask(mask, grid, item, some, columns) if key % 2 else None
                yield [GatheredBlock(item, grid, size, some, columns, visible)]


def _seems_sparse(mask: Mask, grid: Grid, probes: int = 9) -> bool:
    """Estimate, from a few tiles of rows, whether most have few visible tiles of keys; cheaper than classifying all."""
    tiles = Tiles.of(grid, _sizes().sparse_tile, _sizes().sparse_tile)
    some = slice(None, None, -(-len(tiles.q_first) // probes))
    status = block_status(mask, replace(tiles, q_first=tiles.q_first[some], q_last=tiles.q_last[some]), grid)
    share = (status != EMPTY).double().mean(-1)
    return bool((share <= SPARSE_SHARE).double().mean() >= 0.5)


def _shared_keys(status: Tensor) -> slice | None:
    """The keys of one or two adjacent tiles, if at least half of the rows attend to no other keys."""
    row = status[0, len(status[0]) // 2] != EMPTY
    columns = row.nonzero()[:, 0]
    if not 1 <= len(columns) <= 2 or columns[-1] - columns[0] != len(columns) - 1:
        return None
    alike = ((status != EMPTY) <= row).all(-1).all(0)
    if alike.double().mean() < 0.5:
        return None
    return slice(int(columns[0]) * _sizes().sparse_tile, (int(columns[-1]) + 1) * _sizes().sparse_tile)


def _shared_blocks(mask: Mask, grid: Grid, status: Tensor, keys: slice) -> Iterator[RowBlock]:
    """One block for rows that all attend to the same few keys (sinks, global tokens), `_tile_blocks` for the others."""
    row = torch.zeros(status.shape[2], dtype=torch.bool)
    row[keys.start // _sizes().sparse_tile : keys.stop // _sizes().sparse_tile] = True
    alike = ((status != EMPTY) <= row).all(-1).all(0)
    at = 0
    for same, group in itertools.groupby(alike.tolist()):
        start, at = at, min(at + len(list(group)) * _sizes().sparse_tile, grid.n_queries)
        if not same:
            yield from _tile_blocks(mask, grid, start, at)
            continue
        rows, columns = slice(start, at), slice(keys.start, min(keys.stop, grid.n_keys))
        visible = mask.visible(Region(rows, columns), grid)
        some = visible.any(2).any(1).any(0).nonzero()[:, 0]
        if len(some):
            first = columns.start + int(some[0]) // ALIGN * ALIGN
            last = min(columns.start + int(some[-1]) // ALIGN * ALIGN + ALIGN, columns.stop)
            inside = slice(first - columns.start, last - columns.start)
            yield [DenseBlock(rows, slice(first, last), visible=visible[..., inside].contiguous())]


def _true_runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of True."""
    at = 0
    for flag, group in itertools.groupby(flags):
        size = len(list(group))
        if flag:
            yield at, at + size
        at += size


def _gathered_mask(mask: Mask, grid: Grid, item: int, rows: Tensor, columns: Tensor) -> Bool[Tensor, "tiles h q k"]:
    keys = positions(columns, _sizes().sparse_tile)[:, None, None]
    inside = keys < grid.n_keys
    heads = torch.arange(grid.heads)[:, None, None]
    queries = positions(rows[:, None], _sizes().sparse_tile)[:, None, :, None] + grid.offset
    visible = mask.is_visible(torch.tensor(item), heads, queries, keys.clamp(max=grid.n_keys - 1), grid) & inside
    return visible.expand(len(rows), *visible.shape[1:])


def _tile_blocks(mask: Mask | None, grid: Grid, start: int, stop: int) -> Iterator[RowBlock]:
    """Blocks for queries `start` to `stop` of any mask: runs of FULL or PARTIAL tiles, equal rows of tiles together."""
    if start >= stop:
        return
    size = max(_sizes().tile, 2 ** math.ceil(math.log2(grid.n_keys / 1024)))  # bounds the table of block status
    status = block_status(mask, Tiles.of(grid, size, size, start, stop), grid)
    low, high = status.amin(1), status.amax(1)
    status = torch.where(low == high, low, PARTIAL)  # over heads: (b, rows, columns)
    for item, table in enumerate(status.tolist()):
        batch = slice(None) if len(status) == 1 else slice(item, item + 1)
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


def _runs(
    mask: Mask | None, grid: Grid, status: list[int], rows: slice, size: int, batch: slice
) -> Iterator[DenseBlock]:
    """One block per run of tiles of equal status; PARTIAL runs get a mask tensor unless in fact full or empty."""
    column = 0
    for one, run in itertools.groupby(status):
        first, column = column, column + len(list(run))
        keys = slice(first * size, min(column * size, grid.n_keys))
        if one == FULL:
            yield DenseBlock(rows, keys, batch)
        elif one == PARTIAL:
            assert mask is not None
            visible = mask.visible(Region(rows, keys, batch), grid)
            if visible.all():
                yield DenseBlock(rows, keys, batch)
            elif visible.any():
                yield DenseBlock(rows, keys, batch, visible=visible)
