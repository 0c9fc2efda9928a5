"""Rectangular blocks of a score matrix, each of which a dense attention kernel computes in one call.

A block selects its queries, keys and values from the whole tensors, and writes or adds results back.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.biases import Additive
from qkv.masks import Grid, Region


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """Queries `rows` against `keys`; or a batch of `count` such tiles, each `step` further along the diagonal."""

    rows: slice
    keys: slice
    batch: slice = field(default_factory=lambda: slice(None))
    causal: bool = False
    visible: Bool[Tensor, "b h q k"] | None = None
    pattern: Float[Tensor, "1 h q k"] | None = None  # additive mask; every row has a visible key
    flipped: bool = False  # whether the pattern is for the rows in reverse order
    count: int = 1
    step: int = 0

    def rows_of(self, x: Tensor) -> Tensor:
        """Its rows of x (b, h, nq, …): (b, h, size, …), or as a batch of tiles (count, b·h, size, …)."""
        part = self._cut(x, self.rows)
        return part.flip(2) if self.flipped else part

    def keys_of(self, x: Tensor, buffer: ScratchBuffer | None = None) -> Tensor:
        """Its keys of x (b, hkv, nk, …), shaped as by `rows_of`; a view that needs no buffer."""
        return self._cut(x, self.keys)

    def put(self, x: Tensor, value: Tensor) -> None:
        """Assign `value`, shaped as by `rows_of`, to the rows of x; rows of tiles never overlap."""
        span = self._span(x, self.rows)
        value = value.flip(2) if self.flipped else value
        span.copy_(value if self.count == 1 else value.transpose(0, 1).flatten(1, 2).view_as(span))

    def add_rows(self, x: Tensor, value: Tensor) -> None:
        """Add `value`, shaped as by `rows_of`, to the rows of x."""
        self._add(x, self.rows, value.flip(2) if self.flipped else value)

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """Add `value`, shaped as by `keys_of`, to the keys of x; overlapping tiles add up."""
        self._add(x, self.keys, value)

    def bias(self, bias: Additive, grid: Grid, dtype: torch.dtype) -> Tensor:
        """The tensor that an additive bias adds to the scores of the block."""
        heads = slice(0, grid.heads)
        return bias.added(Region(self.rows, self.keys, self.batch, heads, grid.offset, grid.device)).to(dtype)

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys of one tile."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

    def rows_covered(self, batch: int) -> int:
        """Number of queries it covers, over the batch."""
        return len(range(*self.batch.indices(batch))) * self.count * self.size[0]

    @functools.cached_property
    def masked_rows(self) -> Bool[Tensor, "b h q"] | None:
        """The fully masked rows, or None if there are none."""
        masked = None if self.visible is None else ~self.visible.any(-1)
        return masked if masked is not None and masked.any() else None

    def _span(self, x: Tensor, where: slice) -> Tensor:
        stop = where.stop + (self.count - 1) * self.step
        some = x if self.batch == slice(None) else x[self.batch]
        return some if where.start == 0 and stop == x.shape[2] else some[:, :, where.start : stop]

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
        for start in range(0, value.shape[3], self.step):  # the same part of every tile: no two overlap
            part = value[:, :, :, start : start + self.step]
            size = part.shape[3]
            stop = start + (self.count - 1) * self.step + size
            span[:, :, start:stop].unfold(2, size, self.step).add_(part.transpose(-1, -2))


class ScratchBuffer:
    """A reusable buffer for gathered rows: allocating memory would cost more than the copy."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def of(self, rows: int, like: Tensor) -> Tensor:
        """A view of the buffer for `rows` rows like those of `like`."""
        if self.kept is None or self.kept.numel() < rows * like.shape[1]:
            self.kept = like.new_empty(rows * like.shape[1])
        return self.kept[: rows * like.shape[1]].view(rows, -1)


@dataclass(frozen=True, eq=False)
class GatheredBlock:
    """Tiles of rows of one batch item; the tiles of keys visible to each are gathered side by side."""

    item: int
    grid: Grid
    tile: int
    row_tiles: Int[Tensor, " tiles"]
    key_tiles: Int[Tensor, "tiles visible"]
    visible: Bool[Tensor, "tiles h q k"] | None
    causal = False
    pattern = None

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys of one tile of rows."""
        return self.tile, self.tile * self.key_tiles.shape[1]

    def rows_of(self, x: Tensor) -> Tensor:
        """Its rows of x (b, h, nq, …): (tiles, h, size, …)."""
        tiled = self._tiled(x)
        if len(self._runs) == 1:
            return tiled[:, self._runs[0][0]].transpose(0, 1)
        return torch.cat([tiled[:, tiles] for tiles, _ in self._runs], 1).transpose(0, 1)

    def keys_of(self, x: Tensor, buffer: ScratchBuffer | None = None) -> Tensor:
        """Its keys of x (b, hkv, nk, d): (tiles, hkv, size, d), in `buffer` if given. Fast if x is contiguous."""
        flat, index = self._flat(self._whole(x))
        gathered = torch.index_select(flat, 0, index, out=None if buffer is None else buffer.of(len(index), flat))
        return gathered.view(x.shape[1], len(self.key_tiles), -1, x.shape[3]).transpose(0, 1)

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
        """Add `value`, shaped as by `keys_of`, to its keys of x; a key may be visible to many tiles."""
        spare = -x.shape[2] % self.tile
        total = x if not spare else x.new_zeros(*x.shape[:2], x.shape[2] + spare, x.shape[3])
        flat, index = self._flat(total)
        flat.index_add_(0, index, value.transpose(0, 1).reshape(len(index), -1).to(x.dtype))
        if spare:
            x[self.item] += total[self.item, :, : x.shape[2]]

    def bias(self, bias: Additive, grid: Grid, dtype: torch.dtype) -> Tensor:
        """The tensor that an additive bias adds to the scores of the block."""
        rows, keys = positions(self.row_tiles[:, None], self.tile), positions(self.key_tiles, self.tile)
        heads = torch.arange(self.grid.heads)[:, None, None]
        keys = keys.clamp(max=self.grid.n_keys - 1)[:, None, None]
        zero = torch.zeros(1, 1, 1, 1, dtype=dtype)  # a 0-dimensional tensor would not promote bfloat16
        return bias.at(zero, torch.tensor(self.item), heads, rows[:, None, :, None], keys)

    def rows_covered(self, batch: int) -> int:
        """Number of queries it covers, over the batch."""
        return len(self.row_tiles) * self.tile

    @functools.cached_property
    def masked_rows(self) -> Bool[Tensor, "b h q"] | None:
        """The fully masked rows, or None if there are none."""
        masked = None if self.visible is None else ~self.visible.any(-1)
        return masked if masked is not None and masked.any() else None

    @functools.cached_property
    def _runs(self) -> list[tuple[slice, slice]]:
        """Runs of consecutive row tiles: their slices in the whole matrix, and in this block."""
        breaks = ((self.row_tiles[1:] - self.row_tiles[:-1]) != 1).nonzero()[:, 0] + 1
        edges = [0, *breaks.tolist(), len(self.row_tiles)]
        first = self.row_tiles.tolist()
        return [(slice(first[a], first[a] + b - a), slice(a, b)) for a, b in itertools.pairwise(edges)]

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tiles of all heads of x (b, hkv, n, d) as rows, a view if x is contiguous, and the indices of its key tiles.

        Whole rows of one matrix are copied much faster than slices of an inner dimension.
        """
        heads, tiles = x.shape[1], x.shape[2] // self.tile
        index = (torch.arange(heads)[:, None] * tiles + self.key_tiles.flatten()).flatten()
        return x[self.item].reshape(heads * tiles, -1), index

    def _tiled(self, x: Tensor) -> Tensor:
        """x (b, h, n, …) of its item as (h, n / size, size, …), without the last tile if that is short."""
        whole = x.shape[2] // self.tile
        return x[self.item, :, : whole * self.tile].unflatten(1, (whole, self.tile))

    def _whole(self, x: Tensor) -> Tensor:
        """x with its last tile padded."""
        spare = -x.shape[2] % self.tile
        return torch.nn.functional.pad(x, (0, 0, 0, spare)) if spare else x


def positions(tiles: Int[Tensor, "*n"], size: int) -> Int[Tensor, "*m"]:
    """Token indices of tiles: expands the last dimension from tile indices to token indices."""
    return (tiles[..., None] * size + torch.arange(size)).flatten(-2)
