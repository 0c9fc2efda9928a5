"""The masks of this package: those defined by positions, and `Padding`, `Document`, `Dense` and `Predicate` by data."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError, kind_of, one_of
from qkv.masks.base import Blockwise, Mask, Predicate, TensorMask, check_pairs, full_and_empty, tile_status, whole
from qkv.masks.geometry import Grid, Region, Tiles


class _OfDistance(Mask):
    """All pairs whose distance q − k is a multiple of `step` in low … high, where q and k are positions."""

    @property
    def _distances(self) -> tuple[float, float, int]:
        """The low and the high end, multiples of the step or infinite, and the step."""
        raise NotImplementedError

    @property
    def band(self) -> tuple[float, float] | None:
        low, high, step = self._distances
        return (low, high) if step == 1 else None

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        (low, high, step), back = self._distances, q - k
        visible = back >= low
        if high < math.inf:
            visible = visible & (back <= high)
        return visible & (back % step == 0) if step > 1 else visible

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        low, high, step = self._distances
        least = (tiles.q_first[:, None] - tiles.k_last).double()
        most = (tiles.q_last[:, None] - tiles.k_first).double()
        last = most.clamp(max=high).div(step, rounding_mode="floor") * step  # the greatest visible distance, if any
        full = (least >= low) & (most <= high) & (last >= least) & ((least == most) | (step == 1))
        return tile_status(full, last < least.clamp(min=low))


@dataclass(frozen=True)
class Causal(_OfDistance):
    """A query attends to its own position and all earlier ones.

    >>> Causal().dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    @property
    def _distances(self) -> tuple[float, float, int]:
        return 0, math.inf, 1


@dataclass(frozen=True)
class Window(_OfDistance):
    """A query attends to `size` keys ending with its own, and to `ahead` keys after it.

    ``Window(w)`` is the sliding window of a causal model; ``Window(r + 1, ahead=r)`` is the symmetric
    window of radius r. (Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825.)

    >>> Window(2).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    size: int
    ahead: int = 0

    def __post_init__(self) -> None:
        whole(self, "size", 1, "the query's own key")
        whole(self, "ahead", 0, "keys after the query")

    @property
    def _distances(self) -> tuple[float, float, int]:
        return -self.ahead, self.size - 1, 1


@dataclass(frozen=True)
class Strided(_OfDistance):
    """A query attends to every `step`-th key, counted from its own in both directions.

    The strided pattern of Child et al. 2019 (arXiv:1904.10509, §4.3) is ``(Strided(l) | Window(l)) & Causal()``, with
    l near √n: two layers then reach every position.

    >>> (Strided(2) & Causal()).dense(4, 4)[0, 0].int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    """

    step: int

    def __post_init__(self) -> None:
        whole(self, "step", 1, "positions")

    @property
    def _distances(self) -> tuple[float, float, int]:
        return -math.inf, math.inf, self.step


@dataclass(frozen=True)
class Dilated(_OfDistance):
    """A window with gaps: `size` keys `step` positions apart, ending with the query's own, and `ahead` keys after it.

    (Beltagy et al. 2020, arXiv:2004.05150, fig. 2c.)

    >>> Dilated(2, step=2).dense(4, 4)[0, 0].int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    """

    size: int
    step: int
    ahead: int = 0

    def __post_init__(self) -> None:
        whole(self, "size", 1, "the query's own key")
        whole(self, "step", 1, "positions")
        whole(self, "ahead", 0, "keys after the query")

    @property
    def _distances(self) -> tuple[float, float, int]:
        return -self.ahead * self.step, (self.size - 1) * self.step, self.step


@dataclass(frozen=True)
class Prefix(Mask):
    """Only the first `length` keys are visible, to every query.

    A prefix language model (Raffel et al. 2020, arXiv:1910.10683, fig. 3) is ``Prefix(n) | Causal()``.

    >>> (Prefix(2) | Causal()).dense(3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    length: int

    def __post_init__(self) -> None:
        whole(self, "length", 0, "keys")

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return k < self.length

    def key_mask(self, grid: Grid) -> Tensor:
        return grid.columns(0, grid.n_keys)[None] < self.length


def _integers(mask: Mask, name: str, ndims: tuple[int, ...], expected: str) -> Tensor:
    """An argument of a mask as a tensor of integers; raise `InputError` for anything else, but an empty list."""
    value = getattr(mask, name)
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(())
    kind = found.dtype
    if found.ndim not in ndims or (found.numel() and (kind.is_floating_point or kind.is_complex or kind == torch.bool)):
        raise InputError(f"{type(mask).__name__}: {name} is {kind_of(value)}, expected {expected}")
    return found


@dataclass(frozen=True)
class Global(Mask):
    """The tokens at `indices` attend to every key and are visible to every query; all other pairs are masked.

    Negative indices count from the last key. (Beltagy et al. 2020, arXiv:2004.05150, §3.1; Zaheer et al. 2020,
    arXiv:2007.14062, §2.) For tokens that are visible to all queries, but whose own queries are not global, use
    `Prefix` or `Dense`.

    >>> Global([0]).dense(3, 3)[0, 0].int().tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """

    indices: Sequence[int]

    def __post_init__(self) -> None:
        indices = _integers(self, "indices", (1,), "a sequence of integers")
        object.__setattr__(self, "indices", tuple(dict.fromkeys(indices.tolist())))

    def check(self, grid: Grid) -> None:
        wrong = [i for i in self.indices if not -grid.n_keys <= i < grid.n_keys]
        if wrong:
            raise InputError(
                f"Global: indices contains {wrong[0]} for {grid.n_keys} keys, expected "
                f"{-grid.n_keys}..{grid.n_keys - 1}"
            )

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.specialize(grid).sees(b, h, q, k, grid)

    def specialize(self, grid: Grid) -> Mask:
        chosen, n_keys = _chosen(self.indices, grid.n_keys).to(grid.device), grid.n_keys

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            inside = (q >= 0) & (q < n_keys)  # a query may precede the first key
            return (chosen[q.clamp(0, n_keys - 1)] & inside) | chosen[k]

        return Predicate(visible)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        chosen = _chosen(self.indices, grid.n_keys)[None]
        (all_q, no_q), (all_k, no_k) = (
            full_and_empty(chosen, first, last)
            for first, last in ((tiles.q_first, tiles.q_last), (tiles.k_first, tiles.k_last))
        )
        return tile_status(all_q.T | all_k, no_q.T & no_k)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # cached tensors must serve training too
def _chosen(indices: tuple[int, ...], n_keys: int) -> Tensor:
    """Return True at the chosen keys."""
    chosen = torch.zeros(n_keys, dtype=torch.bool)
    chosen[torch.tensor(indices, dtype=torch.long)] = True
    return chosen


@dataclass(frozen=True)
class RandomKeys(Mask):
    """Every query attends to `size` distinct random keys, determined by the seed, the number of keys and its position.

    Keys that are visible under `besides` are not drawn, so that ``besides | RandomKeys(r, besides=besides)`` has r
    additional keys per query (or all keys, if there are fewer). All heads and batch items share the draw. (Zaheer et
    al. 2020, arXiv:2007.14062, §2.)

    >>> RandomKeys(2, seed=1).dense(5, 5).sum(-1).tolist()
    [[[2, 2, 2, 2, 2]]]
    """

    size: int
    seed: int = 0
    besides: Mask | None = None

    def __post_init__(self) -> None:
        whole(self, "size", 0, "keys per query")
        if self.besides is not None and not (isinstance(self.besides, Mask) and self.besides.cacheable):
            raise InputError(
                "RandomKeys: besides depends on data or a function, which may differ between batch items and heads; "
                "expected a mask of positions alone"
            )

    def check(self, grid: Grid) -> None:
        if grid.offset < 0 or grid.n_queries + grid.offset > grid.n_keys:
            where = "before the first" if grid.offset < 0 else "after the last"
            raise InputError(
                f"RandomKeys: n_queries is {grid.n_queries}, which puts queries {where} of {grid.n_keys} keys; "
                "expected no more queries than keys"
            )
        if self.besides is not None:
            self.besides.check(grid)

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.specialize(grid).sees(b, h, q, k, grid)

    def specialize(self, grid: Grid) -> Mask:
        columns = [x.to(grid.device) for x in _columns(self.size, self.seed, self.besides, grid.n_keys)]

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            pairs = k < 0  # none
            for column in columns:
                pairs = pairs | (column[q] == k)
            return pairs

        return Predicate(visible)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        drawn = _draw(self.size, self.seed, self.besides, grid.n_keys)
        counts = torch.zeros(len(tiles.q_first), len(tiles.k_first), dtype=torch.long)
        for row, (first, last) in enumerate(zip(tiles.q_first.tolist(), tiles.q_last.tolist(), strict=True)):
            keys = drawn[first : last + 1].flatten().sort().values
            # Tiles may share a column: under Blockwise, two tiles of tokens may overlap the same block.
            counts[row] = torch.searchsorted(keys, tiles.k_last, right=True) - torch.searchsorted(keys, tiles.k_first)
        area = (tiles.q_last - tiles.q_first + 1)[:, None] * (tiles.k_last - tiles.k_first + 1)
        return tile_status(counts == area, counts == 0)


DRAW_ROWS = 1024  # rows per chunk when some keys are excluded, which needs all candidates in memory


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # cached tensors must serve training too
def _draw(size: int, seed: int, besides: Mask | None, n_keys: int) -> Tensor:
    """Return random keys of every position, (n_keys positions, size); −1 where there are too few keys."""
    generator = torch.Generator().manual_seed(seed)
    if besides is None and size * 4 <= n_keys:
        drawn = torch.randint(n_keys, (n_keys, size), generator=generator)
        while True:
            order = drawn.sort(-1).values
            repeated = (order[:, 1:] == order[:, :-1]).any(-1)
            if not repeated.any():
                return drawn
            drawn[repeated] = torch.randint(n_keys, (int(repeated.sum()), size), generator=generator)
    grid, parts = Grid.of(n_keys, n_keys), []
    for start in range(0, n_keys, DRAW_ROWS):
        rows = slice(start, min(start + DRAW_ROWS, n_keys))
        rank = torch.rand(rows.stop - rows.start, n_keys, generator=generator)
        if besides is not None:
            rank[besides.visible(Region(rows, slice(0, n_keys)), grid)[0, 0]] = -1
        best, keys = rank.topk(min(size, n_keys), -1)
        parts.append(torch.where(best >= 0, keys, -1))
    return torch.cat(parts)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # cached tensors must serve training too
def _columns(size: int, seed: int, besides: Mask | None, n_keys: int) -> list[Tensor]:
    """Return the same, one tensor for each random key of a position: FlexAttention compiles single loads alone."""
    return [x.contiguous() for x in _draw(size, seed, besides, n_keys).unbind(1)]


def longformer(window: int, tokens: Sequence[int] = (0,), *, causal: bool = False) -> Mask:
    """Return Longformer's mask: `window` keys around the query, half on each side, and global `tokens`.

    `window` is even, as in the paper: window / 2 keys before the query, its own, and window / 2 after. With `causal`, a
    query attends to the `window` keys before it and its own, and global attention is causal, too. (Beltagy et al.
    2020, arXiv:2004.05150, §3.1.)

    >>> longformer(2, [0]).dense(5, 5)[0, 0].int().tolist()[3]
    [1, 0, 1, 1, 1]
    """
    if window < 2 or window % 2:
        raise InputError(f"longformer: window is {window}, expected an even number of keys, half on each side")
    if causal:
        return Window(window + 1) | (Global(tokens) & Causal())
    return Window(window // 2 + 1, ahead=window // 2) | Global(tokens)


def bigbird(block: int = 64, random: int = 3, *, window: int = 3, seed: int = 0) -> Mask:
    """Return BigBird's mask of blocks of tokens: `window` around the query's, `random` ones, first and last global.

    Random blocks are drawn from the blocks that are not visible otherwise. (Zaheer et al. 2020, arXiv:2007.14062, §2
    and app. D.)

    >>> bigbird(block=2, random=0).sparsity(16)
    0.3125
    """
    if window < 1 or window % 2 == 0:
        raise InputError(f"bigbird: window is {window}, expected an odd number of blocks around the query's own")
    if random < 0:
        raise InputError(f"bigbird: random is {random}, expected 0 or more blocks")
    near = Window(window // 2 + 1, ahead=window // 2) | Global([0, -1])
    return Blockwise(near | RandomKeys(random, seed, besides=near) if random else near, block)


@dataclass(frozen=True, eq=False)
class Padding(TensorMask):
    """Masks padding keys for every query.

    `lengths` is the number of real keys of each batch item; they are at the start (``side="right"``: padding on the
    right) or at the end (``side="left"``). Padding queries are not masked: use `Document` with id −1 for that.

    >>> Padding([1, 2]).dense(1, 3, batch=2)[:, 0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """

    lengths: Sequence[int] | Int[Tensor, " b"]
    side: str = "right"

    def __post_init__(self) -> None:
        lengths = _integers(self, "lengths", (1,), "one integer per batch item")
        one_of("Padding: side", self.side, ("left", "right"))
        object.__setattr__(self, "lengths", lengths)

    def check(self, grid: Grid) -> None:
        lengths = torch.as_tensor(self.lengths)
        if len(lengths) not in (1, grid.batch):
            raise InputError(f"Padding: lengths has {len(lengths)} numbers for a batch of {grid.batch}")
        if int(lengths.min()) < 0 or int(lengths.max()) > grid.n_keys:
            raise InputError(
                f"Padding: lengths lie in {int(lengths.min())}..{int(lengths.max())}, "
                f"expected 0..{grid.n_keys} (the number of keys)"
            )

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        lengths = torch.as_tensor(self.lengths).to(k.device)
        length = lengths[b] if len(lengths) > 1 else lengths[0]
        return (k < length) if self.side == "right" else (k >= grid.n_keys - length)

    def key_mask(self, grid: Grid) -> Tensor:
        lengths, keys = torch.as_tensor(self.lengths).to(grid.device)[:, None], grid.columns(0, grid.n_keys)
        return keys < lengths if self.side == "right" else keys >= grid.n_keys - lengths


@dataclass(frozen=True, eq=False)
class Document(TensorMask):
    """A query attends only to keys of its own document; positions with a negative id are fully masked.

    `ids` is (n_keys,) or (batch, n_keys); query i has the id of position i + offset. Use it for packed sequences,
    chunked attention, and padding of both queries and keys.

    >>> from qkv.masks import Causal
    >>> (Document([0, 0, 1]) & Causal()).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """

    ids: Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "..."]

    def __post_init__(self) -> None:
        ids = _integers(self, "ids", (1, 2), "integers (n_keys,) or (batch, n_keys)")
        object.__setattr__(self, "ids", ids if ids.ndim == 2 else ids[None])

    def check(self, grid: Grid) -> None:
        shape = tuple(torch.as_tensor(self.ids).shape)
        if shape[0] not in (1, grid.batch) or shape[1] != grid.n_keys:
            raise InputError(
                f"Document: ids has shape {shape}, expected (1 or {grid.batch}, {grid.n_keys}) for this batch"
            )
        if grid.offset < 0 or grid.n_queries + grid.offset > grid.n_keys:
            raise InputError(
                f"Document: ids are those of {grid.n_keys} keys, but the queries are positions {grid.offset} to "
                f"{grid.n_queries + grid.offset - 1}; expected positions of these keys"
            )

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        ids = torch.as_tensor(self.ids).to(k.device)
        b = b if len(ids) > 1 else torch.zeros_like(q)
        of_query, of_key = ids[b, q], ids[b, k]
        return (of_query == of_key) & (of_query >= 0)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        ids = torch.as_tensor(self.ids).cpu()
        q_min, q_max = _extremes(ids, tiles.q_first, tiles.q_last)
        k_min, k_max = _extremes(ids, tiles.k_first, tiles.k_last)
        q_min, q_max = q_min[:, None, :, None], q_max[:, None, :, None]
        k_min, k_max = k_min[:, None, None, :], k_max[:, None, None, :]
        full = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
        empty = (q_max < k_min) | (k_max < q_min) | (q_max < 0) | (k_max < 0)
        return tile_status(full, empty)


def _extremes(ids: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest id in each span of positions."""
    spans = _spans(first, last)
    return torch.stack([ids[:, s].amin(1) for s in spans], 1), torch.stack([ids[:, s].amax(1) for s in spans], 1)


def _spans(first: Tensor, last: Tensor) -> list[slice]:
    return [slice(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class Dense(TensorMask):
    """A boolean tensor, True where a query may attend, of a shape that broadcasts to (batch, heads, nq, nk).

    Integer and float masks are rejected, because libraries disagree on the meaning of 1, 0 and −inf.

    >>> Dense(torch.tensor([[True, False]])).dense(1, 2)[0, 0].tolist()
    [[True, False]]
    """

    tensor: Bool[Tensor, "..."]
    ndim: int = field(init=False, repr=False)  # number of dimensions of the tensor as passed

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or self.tensor.dtype != torch.bool:
            raise InputError(
                f"mask is {kind_of(self.tensor)}, expected a boolean tensor that is True where a query may attend; "
                "compare an integer mask with == (for example `ids == 1`), "
                "and pass an additive 0 / −inf mask as bias=qkv.biases.TensorBias(tensor)"
            )
        if not 2 <= self.tensor.ndim <= 4:
            raise InputError(
                f"mask has {self.tensor.ndim} dimensions, expected (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk)"
            )
        object.__setattr__(self, "ndim", self.tensor.ndim)
        object.__setattr__(self, "tensor", self.tensor[(None,) * (4 - self.tensor.ndim)])

    def check(self, grid: Grid) -> None:
        check_pairs("mask", self.ndim, self.tensor, grid)

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        where = (b, h, q - grid.offset, k)
        visible = self.tensor.to(k.device)
        return visible[
            tuple(x if size > 1 else torch.zeros_like(x) for x, size in zip(where, visible.shape, strict=True))
        ]

    def key_mask(self, grid: Grid) -> Tensor | None:
        b, h, n_queries, _ = self.tensor.shape
        if h > 1 or n_queries > 1:
            return None
        return self.tensor[:, 0, 0].to(grid.device).expand(b, grid.n_keys)

    def visible_keys(self, grid: Grid) -> Tensor:
        tensor = self.tensor.to(grid.device).expand(-1, -1, grid.n_queries, grid.n_keys)
        if tensor.is_cpu:  # torch takes fifteen times as long as NumPy
            return torch.from_numpy(np.count_nonzero(tensor.numpy(), axis=-1))
        return tensor.sum(-1)

    def visible(self, region: Region, grid: Grid) -> Tensor:
        visible = region.of(self.tensor.to(grid.device))  # a slice: much faster than looking up every pair
        size = (region.rows.stop - region.rows.start, region.columns.stop - region.columns.start)
        return visible.expand(*visible.shape[:2], *size)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        some = every = self.tensor.view(torch.uint8)  # torch's any and all of bools take ten times as long
        q_spans = _spans(tiles.q_first - grid.offset, tiles.q_last - grid.offset)
        for dim, spans in ((2, q_spans), (3, _spans(tiles.k_first, tiles.k_last))):
            one = self.tensor.shape[dim] == 1  # one row (column) stands for all of them
            cut = [(slice(None),) * dim + (slice(0, 1) if one else span,) for span in spans]
            some = torch.cat([some[c].amax(dim, keepdim=True) for c in cut], dim)
            every = torch.cat([every[c].amin(dim, keepdim=True) for c in cut], dim)
        return tile_status(every.cpu().bool(), some.cpu() == 0)
