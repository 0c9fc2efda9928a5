"""Biases: functions of the score, applied after the score function and before the mask.

Each bias maps a tile of scores to a tile of scores (`apply`). Several biases are passed as a tuple and apply in that
order. An `AdditiveBias` adds a tensor (`tile`), which fused kernels support. Every call binds its biases (`bind`):
those of this package then become tensors by pair, by distance, or by query and distance.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv._contract import Definition, check_by_head, learned_tensors, overrides, require, with_attributes
from qkv.errors import InputError, finite, kind_of
from qkv.masks import Grid, Region
from qkv.masks.base import check_pairs

__all__ = [
    "ALiBi", "AdditiveBias", "Bias", "ByDistance", "Forget", "RelativePosition", "SoftCap", "T5Bias", "TensorBias",
    "alibi_slopes", "distances", "t5_bucket",
]  # fmt: skip
__dir__ = __all__.copy

Form = Literal["distance", "tensor", "difference", "cap", "log sigmoid", "log elu + 1"]


class Bias(Definition):
    """Base of all biases: any function of a score and its position. One method is required: `apply`.

    A bias that is added to the score inherits from `AdditiveBias` instead, which fused kernels support. Gradients come
    from autograd on the tile, also for every `nn.Parameter` among the object's attributes. `qkv.testing.check_bias`
    checks an object.

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

    definitions: ClassVar = {"apply": ("at", "position_free", "by_head", "part", "form")}
    position_free = False
    """Whether the bias depends on the score alone, not on the positions of its query and key."""
    by_head = True
    """Whether the bias may have per-head parameters. `apply` then always gets all query heads."""
    constant: bool = False
    """Whether the bound bias is finite and never changes, so that what follows from it may be kept."""
    form: Form | None = None
    """What compiled kernels compute without calling a method: the tensors of a bound `ByDistance`, `TensorBias` or
    `Forget`, or the cap of a `SoftCap`; None for every other bias."""
    value_table: Tensor | None = None
    """Vectors of `RelativePosition` that are added to the values by clipped distance, (heads, 2 reach + 1, dv)."""

    @property
    def depends_on_query(self) -> bool:
        """Whether the bias depends on the vector of the query."""
        return overrides(self, Bias, "bind")

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the bias does not fit `grid`."""

    def require(self) -> None:
        """Raise `InputError` if the bias is incomplete."""
        require(self, Bias, "apply", "scores, region", "the scores of a region of the matrix with the bias in them")

    def bind(self, q: Float[Tensor, "b h nq d"], grid: Grid, scale: float) -> Bias:
        """Return the bias for these projected queries on this grid; differentiable. `scale` is the factor of q·k."""
        return self

    # --- methods of a bound bias --------------------------------------------------------------------------------------

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        """Return the scores of a region with the bias applied, by torch operations that act elementwise.

        `region.queries` (q, 1) and `region.keys` (k,) are the positions of its queries and keys, and ``region.of(x)``
        is the slice of a tensor that broadcasts to (b, h, nq, nk). The region has all query heads, so a per-head
        parameter has shape (heads, 1, 1). Inputs must not be changed in place. A score of −inf masks a pair.
        """
        raise InputError(f"{type(self).__name__}: no method apply(scores, region)")

    # --- optional shortcuts; a subclass that overrides `apply` loses the inherited ones -------------------------------

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the score of query i (its row, not its position) and key j with the bias, as a ``score_mod``.

        Used by FlexAttention.
        """
        raise InputError(f"{type(self).__name__}: no method at(score, b, h, i, j)")

    def part(self, region: Region) -> Bias:
        """Return the bound bias of a rectangle of the matrix, whose queries and keys are counted from 0."""
        return self if self.position_free else _PartOfBias(self, region)

    # --- the tensors of a bound bias, by name -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors that may need gradients; for a user-defined bias, its attributes that require gradients."""
        return learned_tensors(self)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Bias:
        """Return the same bias with other tensors; a user-defined bias is returned unchanged."""
        return self


@dataclass(frozen=True, eq=False)
class _PartOfBias(Bias):
    """A bound bias of a whole matrix, applied to the rectangle `part` of it."""

    bias: Bias
    part_of: Region

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        return self.bias.by_head

    def tensors(self) -> dict[str, Tensor]:
        return self.bias.tensors()

    def with_tensors(self, tensors: dict[str, Tensor]) -> Bias:
        return replace(self, bias=self.bias.with_tensors(tensors))

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        part = self.part_of
        return self.bias.apply(scores, region.moved(part.rows.start, part.columns.start, part.offset))


class AdditiveBias(Bias):
    """Base of the biases that are added to the scores. One method is required: `tile`.

    >>> class Diagonal(AdditiveBias):
    ...     def tile(self, region):
    ...         return (region.queries == region.keys).float()[None, None]
    >>> from qkv import attend
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> attend(q, q, q, bias=Diagonal(), return_weights=True)[1][0, 0, 0].tolist()
    [0.7310585975646973, 0.2689414322376251]
    """

    definitions: ClassVar = {"tile": ("at", "by_head", "part", "form", "tensors", "with_tensors")}

    def require(self) -> None:
        require(self, AdditiveBias, "tile", "region", "the tensor to add to the scores of a region")
        if overrides(self, AdditiveBias, "apply"):
            raise InputError(
                f"{type(self).__name__}: an AdditiveBias overrides apply, but kernels add its tile; inherit from "
                "qkv.biases.Bias, or define only tile(region)"
            )

    def tile(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """Return the tensor to add to the scores of a region (see `Bias.apply`); −inf masks a pair.

        Dimensions of size 1 broadcast.
        """
        raise InputError(f"{type(self).__name__}: no method tile(region)")

    def added(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """Return `tile`, with a check of its result; missing leading dimensions are added."""
        tile = self.tile(region)
        if not isinstance(tile, Tensor) or tile.ndim > 4 or not tile.dtype.is_floating_point:
            name, got = type(self).__name__, kind_of(tile)
            raise InputError(f"{name}: tile returned {got}, expected floats that broadcast to (b, h, q, k)")
        return tile[(None,) * (4 - tile.ndim)]

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        return scores + self.added(region).to(scores)


class SingleTensorBias(AdditiveBias):
    """Base of the bound additive biases of this package: one tensor, which may need a gradient."""

    tensor: Tensor
    by_head = False

    def tensors(self) -> dict[str, Tensor]:
        return {"tensor": self.tensor}

    def with_tensors(self, tensors: dict[str, Tensor]) -> SingleTensorBias:
        return with_attributes(self, **tensors)


@dataclass(frozen=True, eq=False)
class TensorBias(SingleTensorBias):
    """A float tensor added to the scores, of a shape that broadcasts to (batch, heads, queries, keys).

    −inf masks a pair. Learnable if it requires a gradient.

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> v = torch.ones(1, 1, 1, 8)
    >>> round(attend(q, k, v, bias=TensorBias(torch.tensor([[3.0]])), return_lse=True)[1].item(), 5)
    3.0
    """

    form = "tensor"
    tensor: Float[Tensor, "..."]  # as passed, so that a module finds the parameter; (#b, #h, #nq, #nk) if bound
    depends_on_query = False

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or not self.tensor.dtype.is_floating_point:
            raise InputError(
                f"bias is {kind_of(self.tensor)}, expected a float tensor to add to the scores; "
                "pass a boolean mask as mask=qkv.masks.Dense(tensor)"
            )
        if not 2 <= self.tensor.ndim <= 4:
            raise InputError(
                f"bias has {self.tensor.ndim} dimensions, expected (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk)"
            )

    def check(self, grid: Grid) -> None:
        check_pairs("bias", self.tensor.ndim, self._pairs, grid)

    @property
    def _pairs(self) -> Float[Tensor, "#b #h #nq #nk"]:
        return self.tensor[(None,) * (4 - self.tensor.ndim)]

    def bind(self, q: Tensor, grid: Grid, scale: float) -> TensorBias:
        return with_attributes(self, tensor=self._pairs)  # of a subclass, too

    def tile(self, region: Region) -> Tensor:
        return region.of(self._pairs)

    def part(self, region: Region) -> TensorBias:
        return TensorBias(region.of(self.tensor))

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        where = (x if size > 1 else x * 0 for x, size in zip((b, h, i, j), self.tensor.shape, strict=True))
        return score + self.tensor[tuple(where)]


@dataclass(frozen=True, eq=False)
class ByDistance(SingleTensorBias):
    """A bias by distance p − j of query position and key: `tensor` is (heads or 1, nq + nk − 1).

    Entry t is added at distance t − (nk − 1) + (nk − nq); that of row i and key j is i − j + nk − 1. O(n) memory.
    `ALiBi` and `T5Bias` are bound to this form. Learnable.

    >>> ByDistance(torch.arange(3.0)[None]).tile(Region(slice(0, 2), slice(0, 2)))[0, 0].tolist()
    [[1.0, 0.0], [2.0, 1.0]]
    """

    form = "distance"
    tensor: Float[Tensor, "h distances"]
    n_keys: int | None = None  # set by `bind`
    depends_on_query = False

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or self.tensor.ndim != 2 or not self.tensor.dtype.is_floating_point:
            raise InputError("ByDistance: tensor is not a float tensor, expected (heads or 1, n_queries + n_keys − 1)")

    def check(self, grid: Grid) -> None:
        expected = (grid.heads, grid.n_queries + grid.n_keys - 1)
        if self.tensor.shape[0] not in (1, grid.heads) or self.tensor.shape[1] != expected[1]:
            raise InputError(
                f"ByDistance: tensor has shape {tuple(self.tensor.shape)}, expected (1 or heads, n_queries + n_keys "
                f"− 1) = {expected}"
            )

    def bind(self, q: Tensor, grid: Grid, scale: float) -> ByDistance:
        dtype = torch.promote_types(torch.promote_types(q.dtype, self.tensor.dtype), torch.float32)
        return replace(self, tensor=self.tensor.to(q.device, dtype), n_keys=grid.n_keys)

    def span(self, region: Region) -> slice:
        """Return the entries of a region's distances, from its top right corner to its bottom left."""
        n_keys = (self.tensor.shape[1] + 1) // 2 if self.n_keys is None else self.n_keys
        first, last = region.rows.start - region.columns.stop + 1, region.rows.stop - 1 - region.columns.start
        return slice(first + n_keys - 1, last + n_keys)

    def part(self, region: Region) -> ByDistance:
        span = self.tensor[region.heads if len(self.tensor) > 1 else slice(None), self.span(region)]
        return ByDistance(span, region.columns.stop - region.columns.start)

    def tile(self, region: Region) -> Tensor:
        part = self.part(region)
        assert part.n_keys is not None
        return part.tensor.unfold(1, part.n_keys, 1).flip(-1)[None]  # entry (i, c) of `unfold` is key stop − 1 − c

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert self.n_keys is not None
        return score + self.tensor[h if len(self.tensor) > 1 else h * 0, i - j + self.n_keys - 1]


def distances(grid: Grid) -> Int[Tensor, " distances"]:
    """Return p − j, query position minus key, in the order of `ByDistance`.

    >>> from qkv.masks import Grid
    >>> distances(Grid.of(2, 3)).tolist()
    [-1, 0, 1, 2]
    """
    first = grid.offset - grid.n_keys + 1
    return torch.arange(first, first + grid.n_queries + grid.n_keys - 1, device=grid.device)


@dataclass(frozen=True, eq=False)
class ByQuery(SingleTensorBias):
    """A bias by query and clipped distance: `tensor` is (b, h, nq, 2 reach + 1), with entry clip(j − p) + reach."""

    tensor: Float[Tensor, "b h nq distances"]
    offset: int
    depends_on_query = True

    @property
    def reach(self) -> int:
        """The distance at which positions are clipped."""
        return self.tensor.shape[3] // 2

    def _index(self, region: Region) -> Tensor:
        rows = torch.arange(region.rows.start, region.rows.stop, device=self.tensor.device) + self.offset
        columns = torch.arange(region.columns.start, region.columns.stop, device=self.tensor.device)
        return clipped(rows[:, None], columns, self.reach)

    def part(self, region: Region) -> ByQuery:
        first = self.offset + region.rows.start - region.columns.start
        return ByQuery(self.tensor[region.batch, region.heads, region.rows], first)

    def tile(self, region: Region) -> Tensor:
        rows = self.tensor[region.batch, region.heads, region.rows]
        return rows.gather(3, self._index(region).expand(*rows.shape[:3], -1))

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + self.tensor[b, h, i, clipped(i + self.offset, j, self.reach)]


def clipped(position: Tensor, key: Tensor, reach: int) -> Tensor:
    """Return the index of the clipped distance key − position in a table of 2 reach + 1 rows."""
    return (key - position).clamp(-reach, reach) + reach


@dataclass(frozen=True)
class SoftCap(Bias):
    """Scores bounded smoothly: cap · tanh(score / cap) (Gemma 2, arXiv:2408.00118, §2).

    >>> SoftCap(2.0).apply(torch.tensor([[[[1e9]]]]), Region(slice(0, 1), slice(0, 1))).item()
    2.0
    """

    form = "cap"
    cap: float
    position_free = True
    by_head = False

    def __post_init__(self) -> None:
        if not finite(self.cap) or self.cap <= 0:
            raise InputError(f"SoftCap: cap is {self.cap!r}, expected a positive number")

    def apply(self, scores: Tensor, region: Region) -> Tensor:
        return torch.tanh(scores / self.cap) * self.cap

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap


def alibi_slopes(heads: int, dtype: torch.dtype | None = None) -> Float[Tensor, " heads"]:
    """Return ALiBi's slopes: 2^(−8(i+1)/H) for H a power of two.

    Otherwise the slopes of the next lower power of two, followed by every other slope of the next higher one. In
    torch's default dtype if `dtype` is None.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if heads < 1:
        raise InputError(f"ALiBi: heads is {heads}, expected at least 1")
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=dtype)


@dataclass(frozen=True, eq=False)
class ALiBi(Bias):
    """`−m |p − j|`: a penalty linear in the distance, with one slope m per head (Press et al. 2022, arXiv:2108.12409).

    `slopes` (heads,) may be learned; if None, those of the paper, for any number of heads. No n × n tensor is formed.

    >>> q = k = torch.zeros(1, 1, 3, 4)
    >>> from qkv import attend
    >>> weights = attend(q, k, k, bias=ALiBi(torch.tensor([0.7])), return_weights=True)[1]
    >>> [round(x, 3) for x in weights[0, 0, 2].tolist()]
    [0.141, 0.285, 0.574]
    """

    slopes: Float[Tensor, " heads"] | None = None
    depends_on_query = False

    def __post_init__(self) -> None:
        if self.slopes is not None and (not isinstance(self.slopes, Tensor) or self.slopes.ndim != 1):
            got = kind_of(self.slopes)
            raise InputError(f"ALiBi: slopes is {got}, expected a tensor (heads,), one slope per query head, or None")

    def check(self, grid: Grid) -> None:
        if self.slopes is not None:
            check_by_head("ALiBi: slopes", self.slopes, grid.heads)

    def bind(self, q: Tensor, grid: Grid, scale: float) -> ByDistance:
        dtype = torch.promote_types(q.dtype, torch.float32)
        if self.slopes is not None:
            return _alibi(self.slopes.to(q.device, dtype), grid)
        other = torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None
        short = grid.n_queries > 1 and grid.heads * (grid.n_queries + grid.n_keys) <= LARGEST_TABLE
        return _of_paper(grid, dtype) if short and not other else _of_paper.__wrapped__(grid, dtype)


LARGEST_TABLE = 2**16
"""Most numbers of a table that is cached for other calls; longer ones take less time than attention."""


def _alibi(slopes: Tensor, grid: Grid) -> ByDistance:
    return ByDistance(slopes[:, None] * -distances(grid).abs_(), grid.n_keys)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # cached tensors must serve training too
def _of_paper(grid: Grid, dtype: torch.dtype) -> ByDistance:
    """Return ALiBi with the slopes of the paper; nobody may change its tensor."""
    return with_attributes(_alibi(alibi_slopes(grid.heads, dtype).to(grid.device), grid), constant=True)


@dataclass(frozen=True, eq=False)
class Forget(Bias):
    """Forgetting attention: adds Σ log f of the tokens after the key, up to the query (Lin et al. 2025,
    arXiv:2503.02130).

    `log_f` (b, h, nk) or (h, nk) is the logarithm of the forget gate of each token and query head, ≤ 0 and finite, such
    as logsigmoid(w · x + b); query i has position i + nk − nq. For a causal mask, since later keys would gain. O(n)
    memory: the bias is the difference of two cumulative sums, which are in float64. Gates that are all e^−m are `ALiBi`
    with slope m.

    >>> from qkv import attend, masks
    >>> q = k = torch.zeros(1, 1, 3, 4)
    >>> forget = Forget(torch.tensor([[1.0, 0.5, 0.25]]).log())
    >>> weights = attend(q, k, k, bias=forget, mask=masks.Causal(), return_weights=True)[1]
    >>> [round(x, 4) for x in (weights[0, 0, 2] / weights[0, 0, 2, 2]).tolist()]
    [0.125, 0.25, 1.0]
    """

    log_f: Float[Tensor, "b h nk"] | Float[Tensor, "h nk"]
    depends_on_query = False

    def __post_init__(self) -> None:
        if not isinstance(self.log_f, Tensor) or self.log_f.ndim not in (2, 3) or not self.log_f.is_floating_point():
            raise InputError(
                f"Forget: log_f is {kind_of(self.log_f)}, expected floats (batch, heads, keys) or (heads, keys), the "
                "logarithms of the forget gates"
            )

    def check(self, grid: Grid) -> None:
        *_, heads, n_keys = self.log_f.shape
        batch = 1 if self.log_f.ndim == 2 else len(self.log_f)
        if batch not in (1, grid.batch) or heads not in (1, grid.heads) or n_keys != grid.n_keys:
            raise InputError(
                f"Forget: log_f has shape {tuple(self.log_f.shape)}, expected (batch, heads, keys) = "
                f"{(grid.batch, grid.heads, grid.n_keys)}"
            )
        if grid.offset < 0 or grid.n_queries + grid.offset > n_keys:
            raise InputError(
                f"Forget: {grid.n_queries} queries for {n_keys} keys, expected queries at positions of the keys"
            )

    def bind(self, q: Tensor, grid: Grid, scale: float) -> _Difference:
        total = self.log_f.to(q.device, torch.float64).cumsum(-1)[(None,) * (3 - self.log_f.ndim)]
        rows = total[..., grid.offset : grid.offset + grid.n_queries]
        return _Difference(rows[..., None], total[..., None, :])


@dataclass(frozen=True, eq=False)
class _Difference(AdditiveBias):
    """A number of the query minus one of the key, in float64."""

    form = "difference"
    rows: Float[Tensor, "#b #h nq 1"]
    columns: Float[Tensor, "#b #h 1 nk"]
    by_head = False
    depends_on_query = False

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.rows, "columns": self.columns}

    def with_tensors(self, tensors: dict[str, Tensor]) -> _Difference:
        return with_attributes(self, **tensors)

    def part(self, region: Region) -> _Difference:
        return _Difference(region.of(self.rows), region.of(self.columns))

    def tile(self, region: Region) -> Tensor:
        return region.of(self.rows) - region.of(self.columns)


def t5_bucket(back: Int[Tensor, "*n"], buckets: int, max_distance: int, *, bidirectional: bool) -> Int[Tensor, "*n"]:
    """Return the bucket of each distance p − j: half of the buckets are exact, half logarithmic up to `max_distance`.

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
    """A learned bias per head and bucket of distances (Raffel et al. 2020, arXiv:1910.10683, §2.1).

    `table` is (buckets, heads), the layout of the embedding in T5 checkpoints. Causal decoders use
    ``bidirectional=False``: later keys then share the bucket of distance 0. T5 itself does not divide scores by √d: use
    ``score=Dot(1.0)``.

    >>> T5Bias(torch.zeros(32, 8)).max_distance
    128
    """

    table: Float[Tensor, "buckets heads"]
    bidirectional: bool = True
    max_distance: int = 128
    depends_on_query = False

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or self.table.ndim != 2 or not self.table.dtype.is_floating_point:
            raise InputError("T5Bias: table is not a float tensor, expected shape (buckets, heads)")
        exact = len(self.table) // (4 if self.bidirectional else 2)
        if not finite(self.max_distance) or exact < 1 or self.max_distance <= exact:
            raise InputError(
                f"T5Bias: max_distance is {self.max_distance!r} with {len(self.table)} buckets, expected at least "
                f"{4 if self.bidirectional else 2} buckets and a distance above {exact}, where the exact ones end"
            )

    def check(self, grid: Grid) -> None:
        if self.table.shape[1] != grid.heads:
            raise InputError(f"T5Bias: table has {self.table.shape[1]} columns for {grid.heads} query heads")

    def bind(self, q: Tensor, grid: Grid, scale: float) -> ByDistance:
        bucket = t5_bucket(distances(grid), len(self.table), self.max_distance, bidirectional=self.bidirectional)
        dtype = torch.promote_types(q.dtype, torch.float32)
        return ByDistance(self.table.to(q.device, dtype)[bucket].T.contiguous(), grid.n_keys)


@dataclass(frozen=True, eq=False)
class RelativePosition(Bias):
    """Relative position representations: learned vectors per clipped distance, added to the keys and the values.

    score = scale · q·(k + keys[clip(j − p)]) and out = Σ A (v + values[clip(j − p)]) (Shaw et al. 2018,
    arXiv:1803.02155, eqs. 3 to 5). `keys` is (2 reach + 1, d) or (heads, 2 reach + 1, d), `values` is
    (2 reach + 1, dv) or (heads, 2 reach + 1, dv), or None; entry 0 is for keys `reach` or more before the query.

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
                shape = "(2 reach + 1, d) or (heads, 2 reach + 1, d)"
                raise InputError(f"RelativePosition: {name} is {kind_of(table)}, expected a table {shape}")
        if self.values is not None and self.values.shape[-2] != self.keys.shape[-2]:
            raise InputError(
                f"RelativePosition: keys has {self.keys.shape[-2]} distances and values {self.values.shape[-2]}, "
                "expected equal"
            )

    @property
    def reach(self) -> int:
        """The distance at which positions are clipped."""
        return self.keys.shape[-2] // 2

    def check(self, grid: Grid) -> None:
        for name, table in (("keys", self.keys), ("values", self.values)):
            if table is not None and table.ndim == 3 and len(table) != grid.heads:
                raise InputError(f"RelativePosition: {name} has {len(table)} tables for {grid.heads} query heads")

    def bind(self, q: Tensor, grid: Grid, scale: float) -> ByQuery:
        if self.keys.shape[-1] != q.shape[3]:
            raise InputError(
                f"RelativePosition: keys has vectors of {self.keys.shape[-1]} entries, expected {q.shape[3]} as in q"
            )
        dtype = torch.promote_types(q.dtype, torch.float32)
        return ByQuery(scale * q.to(dtype) @ self.keys.to(q.device, dtype).transpose(-1, -2), grid.offset)
