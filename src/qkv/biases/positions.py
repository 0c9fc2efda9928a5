"""Biases by position: ALiBi, T5's buckets, Shaw's learned vectors. Bound to a call they become tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.biases.base import Bias
from qkv.biases.tensors import ByDistance, ByQuery, distances
from qkv.errors import InputError
from qkv.masks import Grid


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
