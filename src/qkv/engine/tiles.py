"""The tiles of a score matrix: their block status, scores and weights, the noise of dropout, and the loop over them.

Attention and its backward, statistics, attention maps, products with the weights and the search for a row's level are
all reducers over the same tiles. Empty tiles are skipped, and several heads are computed together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from cachetools import LRUCache
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.biases import Bias
from qkv.engine.call import Call, RowState, along, at_least_float32
from qkv.engine.sizes import readable, sizes
from qkv.engine.transforms import transforming
from qkv.errors import InputError
from qkv.masks import EMPTY, FULL, PARTIAL, Grid, Mask, Region, Tiles
from qkv.normalizers import LOG2_E, checked_shape, weights_of
from qkv.scores import Pairwise

T = TypeVar("T")
Scores = Float[Tensor, "b h q k"]
PerRow = Float[Tensor, "b h q"]

LARGEST = 2**25  # bytes of the largest entry
ENTRY = 1000  # bytes of an entry besides the tensors
_CACHE: LRUCache[Hashable, tuple[Any, int]] = LRUCache(2**27, getsizeof=lambda entry: entry[1])
_LOCK = threading.Lock()


def cached_for_mask(
    mask: Mask, grid: Grid, key: Hashable, make: Callable[[], T], nbytes: Callable[[T], int] = lambda result: 0
) -> T:
    """Return ``make()``, or what it returned for an equal mask, grid and key before; nobody may change it.

    Only masks that compare by value have entries, as tensors and functions inside of a mask may change. Decoding has
    none, since each step has another grid. `nbytes` is the memory of a result.
    """
    if grid.n_queries == 1 or not mask.cacheable or transforming() or _other_tensors():
        return make()
    place = mask, grid, key
    with _LOCK:
        entry = _CACHE.get(place)
    if entry is not None:
        cached: T = entry[0]
        return cached
    with torch.inference_mode(False):  # an inference tensor could not be used in training
        result = make()
    size = ENTRY + nbytes(result)
    if size <= LARGEST:
        with _LOCK:
            _CACHE[place] = result, size
    return result


def _other_tensors() -> bool:
    """Return whether a dispatch mode is active under which new tensors may be fake or wrapped."""
    return torch._C._len_torch_dispatch_stack() > 0


MASKED_SCORE = -1e30  # score of a masked pair: exp of it is 0, and 0 times it is 0 (0 · −inf would be NaN)


class ScoreTiles:
    """Tiles of the score matrix of some heads of a call, in float32 or better; the whole matrix is never formed.

    Query heads that share a key head are folded into the rows of one matrix product, so a tile is one batched product
    for any grouping, and keys are not repeated.
    """

    def __init__(self, call: Call, batch: slice = slice(None), key_heads: slice = slice(None)) -> None:
        self.call = call
        self.dtype = at_least_float32(call.q.dtype)
        self.group = call.q.shape[1] // call.k.shape[1]
        start, stop, _ = key_heads.indices(call.k.shape[1])
        self.batch, self.heads, self.key_heads = batch, slice(start * self.group, stop * self.group), slice(start, stop)
        q, k = call.q[batch, self.heads], call.k[batch, start:stop]
        self.shape = q.shape[:2]  # (batch, query heads)
        self.q = (q.to(self.dtype) * (call.scale if call.pairwise is None else 1)).reshape(-1, self.group, *q.shape[2:])
        self.k = k.to(self.dtype).flatten(0, 1)
        self.v = call.v[batch, start:stop].to(self.dtype).flatten(0, 1)
        self._patterns: dict[tuple[int, int, int], Tensor] = {}

    def of(self, x: Tensor | None) -> Tensor | None:
        """Return the slice of x (b, h, …) for these batch items and heads; dimensions of size 1 broadcast."""
        if x is None:
            return None
        return x[self.batch if len(x) > 1 else slice(None), self.heads if x.shape[1] > 1 else slice(None)]

    def of_head(self, head: int) -> ScoreTiles:
        """Return the score tiles of one query head, counted from the first of these heads."""
        key_head, within = divmod(head, self.group)
        b, key_heads = self.shape[0], self.shape[1] // self.group
        one = copy(self)
        one.group, one.shape = 1, torch.Size((b, 1))
        one.heads = slice(self.heads.start + head, self.heads.start + head + 1)
        one.key_heads = slice(self.key_heads.start + key_head, self.key_heads.start + key_head + 1)
        one.q, one.k, one.v = (
            self.q[key_head::key_heads, within : within + 1],
            self.k[key_head::key_heads],
            self.v[key_head::key_heads],
        )
        one._patterns = {}
        return one

    def region(self, rows: slice, columns: slice) -> Region:
        return Region(rows, columns, self.batch, self.heads, self.call.grid.offset, self.call.q.device)

    @property
    def linear(self) -> bool:
        """Whether the final scores are a plain matrix product, without biases."""
        return self.call.pairwise is None and not self.call.biases

    def with_all_heads(self, method: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call a user-defined method on tiles (b, h, …) of all query heads, and return its result for these heads.

        Tiles of the missing heads are filled with those of the first head present.
        """
        heads = self.call.q.shape[1]
        if self.shape[1] == heads:
            return method(*tensors)
        index = torch.zeros(heads, dtype=torch.long, device=self.q.device)
        index[self.heads] = torch.arange(self.shape[1], device=self.q.device)
        return method(*(x[:, index] for x in tensors))[:, self.heads]

    def queries_and_keys(
        self, rows: slice, columns: slice
    ) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b h k d"]]:
        """Return queries and keys of a tile for a pairwise score; keys of grouped heads are repeated."""
        q, k = self.q[:, :, rows], self.k[:, None, columns].expand(-1, self.group, -1, -1)
        return q.reshape(*self.shape, *q.shape[2:]), k.reshape(*self.shape, *k.shape[2:])

    def product(self, rows: slice, columns: slice, out: Tensor | None = None) -> Scores:
        """Return scale · q·k of the tile, or its pairwise scores, before any bias; `out` may hold a product."""
        if self.call.pairwise is not None:
            return self._pairwise(self.call.pairwise, rows, columns)
        q, k = self.q[:, :, rows].flatten(1, 2), self.k[:, columns].transpose(1, 2)
        if out is None:
            return torch.bmm(q, k).view(*self.shape, rows.stop - rows.start, -1)
        torch.bmm(q, k, out=out.view(len(k), -1, out.shape[3]))
        return out

    def _pairwise(self, score: Pairwise, rows: slice, columns: slice) -> Scores:
        """Return pairwise scores of a tile, in chunks of rows to bound the memory of intermediates."""
        heads = self.call.q.shape[1] if score.by_head else self.shape[1]
        numbers = self.shape[0] * heads * (columns.stop - columns.start) * self.q.shape[3]
        parts = []
        for some in spans(rows.stop - rows.start, max(1, 4 * sizes(self.q.device).pairs // numbers)):
            q, k = self.queries_and_keys(slice(rows.start + some.start, rows.start + some.stop), columns)
            scores = self.with_all_heads(score.scores, q, k) if score.by_head else score.scores(q, k)
            expected = torch.Size((*q.shape[:3], k.shape[2]))
            if not isinstance(scores, Tensor) or scores.shape != expected:
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise InputError(
                    f"{type(score).__name__}: scores returned {got} for q {tuple(q.shape)} and k {tuple(k.shape)}, "
                    f"expected {tuple(expected)}; a per-head parameter has shape (heads, 1, 1)"
                )
            parts.append(scores.to(self.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def apply(self, bias: Bias, scores: Scores, rows: slice, columns: slice) -> Scores:
        """Apply one bias to the scores of a tile."""
        region = self.region(rows, columns)
        if not bias.by_head:
            return bias.apply(scores, region)
        region = replace(region, heads=slice(0, self.call.q.shape[1]))
        biased = self.with_all_heads(lambda x: bias.apply(x, region), scores)
        return checked_shape(bias, biased, scores, "apply")

    def weights(self, scores: Scores, level: PerRow | None) -> Scores:
        """Return weights of final scores by the normalizer's definition, 0 for scores of −inf; not yet divided."""
        normalizer = self.call.normalizer
        if not normalizer.by_head:
            return weights_of(normalizer, scores, level)
        if level is None:
            return self.with_all_heads(lambda s: weights_of(normalizer, s, None), scores)
        return self.with_all_heads(lambda s, at: weights_of(normalizer, s, at), scores, level)

    def scores(self, rows: slice, columns: slice, out: Tensor | None = None) -> Scores:
        """Return final scores of the tile: with biases, divided by the temperature, with the shift; not masked.

        `out` may hold the products.
        """
        scores = self.product(rows, columns, out)
        for bias in self.call.biases:
            scores = self.apply(bias, scores, rows, columns)
        if self.call.normalizer.temperature != 1 and not self.linear:
            scores = scores / self.call.normalizer.temperature
        if (shift := along(self.of(self.call.shift), rows)) is not None:
            scores = scores + shift[..., None]
        return scores

    def log2_weights(self, rows: slice, columns: slice, lse: PerRow, out: Scores) -> Scores:
        """Return log2 of the softmax weights, (final score − `lse`) / ln 2; not masked, in `out` if there is no bias.

        Base 2 because torch's exp is MKL's, which on some processors takes several times as long as its exp2.
        """
        if not self.linear:
            return self.scores(rows, columns).sub_(lse[..., None]).mul_(LOG2_E)
        q = self.q[:, :, rows].flatten(1, 2)
        folded = out.view(len(self.k), -1, out.shape[3])
        lse = lse.reshape(*folded.shape[:2], 1)
        keys = self.k[:, columns].transpose(1, 2)
        torch.baddbmm(lse, q, keys, beta=-LOG2_E, alpha=LOG2_E, out=folded)
        return out

    def block_status(self, mask: Mask | None, size: int) -> list[list[int]]:
        """Return the block status of each tile of `size` × `size`, over these heads."""
        grid, of = self.call.grid, (self.batch.start, self.batch.stop, self.heads.start, self.heads.stop)

        def status() -> list[list[int]]:
            statuses = block_status(mask, Tiles.of(grid, size, size), grid)
            statuses = Region(slice(None), slice(None), self.batch, self.heads).of(statuses)
            low, high = statuses.amin((0, 1)), statuses.amax((0, 1))
            return torch.where(low == high, low, PARTIAL).tolist()

        tiles = -(-grid.n_queries // size) * -(-grid.n_keys // size)
        if mask is None:
            return status()
        return cached_for_mask(mask, grid, ("status", size, of), status, lambda _: 8 * tiles)

    def masked(self, rows: slice, columns: slice) -> Bool[Tensor, "b h q k"]:
        """Return which pairs of a tile are masked; the pattern of a band depends on the offset alone, and is cached."""
        mask = self.call.mask
        assert mask is not None
        key = (rows.start - columns.start, rows.stop - rows.start, columns.stop - columns.start)
        if key in self._patterns:
            return self._patterns[key]

        def masked() -> Tensor:
            return ~mask.visible(self.region(rows, columns), self.call.grid)

        if mask.band is None:
            return masked()
        pattern = cached_for_mask(mask, self.call.grid, ("masked", *key), masked, lambda x: x.nbytes)
        self._patterns[key] = pattern
        return pattern

    def weigh(self, weights: Scores, v: Float[Tensor, "n k d"]) -> Float[Tensor, "b h q d"]:
        """Return weights @ v, where v has its batch and key heads folded: (b · key heads, k, d)."""
        folded = weights.reshape(len(v), -1, weights.shape[3])
        return torch.bmm(folded, v).view(*weights.shape[:3], -1)


def heads_together(call: Call, most: int) -> int:
    """Return key heads per group: those of `most` query heads, or all if a user-defined method needs all heads."""
    return call.k.shape[1] if call.by_head else max(1, most // (call.q.shape[1] // call.k.shape[1]))


def zero_masked_keys(
    x: Float[Tensor, "b h k d"], visible: Bool[Tensor, "b2 h2 q k"] | None
) -> Float[Tensor, "b h k d"]:
    """Zero keys or values that are masked for all queries that share them, so that NaN in padding cannot spread."""
    if visible is None:
        return x
    used = visible.any(2)
    masked = ~(used if used.shape[1] == 1 else used.unflatten(1, (x.shape[1], -1)).any(2))
    return x if readable(x) and not masked.any() else x.masked_fill(masked[..., None], 0)


def all_finite(*tensors: Tensor) -> bool:
    """Return whether all numbers are finite, so that none turns into NaN; False for a sum that overflows."""
    return all(readable(x) and math.isfinite(x.sum().item()) for x in tensors)


def block_status(mask: Mask | None, tiles: Tiles, grid: Grid) -> Int[Tensor, "b h r c"]:
    """Return the block status (EMPTY, PARTIAL or FULL) of each tile; without a mask all tiles are FULL."""
    if mask is None:
        return torch.full((1, 1, len(tiles.q_first), len(tiles.k_first)), FULL, dtype=torch.int8)
    return mask.classify(tiles, grid)


def spans(length: int, size: int) -> Iterator[slice]:
    """Return consecutive slices of `size` that cover `length`; the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


class WeightTiles:
    """Tiles of the weight matrix of the heads of `tiles`; the whole matrix is never formed.

    `rows` is the state of all rows of the call. Queries that are not True in `queries` have weights of 0.
    """

    def __init__(self, tiles: ScoreTiles, rows: RowState, queries: Bool[Tensor, "b nq"] | None = None) -> None:
        self.tiles = tiles
        here = (tiles.batch, tiles.heads)
        self.level, self.total, self.chosen = (
            None if x is None else x[here] for x in (rows.level, rows.total, rows.chosen)
        )
        self.uncounted = None if queries is None else ~queries[tiles.batch, None]
        if tiles.call.normalizer.has_lse:
            # exp(score − ∞) = 0 gives fully masked and excluded queries zero weights. (Finite, because 0 · ∞ is NaN.)
            assert self.level is not None
            empty = self.level == -torch.inf
            empty = empty if self.uncounted is None else empty | self.uncounted
            self.level = self.level.masked_fill(empty, -MASKED_SCORE)

    def fill(
        self, rows: slice, columns: slice, masked: Bool[Tensor, "#b #h q k"] | None, out: Scores, scratch: Scores
    ) -> Scores | None:
        """Write the weights of a tile to `out`; `masked` are its masked pairs, None if all are visible.

        Returns log2 of the weights for softmax (a view of `scratch` if possible), else None.
        """
        if not self.tiles.call.normalizer.has_lse:
            self._fill_by_definition(rows, columns, masked, out)
            return None
        tiles = self.tiles
        assert self.level is not None
        log2 = tiles.log2_weights(rows, columns, self.level[:, :, rows], out=scratch)
        if masked is not None:
            log2.masked_fill_(masked, MASKED_SCORE)
        if not tiles.linear:
            log2.clamp_(min=MASKED_SCORE)  # a bias may also mask pairs, with −inf
        torch.exp2(log2, out=out)
        return log2

    def _fill_by_definition(self, rows: slice, columns: slice, masked: Tensor | None, out: Tensor) -> None:
        """Write the weights of any normalizer, by its definition, to `out`."""
        tiles, call = self.tiles, self.tiles.call
        if self.chosen is not None:
            keys = call.grid.columns(columns.start, columns.stop)
            out.copy_(keys == self.chosen[:, :, rows, None])
        else:
            scores, divisor = tiles.scores(rows, columns), tiles.of(call.divisor)
            if masked is not None:
                scores = scores.masked_fill(masked, -torch.inf)  # masked scores may be NaN
            out.copy_(tiles.weights(scores, None if self.level is None else self.level[:, :, rows]))
            for by in (self.total, divisor):
                if by is not None:
                    out /= by[:, :, rows, None]
        if masked is not None:
            out.masked_fill_(masked, 0)
        if self.uncounted is not None:
            out.masked_fill_(self.uncounted[..., rows, None], 0)


# --- noise ------------------------------------------------------------------------------------------------------------
#
# Each number is a hash of (seed, batch item, head, query, key), so all kernels draw the same numbers and the backward
# recomputes them. The mixing steps are Stafford's and Wellons's 32-bit finalizers ("hash-prospector", 2018).

_MASK = 0xFFFFFFFF


def _hash32(x: Tensor) -> Tensor:
    """Return a 32-bit hash: a bijection in which every input bit affects every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform(seed: int, region: Region, grid: Grid) -> Scores:
    """Return uniform numbers in (0, 1), one for each pair of a region; float32 with 24 random bits.

    >>> from qkv.masks import Grid, Region
    >>> whole, row = slice(0, 4), slice(2, 3)
    >>> a, b = (uniform(1, Region(rows, whole), Grid.of(4, 4)) for rows in (whole, row))
    >>> torch.equal(a[:, :, 2:3], b)
    True
    """
    b, h, q, k = region.indices(grid)
    hashed = torch.tensor(seed & _MASK)  # without a hash, seed + 1 would give the noise of seed shifted by one query
    hashed = _hash32((_hash32(hashed) + 0x9E3779B9) & _MASK)
    row = _hash32((q - grid.offset + int(hashed)) & _MASK)
    for index in (h, b):
        row = _hash32((row + (index + 1) * 0x9E3779B9) & _MASK)
    bits = _hash32((row ^ _hash32(k + 0x632BE5AB)) & _MASK)
    return ((bits >> 8).float() + 0.5) * 2**-24


def gumbel(seed: int, region: Region, grid: Grid) -> Scores:
    """Return standard Gumbel noise: argmax(scores + noise) is a sample from softmax(scores) (Gumbel 1954)."""
    return -torch.log(-torch.log(uniform(seed, region, grid)))


# --- the loop over tiles ----------------------------------------------------------------------------------------------


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

    def __init__(
        self, block: Block, index: int, status: int, space: dict[tuple[str, torch.dtype, torch.device], Tensor]
    ) -> None:
        """`index` is that of its columns in the group, and `space` the memory of scratch buffers."""
        self._masked: Tensor | None
        self.block, self.group, self.index, self.space = block, block.group, index, space
        self.rows, self.columns = block.rows, block.group.columns[index]
        self.status, self._masked = status, None
        self.shape = (*block.shape, self.columns.stop - self.columns.start)

    @property
    def region(self) -> Region:
        return self.group.tiles.region(self.rows, self.columns)

    def buffer(self, name: str) -> Float[Tensor, "b h q k"]:
        """Return the scratch buffer of the tile's shape, which may hold old data; the next tile reuses it."""
        like, size = self.group.tiles.k, math.prod(self.shape)
        key = name, like.dtype, like.device
        memory = self.space.get(key)
        if memory is None or memory.numel() < size:
            memory = self.space[key] = like.new_empty(size)
        return memory[:size].view(self.shape)

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
    space: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
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
    table, (batch, h, n_queries, _), (_, key_heads, n_keys, _) = sizes(call.q.device), call.q.shape, call.k.shape
    together = heads_together(call, table.heads)
    size = tile_size(call) if size is None else size
    rows, columns, most = list(spans(n_queries, size)), list(spans(n_keys, size)), 1
    if batched:  # as many items as fit into one tile of the table's size
        scores = min(together, key_heads) * (h // key_heads) * min(n_queries, size) * min(n_keys, size)
        most = max(1, table.heads * table.tile**2 // max(scores, 1))
    for items in spans(batch, most):
        for heads in spans(key_heads, together):
            tiles = ScoreTiles(call, items, heads)
            yield Group(tiles, rows, columns, tiles.block_status(call.mask, size))


def tile_size(call: Call) -> int:
    """Return the tile size for a call: the table's, or smaller for sparse masks and where tiles need more memory."""
    table, (_, heads, n_queries, d), key_heads = sizes(call.q.device), call.q.shape, call.k.shape[1]
    size, mask = table.tile, call.mask
    if mask is not None and n_queries >= 4 * size:  # a quarter, if smaller tiles skip many more masked pairs
        small = max(1, size // 4)
        status = (mask.classify(Tiles.of(call.grid, n, n), call.grid) for n in (size, small))
        computed, of_small = (float((x != EMPTY).double().mean()) for x in status)
        size = small if of_small < 0.6 * computed else size
    most = min(heads_together(call, table.heads) * (heads // key_heads), heads)
    if call.by_head and most > table.heads:  # a tile of all heads should fit in cache, too
        size = max(8, size // 2 ** math.ceil(math.log2(most / table.heads) / 2))
    if call.pairwise is not None:
        size = min(size, max(8, math.isqrt(table.pairs // (d * most))))
    return size
