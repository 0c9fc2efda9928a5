"""Biases: what happens to a score after query and key have met and before the mask.

Each bias maps a tile of scores to a tile of scores (`apply`). Several are given as a tuple and apply in that order.
An `Additive` bias adds a tensor (`tile`), which fused kernels can take. Before a kernel sees it, a bias is bound to its
call (`bound`): ours then are tensors by pair, by distance, or by query and distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.contract import Definition, learned_tensors, overrides, require
from qkv.errors import InputError
from qkv.masks import Grid, Region
from qkv.masks.base import unambiguous

__all__ = [
    "ALiBi",
    "Additive",
    "Bias",
    "ByDistance",
    "Dense",
    "RelativePosition",
    "SoftCap",
    "T5Bias",
    "alibi_slopes",
    "t5_bucket",
]


class Bias(Definition):
    """Base of all biases: any function of a score and its place. One method is required: `apply`.

    A bias that adds something to the score inherits from `Additive` instead, which fused kernels can take. Gradients
    come from autograd on the tile, of every `nn.Parameter` among the object's attributes, too.
    `qkv.testing.check_bias` checks an object.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Halved(Bias):
    ...     def apply(self, scores, region):
    ...         return scores / 2
    >>> from qkv import attend
    >>> q = k = torch.ones(1, 1, 1, 4)
    >>> attend(q, k, k, return_lse=True)[1].item(), attend(q, k, k, bias=Halved(), return_lse=True)[1].item()
    (2.0, 1.0)
    """

    definitions: ClassVar = {"apply": ("at", "gradients", "by_score", "by_head", "part")}
    by_score = False
    """Whether the bias depends on the score alone, not on where its query and key stand."""
    by_head = True
    """Whether something in the object differs between heads. `apply` is then always given all query heads."""
    by_distance: Tensor | None = None
    """A number for each distance, (heads or 1, nq + nk − 1), if that is all the bound bias adds: see `ByDistance`."""
    value_table: Tensor | None = None
    """Vectors added to the values by clipped distance, (heads, 2 reach + 1, dv): see `RelativePosition`."""

    @property
    def by_query(self) -> bool:
        """Whether the bias depends on the vector of the query."""
        return overrides(self, Bias, "bound")

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the bias cannot be laid over `grid`."""

    def require(self) -> None:
        """Raise `InputError` if the bias is incomplete."""
        require(self, Bias, "apply", "scores, region", "the scores of a region of the matrix with the bias in them")

    def bound(self, q: Float[Tensor, "b h nq d"], grid: Grid, scale: float) -> Bias:
        """The bias for these queries, already projected, on this grid; differentiable. `scale` multiplies q·k."""
        return self

    # --- of a bound bias ---------------------------------------------------------------------------------------------

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        """The scores of a region with the bias in them, from torch operations that act on each score alone.

        `region.queries` (q, 1) and `region.keys` (k,) are the positions of its queries and keys, and ``region.of(x)``
        its part of a tensor (b, h, nq, nk) whose dimensions of size 1 stand for all. The region has all query heads,
        so a parameter for each head has shape (heads, 1, 1). Nothing may be changed in place. −inf hides a pair.
        """
        raise InputError(f"{type(self).__name__}: no method apply(scores, region)")

    # --- shortcuts: none is needed; a subclass that redefines `apply` loses those it inherits -------------------------

    def gradients(
        self, before: Float[Tensor, "b h q k"], region: Region, slope: Float[Tensor, "b h q k"], learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of Σ slope · apply(before) in the scores `before` and each of `learned`."""
        before = before.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.apply(before, region), (before, *learned), slope, allow_unused=True)

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score of query i (its row, not its position) and key j with the bias in it, as in a ``score_mod``.

        Only for FlexAttention, `choose_keys` and masks whose tiles are gathered.
        """
        raise InputError(f"{type(self).__name__}: no method at(score, b, h, i, j)")

    def part(self, region: Region) -> Bias | None:
        """The bound bias of a rectangle of the matrix, whose rows and columns count from 0; None if it has none."""
        return None

    # --- the tensors of a bound bias, by name -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that may want a gradient; of a user's own bias, those among its attributes that require one."""
        return learned_tensors(self)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Bias:
        """The same bias made of other tensors; one of a user's own keeps its own."""
        return self


class Additive(Bias):
    """Base of the biases that add something to a score. One method is required: `tile`.

    >>> class Diagonal(Additive):
    ...     def tile(self, region):
    ...         return (region.queries == region.keys).float()[None, None]
    >>> from qkv import attend
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> attend(q, q, q, bias=Diagonal(), return_weights=True)[1][0, 0, 0].tolist()
    [0.7310585975646973, 0.2689414322376251]
    """

    definitions: ClassVar = {
        "tile": ("at", "gradients", "by_distance", "by_head", "part", "tensors", "with_tensors", "add_gradient"),
    }
    by_head = True
    by_distance = None
    add_gradient: Callable[[Tensor, Region, Tensor], None] | None = None
    """``add_gradient(total, region, slope)`` adds to `total`, shaped like the one tensor of the bias, its gradient."""

    def require(self) -> None:
        require(self, Additive, "tile", "region", "what is added to the scores of a region")
        if overrides(self, Additive, "apply"):
            raise InputError(
                f"{type(self).__name__}: an Additive bias overrides apply, but kernels add its tile; inherit from "
                "qkv.biases.Bias, or give tile(region) alone"
            )

    def tile(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """What is added to the scores of a region, whose places are as in `Bias.apply`; −inf hides a pair.

        Dimensions of size 1 stand for all.
        """
        raise InputError(f"{type(self).__name__}: no method tile(region)")

    def added(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """`tile`, with a check of what it returned; missing dimensions stand for all."""
        made = self.tile(region)
        if not isinstance(made, Tensor) or made.ndim > 4 or not made.dtype.is_floating_point:
            got = f"{made.dtype} of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise InputError(
                f"{type(self).__name__}: tile returned {got}, expected floats that broadcast to (b, h, q, k)"
            )
        return made[(None,) * (4 - made.ndim)]

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        return scores + self.added(region).to(scores)

    def gradients(
        self, before: Float[Tensor, "b h q k"], region: Region, slope: Float[Tensor, "b h q k"], learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        if not learned:
            return (slope,)
        with torch.enable_grad():
            added = self.added(region)
            return slope, *torch.autograd.grad(
                added, learned, slope.sum_to_size(added.shape).to(added), allow_unused=True
            )

    at, part, tensors, with_tensors = Bias.at, Bias.part, Bias.tensors, Bias.with_tensors


class Tensorial(Additive):
    """Base of the additive biases of this package once bound: made of one tensor, which may want a gradient."""

    tensor: Tensor
    by_head = False

    def tensors(self) -> dict[str, Tensor]:
        return {"tensor": self.tensor}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Tensorial:
        made: Any = self
        bound: Tensorial = replace(made, **tensors)
        return bound


@dataclass(frozen=True)
class SoftCap(Bias):
    """Scores bounded smoothly: cap · tanh(score / cap) (Gemma 2, arXiv:2408.00118, §2).

    >>> SoftCap(2.0).apply(torch.tensor([[[[1e9]]]]), Region(slice(0, 1), slice(0, 1))).item()
    2.0
    """

    cap: float
    by_score = True
    by_head = False

    def __post_init__(self) -> None:
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise InputError(f"SoftCap: cap is {self.cap}, expected a positive number")

    def apply(self, scores: Tensor, region: Region) -> Tensor:
        return torch.tanh(scores / self.cap) * self.cap

    def gradients(
        self, before: Tensor, region: Region, slope: Tensor, learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return (slope * (1 - torch.tanh(before / self.cap).square()),)

    def part(self, region: Region) -> SoftCap:
        return self

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class Dense(Tensorial):
    """A float tensor added to the scores, of a shape that broadcasts to (batch, heads, queries, keys).

    −inf hides a pair. Learnable if it requires a gradient.

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> v = torch.ones(1, 1, 1, 8)
    >>> attend(q, k, v, bias=Dense(torch.tensor([[3.0]])), return_lse=True)[1].item()
    3.0
    """

    tensor: Float[Tensor, "..."]
    ndim: int = field(init=False, repr=False)  # of the tensor as it was given

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or not self.tensor.dtype.is_floating_point:
            kind = self.tensor.dtype if isinstance(self.tensor, Tensor) else type(self.tensor).__name__
            raise InputError(
                f"bias: got {kind}, expected a float tensor to add to the scores; "
                "a boolean mask goes to mask=qkv.masks.Dense(tensor)"
            )
        if not 2 <= self.tensor.ndim <= 4:
            raise InputError(
                f"bias: a tensor of {self.tensor.ndim} dimensions, expected (nq, nk), (heads, nq, nk) "
                "or (batch, heads, nq, nk)"
            )
        object.__setattr__(self, "ndim", self.tensor.ndim)
        object.__setattr__(self, "tensor", self.tensor[(None,) * (4 - self.tensor.ndim)])

    def check(self, grid: Grid) -> None:
        expected = (grid.batch, grid.heads, grid.n_queries, grid.n_keys)
        unambiguous("bias", self.ndim, self.tensor, grid)
        if any(got not in (1, want) for got, want in zip(self.tensor.shape, expected, strict=True)):
            raise InputError(
                f"bias: shape {tuple(self.tensor.shape)} does not broadcast to "
                f"(batch, heads, queries, keys) = {expected}"
            )

    def tile(self, region: Region) -> Tensor:
        return region.of(self.tensor)

    def part(self, region: Region) -> Dense:
        return Dense(region.of(self.tensor))

    def add_gradient(self, total: Tensor, region: Region, slope: Tensor) -> None:
        inside = region.of(total)
        inside += slope.sum_to_size(inside.shape)

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        where = (x if size > 1 else x * 0 for x, size in zip((b, h, i, j), self.tensor.shape, strict=True))
        return score + self.tensor[tuple(where)]


@dataclass(frozen=True, eq=False)
class ByDistance(Tensorial):
    """A number for each distance p − j of query position and key: `tensor` is (heads or 1, nq + nk − 1).

    Entry t is added at distance t − (nk − 1) + (nk − nq): row i, key j find theirs at i − j + nk − 1. O(n) memory;
    what `ALiBi` and `T5Bias` become. Learnable.

    >>> ByDistance(torch.arange(3.0)[None]).tile(Region(slice(0, 2), slice(0, 2)))[0, 0].tolist()
    [[1.0, 0.0], [2.0, 1.0]]
    """

    tensor: Float[Tensor, "h distances"]
    n_keys: int | None = None  # known once bound
    by_query = False

    @property
    def by_distance(self) -> Tensor:  # type: ignore[override]
        return self.tensor

    def part(self, region: Region) -> ByDistance:
        return ByDistance(self.tensor[:, self.span(region)], region.columns.stop - region.columns.start)

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or self.tensor.ndim != 2 or not self.tensor.dtype.is_floating_point:
            raise InputError("ByDistance: expected a float tensor (heads or 1, n_queries + n_keys − 1)")

    def check(self, grid: Grid) -> None:
        expected = (grid.heads, grid.n_queries + grid.n_keys - 1)
        if self.tensor.shape[0] not in (1, grid.heads) or self.tensor.shape[1] != expected[1]:
            raise InputError(
                f"ByDistance: shape {tuple(self.tensor.shape)}, expected (1 or heads, n_queries + n_keys − 1) = "
                f"{expected}"
            )

    def bound(self, q: Tensor, grid: Grid, scale: float) -> ByDistance:
        wide = torch.promote_types(torch.promote_types(q.dtype, self.tensor.dtype), torch.float32)
        return replace(self, tensor=self.tensor.to(q.device, wide), n_keys=grid.n_keys)

    def span(self, region: Region) -> slice:
        """Where the distances of a region lie: from its top right corner to its bottom left."""
        n_keys = (self.tensor.shape[1] + 1) // 2 if self.n_keys is None else self.n_keys
        start = region.rows.start - (region.columns.stop - 1) + n_keys - 1
        return slice(
            start, start + region.rows.stop - region.rows.start + region.columns.stop - region.columns.start - 1
        )

    def _heads(self, region: Region) -> Tensor:
        return self.tensor[region.heads] if len(self.tensor) > 1 else self.tensor

    def hankel(self, region: Region) -> Float[Tensor, "1 h q k"]:
        """The region with its columns reversed, as a view: entry (i, c) is that of row i and key stop − 1 − c."""
        span = self._heads(region)[:, self.span(region)]
        size = (1, len(span), region.rows.stop - region.rows.start, region.columns.stop - region.columns.start)
        return span.as_strided(size, (0, span.stride(0), span.stride(1), span.stride(1)), span.storage_offset())

    def tile(self, region: Region) -> Tensor:
        return self.hankel(region).flip(-1)

    def add_gradient(self, total: Tensor, region: Region, slope: Tensor) -> None:
        inside = total[region.heads] if len(total) > 1 else total
        slope = slope.sum(0).sum_to_size(len(inside), *slope.shape[2:]).flip(-1)
        _, rows, columns = slope.shape
        # Row i moved i to the right: all of one distance then stand in one column.
        skewed = (
            torch.nn.functional.pad(slope, (0, rows)).flatten(1)[:, :-rows].unflatten(1, (rows, columns + rows - 1))
        )
        inside[:, self.span(region)] += skewed.sum(1)

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert self.n_keys is not None
        return score + self.tensor[h if len(self.tensor) > 1 else h * 0, i - j + self.n_keys - 1]


def distances(grid: Grid) -> Int[Tensor, " distances"]:
    """p − j, query position minus key, in the order of `ByDistance`."""
    return torch.arange(grid.n_queries + grid.n_keys - 1, device=grid.device) - (grid.n_keys - 1) + grid.offset


def alibi_slopes(heads: int, dtype: torch.dtype | None = None) -> Float[Tensor, " heads"]:
    """2^(−8(i+1)/H) for H a power of two; else those of the next power below, and every other one of the next above.

    In torch's default dtype unless one is given.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if heads < 1:
        raise InputError(f"ALiBi: {heads} heads, expected at least 1")
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=dtype)


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """`−m |p − j|`: a penalty linear in the distance, with one slope m a head (Press et al. 2022, arXiv:2108.12409).

    `slopes` (heads,) are those of the paper, for any number of heads, unless given; learnable if they require a
    gradient. No n × n tensor is formed.

    >>> q = k = torch.zeros(1, 1, 3, 4)
    >>> from qkv import attend
    >>> weights = attend(q, k, k, bias=ALiBi(torch.tensor([0.7])), return_weights=True)[1]
    >>> [round(x, 3) for x in weights[0, 0, 2].tolist()]
    [0.141, 0.285, 0.574]
    """

    slopes: Float[Tensor, " heads"] | None = None
    by_query = False

    def __post_init__(self) -> None:
        if self.slopes is not None and (not isinstance(self.slopes, Tensor) or self.slopes.ndim != 1):
            raise InputError("ALiBi: slopes is not a tensor (heads,); expected one slope a query head, or None")

    def check(self, grid: Grid) -> None:
        if self.slopes is not None and len(self.slopes) != grid.heads:
            raise InputError(f"ALiBi: {len(self.slopes)} slopes for {grid.heads} query heads")

    def bound(self, q: Tensor, grid: Grid, scale: float) -> ByDistance:
        wide = torch.promote_types(q.dtype, torch.float32)
        slopes = alibi_slopes(grid.heads, wide) if self.slopes is None else self.slopes
        return ByDistance(-slopes.to(q.device, wide)[:, None] * distances(grid).abs(), grid.n_keys)


def t5_bucket(back: Int[Tensor, "*n"], buckets: int, max_distance: int, *, bidirectional: bool) -> Int[Tensor, "*n"]:
    """The bucket of each distance p − j: half of them exact, half logarithmic up to `max_distance`.

    >>> t5_bucket(torch.tensor([0, 3, 8, 50, 500, -3]), 32, 128, bidirectional=True).tolist()
    [0, 3, 8, 13, 15, 19]
    """
    offset = torch.zeros_like(back)
    if bidirectional:
        buckets //= 2
        offset, back = torch.where(back < 0, buckets, 0), back.abs()
    back = back.clamp(min=0)
    exact = buckets // 2
    far = torch.log(back.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    return offset + torch.where(back < exact, back, (exact + far.to(back.dtype)).clamp(max=buckets - 1))


@dataclass(frozen=True, eq=False)
class T5Bias(Bias):
    """A learned number a head for each bucket of distances (Raffel et al. 2020, arXiv:1910.10683, §2.1).

    `table` is (buckets, heads), laid out as the embedding of T5 checkpoints. Causal decoders use
    ``bidirectional=False``: keys ahead then share the bucket of distance 0. T5 itself divides by no √d: use
    ``score=Dot(1.0)``.

    >>> T5Bias(torch.zeros(32, 8)).max_distance
    128
    """

    table: Float[Tensor, "buckets heads"]
    bidirectional: bool = True
    max_distance: int = 128
    by_query = False

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or self.table.ndim != 2 or not self.table.dtype.is_floating_point:
            raise InputError("T5Bias: table is not a float tensor (buckets, heads)")
        exact = len(self.table) // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise InputError(
                f"T5Bias: {len(self.table)} buckets and max_distance {self.max_distance}; expected at least "
                f"{4 if self.bidirectional else 2} buckets and a distance above {exact}, where the exact ones end"
            )

    def check(self, grid: Grid) -> None:
        if self.table.shape[1] != grid.heads:
            raise InputError(f"T5Bias: table has {self.table.shape[1]} columns for {grid.heads} query heads")

    def bound(self, q: Tensor, grid: Grid, scale: float) -> ByDistance:
        bucket = t5_bucket(distances(grid), len(self.table), self.max_distance, bidirectional=self.bidirectional)
        wide = torch.promote_types(q.dtype, torch.float32)
        return ByDistance(self.table.to(q.device, wide)[bucket].T.contiguous(), grid.n_keys)


@dataclass(frozen=True, eq=False)
class ByQuery(Tensorial):
    """A number for each query and clipped distance: `tensor` is (b, h, nq, 2 reach + 1), entry clip(j − p) + reach."""

    tensor: Float[Tensor, "b h nq distances"]
    offset: int

    @property
    def reach(self) -> int:
        """The distance at which it is clipped."""
        return self.tensor.shape[3] // 2

    def _index(self, region: Region) -> Tensor:
        rows = torch.arange(region.rows.start, region.rows.stop, device=self.tensor.device) + self.offset
        columns = torch.arange(region.columns.start, region.columns.stop, device=self.tensor.device)
        return clipped(rows[:, None], columns, self.reach)

    def _rows(self, x: Tensor, region: Region) -> Tensor:
        return x[region.batch, region.heads, region.rows]

    def tile(self, region: Region) -> Tensor:
        rows = self._rows(self.tensor, region)
        return rows.gather(3, self._index(region).expand(*rows.shape[:3], -1))

    def add_gradient(self, total: Tensor, region: Region, slope: Tensor) -> None:
        inside = self._rows(total, region)
        inside.scatter_add_(3, self._index(region).expand(*inside.shape[:3], -1), slope.to(inside.dtype))

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + self.tensor[b, h, i, clipped(i + self.offset, j, self.reach)]


def clipped(position: Tensor, key: Tensor, reach: int) -> Tensor:
    """Index of the clipped distance key − position in a table of 2 reach + 1 rows."""
    return (key - position).clamp(-reach, reach) + reach


@dataclass(frozen=True, eq=False)
class RelativePosition(Bias):
    """Learned vectors for each clipped distance, met by the query and added to the value.

    score = scale · q·(k + keys[clip(j − p)]) and out = Σ A (v + values[clip(j − p)]) (Shaw et al. 2018,
    arXiv:1803.02155, eqs. 3 to 5). `keys` is (2 reach + 1, d) or (heads, 2 reach + 1, d), `values` the same with the
    size of values, or None for none; entry 0 belongs to keys `reach` or more before the query.

    >>> table = torch.zeros(5, 4)
    >>> RelativePosition(table).reach
    2
    """

    keys: Float[Tensor, "distances d"] | Float[Tensor, "heads distances d"]
    values: Float[Tensor, "distances dv"] | Float[Tensor, "heads distances dv"] | None = None

    @property
    def value_table(self) -> Tensor | None:  # type: ignore[override]
        return self.values

    def __post_init__(self) -> None:
        for name, table in (("keys", self.keys), ("values", self.values)):
            if table is None and name == "values":
                continue
            if not isinstance(table, Tensor) or table.ndim not in (2, 3) or table.shape[-2] % 2 == 0:
                shape = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
                raise InputError(
                    f"RelativePosition: {name} is {shape}, expected a table (2 reach + 1, d) or (heads, 2 reach + 1, d)"
                )
        if self.values is not None and self.values.shape[-2] != self.keys.shape[-2]:
            raise InputError(
                f"RelativePosition: {self.keys.shape[-2]} distances for keys and {self.values.shape[-2]} for values"
            )

    @property
    def reach(self) -> int:
        """The distance at which the tables end."""
        return self.keys.shape[-2] // 2

    def check(self, grid: Grid) -> None:
        for name, table in (("keys", self.keys), ("values", self.values)):
            if table is not None and table.ndim == 3 and len(table) != grid.heads:
                raise InputError(f"RelativePosition: {name} has {len(table)} tables for {grid.heads} query heads")

    def bound(self, q: Tensor, grid: Grid, scale: float) -> ByQuery:
        if self.keys.shape[-1] != q.shape[3]:
            raise InputError(
                f"RelativePosition: keys have {self.keys.shape[-1]} entries, but queries have {q.shape[3]}"
            )
        wide = torch.promote_types(q.dtype, torch.float32)
        return ByQuery(scale * q.to(wide) @ self.keys.to(q.device, wide).transpose(-1, -2), grid.offset)
