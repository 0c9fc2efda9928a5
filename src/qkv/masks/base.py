"""`Mask`, the base class of all masks, which has visible pairs and a block status for each tile; and &, | and ~."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv._above import above
from qkv._contract import Definition, with_attributes
from qkv.errors import InputError, at_least_one, kind_of
from qkv.masks.geometry import EMPTY, FULL, PARTIAL, Grid, Region, Tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Mask(Definition):
    """Base of all masks. One method is required: `sees`, which returns the visible pairs (True means may attend).

    `qkv.testing.check_mask` checks an object.

    >>> class Even(Mask):
    ...     def sees(self, b, h, q, k, grid):
    ...         return k % 2 == 0
    >>> Even().dense(1, 4)[0, 0, 0].int().tolist()
    [1, 0, 1, 0]
    """

    definitions: ClassVar = {
        "sees": (
            "classify", "band", "cacheable", "visible", "visible_keys", "key_mask", "factors", "alternatives",
            "specialize",
        )
    }  # fmt: skip

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Return whether queries at positions `q` of batch items `b` and heads `h` may attend to keys `k`.

        The arguments are integer tensors that broadcast against one another, as in FlexAttention's ``mask_mod``. The
        result is a boolean tensor; dimensions that it does not depend on may have size 1.
        """
        raise InputError(
            f"{type(self).__name__}: no method sees(b, h, q, k, grid); a Mask needs one, which returns True where "
            "a query may attend"
        )

    # --- optional shortcuts; a subclass that overrides `sees` loses the inherited ones --------------------------------

    def classify(self, tiles: Tiles, grid: Grid) -> Int[Tensor, "b h rows cols"]:
        """Return the block status (EMPTY, PARTIAL or FULL) of each tile (b and h may be 1); PARTIAL is always right.

        That of a `key_mask` follows from it; all tiles of other masks are PARTIAL by default.
        """
        rows, columns = len(tiles.q_first), len(tiles.k_first)
        keys = self.key_mask(replace(grid, device=torch.device("cpu")))
        if keys is None:
            return torch.full((1, 1, rows, columns), PARTIAL, dtype=torch.int8)
        full, empty = (x[:, None, None] for x in full_and_empty(keys, tiles.k_first, tiles.k_last))
        return tile_status(full, empty).expand(-1, -1, rows, -1)

    @property
    def band(self) -> tuple[float, float] | None:
        """``(low, high)`` if exactly the pairs with low ≤ q − k ≤ high are visible, else None."""
        return None

    @property
    def cacheable(self) -> bool:
        """Whether the mask is immutable and compares by value, so that results computed from it may be cached.

        True for a frozen dataclass of numbers, strings and such masks; tensors and functions may change.
        """
        if not is_dataclass(self) or not self.__dataclass_params__.frozen or not self.__dataclass_params__.eq:
            return False
        named = {f.name for f in fields(self)}
        return named.issuperset(vars(self)) and all(_is_value(getattr(self, name)) for name in named)

    def key_mask(self, grid: Grid) -> Bool[Tensor, "#b nk"] | None:
        """Return the visible keys, if visibility depends only on the batch item and the key; else None."""
        return None

    def factors(self) -> tuple[Mask, ...]:
        """Return the masks of which this one is the intersection (`And`); only the mask itself by default."""
        return (self,)

    def alternatives(self) -> tuple[Mask, ...]:
        """Return the masks of which this one is the union (`Or`); only the mask itself by default."""
        return (self,)

    def specialize(self, grid: Grid) -> Mask:
        """Return the mask for this grid alone, with a `sees` that can be traced: no transfers, draws or caches."""
        return self

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the mask does not fit `grid`."""

    # --- derived methods ----------------------------------------------------------------------------------------------

    def is_visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Return `sees`, with a check of its result."""
        visible = self.sees(b, h, q, k, grid)
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            name, got = type(self).__name__, kind_of(visible)
            raise InputError(f"{name}: sees returned {got}, expected a boolean tensor, True where a query may attend")
        return visible

    def visible(self, region: Region, grid: Grid) -> Bool[Tensor, "b h q k"]:
        """Return the visible pairs of a region; b and h may be 1."""
        b, h, q, k = region.indices(grid)
        visible = self.is_visible(b, h, q, k, grid)
        visible = visible[(None,) * (4 - visible.ndim)]
        return visible.expand(*visible.shape[:2], len(q), len(k))

    def dense(self, n_queries: int, n_keys: int, *, batch: int = 1, heads: int = 1) -> Bool[Tensor, "b h nq nk"]:
        """Return the mask as a boolean tensor, True where a query may attend; b and h are 1 where all are the same.

        >>> from qkv.masks import Causal
        >>> Causal().dense(2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        """
        grid = Grid.of(n_queries, n_keys, batch, heads)
        self.check(grid)
        return self.visible(Region(slice(0, n_queries), slice(0, n_keys)), grid)

    def visible_keys(self, grid: Grid) -> Int[Tensor, "b h nq"]:
        """Return how many keys each query may attend to, in linear memory; b and h may be 1.

        >>> from qkv.masks import Window
        >>> Window(2).visible_keys(Grid.of(4, 4))[0, 0].tolist()
        [1, 2, 2, 2]
        """
        if self.band is None:
            return _count(self, grid)
        low, high = in_reach(self.band, grid.n_queries + grid.n_keys)
        queries = grid.rows(0, grid.n_queries)
        last, first = (queries - low).clamp(max=grid.n_keys - 1), (queries - high).clamp(min=0)
        return (last - first + 1).clamp_(min=0)[None, None]

    def sparsity(self, n_queries: int, n_keys: int | None = None, *, batch: int = 1, heads: int = 1) -> float:
        """Return the fraction of masked pairs, counted exactly in linear memory; n_keys is n_queries by default.

        >>> from qkv.masks import Causal
        >>> Causal().sparsity(4)
        0.375
        """
        n_keys = n_queries if n_keys is None else n_keys
        at_least_one("sparsity", n_queries=n_queries, n_keys=n_keys, batch=batch, heads=heads)
        grid = Grid.of(n_queries, n_keys, batch, heads)
        self.check(grid)
        return 1 - float(self.visible_keys(grid).double().mean()) / grid.n_keys

    def plot(
        self, n_queries: int, n_keys: int | None = None, *, ax: Axes | None = None, tile: int | None = None
    ) -> Axes:
        """Draw the mask over n_queries × n_keys pairs (square by default) and return the matplotlib axes.

        Up to 512 tokens, each cell is a pair; for more, it is the visible fraction of a tile. `tile` draws the block
        status of tiles of that size. Draws the first batch item and head.
        """
        axes: Axes = above("mask", self, n_queries, n_queries if n_keys is None else n_keys, ax, tile)
        return axes

    def __and__(self, other: Mask) -> Mask:
        return And(self, _as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _as_mask(other))

    def __invert__(self) -> Mask:
        return Not(self)


def _as_mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise InputError(
            f"mask is combined with {kind_of(value)}, expected another mask; "
            "wrap a boolean tensor (True = may attend) in qkv.masks.Dense"
        )
    return value


def whole(mask: Mask, name: str, least: float, of: str) -> None:
    """Make a number of a mask an int; raise `InputError` if it is not whole, or less than `least`."""
    value = getattr(mask, name)
    try:
        number = value if isinstance(value, int | torch.SymInt) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        kind, range_ = type(mask).__name__, f", at least {least}" * math.isfinite(least)
        raise InputError(f"{kind}: {name} is {value!r}, expected a whole number{range_} ({of})")
    object.__setattr__(mask, name, number)


def check_pairs(name: str, ndim: int, tensor: Tensor, grid: Grid) -> None:
    """Raise `InputError` for a tensor that does not broadcast to all pairs, or where x of (x, nq, nk) is ambiguous."""
    expected = (grid.batch, grid.heads, grid.n_queries, grid.n_keys)
    if any(got not in (1, want) for got, want in zip(tensor.shape, expected, strict=True)):
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to (batch, heads, queries, keys) = "
            f"{expected}"
        )
    if ndim == 3 and len(tensor[0]) > 1 and grid.batch == grid.heads == tensor.shape[1]:
        raise InputError(
            f"{name} has the ambiguous shape {tuple(tensor.shape[1:])}, for {grid.batch} batch items and "
            f"{grid.heads} heads; pass x[:, None] for one per batch item, x[None] for one per head"
        )


def _is_value(x: object) -> bool:
    if isinstance(x, Mask):
        return x.cacheable
    if isinstance(x, tuple):
        return all(map(_is_value, x))
    return x is None or isinstance(x, int | float | str)


def in_reach(band: tuple[float, float], far: int) -> tuple[int, int]:
    """Cut a band at distances that no pair has; its width is 0 if it is empty."""
    low, high = math.ceil(min(max(band[0], -far), far)), math.floor(min(max(band[1], -far), far))
    return low, max(high, low - 1)


def whole_status(mask: Mask, grid: Grid, size: int) -> Int[Tensor, "b h rows cols"]:
    """Return `classify` for all tiles of `size` × `size`; b and h are 1 where all are the same."""
    status = mask.classify(Tiles.of(grid, size, size), grid).to(grid.device)
    probe = mask.visible(Region(slice(0, 1), slice(0, 1)), grid)
    return status.expand(*torch.broadcast_shapes(status.shape[:2], probe.shape[:2]), -1, -1).clone()


def partial_rows(
    mask: Mask, grid: Grid, size: int, status: Int[Tensor, "b h rows cols"]
) -> Iterator[tuple[int, Int[Tensor, " n"], Bool[Tensor, "b h n {size} {size}"]]]:
    """Evaluate the PARTIAL tiles of `status`, one row of tiles at a time, and make their status exact.

    Yields the number of the row, the columns with a PARTIAL tile, and the pairs of the tiles in these columns: True
    where visible, False beyond the last query or key.
    """
    specialized, partial = mask.specialize(grid), (status == PARTIAL).any(0).any(0)
    b, h, *_ = Region(slice(0, 1), slice(0, 1)).indices(grid)
    b, h = b[: len(status)], h[: status.shape[1]]  # the others are equal
    inside = torch.arange(size, device=grid.device)
    for row in partial.any(1).nonzero()[:, 0].tolist():
        columns = partial[row].nonzero()[:, 0]
        queries, keys = row * size + inside, (columns[:, None] * size + inside).flatten()
        real = (queries < grid.n_queries)[:, None] & (keys < grid.n_keys)
        positions = queries.clamp(max=grid.n_queries - 1)[:, None] + grid.offset
        pairs = specialized.is_visible(b, h, positions, keys.clamp(max=grid.n_keys - 1), grid)
        pairs = pairs[(None,) * (4 - pairs.ndim)].expand(*status.shape[:2], size, len(keys))
        visible, full = (x.unflatten(3, (-1, size)).transpose(2, 3) for x in (pairs & real, pairs | ~real))
        exact = torch.where(full.all(4).all(3), FULL, torch.where(visible.any(4).any(3), PARTIAL, EMPTY))
        status[:, :, row, columns] = exact.to(status)
        yield row, columns, visible


def _count(mask: Mask, grid: Grid, tile: int = 256) -> Int[Tensor, "b h nq"]:
    status, widths = whole_status(mask, grid, tile), grid.columns(0, grid.n_keys).split(tile)
    total = torch.zeros(*status.shape[:3], tile, dtype=torch.long, device=grid.device)
    for row, columns, visible in partial_rows(mask, grid, tile, status):
        total[:, :, row] = visible.sum(4).masked_fill_(status[:, :, row, columns, None] == FULL, 0).sum(2)
    full = (status == FULL) * torch.tensor([len(keys) for keys in widths], device=grid.device)
    return (total + full.sum(-1, keepdim=True)).flatten(2)[..., : grid.n_queries]


def tile_status(full: Tensor, empty: Tensor) -> Tensor:
    """Return the block status of tiles, (rows, cols) or (b, h, rows, cols): PARTIAL unless `full` or `empty`."""
    out = torch.where(empty, EMPTY, torch.where(full, FULL, PARTIAL)).to(torch.int8)
    return out if out.ndim == 4 else out[None, None]


def full_and_empty(positions: Bool[Tensor, "b n"], first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each span of positions, (b, spans), whether all of them are True, and whether none is."""
    n = positions.shape[1]
    before = torch.nn.functional.pad(positions.cumsum(1), (1, 0))
    count = before[:, (last + 1).clamp(0, n)] - before[:, first.clamp(0, n)]
    return count == last - first + 1, count == 0


@dataclass(frozen=True)
class _Two(Mask):
    """Base of `And` and `Or`."""

    left: Mask
    right: Mask

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def specialize(self, grid: Grid) -> Mask:
        return type(self)(self.left.specialize(grid), self.right.specialize(grid))


class OtherGrid(Mask):
    """Base of masks that show a pair if `mask` shows the pair at other positions, on another grid."""

    mask: Mask

    def _grid(self, grid: Grid) -> Grid:
        """Return the grid of `mask`."""
        raise NotImplementedError

    def _at(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys in the grid of `mask`."""
        raise NotImplementedError

    def check(self, grid: Grid) -> None:
        self.mask.check(self._grid(grid))

    def specialize(self, grid: Grid) -> Mask:
        whole = self._grid(grid)
        mask = self.mask.specialize(whole)
        return Predicate(lambda b, h, q, k: mask.sees(b, h, *self._at(q, k, grid), whole))

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.mask.is_visible(b, h, *self._at(q, k, grid), self._grid(grid))

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        q_first, k_first = self._at(tiles.q_first, tiles.k_first, grid)
        q_last, k_last = self._at(tiles.q_last, tiles.k_last, grid)
        return self.mask.classify(Tiles(q_first, q_last, k_first, k_last), self._grid(grid))


@dataclass(frozen=True)
class Shifted(OtherGrid):
    """`mask` with query 0 at position `offset` instead of bottom-right alignment: for buffers with unused rows.

    >>> from qkv.masks import Causal
    >>> Shifted(Causal(), 1).dense(2, 4)[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0]]
    """

    mask: Mask
    offset: int

    def __post_init__(self) -> None:
        whole(self, "offset", -math.inf, "the position of query 0")

    def _grid(self, grid: Grid) -> Grid:
        return replace(grid, offset=self.offset)

    def _at(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return q + (self.offset - grid.offset), k


@dataclass(frozen=True)
class Submask(OtherGrid):
    """`mask` of a whole matrix `grid`, restricted to a rectangle of it.

    Adding `down` to query positions and `right` to key positions of the rectangle gives those in the whole matrix.
    """

    mask: Mask
    grid: Grid
    down: int
    right: int

    def _grid(self, grid: Grid) -> Grid:
        return self.grid

    def _at(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return q + self.down, k + self.right

    def check(self, grid: Grid) -> None:
        """Check nothing: the mask has been checked against its own grid."""

    def visible(self, region: Region, grid: Grid) -> Tensor:
        down, right = self.down + grid.offset - self.grid.offset, self.right  # shift of rows, not of positions
        return self.mask.visible(region.moved(down, right, self.grid.offset), self.grid)


def mask_of_part(mask: Mask, grid: Grid, part: Region) -> Mask | None:
    """Return the mask of a rectangle, in a matrix of the rectangle's size; None if all its pairs are visible."""
    if bool((mask.classify(Tiles.of_spans([part.rows], [part.columns], grid), grid) == FULL).all()):
        return None
    n_queries, n_keys = part.rows.stop - part.rows.start, part.columns.stop - part.columns.start
    # A matrix of this size has query 0 at position n_keys − n_queries.
    down, right = part.rows.start + grid.offset - (n_keys - n_queries), part.columns.start
    unchanged = mask.band is not None and down == right  # a band depends only on distances, which are the same
    return mask if unchanged else Submask(mask, grid, down, right)


class And(_Two):
    """Intersection: visible where both masks are visible.

    >>> from qkv.masks import Causal, Window
    >>> (Causal() & Window(2)).dense(1, 4)[0, 0, 0].int().tolist()
    [0, 0, 1, 1]
    """

    @property
    def band(self) -> tuple[float, float] | None:
        if self.left.band is None or self.right.band is None:
            return None
        (a, b), (c, d) = self.left.band, self.right.band
        return max(a, c), min(b, d)

    def factors(self) -> tuple[Mask, ...]:
        return self.left.factors() + self.right.factors()

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.left.is_visible(b, h, q, k, grid) & self.right.is_visible(b, h, q, k, grid)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        return torch.minimum(self.left.classify(tiles, grid), self.right.classify(tiles, grid))


class Or(_Two):
    """Union: visible where either mask is visible.

    >>> from qkv.masks import Prefix, Window
    >>> (Prefix(1) | Window(1)).dense(1, 4)[0, 0, 0].int().tolist()
    [1, 0, 0, 1]
    """

    def alternatives(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.left.is_visible(b, h, q, k, grid) | self.right.is_visible(b, h, q, k, grid)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        return torch.maximum(self.left.classify(tiles, grid), self.right.classify(tiles, grid))


@dataclass(frozen=True)
class Not(Mask):
    """Complement: visible where the mask is not.

    >>> from qkv.masks import Prefix
    >>> (~Prefix(1)).dense(1, 4)[0, 0, 0].int().tolist()
    [0, 1, 1, 1]
    """

    mask: Mask

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def specialize(self, grid: Grid) -> Mask:
        return Not(self.mask.specialize(grid))

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return ~self.mask.is_visible(b, h, q, k, grid)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        return FULL - self.mask.classify(tiles, grid)


@dataclass(frozen=True)
class Blockwise(OtherGrid):
    """A mask over blocks of `size` tokens: a pair is visible where `mask` is visible for its pair of blocks.

    Positions 0 … size − 1 are block 0 and so on; the last block may be short.

    >>> from qkv.masks import Causal
    >>> Blockwise(Causal(), 2).dense(4, 4)[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """

    mask: Mask
    size: int

    def __post_init__(self) -> None:
        whole(self, "size", 1, "tokens per block")

    def _grid(self, grid: Grid) -> Grid:
        first, last = grid.offset // self.size, (grid.offset + grid.n_queries - 1) // self.size
        return replace(grid, n_queries=last - first + 1, n_keys=-(-grid.n_keys // self.size), offset=first)

    def _at(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return q // self.size, k // self.size


class TensorMask(Mask):
    """Base of masks that hold data: compared by identity, moved to the grid's device when used."""

    __hash__ = object.__hash__

    @property
    def cacheable(self) -> bool:
        return False

    def specialize(self, grid: Grid) -> Mask:
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return with_attributes(self, **{name: x.to(grid.device) for name, x in tensors.items()})


@dataclass(frozen=True, eq=False)
class Predicate(TensorMask):
    """A mask defined by ``function(batch, head, q, k) -> bool tensor`` of broadcasting index tensors.

    Both `q` and `k` are key positions, as everywhere in this module. The block status of tiles is unknown, so every
    tile is evaluated; memory is still linear.

    >>> even = Predicate(lambda b, h, q, k: (q - k) % 2 == 0)
    >>> even.dense(2, 3)[0, 0].int().tolist()
    [[0, 1, 0], [1, 0, 1]]
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.function(b, h, q, k)


SHOWN = 4  # the longest sequence that an expression writes out


def expression(part: object) -> str:
    """A mask, or another part of a composition, as an expression without defaults: Causal() & Window(size=4)."""
    if isinstance(part, And):
        return " & ".join(f"({expression(x)})" if isinstance(x, Or) else expression(x) for x in (part.left, part.right))
    if isinstance(part, Or):
        return f"{expression(part.left)} | {expression(part.right)}"
    if isinstance(part, Not):
        inner = expression(part.mask)
        return f"~({inner})" if isinstance(part.mask, And | Or) else f"~{inner}"
    if isinstance(part, Tensor):
        return f"tensor {' × '.join(map(str, part.shape)) or 'of one number'}"
    if isinstance(part, tuple | list) and len(part) > SHOWN:
        return f"{len(part)} values"
    if not is_dataclass(part):
        described = type(part).__name__ if type(part).__repr__ is object.__repr__ else repr(part)
        return getattr(part, "__name__", described)
    given = ((f.name, f.default, getattr(part, f.name)) for f in fields(part) if f.init)
    named = (f"{name}={expression(x)}" for name, default, x in given if isinstance(x, Tensor) or x != default)
    return f"{type(part).__name__}({', '.join(named)})"
