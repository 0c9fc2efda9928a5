"""Inputs on awkward shapes, and how a failed check is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qkv.errors import InputError, kind_of
from qkv.masks import Causal, Dense, Grid, Mask, Padding, Region

EPS = torch.finfo(torch.float64).eps
ROUNDINGS = 2.0**12  # eps that the same function of the same numbers may be off


class CheckFailed(AssertionError):  # noqa: N818  (an AssertionError, whose name ends in Error already)
    """An object breaks the contract of its base class.

    The message is one sentence with the class, the method, the place, the expected result and the actual one.

    >>> issubclass(CheckFailed, AssertionError)
    True
    """


def fail(thing: object, method: str, message: str) -> NoReturn:
    """Raise `CheckFailed` about a method of an object."""
    raise CheckFailed(f"{type(thing).__name__}.{method}: {message}")


@contextmanager
def calling(thing: object, method: str, situation: str) -> Iterator[None]:
    """Turn any exception in the block into a `CheckFailed` about a method of an object."""
    try:
        yield
    except CheckFailed:
        raise
    except InputError as error:
        fail(thing, method, f"{situation}: {str(error).removeprefix(f'{type(thing).__name__}: ')}")
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckFailed(
            f"{type(thing).__name__}.{method}: {situation}: raised {type(error).__name__}: {reason}"
        ) from error


def number(x: object) -> str:
    """A number as messages print it."""
    return f"{x:.8g}" if isinstance(x, float) else str(x)


def largest(x: Tensor) -> float:
    """The largest finite absolute value, at least 1."""
    return max(1.0, float(x.detach().abs().nan_to_num(nan=0, posinf=0).max()))


def same(
    thing: object, method: str, what: str, got: Tensor, want: Tensor, tolerance: float | Tensor = 0.0, *,
    expected: str = "", where: Callable[[tuple[int, ...]], str] = str,
) -> None:  # fmt: skip
    """Fail where two tensors differ most, if by more than the tolerance; NaN differs from everything but NaN.

    `what` begins the message, `expected` ends it, and `where` describes a place in the tensors.
    """
    got, want = torch.broadcast_tensors(got.detach(), want.detach())
    wide, exact = got.double(), want.double()
    equal = (wide == exact) | (wide.isnan() & exact.isnan())
    excess = torch.where(equal, 0.0, (wide - exact).abs().nan_to_num(nan=torch.inf)) - tolerance
    if bool((excess > 0).any()):
        place = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        made, right = number(got[place].item()), number(want[place].item())
        fail(thing, method, f"{what}got {made} at {where(place)}, expected {right}{expected}")


def forbid(
    thing: object, method: str, wrong: Tensor, x: Tensor, expected: str, *, what: str = "",
    where: Callable[[tuple[int, ...]], str] = str,
) -> None:  # fmt: skip
    """Fail with the first number of `x` where `wrong` is True; `what` begins the message and `expected` ends it."""
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        fail(thing, method, f"{what}is {number(x[place].item())} at {where(place)}, expected {expected}")


def without_writing(thing: object, method: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
    """The result of a method for copies of these tensors; fails if the method writes to them."""
    copies = [x.clone() for x in tensors]
    result = function(*copies)
    if not all(map(torch.equal, copies, tensors)):
        fail(thing, method, "wrote to its arguments, expected a new tensor")
    return result


def check_returned(
    thing: object, method: str, result: object, shape: Sequence[int], dtype: torch.dtype | None, arguments: str
) -> Tensor:
    """The value that a method returned; fails unless it is a tensor of this shape and at least this precision."""
    if not isinstance(result, Tensor) or tuple(result.shape) != tuple(shape):
        fail(thing, method, f"returned {kind_of(result)} for {arguments}, expected a tensor of shape {tuple(shape)}")
    if dtype is not None and torch.promote_types(result.dtype, dtype) != result.dtype:
        fail(thing, method, f"returned {result.dtype} for {arguments}, expected {dtype}")
    return result


def check_alone(
    thing: object, method: str, function: Callable[[Tensor, Region], Tensor], scores: Tensor, size: Size,
    eps: float = EPS, *, rule: str,
) -> Tensor:  # fmt: skip
    """The function of the whole score matrix; fails if tiles or other scores change its result for a score."""
    whole: Tensor = without_writing(thing, method, lambda x: function(x, size.whole), scores).detach()
    rounding = ROUNDINGS * eps * largest(whole)
    for name, region in parts(size):
        result = function(region.of(scores).clone(), region)
        what = f"depends on the tile: in a tile of {name} "
        same(thing, method, what, result, region.of(whole), rounding, expected=f" from the whole matrix; {rule}")
    last = (size.batch - 1, size.heads - 1, size.queries - 1, 0)
    for place, change in (((0, 0, size.queries // 2, size.keys // 2), 1.7), (last, torch.nan)):
        changed = scores.clone()
        changed[place] += change
        result = function(changed, size.whole).detach().clone()
        result[place] = whole[place]
        what = f"depends on another score: when that at {place} becomes {number(changed[place].item())}, "
        same(thing, method, what, result, whole, rounding, expected=f" as before; {rule}")
    return whole


Sizes = Sequence[tuple[int, int]]
SIZES: Sizes = ((7, 9), (40, 33), (130, 150), (300, 320))
"""Queries and keys: few scores and many (above 128 × 128 `attend` picks another kernel), one tile and several."""
MANY = 2**15  # with more pairs than this, default sizes have one batch item


@dataclass(frozen=True)
class Size:
    """The dimensions of one call."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int = 8
    dim_k: int = 8
    dim_v: int = 6

    def __str__(self) -> str:
        return f"{self.batch} × {self.heads} heads × {self.queries} queries × {self.keys} keys"

    @property
    def grid(self) -> Grid:
        return Grid.of(self.queries, self.keys, self.batch, self.heads)

    @property
    def whole(self) -> Region:
        """The whole score matrix."""
        return Region(
            slice(0, self.queries), slice(0, self.keys), slice(0, self.batch), slice(0, self.heads), self.grid.offset
        )

    @property
    def small(self) -> bool:
        """Small enough to check in float64."""
        return self.queries * self.keys <= 2048

    @property
    def tiny(self) -> bool:
        """Small enough for the slow kernels, flex and the reference."""
        return self.queries * self.keys <= 256


def sizes_of(sizes: Sizes | None, default: Sizes, batch: int, heads: int, key_heads: int, **dims: int) -> list[Size]:
    """The sizes of a check; the large ones of the default have one batch item."""
    return [
        Size(1 if sizes is None and nq * nk > MANY else batch, heads, key_heads, nq, nk, **dims)
        for nq, nk in (default if sizes is None else sizes)
    ]


def key_heads_of(heads: int) -> int:
    """The number of key heads: half the query heads if that divides them, else 1."""
    return heads // 2 if heads % 2 == 0 else 1


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, the same for the same seed and shape."""
    generator = torch.Generator().manual_seed(7919 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def triple(size: Size, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v."""
    q = normal(size.batch, size.heads, size.queries, size.dim, seed=seed, dtype=dtype)
    k = normal(size.batch, size.key_heads, size.keys, size.dim_k, seed=seed + 1, dtype=dtype)
    v = normal(size.batch, size.key_heads, size.keys, size.dim_v, seed=seed + 2, dtype=dtype)
    return q, k, v


def with_holes(size: Size) -> Mask:
    """A random mask with a query without visible keys, and keys masked for all queries."""
    visible = torch.rand(size.batch, 1, size.queries, size.keys, generator=torch.Generator().manual_seed(5)) < 0.7
    visible[:, :, size.queries // 2] = False
    visible[..., size.keys // 3] = False
    visible[-1, ..., -1] = False
    return Dense(visible)


def padded(size: Size) -> Mask:
    """A causal mask with padding at the end of the keys."""
    lengths = [max(1, size.keys - 2 - 2 * item) for item in range(size.batch)]
    return Causal() & Padding(lengths)


def parts(size: Size) -> Iterator[tuple[str, Region]]:
    """Tiles of the score matrix, with names: some rows, some columns, some batch items, one pair of each head."""
    whole = size.whole
    for name, along in (("columns", "columns"), ("rows", "rows"), ("batch items", "batch")):
        all_of_it: slice = getattr(whole, along)
        middle = (all_of_it.stop + 1) // 2
        for part in (slice(0, middle), slice(middle, all_of_it.stop)):
            if part.start < part.stop:
                change: dict[str, Any] = {along: part}
                yield f"{name} {part.start} to {part.stop - 1}", replace(whole, **change)
    last = slice(size.queries - 1, size.queries), slice(size.keys - 1, size.keys)
    yield "the last query and the last key", replace(whole, rows=last[0], columns=last[1])


def converted(thing: Any, dtype: torch.dtype) -> Any:
    """A copy of the object with the parameters of its modules in `dtype`, as after ``model.to(dtype)``.

    Objects without modules convert their tensors themselves (``self.scale.to(scores)``) and are returned unchanged.
    """
    if isinstance(thing, nn.Module):
        return deepcopy(thing).to(dtype)
    modules = (
        [name for name, x in vars(thing).items() if isinstance(x, nn.Module)] if hasattr(thing, "__dict__") else []
    )
    if not modules:
        return thing
    made = deepcopy(thing)
    for name in modules:
        object.__setattr__(made, name, getattr(made, name).to(dtype))
    return made
