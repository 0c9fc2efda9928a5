"""Positional biases: ALiBi, T5's relative position buckets, and the relative position vectors of Shaw et al."""

from __future__ import annotations

import functools
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
    """ALiBi's slopes: 2^(−8(i+1)/H) for H a power of two.

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
    by_query = False

    def __post_init__(self) -> None:
        if self.slopes is not None and (not isinstance(self.slopes, Tensor) or self.slopes.ndim != 1):
            got = f"of shape {tuple(self.slopes.shape)}" if isinstance(self.slopes, Tensor) else repr(self.slopes)
            raise InputError(
                f"ALiBi: slopes is {got}, expected a tensor (heads,) with one slope per query head, or None"
            )

    def check(self, grid: Grid) -> None:
        if self.slopes is not None and len(self.slopes) != grid.heads:
            raise InputError(f"ALiBi: slopes has {len(self.slopes)} numbers for {grid.heads} query heads")

    def bound(self, q: Tensor, grid: Grid, scale: float) -> ByDistance:
        wide = torch.promote_types(q.dtype, torch.float32)
        if self.slopes is not None:
            return _alibi(self.slopes.to(q.device, wide), grid)
        other = torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None
        short = grid.n_queries > 1 and grid.heads * (grid.n_queries + grid.n_keys) <= KEPT
        return _of_paper(grid, wide) if short and not other else _of_paper.__wrapped__(grid, wide)


KEPT = 2**16  # most numbers of a table that is kept for other calls; longer ones take less time than attention


def _alibi(slopes: Tensor, grid: Grid) -> ByDistance:
    return ByDistance(slopes[:, None] * -distances(grid).abs_(), grid.n_keys)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # cached tensors must serve training too
def _of_paper(grid: Grid, dtype: torch.dtype) -> ByDistance:
    """ALiBi with the slopes of the paper; nobody may change its tensor."""
    made = _alibi(alibi_slopes(grid.heads, dtype).to(grid.device), grid)
    object.__setattr__(made, "_constant", True)
    return made


def t5_bucket(back: Int[Tensor, "*n"], buckets: int, max_distance: int, *, bidirectional: bool) -> Int[Tensor, "*n"]:
    """The bucket of each distance p − j: half of the buckets are exact, half logarithmic up to `max_distance`.

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
    by_query = False

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or self.table.ndim != 2 or not self.table.dtype.is_floating_point:
            raise InputError("T5Bias: table is not a float tensor, expected shape (buckets, heads)")
        exact = len(self.table) // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise InputError(
                f"T5Bias: max_distance is {self.max_distance} with {len(self.table)} buckets, expected at least "
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
                shape = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
                raise InputError(
                    f"RelativePosition: {name} is {shape}, expected a table (2 reach + 1, d) or (heads, 2 reach + 1, d)"
                )
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

    def bound(self, q: Tensor, grid: Grid, scale: float) -> ByQuery:
        if self.keys.shape[-1] != q.shape[3]:
            raise InputError(
                f"RelativePosition: keys has vectors of {self.keys.shape[-1]} entries, expected {q.shape[3]} as in q"
            )
        wide = torch.promote_types(q.dtype, torch.float32)
        return ByQuery(scale * q.to(wide) @ self.keys.to(q.device, wide).transpose(-1, -2), grid.offset)
