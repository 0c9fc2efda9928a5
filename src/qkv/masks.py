"""Masks: which query may attend to which key.

A mask is **True where a query may attend**. It is a description, not a tensor: it can tell any
tile of the score matrix what is visible, and classify whole tiles as empty, partial or full, so that
kernels skip the first, mask the second and leave the third alone. Masks compose with ``&``, ``|``, ``~``.

Positions are key indices. Query ``i`` stands at position ``i + offset``, where ``offset`` is
``n_keys - n_queries`` unless stated otherwise: the last query sees the last key (bottom-right alignment).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError

EMPTY, PARTIAL, FULL = 0, 1, 2  # in this order `and` is min, `or` is max and `not` is 2 - x


@dataclass(frozen=True)
class Grid:
    """The score matrix a mask is laid over: its sizes, and where query 0 stands among the keys."""

    batch: int
    heads: int
    n_queries: int
    n_keys: int
    offset: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of(n_queries: int, n_keys: int, batch: int = 1, heads: int = 1) -> Grid:
        return Grid(batch, heads, n_queries, n_keys, n_keys - n_queries)

    def rows(self, start: int, stop: int) -> Int[Tensor, " q"]:
        """Positions of queries ``start`` to ``stop``."""
        return torch.arange(start, stop, device=self.device) + self.offset

    def columns(self, start: int, stop: int) -> Int[Tensor, " k"]:
        return torch.arange(start, stop, device=self.device)


@dataclass(frozen=True)
class Region:
    """A rectangle of the score matrix: which queries and keys, of which batch items and query heads."""

    rows: slice
    columns: slice
    batch: slice = field(default_factory=lambda: slice(None))
    heads: slice = field(default_factory=lambda: slice(None))

    def of(self, x: Tensor) -> Tensor:
        """The region's part of x (b, h, q, k), whose dimensions of size 1 stand for all."""
        cuts = (self.batch, self.heads, self.rows, self.columns)
        return x[tuple(cut if size > 1 else slice(None) for cut, size in zip(cuts, x.shape, strict=True))]


@dataclass(frozen=True)
class Tiles:
    """First and last position (inclusive) of every row tile and every column tile."""

    q_first: Int[Tensor, " rows"]
    q_last: Int[Tensor, " rows"]
    k_first: Int[Tensor, " cols"]
    k_last: Int[Tensor, " cols"]

    @staticmethod
    def of(grid: Grid, rows: int, columns: int, start: int = 0, stop: int | None = None) -> Tiles:
        """Tiles of `rows` × `columns` over queries `start` to `stop` and all keys."""
        stop = grid.n_queries if stop is None else stop
        q = torch.arange(start, stop, rows)
        k = torch.arange(0, grid.n_keys, columns)
        return Tiles(
            q + grid.offset,
            (q + rows).clamp(max=stop) - 1 + grid.offset,
            k,
            (k + columns).clamp(max=grid.n_keys) - 1,
        )


class Mask:
    """Base of all masks. Subclasses say what is visible (`visible`) and classify tiles (`classify`)."""

    def allowed(self, region: Region, grid: Grid) -> Bool[Tensor, "b h q k"]:
        """Visibility inside a region; b and h may be 1."""
        rows, columns = region.rows, region.columns
        seen = self.visible(grid.rows(rows.start, rows.stop), grid.columns(columns.start, columns.stop), grid)
        everything = slice(None)
        return Region(everything, everything, region.batch, region.heads).of(seen)

    def visible(self, q: Int[Tensor, " q"], k: Int[Tensor, " k"], grid: Grid) -> Bool[Tensor, "b h q k"]:
        """Visibility of keys at positions `k` to queries at positions `q`; b and h may be 1."""
        raise TypeError(f"{type(self).__name__} does not say what is visible")

    def classify(self, tiles: Tiles, grid: Grid) -> Int[Tensor, "b h rows cols"]:
        """EMPTY, PARTIAL or FULL for each tile; PARTIAL is always a safe answer. b and h may be 1."""
        return torch.full((1, 1, len(tiles.q_first), len(tiles.k_first)), PARTIAL, dtype=torch.int8)

    @property
    def band(self) -> tuple[float, float] | None:
        """``(low, high)`` if exactly the pairs with low ≤ q − k ≤ high are visible, else None."""
        return None

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the mask cannot be laid over `grid`."""

    def dense(self, n_queries: int, n_keys: int, *, batch: int = 1, heads: int = 1) -> Bool[Tensor, "b h nq nk"]:
        """The whole mask as a boolean tensor, True where a query may attend.

        >>> Causal().dense(2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        """
        grid = Grid.of(n_queries, n_keys, batch, heads)
        self.check(grid)
        seen = self.visible(grid.rows(0, n_queries), grid.columns(0, n_keys), grid)
        return seen.expand(*seen.shape[:2], n_queries, n_keys)

    def __and__(self, other: Mask) -> Mask:
        return And(self, _as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _as_mask(other))

    def __invert__(self) -> Mask:
        return Not(self)


def _as_mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise InputError(
            f"mask: cannot combine a mask with {type(value).__name__}; "
            "wrap a boolean tensor (True = may attend) in qkv.masks.Dense"
        )
    return value


def _classes(full: Tensor, empty: Tensor) -> Tensor:
    """PARTIAL everywhere but where `full` or `empty` says better; given (rows, cols) or (b, h, rows, cols)."""
    out = torch.where(empty, EMPTY, torch.where(full, FULL, PARTIAL)).to(torch.int8)
    return out if out.ndim == 4 else out[None, None]


class _Band(Mask):
    """All pairs with low ≤ q − k ≤ high, where q and k are positions."""

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        assert self.band is not None
        low, high = self.band
        back = q[:, None] - k[None, :]
        seen = torch.ones_like(back, dtype=torch.bool)
        if low > -math.inf:
            seen &= back >= low
        if high < math.inf:
            seen &= back <= high
        return seen[None, None]

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        assert self.band is not None
        low, high = self.band
        least = tiles.q_first[:, None] - tiles.k_last[None, :]
        most = tiles.q_last[:, None] - tiles.k_first[None, :]
        return _classes((least >= low) & (most <= high), (most < low) | (least > high))


@dataclass(frozen=True)
class Causal(_Band):
    """A query sees its own position and everything before it.

    >>> Causal().dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    @property
    def band(self) -> tuple[float, float]:
        return 0, math.inf


@dataclass(frozen=True)
class Window(_Band):
    """A query sees `size` keys, the last of them its own, and `ahead` keys after it.

    ``Window(w)`` is the sliding window of a causal model; ``Window(r + 1, ahead=r)`` is the symmetric
    window of radius r. (Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825.)

    >>> Window(2).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    size: int
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"Window: size is {self.size}, expected at least 1 (the query's own key)")
        if self.ahead < 0:
            raise InputError(f"Window: ahead is {self.ahead}, expected 0 or more keys after the query")

    @property
    def band(self) -> tuple[float, float]:
        return -self.ahead, self.size - 1


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` keys are visible to every query; nothing else.

    A prefix language model (Raffel et al. 2020, arXiv:1910.10683, fig. 4) is ``Prefix(n) | Causal()``.

    >>> (Prefix(2) | Causal()).dense(3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise InputError(f"Prefix: length is {self.length}, expected 0 or more keys")

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return (k < self.length).expand(len(q), -1)[None, None]

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        full = (tiles.k_last < self.length).expand(len(tiles.q_first), -1)
        empty = (tiles.k_first >= self.length).expand(len(tiles.q_first), -1)
        return _classes(full, empty)


class _TensorMask(Mask):
    """A mask made of data: compared by identity, moved to the grid's device when used."""

    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Padding(_TensorMask):
    """Keys that are padding are invisible to every query.

    `lengths` gives the number of real keys of each batch item; they stand at the start (``side="right"``:
    padding on the right) or at the end (``side="left"``). Queries are not masked: use `Document`
    with −1 to mask padding on both sides.

    >>> Padding([1, 2]).dense(1, 3, batch=2)[:, 0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """

    lengths: Sequence[int] | Int[Tensor, " b"]
    side: str = "right"

    def __post_init__(self) -> None:
        lengths = torch.as_tensor(self.lengths)
        if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
            raise InputError(
                f"Padding: lengths is {lengths.dtype} of shape {tuple(lengths.shape)}, "
                "expected one integer a batch item"
            )
        if self.side not in ("left", "right"):
            raise InputError(f"Padding: side is {self.side!r}, expected 'left' or 'right'")
        object.__setattr__(self, "lengths", lengths)

    def _range(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """First visible key and first key after them, shaped (b, 1, 1, 1)."""
        lengths = torch.as_tensor(self.lengths)[:, None, None, None]
        return (0 * lengths, lengths) if self.side == "right" else (grid.n_keys - lengths, 0 * lengths + grid.n_keys)

    def check(self, grid: Grid) -> None:
        lengths = torch.as_tensor(self.lengths)
        if len(lengths) not in (1, grid.batch):
            raise InputError(f"Padding: {len(lengths)} lengths for a batch of {grid.batch}")
        if int(lengths.min()) < 0 or int(lengths.max()) > grid.n_keys:
            raise InputError(
                f"Padding: lengths lie in {int(lengths.min())}..{int(lengths.max())}, "
                f"expected 0..{grid.n_keys} (the number of keys)"
            )

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        start, stop = (x.to(k.device) for x in self._range(grid))
        return ((k >= start) & (k < stop)).expand(-1, -1, len(q), -1)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        start, stop = (x.cpu() for x in self._range(grid))
        shape = (-1, -1, len(tiles.q_first), -1)
        full = (tiles.k_first >= start) & (tiles.k_last < stop)
        empty = (tiles.k_last < start) | (tiles.k_first >= stop)
        return _classes(full.expand(shape), empty.expand(shape))


@dataclass(frozen=True, eq=False)
class Document(_TensorMask):
    """Positions see only positions of their own document; a negative id belongs to none and sees nothing.

    `ids` is (n_keys,) or (batch, n_keys); query i has the id of position i + offset. Several texts packed
    into one row, chunked attention and padding on both sides are all this mask.

    >>> (Document([0, 0, 1]) & Causal()).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """

    ids: Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "..."]

    def __post_init__(self) -> None:
        ids = torch.as_tensor(self.ids)
        if ids.ndim not in (1, 2) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise InputError(
                f"Document: ids is {ids.dtype} of shape {tuple(ids.shape)}, "
                "expected integers of shape (n_keys,) or (batch, n_keys)"
            )
        object.__setattr__(self, "ids", ids if ids.ndim == 2 else ids[None])

    def check(self, grid: Grid) -> None:
        shape = tuple(torch.as_tensor(self.ids).shape)
        if shape[0] not in (1, grid.batch) or shape[1] != grid.n_keys:
            raise InputError(
                f"Document: ids has shape {shape}, expected (1 or {grid.batch}, {grid.n_keys}) for this batch"
            )
        if grid.offset < 0 or grid.n_queries + grid.offset > grid.n_keys:
            raise InputError(
                f"Document: {grid.n_queries} queries cannot have ids among {grid.n_keys} keys; "
                "expected no more queries than keys"
            )

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        ids = torch.as_tensor(self.ids).to(k.device)
        ours, theirs = ids[:, q][:, None, :, None], ids[:, k][:, None, None, :]
        return (ours == theirs) & (ours >= 0)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        ids = torch.as_tensor(self.ids).cpu()
        q_min, q_max = _extremes(ids, tiles.q_first, tiles.q_last)
        k_min, k_max = _extremes(ids, tiles.k_first, tiles.k_last)
        q_min, q_max = q_min[:, None, :, None], q_max[:, None, :, None]
        k_min, k_max = k_min[:, None, None, :], k_max[:, None, None, :]
        full = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
        empty = (q_max < k_min) | (k_max < q_min) | (q_max < 0) | (k_max < 0)
        return _classes(full, empty)


def _extremes(ids: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest id in each span of positions."""
    spans = _spans(first, last)
    return torch.stack([ids[:, s].amin(1) for s in spans], 1), torch.stack([ids[:, s].amax(1) for s in spans], 1)


def _spans(first: Tensor, last: Tensor) -> list[slice]:
    return [slice(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class Dense(_TensorMask):
    """A boolean tensor, True where a query may attend, of a shape that broadcasts to (batch, heads, nq, nk).

    Integer and float masks are refused: libraries disagree on what 1, 0 and −inf mean.

    >>> Dense(torch.tensor([[True, False]])).dense(1, 2)[0, 0].tolist()
    [[True, False]]
    """

    tensor: Bool[Tensor, "..."]

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or self.tensor.dtype != torch.bool:
            kind = self.tensor.dtype if isinstance(self.tensor, Tensor) else type(self.tensor).__name__
            raise InputError(
                f"mask: got {kind}, expected a boolean tensor that is True where a query may attend; "
                "compare an integer mask with == (for example `ids == 1`), "
                "and pass an additive 0 / −inf mask as bias=qkv.biases.Dense(tensor)"
            )
        if not 2 <= self.tensor.ndim <= 4:
            raise InputError(
                f"mask: a tensor of {self.tensor.ndim} dimensions, expected (nq, nk), (heads, nq, nk) "
                "or (batch, heads, nq, nk)"
            )
        missing = 4 - self.tensor.ndim
        object.__setattr__(self, "tensor", self.tensor[(None,) * missing])

    def check(self, grid: Grid) -> None:
        expected = (grid.batch, grid.heads, grid.n_queries, grid.n_keys)
        if any(got not in (1, want) for got, want in zip(self.tensor.shape, expected, strict=True)):
            raise InputError(
                f"mask: shape {tuple(self.tensor.shape)} does not broadcast to "
                f"(batch, heads, queries, keys) = {expected}"
            )

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        seen = self.tensor.to(k.device)
        seen = seen[:, :, q - grid.offset] if seen.shape[2] > 1 else seen.expand(-1, -1, len(q), -1)
        return seen[..., k] if seen.shape[3] > 1 else seen.expand(-1, -1, -1, len(k))

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        some = every = self.tensor
        q_spans = _spans(tiles.q_first - grid.offset, tiles.q_last - grid.offset)
        for dim, spans in ((2, q_spans), (3, _spans(tiles.k_first, tiles.k_last))):
            one = self.tensor.shape[dim] == 1  # one row (column) stands for all of them
            cut = [(slice(None),) * dim + (slice(0, 1) if one else span,) for span in spans]
            some = torch.cat([some[c].any(dim, keepdim=True) for c in cut], dim)
            every = torch.cat([every[c].all(dim, keepdim=True) for c in cut], dim)
        return _classes(every.cpu(), ~some.cpu())


@dataclass(frozen=True, eq=False)
class Predicate(_TensorMask):
    """Whatever a function says: ``sees(batch, head, q, k) -> bool tensor`` on broadcasting index tensors.

    Positions `q` and `k` are key positions as everywhere in this module. Nothing is known of the tiles beforehand,
    so every one is evaluated; memory stays linear.

    >>> even = Predicate(lambda b, h, q, k: (q - k) % 2 == 0)
    >>> even.dense(2, 3)[0, 0].int().tolist()
    [[0, 1, 0], [1, 0, 1]]
    """

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        b = torch.arange(grid.batch, device=k.device)[:, None, None, None]
        h = torch.arange(grid.heads, device=k.device)[None, :, None, None]
        seen = self.sees(b, h, q[None, None, :, None], k[None, None, None, :])
        return seen.expand(*seen.shape[:-2], len(q), len(k))


@dataclass(frozen=True)
class Shifted(Mask):
    """`mask` with query 0 at position `offset` instead of bottom-right: for caches with room to spare."""

    mask: Mask
    offset: int

    def _grid(self, grid: Grid) -> Grid:
        return replace(grid, offset=self.offset)

    def check(self, grid: Grid) -> None:
        self.mask.check(self._grid(grid))

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.mask.visible(q - grid.offset + self.offset, k, self._grid(grid))

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        move = self.offset - grid.offset
        moved = replace(tiles, q_first=tiles.q_first + move, q_last=tiles.q_last + move)
        return self.mask.classify(moved, self._grid(grid))


@dataclass(frozen=True)
class And(Mask):
    """Visible where both masks say so."""

    left: Mask
    right: Mask

    @property
    def band(self) -> tuple[float, float] | None:
        if self.left.band is None or self.right.band is None:
            return None
        (a, b), (c, d) = self.left.band, self.right.band
        return max(a, c), min(b, d)

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.left.visible(q, k, grid) & self.right.visible(q, k, grid)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        return torch.minimum(self.left.classify(tiles, grid), self.right.classify(tiles, grid))


@dataclass(frozen=True)
class Or(Mask):
    """Visible where either mask says so."""

    left: Mask
    right: Mask

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.left.visible(q, k, grid) | self.right.visible(q, k, grid)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        return torch.maximum(self.left.classify(tiles, grid), self.right.classify(tiles, grid))


@dataclass(frozen=True)
class Not(Mask):
    """Visible where the mask says not."""

    mask: Mask

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def visible(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return ~self.mask.visible(q, k, grid)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        return FULL - self.mask.classify(tiles, grid)
