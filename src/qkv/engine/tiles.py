"""The tiles of a score matrix: their block status, scores and weights, and the noise of dropout.

Attention and its gradients (`qkv.engine.rows`), statistics and attention maps all take their scores from the same
tiles. Empty tiles are skipped, and several heads are computed together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from cachetools import LRUCache
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import Bias
from qkv.engine.call import Call, RowState, at_least_float32, user_defined
from qkv.engine.modes import dispatching, readable, transforming
from qkv.engine.sizes import sizes
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
    if grid.n_queries == 1 or not mask.cacheable or transforming() or dispatching():
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


MASKED_SCORE = -1e30  # score of a masked pair: exp of it is 0, and 0 times it is 0 (0 · −inf would be NaN)


def zero_masked_keys(x: Float[Tensor, "b h k d"], visible: Bool[Tensor, "b2 h2 q k"]) -> Float[Tensor, "b h k d"]:
    """Zero keys or values that are masked for all queries that share them, so that NaN in padding cannot spread."""
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


def spans(length: int, size: int, start: int = 0) -> Iterator[slice]:
    """Return consecutive slices of `size` from `start` to `length`; the last may be shorter."""
    return (slice(first, min(first + size, length)) for first in range(start, length, size))


def overwrites() -> bool:
    """Return whether results may overwrite their inputs: autograd and tracing record none of them."""
    return not torch.is_grad_enabled() and not torch._C._is_tracing()


class Leaves:
    """Slices of a call's tensors as leaves of autograd, whose gradients are added to sums of the shapes of the tensors.

    `call` is the call to make tiles of. `totals` are the sums, in float32 or better, of the tensors that are `wanted`.
    """

    SLICED = ("q", "k", "v", "sink", "shift")
    """The tensors of which a tile takes a slice; of a bias it takes the part."""

    def __init__(self, call: Call, wanted: set[str]) -> None:
        wide, named = at_least_float32(call.q.dtype), call.tensors()
        self.totals = {name: torch.zeros_like(x, dtype=wide) for name, x in named.items() if name in wanted}
        parts = {i: bias.tensors() for i, bias in enumerate(call.biases) if _has_parts(bias)}
        tiled = {f"bias {i} {name}" for i, tensors in parts.items() for name in tensors}
        whole = self.totals.keys() - tiled - {*self.SLICED}
        self.call = call.with_tensors({name: named[name].detach().requires_grad_() for name in whole})
        if call.pairwise is not None and not user_defined(call.pairwise):
            # In half precision, the gradients of blocks would be rounded before they are added up.
            inside = {name: named[name].detach().to(wide).requires_grad_() for name in whole if "score " in name}
            score: Any = call.pairwise
            score = replace(score, **{name.removeprefix("score "): x for name, x in inside.items()})
            self.call = replace(self.call, pairwise=score, learned=self.call.learned | inside)
        named = self.call.tensors()
        self._whole = [(named[name], self.totals[name].add_) for name in whole]
        self._slices: list[tuple[Tensor, Callable[[Tensor], object]]] = []

    def leaf(self, x: Tensor, add: Callable[[Tensor], object]) -> Tensor:
        """Return x as a leaf; `add` gets its gradient."""
        leaf = x.detach().requires_grad_()
        self._slices.append((leaf, add))
        return leaf

    def part_of_bias(self, i: int, region: Region) -> Bias:
        """Return bias number i in a region, with leaves as its tensors."""
        bias, part = self.call.biases[i], self.call.biases[i].part(region)
        totals = {name: x for name in bias.tensors() if (x := self.totals.get(f"bias {i} {name}")) is not None}
        sums, tensors = bias.with_tensors(totals).part(region).tensors(), part.tensors()
        return part.with_tensors({
            name: self.leaf(tensors[name].to(sums[name].dtype), sums[name].add_) for name in totals
        })  # fmt: skip

    def backward(self, *results: tuple[Tensor | None, Tensor | None]) -> None:
        """Add the gradients of all leaves, given results with their gradients, and forget the slices."""
        given = [(x, grad.to(x.dtype)) for x, grad in results if x is not None and grad is not None and x.requires_grad]
        leaves = [*self._slices, *self._whole]
        if given and leaves:
            outputs, grads = zip(*given, strict=True)
            gradients = torch.autograd.grad(outputs, [x for x, _ in leaves], grads, allow_unused=True)
            for (_, add), gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    add(gradient)
        self._slices.clear()


def _has_parts(bias: Bias) -> bool:
    """Return whether the tensors of a part of a bias are slices of those of the whole."""
    return overrides(bias, Bias, "part") and overrides(bias, Bias, "with_tensors")


class Tile:
    """A rectangle of the score matrix of some heads of a call: its scores and weights, in float32 or better.

    Query heads that share a key head are folded into the rows of one matrix product, so a tile is one batched product
    for any grouping, and keys are not repeated. With `leaves`, its results are differentiable in them.
    """

    def __init__(
        self, call: Call, batch: slice, heads: slice, rows: slice, columns: slice, status: int = PARTIAL,
        leaves: Leaves | None = None,
    ) -> None:  # fmt: skip
        """`heads` are query heads: all that share some key heads, or a single one."""
        self.call, self.leaves, self.rows, self.columns, self.status = call, leaves, rows, columns, status
        self.dtype = at_least_float32(call.q.dtype)
        share = call.q.shape[1] // call.k.shape[1]
        self.at = batch, heads, rows
        self.at_keys = batch, slice(heads.start // share, -(-heads.stop // share)), columns
        self.shape = tuple(x.stop - x.start for x in (batch, heads, rows, columns))
        self.region = Region(rows, columns, batch, heads, call.grid.offset, call.q.device)
        self.space: Tensor | None = None
        """Memory for the products of queries and keys."""

    def part(self, name: str) -> Tensor | None:
        """Return what the tile needs of a tensor of the call (b, h, n, …); dimensions of size 1 broadcast."""
        x: Tensor | None = getattr(self.call, name)
        if x is None:
            return None
        at = self.at_keys if name in ("k", "v") else self.at
        slices = tuple(cut if size > 1 else slice(None) for cut, size in zip(at, x.shape, strict=False))
        by_hand = name == "v" or (name in ("q", "k") and self.call.pairwise is None)  # see the methods for products
        if self.leaves is None or name not in self.leaves.totals or by_hand:
            return x[slices]
        return self.leaves.leaf(x[slices], self.leaves.totals[name][slices].add_)

    @cached_property
    def masked(self) -> Bool[Tensor, "#b #h q k"] | None:
        """Which pairs are masked; None if all are visible. That of a whole call is kept."""
        mask, grid = self.call.mask, self.call.grid
        if self.status == FULL or mask is None:
            return None

        def masked() -> Tensor:
            return ~mask.visible(self.region, grid)

        if self.shape[2:] != (grid.n_queries, grid.n_keys):
            return masked()
        of = tuple((x.start, x.stop) for x in self.at[:2])
        return cached_for_mask(mask, grid, ("masked", *of), masked, lambda x: x.nbytes)

    def masked_for(self, queries: Bool[Tensor, "b nq"] | None) -> Bool[Tensor, "#b #h q k"] | None:
        """Return which pairs are masked, or those of a query that does not count; None if there are none."""
        if queries is None:
            return self.masked
        excluded = ~queries[self.at[0], None, self.rows, None]
        return excluded.expand(-1, -1, -1, self.shape[3]) if self.masked is None else self.masked | excluded

    @cached_property
    def q(self) -> Float[Tensor, "b h q d"]:
        """Queries; times the scale, if the score is a product."""
        q = self.part("q").to(self.dtype)  # type: ignore[union-attr]
        return q * self.call.scale if self.call.pairwise is None else q

    @cached_property
    def k(self) -> Float[Tensor, "b hkv k d"]:
        """Keys, with zeros where masked for all queries unless all are finite."""
        return self._without_masked("k")

    @cached_property
    def v(self) -> Float[Tensor, "n k dv"]:
        """Values of all batch items and key heads in one dimension, likewise."""
        return self._without_masked("v").flatten(0, 1)

    def _without_masked(self, name: str) -> Tensor:
        x, cache = self.part(name).to(self.dtype), vars(self.call)  # type: ignore[union-attr]
        if self.masked is None:
            return x
        if "finite" not in cache:
            cache["finite"] = not transforming() and all_finite(self.call.k, self.call.v)
        return x if cache["finite"] else zero_masked_keys(x, ~self.masked)

    def with_all_heads(self, method: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call a user-defined method on tiles (b, h, …) of all query heads, and return its result for these heads.

        Tiles of the missing heads are filled with those of the first head present.
        """
        heads = self.call.q.shape[1]
        if self.shape[1] == heads:
            return method(*tensors)
        index = torch.zeros(heads, dtype=torch.long, device=self.q.device)
        index[self.at[1]] = torch.arange(self.shape[1], device=self.q.device)
        return method(*(x[:, index] for x in tensors))[:, self.at[1]]

    @property
    def linear(self) -> bool:
        """Whether the final scores are a plain matrix product, without biases."""
        return self.call.pairwise is None and not self.call.biases

    def _factors(self) -> tuple[Float[Tensor, "n q d"], Float[Tensor, "n d k"]]:
        """Return the factors of the batched product, with the heads of a group in the rows."""
        k = self.k.flatten(0, 1)
        return self.q.reshape(len(k), -1, k.shape[2]), k.mT

    def product(self) -> Scores:
        """Return scale · q·k of the tile, or its pairwise scores, before any bias."""
        if self.call.pairwise is not None:
            return self._pairwise(self.call.pairwise)
        product = multiplied(*self._factors(), self.space).view(self.shape)
        return product if self.leaves is None else self.leaves.leaf(product, self._add_factors)

    def _add_factors(self, grad: Scores) -> None:
        """Add the gradients of queries and keys, given that of their products."""
        assert self.leaves is not None
        q, k = self._factors()
        grad, totals = grad.reshape(len(k), -1, self.shape[3]), self.leaves.totals
        if "q" in totals:
            totals["q"][self.at] += torch.bmm(grad, k.mT).mul_(self.call.scale).view(*self.shape[:3], -1)
        if "k" in totals:
            add_product(totals["k"][self.at_keys], grad.mT, q)

    def value_gradients(self, weights: Scores, grad: Float[Tensor, "b h q dv"], space: Tensor) -> Scores:
        """Add the gradient of the values, given that of `weigh`; return the gradient of the weights, in `space`."""
        assert self.leaves is not None
        grad = grad.reshape(len(self.v), -1, grad.shape[3])
        if "v" in self.leaves.totals:
            folded = weights.detach().reshape(len(grad), -1, self.shape[3])
            add_product(self.leaves.totals["v"][self.at_keys], folded.mT, grad)
        return multiplied(grad, self.v.mT, space).view(self.shape)

    def _pairwise(self, score: Pairwise) -> Scores:
        """Return pairwise scores, of so few queries and keys at a time that intermediates have a fixed memory."""
        heads = self.call.q.shape[1] if score.by_head else self.shape[1]
        pairs = max(1, sizes(self.q.device).pairs // (self.shape[0] * heads * self.q.shape[3]))
        rows = min(self.shape[2], math.isqrt(pairs))
        keys = self.k.repeat_interleave(self.shape[1] // self.k.shape[1], 1).split(pairs // rows, 2)

        def scores_of(q: Tensor, k: Tensor) -> Tensor:
            scores = self.with_all_heads(score.scores, q, k) if score.by_head else score.scores(q, k)
            expected = torch.Size((*q.shape[:3], k.shape[2]))
            if not isinstance(scores, Tensor) or scores.shape != expected:
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise InputError(
                    f"{type(score).__name__}: scores returned {got} for q {tuple(q.shape)} and k {tuple(k.shape)}, "
                    f"expected {tuple(expected)}; a per-head parameter has shape (heads, 1, 1)"
                )
            return scores.to(self.dtype)

        return torch.cat([torch.cat([scores_of(q, k) for k in keys], 3) for q in self.q.split(rows, 2)], 2)

    def _apply(self, i: int, bias: Bias, scores: Scores) -> Scores:
        """Apply bias number i; it may overwrite the scores."""
        if bias.by_head:
            region = replace(self.region, heads=slice(0, self.call.q.shape[1]))
            biased = self.with_all_heads(lambda x: bias.apply(x, region), scores)
            return checked_shape(bias, biased, scores, "apply")
        if self.leaves is not None and _has_parts(bias):
            rows, columns = (slice(0, n) for n in self.shape[2:])
            return self.leaves.part_of_bias(i, self.region).apply(scores, Region(rows, columns))
        return bias.apply(scores, self.region)

    def scores(self) -> Scores:
        """Return final scores: with biases, divided by the temperature, with the shift; not masked."""
        scores = self.product()
        for i, bias in enumerate(self.call.biases):
            scores = self._apply(i, bias, scores)
        if any(map(user_defined, (self.call.pairwise, *self.call.biases))):
            scores = scores.clone()  # a tensor of the user must not be overwritten
        if self.call.normalizer.temperature != 1 and not self.linear:
            scores = scores / self.call.normalizer.temperature
        if (shift := self.part("shift")) is not None:
            scores = scores.add_(shift[..., None]) if overwrites() else scores + shift[..., None]
        return scores

    def masked_scores(self) -> Scores:
        """Return final scores, −inf where masked."""
        scores = self.scores()
        if self.masked is None:
            return scores
        fill = scores.masked_fill_ if overwrites() else scores.masked_fill
        return fill(self.masked, -torch.inf)

    def weigh(self, weights: Scores) -> Float[Tensor, "b h q dv"]:
        """Return the values times these weights of the tile."""
        folded = weights.reshape(len(self.v), -1, weights.shape[3])
        return torch.bmm(folded, self.v).view(*weights.shape[:3], -1)

    def weights(
        self, rows: RowState, queries: Bool[Tensor, "b nq"] | None = None, extremes: RunningExtremes | None = None
    ) -> tuple[Scores, Scores | None]:
        """Return final weights, given the state of all rows; and log2 of them for softmax, else None.

        Queries that are not True in `queries` have weights of 0. The scores are added to `extremes`.
        """
        masked = self.masked_for(queries)
        if not self.call.normalizer.has_lse:
            return self._weights_by_definition(rows, masked, extremes), None
        assert rows.level is not None
        level = rows.level[self.at][..., None]
        # exp(score − ∞) = 0 gives fully masked queries zero weights. (Finite, because 0 · ∞ is NaN.)
        level = level.masked_fill(level == -torch.inf, -MASKED_SCORE)
        if self.linear and self.call.sink is None:
            # In base 2, because torch's exp is MKL's, which on some processors is several times slower.
            q, k = self._factors()
            log2 = torch.baddbmm(level.reshape(len(q), -1, 1), q, k, beta=-LOG2_E, alpha=LOG2_E).view(self.shape)
            if masked is not None:
                log2.masked_fill_(masked, MASKED_SCORE)
            if extremes is not None:
                extremes.add(self, log2, 1 / LOG2_E, level[..., 0])
        else:  # the level may be far above all scores if a sink is in it
            scores = self.scores()
            if masked is not None:
                scores.masked_fill_(masked, -torch.inf)
            if extremes is not None:
                extremes.add(self, scores)
            log2 = scores.sub_(level).mul_(LOG2_E).clamp_(min=MASKED_SCORE)  # a bias may also mask pairs, with −inf
        return torch.exp2(log2), log2

    def _weights_by_definition(self, rows: RowState, masked: Tensor | None, extremes: RunningExtremes | None) -> Scores:
        """Return the final weights of any normalizer, by its definition."""
        call, normalizer, scores = self.call, self.call.normalizer, self.masked_scores()
        if extremes is not None:
            shift = self.part("shift")
            extremes.add(self, scores, 1.0, 0.0 if shift is None else -shift)
        if rows.chosen is not None:
            keys = call.grid.columns(self.columns.start, self.columns.stop)
            weights = (keys == rows.chosen[self.at][..., None]).to(self.dtype)
        else:
            tensors = (scores, *([] if rows.level is None else [rows.level[self.at][..., None]]))

            def weigh(scores: Tensor, level: Tensor | None = None) -> Tensor:
                return weights_of(normalizer, scores, level)

            weights = self.with_all_heads(weigh, *tensors) if normalizer.by_head else weigh(*tensors)
            for by in (None if rows.total is None else rows.total[self.at], self.part("divisor")):
                weights = weights if by is None else weights / by[..., None]
        return weights if masked is None else weights.masked_fill(masked, 0)


@dataclass(eq=False)
class RunningExtremes:
    """The largest score of each query (b, h, nq); and the smallest, and the first key with the largest, if wanted.

    Masked pairs do not count, also those that a bias of −∞ masks. Without others, the scores are −∞ and ∞, and the key
    is −1.
    """

    largest: PerRow
    smallest: PerRow | None
    key: Int[Tensor, "b h q"] | None
    corner: int = 0
    """The number of the first key of the call."""

    @classmethod
    def of(cls, call: Call, *, whole: bool) -> RunningExtremes:
        """Return those of no scores."""
        largest = call.q.new_full(call.q.shape[:3], -torch.inf, dtype=at_least_float32(call.q.dtype))
        return cls(largest, *((-largest, torch.full_like(largest, -1, dtype=torch.long)) if whole else (None, None)))

    def part(self, rows: slice, corner: int) -> RunningExtremes:
        """Return those of some queries, as views, for keys from `corner` on."""
        smallest, key = (None if x is None else x[:, :, rows] for x in (self.smallest, self.key))
        return RunningExtremes(self.largest[:, :, rows], smallest, key, corner)

    def add(self, tile: Tile, x: Scores, factor: float = 1.0, more: Tensor | float = 0.0) -> None:
        """Add the scores `factor` · x + `more` of a tile; x is −1e30 or −∞ at masked pairs."""
        at = tile.at
        top, key = (x.amax(-1), None) if self.key is None else x.max(-1)
        largest = (top * factor + more).masked_fill(top <= MASKED_SCORE / 2, -torch.inf)
        if self.key is not None and key is not None:
            key, before = key + (tile.columns.start + self.corner), self.largest[at]
            better = (largest > before) | ((largest == before) & (key < self.key[at]))
            self.key[at] = torch.where(better, key, self.key[at])
        if self.smallest is not None:
            visible = x.masked_fill(x <= MASKED_SCORE / 2, torch.inf)
            self.smallest[at] = torch.minimum(self.smallest[at], visible.amin(-1) * factor + more)
        self.largest[at] = torch.maximum(self.largest[at], largest)


def multiplied(a: Tensor, b: Tensor, space: Tensor | None) -> Tensor:
    """Return the batched product of matrices, in `space` (b, h, n, m) if given."""
    return torch.bmm(a, b) if space is None else torch.bmm(a, b, out=space.view(len(a), -1, b.shape[2]))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the batched product of matrices to `total` (b, hkv, n, d)."""
    if len(total) == 1:
        total[0].baddbmm_(a, b)
    else:
        total += torch.bmm(a, b).view(total.shape)


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


# --- the tiles of a call ----------------------------------------------------------------------------------------------


def head_groups(call: Call, scores: int, most: int, *, batched: bool = True) -> Iterator[tuple[slice, slice]]:
    """Yield batch items and query heads to compute together, each with `scores` scores, of which there may be `most`.

    They are few items with all heads, one item with the heads of some key heads, or all heads of an item if a
    user-defined method needs them. `batched` allows several items.
    """
    (batch, heads, *_), key_heads = call.q.shape, call.k.shape[1]
    at_once, share = max(1, most // scores), heads // key_heads
    together = heads if call.by_head else min(heads, max(1, at_once // share) * share)
    items = max(1, at_once // heads) if batched and together == heads else 1
    for item in spans(batch, items):
        yield from ((item, some) for some in spans(heads, together))


def status_of_tiles(call: Call, batch: slice, heads: slice, rows: int, columns: int) -> list[list[int]]:
    """Return the block status of each tile of `rows` × `columns`, over these heads."""
    grid, mask = call.grid, call.mask

    def status() -> list[list[int]]:
        every = Region(slice(None), slice(None), batch, heads).of(
            block_status(mask, Tiles.of(grid, rows, columns), grid)
        )
        low, high = every.amin((0, 1)), every.amax((0, 1))
        return torch.where(low == high, low, PARTIAL).tolist()

    if mask is None:
        return status()
    tiles = -(-grid.n_queries // rows) * -(-grid.n_keys // columns)
    of = batch.start, batch.stop, heads.start, heads.stop
    return cached_for_mask(mask, grid, ("status", rows, columns, of), status, lambda _: 8 * tiles)


def tiles(call: Call, *, batched: bool = True) -> Iterator[Tile]:
    """Yield the tiles of a call that are not empty, of the size in the table; `batched` as of `head_groups`."""
    table, n_queries, n_keys = sizes(call.q.device), call.q.shape[2], call.k.shape[2]
    scores = min(n_queries, table.tile) * min(n_keys, table.tile)
    for batch, heads in head_groups(call, scores, table.heads * table.tile**2, batched=batched):
        status = status_of_tiles(call, batch, heads, table.tile, table.tile)
        for rows, of_row in zip(spans(n_queries, table.tile), status, strict=True):
            for columns, one in zip(spans(n_keys, table.tile), of_row, strict=True):
                if one != EMPTY:
                    yield Tile(call, batch, heads, rows, columns, one)
