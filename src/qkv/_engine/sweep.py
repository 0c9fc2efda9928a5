"""The loop over the tiles of a score matrix, with its threads and scratch buffers.

Attention and its backward, statistics, attention maps, products with the weights and the search for a row's level are
all reducers over the same tiles. Empty tiles are skipped, several heads are computed together, and blocks of queries
are distributed over threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.sizes import sizes
from qkv._engine.tiles import ScoreTiles, WeightTiles, all_finite, heads_together, spans, zero_masked_keys
from qkv.masks import EMPTY, PARTIAL, Region, Tiles

KEPT_BYTES = 2**26  # largest workspace that is kept for reuse
_FREE: list[Workspace] = []
_LOCK = threading.Lock()


class Workspace:
    """Named scratch buffers, for one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised buffer of a shape, with the dtype and device of `like`; it may hold old data."""
        size, key = math.prod(shape), (name, like.dtype, like.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
                kept = like.new_empty(size)
            if type(kept) is Tensor:  # not a compiler's fake tensor
                self._kept[key] = kept
        return kept[:size].view(shape)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self._kept.values())


@contextmanager
def workspace() -> Iterator[Workspace]:
    """A workspace for exclusive use, returned to the pool at the end. The pool keeps one per thread."""
    with _LOCK:
        mine = _FREE.pop() if _FREE else Workspace()
    try:
        yield mine
    finally:
        if mine.bytes <= KEPT_BYTES:
            with _LOCK:
                if len(_FREE) < torch.get_num_threads():
                    _FREE.append(mine)


T = TypeVar("T")


def each(
    work: Callable[[T, Workspace], None], items: Sequence[T], device: torch.device, *, single_threaded: bool = False
) -> None:
    """Run `work` on every item, without gradients; on CPU with as many threads as torch may use.

    `single_threaded` runs everything on the calling thread, for work so small that starting threads takes longer.

    Each thread runs single-threaded operations on its own item, with its own workspace. Parallelism inside operations
    would synchronise all threads dozens of times per tile, which on a busy machine costs more than the arithmetic.
    """

    def run(item: T) -> None:
        with torch.no_grad(), workspace() as space:
            work(item, space)

    before = torch.get_num_threads()
    threads = min(before, len(items)) if device.type == "cpu" else 1
    try:
        if single_threaded:
            torch.set_num_threads(1)
        if single_threaded or threads <= 1:
            for item in items:
                run(item)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(run, items))
    finally:
        torch.set_num_threads(before)  # the default of threads that start later


WAVE = 32  # blocks of queries prepared at a time: enough work for all threads, without copying all heads at once


@dataclass(frozen=True, eq=False)
class Group:
    """Some heads of a batch item or of a few, the tiling of their score matrix, and the block status of each tile."""

    tiles: ScoreTiles
    rows: list[slice]
    columns: list[slice]
    status: list[list[int]]
    jobs: list[Sequence[int]] | None = None
    """Blocks of queries that must be computed by one thread; None if threads may take any block."""
    joined: int = 1
    """Neighbouring tiles of a block of queries, at most, that are computed as one wide tile."""

    @cached_property
    def finite(self) -> bool:
        """Whether its keys and values are finite, so that no masked one can turn a sum into NaN."""
        return all_finite(self.tiles.k, self.tiles.v)

    def visible(self, x: Float[Tensor, "n k d"], masked: Bool[Tensor, "b h q k"]) -> Float[Tensor, "n k d"]:
        """Keys or values of a tile (key heads, k, d), with zeros where fully masked unless all are finite."""
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

    @cached_property
    def wide(self) -> list[tuple[range, int]]:
        """The non-empty tiles, joined to wide ones that start at multiples of ``group.joined``: indices and status."""
        if self.group.joined == 1:
            return [(range(c, c + 1), status) for c, status in self.status]
        found: list[tuple[range, int]] = []
        for c, status in self.status:
            before, of_before = found[-1] if found else (range(0), status)
            if before.stop == c > 0 and before.start // self.group.joined == c // self.group.joined:
                found[-1] = (range(before.start, c + 1), status if status == of_before else PARTIAL)
            else:
                found.append((range(c, c + 1), status))
        return found


class Tile:
    """One non-empty tile, or several neighbours joined to a wide one, with scratch buffers."""

    __slots__ = ("_masked", "block", "columns", "group", "indices", "rows", "shape", "space", "status")

    def __init__(self, block: Block, indices: range, status: int, space: Workspace) -> None:
        self._masked: Tensor | None
        self.block, self.group, self.indices, self.space = block, block.group, indices, space
        columns = block.group.columns
        self.rows, self.columns = block.rows, slice(columns[indices[0]].start, columns[indices[-1]].stop)
        self.status, self._masked = status, None
        self.shape = (*block.shape, self.columns.stop - self.columns.start)

    @property
    def index(self) -> int:
        """The index of its (first) tile among the columns of the group."""
        return self.indices[0]

    @property
    def region(self) -> Region:
        return self.group.tiles.region(self.rows, self.columns)

    def buffer(self, name: str) -> Float[Tensor, "b h q k"]:
        """Scratch buffer of the tile's shape; the next tile reuses it."""
        return self.space.buffer(name, self.shape, self.group.tiles.k)

    def masked(self) -> Bool[Tensor, "#b #h q k"] | None:
        """Which pairs are masked; None if all are visible."""
        if self._masked is None and self.status == PARTIAL:
            self._masked = self.group.tiles.masked(self.rows, self.columns)
        return self._masked

    def scores(self) -> tuple[Float[Tensor, "b h q k"], Bool[Tensor, "#b #h q k"] | None]:
        """Final scores with the shift, which may be overwritten; and masked pairs, including those of a −inf bias."""
        tiles, call = self.group.tiles, self.group.tiles.call
        scores = tiles.scores(self.rows, self.columns, self.buffer("scores"))
        if (shift := tiles.of(call.shift)) is not None:
            scores = scores.add_((shift[..., self.rows] if shift.shape[2] > 1 else shift)[..., None])
        masked = self.masked()
        if call.biases and not call.normalizer.zero_at_minus_infinity:
            masked_by_bias = scores == -torch.inf
            masked = masked_by_bias if masked is None else masked | masked_by_bias
        return scores, masked

    def weights(self, known: WeightTiles) -> tuple[Float[Tensor, "b h q k"], Float[Tensor, "b h q k"] | None]:
        """Final weights; and log2 of them for softmax, else None. Both may be overwritten."""
        weights, scratch = self.buffer("weights"), self.buffer("scores")
        return weights, known.fill(self.rows, self.columns, self.masked(), weights, scratch)


Job = TypeVar("Job")
State = TypeVar("State")


class Reducer(Generic[Job, State]):
    """A computation over the tiles of a call. Subclasses implement `tile`; the other methods are optional.

    A *job* is one or more blocks of queries of a group, computed by one thread: `start`, then for each block `begin`,
    `tile` for each tile from left to right, and `end`. `finish` is called with the jobs in a fixed order on one thread,
    so sums over queries are deterministic.
    """

    over_queries = False
    """Whether jobs accumulate sums over queries: a group is then split into only as many jobs as there are threads."""

    def prepare(self, group: Group) -> Any:
        """Data shared by all jobs of a group, passed to `start`."""

    def start(self, group: Group, shared: Any, rows: Sequence[int]) -> Job:
        """Accumulators of a job; `rows` are the indices of its blocks of queries."""
        return shared

    def blocks(self, block: Block) -> Iterable[Block]:
        """Split a block into smaller ones, if whole rows must fit in memory."""
        return (block,)

    def begin(self, job: Job, block: Block) -> State:
        """Accumulators of a block of queries."""
        return job  # type: ignore[return-value]

    def tile(self, state: State, tile: Tile) -> None:
        """Add a tile to the state of its block."""
        raise NotImplementedError

    def end(self, state: State, space: Workspace) -> None:
        """Called after the last tile of a block."""

    def finish(self, group: Group, job: Job) -> None:
        """Add the sums of a job to the total result."""


def reduce_tiles(
    groups: Iterable[Group], reducer: Reducer[Any, Any], device: torch.device, *, single_threaded: bool = False
) -> None:
    """Run a reducer over all tiles of the groups; on CPU, blocks of queries are distributed over threads.

    `single_threaded` is for so little work that starting threads would take longer.
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
        blocks = range(len(group.rows) - 1, -1, -1)  # longest causal rows first, for load balance
        jobs += [(number, rows) for rows in group.jobs or [blocks[s::size] for s in range(size)] if rows]
    found: list[Any] = [None] * len(jobs)

    def run(number: int, space: Workspace) -> None:
        which, rows = jobs[number]
        group = groups[which]
        job = found[number] = reducer.start(group, prepared[which], rows)
        for r in rows:
            for block in reducer.blocks(Block(group, r, group.rows[r])):
                state = reducer.begin(job, block)
                for indices, status in block.wide:
                    reducer.tile(state, Tile(block, indices, status, space))
                reducer.end(state, space)

    each(run, range(len(jobs)), device, single_threaded=single_threaded)
    for (which, _), job in zip(jobs, found, strict=True):
        reducer.finish(groups[which], job)


def groups(call: Call, size: int | None = None, *, batched: bool = False) -> Iterator[Group]:
    """The groups of heads of every batch item of a call, with tiles of `size` (by default `tile_size`).

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


def row_blocks(call: Call, *, batched: bool = False, single_threaded: bool = False) -> Iterator[Group]:
    """The groups of a call for reducers that keep the weights of whole rows until their normalizer is known.

    A row block has queries of as many heads (and batch items, if `batched`) as make good matrix products, but
    there are enough for all threads unless the call is `single_threaded`.
    """
    table, (b, h, n_queries, _), (_, of_keys, n_keys, _) = sizes(call.q.device), call.q.shape, call.k.shape
    share, width = h // of_keys, min(n_keys, table.tile * table.joined)
    rows = min(max(1, table.row_block // (1 << (share - 1).bit_length())), 1 << (n_queries - 1).bit_length())
    if rows > table.tile and _computed(call, table.tile, table.tile) < 0.8 * _computed(call, rows, table.tile):
        rows = table.tile  # a sparse mask
    budget = table.row_block * table.tile * table.joined // width  # rows of all heads together
    heads = of_keys if call.by_head else max(1, min(of_keys, budget // (rows * share)))
    while rows > 8 and rows * heads * share * n_keys > table.kept:
        rows //= 2
    threads = torch.get_num_threads() if call.q.device.type == "cpu" and not single_threaded else 1
    down, across = list(spans(n_queries, rows)), list(spans(n_keys, table.tile))
    if not call.by_head:
        heads = min(heads, max(1, of_keys * b * len(down) // threads))
    groups_of_heads = -(-of_keys // heads)
    items = min(budget // (rows * share * heads), -(-b // -(-threads // groups_of_heads))) if batched else 1
    items = max(1, items)
    joined = max(1, table.row_block * table.joined // (rows * share * heads * items))  # few queries: wide tiles
    for some in spans(b, items):
        for of_heads in spans(of_keys, heads):
            tiles = ScoreTiles(call, some, of_heads)
            status = tiles.block_status(call.mask, rows, table.tile)
            yield Group(tiles, down, across, status, joined=max(table.joined, joined))


def _items_together(call: Call, key_heads: int, size: int) -> int:
    """Batch items per group: as many as fit into one tile of the table's size, but enough groups for all threads."""
    table, (b, h, n_queries, _), (_, of_keys, n_keys, _) = sizes(call.q.device), call.q.shape, call.k.shape
    scores = key_heads * (h // of_keys) * min(n_queries, size) * min(n_keys, size)
    threads = torch.get_num_threads() if call.q.device.type == "cpu" else 1
    shares = -(-threads // -(-of_keys // key_heads))
    return max(1, min(table.heads * table.tile**2 // max(scores, 1), -(-b // shares)))


def tile_size(call: Call) -> int:
    """Tile size for a call: the table's, or smaller for sparse masks and for calls whose tiles need more memory."""
    table, (_, heads, _, d), key_heads = sizes(call.q.device), call.q.shape, call.k.shape[1]
    size = _fitting(call, table.tile)
    most = min(heads_together(call, table.heads) * (heads // key_heads), heads)
    if call.by_head and most > table.heads:  # a tile of all heads should fit in cache, too
        size = max(8, size // 2 ** math.ceil(math.log2(most / table.heads) / 2))
    if call.pairwise is not None:
        size = min(size, max(8, math.isqrt(table.pairs // (d * most))))
    return size


def _fitting(call: Call, tile: int) -> int:
    """`tile`, or a quarter of it if smaller tiles skip many more masked pairs."""
    mask = call.mask
    if mask is None or call.q.shape[2] < 4 * tile:
        return tile

    small = max(1, tile // 4)
    return small if _computed(call, small, small) < 0.6 * _computed(call, tile, tile) else tile


def _computed(call: Call, rows: int, columns: int) -> float:
    """The share of the tiles of rows × columns that are not empty."""
    if call.mask is None:
        return 1.0
    return float((call.mask.classify(Tiles.of(call.grid, rows, columns), call.grid) != EMPTY).double().mean())
