"""Inputs on awkward shapes, and how a failed check is reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qkv._contract import learned_tensors
from qkv.errors import InputError
from qkv.masks import Causal, Dense, Grid, Mask, Padding, Region


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


def shape_of(x: object) -> str:
    """A short description of a value that a method returned."""
    if isinstance(x, Tensor):
        return f"{x.dtype} of shape {tuple(x.shape)}"
    return f"the class {x.__name__}" if isinstance(x, type) else f"an object of class {type(x).__name__}"


def number(x: object) -> str:
    """A number as messages print it."""
    return f"{x:.8g}" if isinstance(x, float) else str(x)


@dataclass(frozen=True)
class Difference:
    """The largest difference of two tensors; its string is part of a sentence."""

    place: tuple[int, ...]
    got: float | bool
    want: float | bool

    def __str__(self) -> str:
        return f"got {number(self.got)} at {self.place}, expected {number(self.want)}"


def difference(got: Tensor, want: Tensor, tolerance: float = 0.0) -> Difference | None:
    """The largest difference above a tolerance, or None; NaN differs from everything but NaN."""
    got, want = torch.broadcast_tensors(got.detach(), want.detach())
    if want.dtype == torch.bool:
        off = (got != want).double()
    else:
        got, want = got.double(), want.double()
        same = (got == want) | (got.isnan() & want.isnan())
        off = torch.where(same, 0.0, (got - want).abs().nan_to_num(nan=torch.inf))
    if not bool((off > tolerance).any()):
        return None
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    return Difference(place, got[place].item(), want[place].item())


def check_returned(
    thing: object, method: str, made: object, shape: Sequence[int], dtype: torch.dtype | None, arguments: str
) -> Tensor:
    """The value that a method returned; fails unless it is a tensor of this shape and at least this precision."""
    if not isinstance(made, Tensor) or tuple(made.shape) != tuple(shape):
        fail(thing, method, f"returned {shape_of(made)} for {arguments}, expected a tensor of shape {tuple(shape)}")
    if dtype is not None and torch.promote_types(made.dtype, dtype) != made.dtype:
        fail(thing, method, f"returned {made.dtype} for {arguments}, expected {dtype}")
    return made


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


def can_be_copied(thing: object) -> bool:
    """Whether all learned tensors are leaves of the autograd graph; torch cannot deepcopy other tensors."""
    return all(x.is_leaf for x in learned_tensors(thing).values())


def shortcuts(thing: object, base: type) -> list[str]:
    """Names of the shortcuts of a base class that the class of an object overrides, for messages."""
    names = {name for made in getattr(base, "definitions", {}).values() for name in made} - {"by_head", "tensors"}
    return sorted(name for name in names if getattr(type(thing), name, None) is not getattr(base, name, None))
