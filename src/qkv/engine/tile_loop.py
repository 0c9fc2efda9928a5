"""The loop over the tiles of a score matrix, with its scratch buffers.

Attention and its backward, statistics, attention maps, products with the weights and the search for a row's level are
all reducers over the same tiles. Empty tiles are skipped, and several heads are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.engine.call import Call
from qkv.engine.sizes import sizes
from qkv.engine.tiles import ScoreTiles, WeightTiles, all_finite, heads_together, spans, zero_masked_keys
from qkv.masks import EMPTY, PARTIAL, Region, Tiles


class Workspace:
    """Named scratch buffers."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised buffer of a shape, with the dtype and device of `like`; it may hold old data."""
        size, key = math.prod(shape), (name, like.dtype, like.device)
        memory = self._buffers.get(key)
        if memory is None or memory.numel() < size:
            memory = self._buffers[key] = like.new_empty(size)
        return memory[:size].view(shape)


@dataclass(frozen=True, eq=False)
class Group:
    """Some heads of a batch item or of a few, the tiling of their score matrix, and the block status of each tile."""

    tiles: ScoreTiles
    rows: list[slice]
    columns: list[slice]
    status: list[list[int]]

    @cached_property
    def finite(self) -> bool:
        """Whether its keys and values are finite, so that no masked one can turn a sum into NaN."""
        return all_finite(self.tiles.k, self.tiles.v)

    def visible(self, x: Float[Tensor, "n k d"], masked: Bool[Tensor, "b h q k"]) -> Float[Tensor, "n k d"]:
        """Return keys or values of a tile (key heads, k, d), with zeros where fully masked unless all are finite."""
        if self.finite:
            return x
        return zero_masked_keys(x.unflatten(0, (self.tiles.shape[0], -1)), ~masked).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Block:
    """A block of consecutive queries of a group, inside ``group.rows[index]``."""

    group: Group
    index: int
    rows: slice

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """Index of its rows in a tensor (b, h, nq, …)."""
        return self.group.tiles.batch, self.group.tiles.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch items, heads, queries)."""
        return (*self.group.tiles.shape, self.rows.stop - self.rows.start)

    @cached_property
    def status(self) -> list[tuple[int, int]]:
        """Index and block status of its non-empty tiles."""
        return [(c, status) for c, status in enumerate(self.group.status[self.index]) if status != EMPTY]


class Tile:
    """One non-empty tile, with scratch buffers."""

    __slots__ = ("_masked", "block", "columns", "group", "index", "rows", "shape", "space", "status")

    def __init__(self, block: Block, index: int, status: int, space: Workspace) -> None:
        """`index` is that of its columns in the group."""
        self._masked: Tensor | None
        self.block, self.group, self.index, self.space = block, block.group, index, space
        self.rows, self.columns = block.rows, block.group.columns[index]
        self.status, self._masked = status, None
        self.shape = (*block.shape, self.columns.stop - self.columns.start)

    @property
    def region(self) -> Region:
        return self.group.tiles.region(self.rows, self.columns)

    def buffer(self, name: str) -> Float[Tensor, "b h q k"]:
        """Return the scratch buffer of the tile's shape; the next tile reuses it."""
        return self.space.buffer(name, self.shape, self.group.tiles.k)

    def masked(self) -> Bool[Tensor, "#b #h q k"] | None:
        """Return which pairs are masked; None if all are visible."""
        if self._masked is None and self.status == PARTIAL:
            self._masked = self.group.tiles.masked(self.rows, self.columns)
        return self._masked

    def scores(self) -> tuple[Float[Tensor, "b h q k"], Bool[Tensor, "#b #h q k"] | None]:
        """Return final scores, which may be overwritten; and pairs masked, also by a −inf bias."""
        scores = self.group.tiles.scores(self.rows, self.columns, self.buffer("scores"))
        masked, call = self.masked(), self.group.tiles.call
        if call.biases and not call.normalizer.zero_at_minus_infinity:
            masked_by_bias = scores == -torch.inf
            masked = masked_by_bias if masked is None else masked | masked_by_bias
        return scores, masked

    def weights(self, of_rows: WeightTiles) -> tuple[Float[Tensor, "b h q k"], Float[Tensor, "b h q k"] | None]:
        """Return final weights; and log2 of them for softmax, else None. Both may be overwritten."""
        weights, scratch = self.buffer("weights"), self.buffer("scores")
        return weights, of_rows.fill(self.rows, self.columns, self.masked(), weights, scratch)


State = TypeVar("State")


class Reducer(Generic[State]):
    """A computation over the tiles of a call. Subclasses implement `tile`; the other methods are optional.

    For each group `start` is called, then for each block of queries `begin`, `tile` for each tile from left to right,
    and `end`.
    """

    def start(self, group: Group) -> None:
        """Prepare what all blocks of a group share."""

    def blocks(self, block: Block) -> Iterable[Block]:
        """Split a block into smaller ones, if whole rows must fit in memory."""
        return (block,)

    def begin(self, block: Block) -> State:
        """Return accumulators of a block of queries."""
        return None  # type: ignore[return-value]

    def tile(self, state: State, tile: Tile) -> None:
        """Add a tile to the state of its block."""
        raise NotImplementedError

    def end(self, state: State) -> None:
        """Finish a block after its last tile."""


@torch.no_grad()
def reduce_tiles(groups: Iterable[Group], reducer: Reducer[Any]) -> None:
    """Run a reducer over all tiles of the groups, without gradients."""
    space = Workspace()
    for group in groups:
        reducer.start(group)
        for r, rows in enumerate(group.rows):
            for block in reducer.blocks(Block(group, r, rows)):
                state = reducer.begin(block)
                for index, status in block.status:
                    reducer.tile(state, Tile(block, index, status, space))
                reducer.end(state)


def groups(call: Call, size: int | None = None, *, batched: bool = False) -> Iterator[Group]:
    """Yield the groups of heads of every batch item of a call, with tiles of `size` (by default `tile_size`).

    `batched` allows groups of several batch items, for short sequences.
    """
    key_heads, (n_queries, n_keys) = call.k.shape[1], (call.q.shape[2], call.k.shape[2])
    together = heads_together(call, sizes(call.q.device).heads)
    size = tile_size(call) if size is None else size
    rows, columns = list(spans(n_queries, size)), list(spans(n_keys, size))
    for items in spans(len(call.q), _items_together(call, min(together, key_heads), size) if batched else 1):
        for heads in spans(key_heads, together):
            tiles = ScoreTiles(call, items, heads)
            yield Group(tiles, rows, columns, tiles.block_status(call.mask, size))


def _items_together(call: Call, key_heads: int, size: int) -> int:
    """Return batch items per group: as many as fit into one tile of the table's size."""
    table, (_, h, n_queries, _), (_, of_keys, n_keys, _) = sizes(call.q.device), call.q.shape, call.k.shape
    scores = key_heads * (h // of_keys) * min(n_queries, size) * min(n_keys, size)
    return max(1, table.heads * table.tile**2 // max(scores, 1))


def tile_size(call: Call) -> int:
    """Return the tile size for a call: the table's, or smaller for sparse masks and where tiles need more memory."""
    table, (_, heads, _, d), key_heads = sizes(call.q.device), call.q.shape, call.k.shape[1]
    size = _fitting(call, table.tile)
    most = min(heads_together(call, table.heads) * (heads // key_heads), heads)
    if call.by_head and most > table.heads:  # a tile of all heads should fit in cache, too
        size = max(8, size // 2 ** math.ceil(math.log2(most / table.heads) / 2))
    if call.pairwise is not None:
        size = min(size, max(8, math.isqrt(table.pairs // (d * most))))
    return size


def _fitting(call: Call, tile: int) -> int:
    """Return `tile`, or a quarter of it if smaller tiles skip many more masked pairs."""
    mask = call.mask
    if mask is None or call.q.shape[2] < 4 * tile:
        return tile

    def computed(size: int) -> float:
        """Return the share of the tiles of size × size that are not empty."""
        return float((mask.classify(Tiles.of(call.grid, size, size), call.grid) != EMPTY).double().mean())

    small = max(1, tile // 4)
    return small if computed(small) < 0.6 * computed(tile) else tile
