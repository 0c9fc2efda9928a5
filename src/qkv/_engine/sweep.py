"""The loop over the tiles of a score matrix. What is computed of them is a `Reducer`.

Attention and its backward, statistics, maps, products with the weights and the search for a level all go over the same
tiles: empty ones are skipped, heads that share a cache are done together, and threads share the blocks of queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.sizes import sizes
from qkv._engine.threads import each
from qkv._engine.tiles import ScoreTiles, all_finite, heads_together, spans, zero_masked_keys
from qkv._engine.weight_tiles import WeightTiles
from qkv._engine.workspace import Workspace
from qkv.masks import EMPTY, PARTIAL, Region, Tiles

WAVE = 32  # blocks of queries made ready at a time: threads share them out, and only so many heads are held twice


@dataclass(frozen=True, eq=False)
class Group:
    """Some heads of one batch item, and how their score matrix is cut. `kinds` is the status of each tile."""

    tiles: ScoreTiles
    rows: list[slice]
    columns: list[slice]
    status: list[list[int]]
    jobs: list[Sequence[int]] | None = None
    """Blocks of queries that one thread has to do together; None if any thread may do any block."""

    @cached_property
    def clean(self) -> bool:
        """Whether its keys and values are finite, so that no masked one can turn a sum into NaN."""
        return all_finite(self.tiles.k, self.tiles.v)

    def visible(self, x: Float[Tensor, "n k d"], masked: Bool[Tensor, "b h q k"]) -> Float[Tensor, "n k d"]:
        """Keys or values of a tile (key heads, k, d), zero where no query of it may look, if that matters."""
        return x if self.clean else zero_masked_keys(x[None], ~masked)[0]


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries of a group; `index` is the block of `group.rows` that they belong to."""

    group: Group
    index: int
    rows: slice

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """Where its rows are in a tensor (b, h, nq, …)."""
        return self.group.tiles.batch, self.group.tiles.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """(1, heads, queries)."""
        return (*self.group.tiles.shape, self.rows.stop - self.rows.start)

    @cached_property
    def status(self) -> list[tuple[int, int]]:
        """Number and status of its tiles that are not empty."""
        return [(c, kind) for c, kind in enumerate(self.group.status[self.index]) if kind != EMPTY]


class Tile:
    """One tile that is not empty, with memory to compute it in."""

    __slots__ = ("_masked", "block", "columns", "group", "index", "rows", "shape", "space", "status")

    def __init__(self, block: Block, index: int, kind: int, space: Workspace) -> None:
        self._masked: Tensor | None
        self.block, self.group, self.index, self.space = block, block.group, index, space
        self.rows, self.columns = block.rows, block.group.columns[index]
        self.status, self._masked = kind, None
        self.shape = (*block.shape, self.columns.stop - self.columns.start)

    @property
    def region(self) -> Region:
        return self.group.tiles.region(self.rows, self.columns)

    def buffer(self, name: str) -> Float[Tensor, "b h q k"]:
        """Memory of the tile's shape: the next tile has the same."""
        return self.space.buffer(name, self.shape, self.group.tiles.k)

    def masked(self) -> Bool[Tensor, "#b #h q k"] | None:
        """Which pairs the mask hides; None if it shows all."""
        if self._masked is None and self.status == PARTIAL:
            self._masked = self.group.tiles.masked(self.rows, self.columns)
        return self._masked

    def scores(self) -> tuple[Float[Tensor, "b h q k"], Bool[Tensor, "#b #h q k"] | None]:
        """Final scores, shifted, which may be written to; and which pairs are masked, by a bias of −inf too."""
        tiles, call = self.group.tiles, self.group.tiles.call
        scores = tiles.scores(self.rows, self.columns, self.buffer("scores"))
        shift = tiles.of(call.shift)
        if shift is not None:
            scores = scores.add_((shift[..., self.rows] if shift.shape[2] > 1 else shift)[..., None])
        masked = self.masked()
        if call.biases and not call.normalizer.zero_at_minus_infinity:
            gone = scores == -torch.inf
            masked = gone if masked is None else masked | gone
        return scores, masked

    def weights(self, known: WeightTiles) -> tuple[Float[Tensor, "b h q k"], Float[Tensor, "b h q k"] | None]:
        """Final weights; and log2 of them if the weights are a softmax, else None. Both may be written to."""
        weights, scratch = self.buffer("weights"), self.buffer("scores")
        return weights, known.fill(self.rows, self.columns, self.masked(), weights, scratch)


Job = TypeVar("Job")
State = TypeVar("State")


class Reducer(Generic[Job, State]):
    """What is computed of the tiles of a call.

    `tile` is required. A thread does a job, one or more blocks of queries of a group: `start`, then for each block
    `begin`, `tile` for each tile from left to right, and `end`. `finish` gets the jobs in a fixed order
    in one thread, so that sums over queries come out the same to the bit each time.
    """

    over_queries = False
    """Whether jobs hold sums over queries: a group is then cut into as few jobs as there are threads."""

    def prepare(self, group: Group) -> Any:
        """What all jobs of a group share; `start` gets it."""

    def start(self, group: Group, shared: Any, rows: Sequence[int]) -> Job:
        """What a job adds to; `rows` are its blocks of queries."""
        return shared

    def blocks(self, block: Block) -> Iterable[Block]:
        """The block in pieces, where whole rows have to be held at once."""
        return (block,)

    def begin(self, job: Job, block: Block) -> State:
        """What the tiles of a block are added to."""
        return job  # type: ignore[return-value]

    def tile(self, state: State, tile: Tile) -> None:
        raise NotImplementedError

    def end(self, state: State, space: Workspace) -> None:
        """The block's tiles have all been added."""

    def finish(self, group: Group, job: Job) -> None:
        """Add what a job found to what all found."""


def reduce_tiles(
    groups: Iterable[Group], reducer: Reducer[Any, Any], device: torch.device, *, single_threaded: bool = False
) -> None:
    """Go over all tiles of the groups; on CPU blocks of queries are shared out among threads.

    `little`: in all, so that threads are not worth starting.
    """
    wave: list[Group] = []
    for group in groups:
        wave.append(group)
        if sum(len(one.rows) for one in wave) >= WAVE:
            _reduce(wave, reducer, device, single_threaded=single_threaded)
            wave = []
    if wave:
        _reduce(wave, reducer, device, single_threaded=single_threaded)


def _reduce(groups: list[Group], reducer: Reducer[Any, Any], device: torch.device, *, single_threaded: bool) -> None:
    prepared = [reducer.prepare(group) for group in groups]
    jobs: list[tuple[int, Sequence[int]]] = []
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    for number, group in enumerate(groups):
        size = -(-threads // len(groups)) if reducer.over_queries else len(group.rows)
        blocks = range(len(group.rows) - 1, -1, -1)  # under a causal mask the longest first: threads then end together
        jobs += [(number, rows) for rows in group.jobs or [blocks[s::size] for s in range(size)] if rows]
    found: list[Any] = [None] * len(jobs)

    def run(number: int, space: Workspace) -> None:
        which, rows = jobs[number]
        group = groups[which]
        job = found[number] = reducer.start(group, prepared[which], rows)
        for r in rows:
            for block in reducer.blocks(Block(group, r, group.rows[r])):
                state = reducer.begin(job, block)
                for index, kind in block.status:
                    reducer.tile(state, Tile(block, index, kind, space))
                reducer.end(state, space)

    each(run, range(len(jobs)), device, single_threaded=single_threaded)
    for (which, _), job in zip(jobs, found, strict=True):
        reducer.finish(groups[which], job)


def groups(call: Call, size: int | None = None) -> Iterator[Group]:
    """The heads of every batch item of a call, cut into tiles of `size`, by default the best for the call."""
    key_heads, (n_queries, n_keys) = call.k.shape[1], (call.q.shape[2], call.k.shape[2])
    together = heads_together(call, sizes(call.q.device).heads)
    size = tile_size(call) if size is None else size
    rows, columns = list(spans(n_queries, size)), list(spans(n_keys, size))
    for item in range(len(call.q)):
        for heads in spans(key_heads, together):
            tiles = ScoreTiles(call, slice(item, item + 1), heads)
            yield Group(tiles, rows, columns, tiles.block_status(call.mask, size))


def tile_size(call: Call) -> int:
    """The table's, or less where the mask hides much of its tiles, or where a tile takes more memory than usual."""
    table, (_, heads, _, d), key_heads = sizes(call.q.device), call.q.shape, call.k.shape[1]
    size = _fitting(call, table.tile)
    most = min(heads_together(call, table.heads) * (heads // key_heads), heads)
    if call.by_head and most > table.heads:  # a tile of all heads should stay in cache, too
        size = max(8, size // 2 ** math.ceil(math.log2(most / table.heads) / 2))
    if call.pairwise is not None:
        size = min(size, max(8, math.isqrt(table.pairs // (d * most))))
    return size


def _fitting(call: Call, tile: int) -> int:
    """A tile's size, or a quarter of it where that leaves out much of what the mask hides."""
    mask = call.mask
    if mask is None or call.q.shape[2] < 4 * tile:
        return tile

    def shown(size: int) -> float:
        return float((mask.classify(Tiles.of(call.grid, size, size), call.grid) != EMPTY).double().mean())

    small = max(1, tile // 4)
    return small if shown(small) < 0.6 * shown(tile) else tile
