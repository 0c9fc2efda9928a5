"""The laws that the checks share: inputs on awkward shapes, what a failure says, and agreement with the definition.

The definition is the eager kernel in float64, which tests/core compares with `qkv.reference`. It computes by the method
that defines an object; the shortcuts that it uses besides are compared with that method first.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qkv._contract import learned_tensors
from qkv.attention import Attention
from qkv.biases import AdditiveBias, Bias
from qkv.errors import InputError, kind_of
from qkv.kernels import KERNELS
from qkv.masks import Causal, Dense, Grid, Mask, Padding, Region
from qkv.normalizers import Identity, SumToOne
from qkv.scores import Pairwise, Score

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


def check_class(check: str, thing: object, kinds: type | tuple[type, ...], names: str) -> None:
    """Fail unless an object is of one of these classes, which `names` writes as a user imports them."""
    if not isinstance(thing, kinds):
        raise CheckFailed(f"{check}: got {kind_of(thing)}, expected an object of a class that inherits from {names}")


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


MUST_SERVE = ("auto", "eager")
ONLY_TINY = ("flex", "reference")  # loops in Python, or the whole matrix in many pieces: slow on a CPU
KERNEL_ROUNDINGS = {torch.float64: 2.0**16, torch.float32: 2.0**10}
"""Tolerance of a kernel in eps: sums of hundreds of terms, and a level found by bisection."""
HALF_ROUNDINGS = 8.0
DRAW = 3  # seed for normalizers that sample a key


@dataclass(frozen=True, eq=False, kw_only=True)
class Composition(Attention):
    """A composition of which one part is under examination."""

    mask: Mask | None = None
    subject: str
    """Name of the argument under examination."""
    label: str = ""
    """How this composition differs from others, for messages."""
    about: object = None
    """The object that messages name, if it is only a part of the one under examination."""
    eps: float = EPS
    """The machine epsilon of the least precise tensor that a method of the object returns."""

    @property
    def thing(self) -> Any:
        """The object under examination."""
        return getattr(self, self.subject)

    @property
    def reported(self) -> tuple[object, str]:
        """The object that messages name, and the method that defines it."""
        thing = self.thing if self.about is None else self.about
        return thing, method_of(thing)

    @property
    def draws(self) -> bool:
        """Whether keys are drawn at random."""
        return isinstance(self.normalizer, SumToOne) and self.normalizer.sample

    def of(self, thing: object) -> Composition:
        """The same composition with another object under examination."""
        change: dict[str, Any] = {self.subject: thing}
        return replace(self, **change)

    def in_dtype(self, dtype: torch.dtype) -> Composition:
        """The same composition with the parameters of the object in another dtype."""
        return self.of(converted(self.thing, dtype))

    def learned(self) -> dict[str, Tensor]:
        """Learned tensors of all parts, by name."""
        result: dict[str, Tensor] = {}
        for name, part in self._parts().items():
            prefix = "" if name == self.subject else f"{name}."
            result |= {prefix + tensor: x for tensor, x in learned_tensors(part).items()}
        return result


def method_of(thing: object) -> str:
    """The method that defines an object."""
    if isinstance(thing, Bias) and not isinstance(thing, AdditiveBias):
        return "apply" if type(thing).apply is not Bias.apply else "bind"
    kinds = {Mask: "sees", Pairwise: "scores", Score: "project", AdditiveBias: "tile"}
    return next((method for kind, method in kinds.items() if isinstance(thing, kind)), "weight")


def describe(c: Composition, size: Size, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
    return ", ".join(part for part in (str(size), kind, c.label) if part)


def run(
    c: Composition, inputs: Sequence[Tensor], kernel: str, where: str, slope: Tensor | None = None
) -> dict[str, Tensor] | None:
    """Output, weights (of the eager kernel) and, with `slope`, gradients of Σ slope · output of `attend`, by name.

    None if the kernel does not support the call, not even without gradients.
    """
    q, k, v = inputs
    with calling(*c.reported, f"attend on kernel {kernel!r} with {where}"), torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(DRAW)  # torch.manual_seed notes the stack for devices that are not there
        try:
            if kernel == "eager":
                out, weights = c(q, k, v, kernel=kernel, return_weights=True)
                results = {"output": out, "weight": weights}
            else:
                results = {"output": c(q, k, v, kernel=kernel)}
        except InputError as error:
            if kernel in MUST_SERVE or not str(error).startswith(f"kernel={kernel!r} cannot serve"):
                raise
            if slope is None:
                return None
            with torch.no_grad():
                return run(c, inputs, kernel, where)
        if (made := results["output"].dtype) != v.dtype:
            fail(
                *c.reported, f"attend on kernel {kernel!r} with {where}: the output is {made}, expected the dtype of v"
            )
        if slope is not None and results["output"].requires_grad:
            named = dict(zip("qkv", inputs, strict=True)) | c.learned()
            total = (results["output"].double() * slope).sum()
            gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
            for (name, x), gradient in zip(named.items(), gradients, strict=True):
                results[f"gradient of {name}"] = torch.zeros_like(x) if gradient is None else gradient
    return results


def by_definition(
    c: Composition, inputs: Sequence[Tensor], where: str, slope: Tensor | None = None
) -> dict[str, Tensor]:
    """The results of the eager kernel in float64; fails if output or weights are not finite."""
    results = run(c.in_dtype(torch.float64), inputs, "eager", f"{where}, by definition", slope)
    assert results is not None
    for name in ("weight", "output"):
        what = f"{where}: the {name} by definition in float64 "
        forbid(*c.reported, ~results[name].isfinite(), results[name], "finite numbers", what=what)
    return results


def condition_of(weights: Tensor) -> float:
    """The largest absolute sum of the weights of a query, at least 1: how far rounding errors are amplified."""
    return max(1.0, float(weights.detach().abs().sum(-1).max()))


def kernels_for(size: Size) -> list[str]:
    """The kernels to check at this size, "auto" first."""
    return ["auto", *(name for name in KERNELS if size.tiny or name not in ONLY_TINY)]


def _inputs(size: Size, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k and v, their values in float64, all with gradients, and the gradient of the output."""
    inputs = [x.requires_grad_() for x in triple(size, dtype)]
    slope = normal(size.batch, size.heads, size.queries, size.dim_v, seed=11)
    return inputs, [x.detach().double().requires_grad_() for x in inputs], slope


def check_kernels(c: Composition, size: Size, dtype: torch.dtype = torch.float64) -> None:
    """Output, weights and gradients on every kernel that supports the call equal those of the definition."""
    where = describe(c, size, dtype)
    inputs, wide, slope = _inputs(size, dtype)
    c = c.in_dtype(dtype)
    want = by_definition(c, wide, where, slope)
    condition = condition_of(want["weight"])
    eps = max(c.eps, *(torch.finfo(kind).eps for kind in (dtype, *(x.dtype for x in c.learned().values()))))
    empty = torch.zeros(1, 1, size.queries, dtype=torch.bool)
    if c.mask is not None:
        empty = ~c.mask.dense(size.queries, size.keys, batch=size.batch, heads=size.heads).any(-1)
    for kernel in kernels_for(size):
        got = run(c, inputs, kernel, where, slope)
        on = f"attend on kernel {kernel!r} with {where}"
        for name, x in (got or {}).items():
            exact = want[name].detach()
            tolerance = (
                KERNEL_ROUNDINGS[dtype] * eps * condition * (condition if "gradient" in name else 1) * largest(exact)
            )
            same(*c.reported, f"{on}: the {name}: ", x, exact, tolerance, expected=" by the definition in float64")
        if got is not None:
            out = got["output"]
            wrong = (out != 0).any(-1) & empty
            forbid(*c.reported, wrong[..., None] & (out != 0), out, "0 without visible keys", what=f"{on}: the output ")


def check_slopes(c: Composition, size: Size) -> None:
    """Gradients of `attend` on two kernels equal finite differences, along two random directions of each tensor."""
    if isinstance(c.normalizer, SumToOne) and c.normalizer.one_key:
        return  # its gradient is defined as that of the soft weights
    where, c = describe(c, size, torch.float64), c.in_dtype(torch.float64)
    inputs, _, slope = _inputs(size, torch.float64)
    named = dict(zip("qkv", inputs, strict=True)) | c.learned()
    for kernel in ("eager", "tiled"):
        found = run(c, inputs, kernel, where, slope)
        if found is None or "gradient of q" not in found:
            continue
        condition = condition_of(by_definition(c, inputs, where)["weight"])
        for name, x in named.items():
            step, loose = (1e-6, 1e-5) if x.dtype == torch.float64 else (1e-4, 1e-2)
            before = x.detach().clone()
            for seed in range(2):
                direction = normal(*x.shape, seed=20 + seed, dtype=x.dtype)
                ends = []
                for sign in (1, -1):
                    try:
                        with torch.no_grad():
                            x.copy_(before + sign * step * direction)
                            moved = run(c, inputs, kernel, where)
                    finally:
                        with torch.no_grad():
                            x.copy_(before)
                    assert moved is not None
                    ends.append(float((moved["output"] * slope).sum()))
                want = (ends[0] - ends[1]) / (2 * step)
                got = float((found[f"gradient of {name}"].double() * direction.double()).sum())
                if not abs(got - want) <= loose * condition * (1 + abs(want)):
                    fail(
                        *c.reported, f"attend on kernel {kernel!r} with {where}: the gradient of {name} along a random "
                        f"direction is {number(got)}, expected {number(want)} by finite differences"
                    )  # fmt: skip


def check_half(c: Composition, size: Size) -> None:
    """bfloat16 and float16 inputs give finite outputs and gradients, close to float64 results on the same inputs."""
    for dtype in (torch.bfloat16, torch.float16):
        where, half = describe(c, size, dtype), c.in_dtype(dtype)
        inputs, wide, _ = _inputs(size, dtype)
        ones = torch.ones((), dtype=torch.float64)
        want = by_definition(half, wide, where, ones)
        temperature = 1.0 if c.normalizer is None else c.normalizer.temperature
        scores = by_definition(
            replace(half, normalizer=Identity().with_temperature(temperature), about=c.reported[0]), wide, where
        )["weight"]
        tolerance = HALF_ROUNDINGS * torch.finfo(dtype).eps * (1 + float(scores.detach().abs().max()))
        tolerance *= condition_of(want["weight"])
        for kernel in kernels_for(size):
            got = None if kernel in ONLY_TINY else run(half, inputs, kernel, where, ones)
            on = f"attend on kernel {kernel!r} with {where}"
            for name, x in (got or {}).items():
                exact = want[name].detach()
                if name == "output":
                    what, most = f"{on}: the output: ", tolerance * largest(exact)
                    same(*c.reported, what, x, exact, most, expected=" by the definition in float64")
                elif "gradient" in name and float(exact.abs().max()) < torch.finfo(x.dtype).max / 64:
                    forbid(*c.reported, ~x.isfinite(), x, "finite numbers", what=f"{on}: the {name} ")


def check_masked(c: Composition, size: Size) -> None:
    """NaN and infinity in keys and values that are masked for all queries change neither output nor gradients."""
    assert c.mask is not None
    visible = c.mask.dense(size.queries, size.keys, batch=size.batch, heads=size.heads)
    idle = ~visible.any(2).any(1).expand(size.batch, -1)[:, None, :, None]
    if not bool(idle.any()):
        return
    where, c = describe(c, size, torch.float64), c.in_dtype(torch.float64)
    (q, k, v), _, slope = _inputs(size, torch.float64)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    clean = [q, *(x.detach().masked_fill(idle, 0).requires_grad_() for x in (k, v))]
    spoilt = [torch.where(idle, bad[torch.arange(x.shape[3]) % 3], x.detach()).requires_grad_() for x in (k, v)]
    for kernel in kernels_for(size):
        if kernel == "reference":  # its loops skip masked keys
            continue
        want, got = run(c, clean, kernel, where, slope), run(c, [q, *spoilt], kernel, where, slope)
        for name, x in (got or {}).items():
            assert want is not None
            what = f"attend on kernel {kernel!r} with {where}: with NaN in keys masked for all queries, the {name}: "
            same(*c.reported, what, x, want[name], 1e-9 * largest(want[name]), expected=" as without")


@torch.no_grad()
def check_measure(c: Composition, size: Size) -> None:
    """Entropy and received attention of `qkv.measure` equal those of the weights by definition."""
    if c.draws:
        return  # it would sample other keys
    where, c = describe(c, size, torch.float64), c.in_dtype(torch.float64)
    q, k, v = triple(size, torch.float64)
    weights = by_definition(c, (q, k, v), where)["weight"]
    with calling(*c.reported, f"measure with {where}"):
        try:
            got = c.measure(q, k)
        except InputError as error:
            if bool((weights < 0).any()) and "negative weights" in str(error):
                return
            raise
    total = weights.sum(-1, keepdim=True)
    shares = weights / torch.where(total == 0, 1.0, total)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    tolerance = 1e-7 + 2.0**16 * c.eps * condition_of(weights)
    for name, made, want in (("entropy", got.entropy, entropy), ("received", got.received, weights.sum(-2))):
        same(*c.reported, f"measure with {where}: {name}: ", made, want, tolerance * largest(want))


@torch.no_grad()
def check_copies(thing: object, result: Callable[[Any], Tensor], what: str) -> None:
    """Copies by pickle and copy.deepcopy can be made, have the same learned tensors and give the same `result`."""
    before, learned = result(thing), learned_tensors(thing)
    ways: list[tuple[str, Callable[[Any], Any]]] = [("pickle", lambda thing: pickle.loads(pickle.dumps(thing)))]
    if all(x.is_leaf for x in learned.values()):  # torch cannot deepcopy other tensors
        ways.append(("copy.deepcopy", deepcopy))
    for way, copied in ways:
        about = f"{type(thing).__name__}: {way}"
        try:
            copy = copied(thing)
        except Exception as error:
            raise CheckFailed(
                f"{about} raised {type(error).__name__}: {str(error).strip()}; expected a copy: "
                "the class and every function among its attributes must be defined at the top level of a module"
            ) from error
        if type(copy) is not type(thing) or list(learned_tensors(copy)) != list(learned):
            raise CheckFailed(
                f"{about} made an object of class {type(copy).__name__} with the learned tensors "
                f"{list(learned_tensors(copy))}, expected {type(thing).__name__} with {list(learned)}"
            )
        same(thing, way, f"made an object whose {what} differs: ", result(copy), before)


def masked(c: Composition, size: Size) -> list[Composition]:
    """The composition without a mask, with holes and a query without visible keys, and causal with padding.

    A mask under examination stays as it is, and then has padding.
    """
    if c.subject == "mask":
        lengths = [max(1, size.keys - 2 - item) for item in range(size.batch)]
        return [c, c, replace(c, mask=c.thing & Padding(lengths), label="padding on the right", about=c.thing)]
    masks = (None, with_holes(size), padded(size))
    labels = ("", "a mask with holes", "a causal mask with padding")
    return [
        replace(c, mask=mask, label=", ".join(x for x in (c.label, label) if x))
        for mask, label in zip(masks, labels, strict=True)
    ]


def check_attend(plain: Composition, sizes: Sequence[Size], more: Sequence[Composition] = ()) -> None:
    """Every law of `attend`: `more` compositions are compared with the definition at the first size only."""
    first, large = sizes[0], sizes[min(1, len(sizes) - 1)]
    for c in (*masked(plain, first), *more):
        check_kernels(c, first)
    check_slopes(masked(plain, first)[1], first)
    for size in sizes[1:]:
        check_kernels(masked(plain, size)[1 if size.small else 2], size, torch.float64 if size.small else torch.float32)
    check_half(masked(plain, large)[2], large)
    for size in dict.fromkeys((first, large)):
        for c in masked(plain, size)[1:]:
            check_masked(c, size)
    for size in sizes[:3]:
        check_measure(masked(plain, size)[2], size)
    tensors, where = triple(first, torch.float64), f"{first}, float64"
    check_copies(plain.thing, lambda copy: by_definition(plain.of(copy), tensors, where)["output"], "output")
