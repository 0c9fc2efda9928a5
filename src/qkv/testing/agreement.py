"""Kernels, half precision, grouped heads and copies agree with the definition."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qkv._contract import learned_tensors
from qkv.attention import attend
from qkv.errors import InputError
from qkv.kernels import KERNELS
from qkv.normalizers import SumToOne
from qkv.statistics.measure import measure
from qkv.testing.definition import Composition, Result, attention, visible_pairs
from qkv.testing.inputs import (
    CheckFailed,
    Size,
    calling,
    can_be_copied,
    converted,
    difference,
    fail,
    normal,
    number,
    padded,
    shortcuts,
    triple,
    with_holes,
)

MUST_SERVE = ("auto", "eager")
ONLY_TINY = ("flex", "reference")  # loops in Python, or the whole matrix in many pieces: slow on a CPU
ROUNDINGS = {torch.float64: 2.0**16, torch.float32: 2.0**10}
"""Tolerance of a kernel in eps: sums of hundreds of terms, and a level found by bisection."""
HALF_ROUNDINGS = 8.0
DRAW = 3  # seed for normalizers that sample a key

KEYS = "q", "k", "v"


@contextmanager
def _attending(c: Composition, kernel: str, where: str) -> Iterator[None]:
    """Turn exceptions of `attend` into `CheckFailed` about the object under examination."""
    with calling(c.reported, c.method, f"attend on kernel {kernel!r} with {where}"):
        yield


def run(
    c: Composition, tensors: Sequence[Tensor], kernel: str, where: str, *, weights: bool = False
) -> tuple[Tensor, ...] | None:
    """``(out,)`` or ``(out, weights)`` of `attend`, or None if the kernel does not support the call."""
    q, k, v = tensors
    seed = DRAW if isinstance(c.normalizer, SumToOne) and c.normalizer.sample else None
    with _attending(c, kernel, where):
        try:
            made = attend(q, k, v, kernel=kernel, return_weights=weights, dropout_seed=seed, **c.arguments())
        except InputError as error:
            if kernel not in MUST_SERVE and str(error).startswith(f"kernel={kernel!r} cannot serve"):
                return None
            raise
    return made if isinstance(made, tuple) else (made,)


def run_or_refuse(
    c: Composition, tensors: Sequence[Tensor], kernel: str, where: str, *, weights: bool = False
) -> tuple[Tensor, ...] | None:
    """`run` with gradients, or without if the kernel has none; None if it supports neither."""
    made = run(c, tensors, kernel, where, weights=weights)
    if made is None:
        with torch.no_grad():
            made = run(c, tensors, kernel, where)
    return made


def kernels_for(size: Size) -> list[str]:
    """The kernels to check at this size, "auto" first."""
    return ["auto", *(name for name in KERNELS if size.tiny or name not in ONLY_TINY)]


def drawn_weights(c: Composition, tensors: Sequence[Tensor], where: str) -> Tensor | None:
    """The one-hot weights of a normalizer that samples keys, or None for any other normalizer."""
    if not (isinstance(c.normalizer, SumToOne) and c.normalizer.sample):
        return None
    with torch.no_grad():
        result = run(c, tensors, "eager", where, weights=True)
    assert result is not None
    one = result[1].double()
    if bool(((one != 0) & (one != 1)).any()) or bool((one.sum(-1) > 1).any()):
        fail(c.reported, c.method, f"{where}: weights of a drawn key are not one-hot, expected a single 1 per query")
    return one


def by_definition(c: Composition, tensors: Sequence[Tensor], where: str, chosen: Tensor | None = None) -> Result:
    """The result by definition; fails if it is not finite."""
    result = attention(c, tensors[0], tensors[1], tensors[2], chosen)
    for name, x in (("weights", result.weights), ("output", result.out)):
        if not bool(x.isfinite().all()):
            place = tuple((~x.isfinite()).nonzero()[0].tolist())
            fail(
                c.reported, c.method, f"{where}: the {name} by definition in float64 is {number(x[place].item())} "
                f"at {place}, expected finite numbers"
            )  # fmt: skip
    return result


def check_kernels(c: Composition, size: Size, dtype: torch.dtype = torch.float64) -> None:
    """Output, weights and gradients on every kernel that supports the call equal those of the definition."""
    where = describe(c, size, dtype)
    inputs = [x.requires_grad_() for x in triple(size, dtype)]
    used, exact = c.of(converted(c.thing, dtype)), c.of(converted(converted(c.thing, dtype), torch.float64))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    result = by_definition(exact, wide, where, drawn_weights(used, inputs, where))
    slope = normal(*result.out.shape, seed=11)
    names, learned = [*KEYS, *used.learned()], [*exact.learned().values()]
    want = _gradients(exact, (result.out * slope).sum(), [*wide, *learned], "the definition", where)
    finest = [dtype, *(x.dtype for x in learned)]
    eps = max(result.eps, *(torch.finfo(x).eps for x in finest))
    tolerance = ROUNDINGS[dtype] * eps * result.condition
    empty = ~(result.weights.detach() != 0).any(-1) & ~result.visible.any(-1)
    for kernel in kernels_for(size):
        got = run_or_refuse(used, inputs, kernel, where, weights=kernel == "eager")
        if got is None:
            continue
        on = f"attend on kernel {kernel!r} with {where}"
        _same(c, f"{on}: the output", got[0], result.out, tolerance)
        if got[0].dtype != dtype:
            fail(c.reported, c.method, f"{on}: the output is {got[0].dtype}, expected the dtype of v")
        if len(got) > 1:
            _same(c, f"{on}: the weight", got[1], result.weights, tolerance)
        if bool((got[0].detach()[empty] != 0).any()):
            fail(c.reported, c.method, f"{on}: a query without visible keys has an output, expected 0")
        if not got[0].requires_grad:
            continue
        total = (got[0].double() * slope).sum()
        slopes = _gradients(used, total, [*inputs, *used.learned().values()], f"kernel {kernel!r}", where)
        for name, mine, theirs in zip(names, slopes, want, strict=True):
            _same(c, f"{on}: the gradient of {name}", mine, theirs, tolerance * result.condition)


def describe(c: Composition, size: Size, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
    return ", ".join(part for part in (str(size), kind, c.label) if part)


def _gradients(c: Composition, total: Tensor, tensors: list[Tensor], of: str, where: str) -> list[Tensor]:
    with calling(c.reported, c.method, f"the gradient of {of} with {where}"):
        if not total.requires_grad:
            return [torch.zeros_like(x) for x in tensors]
        result = torch.autograd.grad(total, tensors, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, result, strict=True)]


def _same(c: Composition, what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    want = want.detach()
    if (wrong := difference(got, want, tolerance * max(1.0, float(want.abs().nan_to_num(posinf=0).max())))) is not None:
        fail(c.reported, c.method, f"{what} is {number(wrong.got)} at {wrong.place}, expected {number(wrong.want)} by "
             "the definition in float64" + _by(c))  # fmt: skip


def _by(c: Composition) -> str:
    """The shortcuts that may cause the failure, for the end of a message."""
    base = next((kind for kind in type(c.reported).__mro__ if "definitions" in kind.__dict__), object)
    result = shortcuts(c.reported, base)
    return f" (shortcuts: {', '.join(result)})" if result else ""


# --- finite differences -----------------------------------------------------------------------------------------------


def check_slopes(c: Composition, size: Size, directions: int = 2) -> None:
    """Gradients of `attend` on two kernels equal finite differences, along random directions of each tensor."""
    if isinstance(c.normalizer, SumToOne) and c.normalizer.one_key:
        return  # its gradient is defined as that of the soft weights
    where = describe(c, size, torch.float64)
    c = c.of(converted(c.thing, torch.float64))
    inputs = [x.requires_grad_() for x in triple(size, torch.float64)]
    named = dict(zip(KEYS, inputs, strict=True)) | c.learned()
    with torch.no_grad():
        condition = by_definition(c, inputs, where).condition
    slope = normal(size.batch, size.heads, size.queries, size.dim_v, seed=11)
    for kernel in ("eager", "tiled"):

        def total(kernel: str = kernel) -> Tensor | None:
            result = run(c, inputs, kernel, where)
            return None if result is None else (result[0] * slope).sum()

        made = total()
        if made is None:
            continue
        slopes = _gradients(c, made, list(named.values()), f"kernel {kernel!r}", where)
        for (name, x), gradient in zip(named.items(), slopes, strict=True):
            step, loose = (1e-6, 1e-5) if x.dtype == torch.float64 else (1e-4, 1e-2)
            for seed in range(directions):
                direction = normal(*x.shape, seed=20 + seed, dtype=x.dtype)
                want = _difference_quotient(total, x, direction, step)
                got = float((gradient.double() * direction.double()).sum())
                if not abs(got - want) <= loose * condition * (1 + abs(want)):
                    fail(
                        c.reported, c.method, f"attend on kernel {kernel!r} with {where}: the gradient of {name} along "
                        f"a random direction is {number(got)}, expected {number(want)} by finite differences" + _by(c)
                    )  # fmt: skip


def _difference_quotient(total: Callable[[], Tensor | None], x: Tensor, direction: Tensor, step: float) -> float:
    """Central difference of `total()` along a direction of x, which is restored afterwards."""
    before = x.detach().clone()
    values = []
    with torch.no_grad():
        try:
            for sign in (1, -1):
                x.copy_(before + sign * step * direction)
                made = total()
                assert made is not None
                values.append(float(made))
        finally:
            x.copy_(before)
    return (values[0] - values[1]) / (2 * step)


# --- half precision ---------------------------------------------------------------------------------------------------


def check_half(c: Composition, size: Size) -> None:
    """bfloat16 and float16 inputs give finite outputs and gradients, close to float64 results on the same inputs."""
    for dtype in (torch.bfloat16, torch.float16):
        where = describe(c, size, dtype)
        inputs = [x.requires_grad_() for x in triple(size, dtype)]
        half = converted(c.thing, dtype)
        used, exact = c.of(half), c.of(converted(half, torch.float64))
        with torch.no_grad():
            result = by_definition(
                exact, [x.detach().double() for x in inputs], where, drawn_weights(used, inputs, where)
            )
        most = float(torch.where(result.visible, result.scores, 0.0).nan_to_num(neginf=0).abs().max())
        tolerance = HALF_ROUNDINGS * torch.finfo(dtype).eps * (1 + most) * result.condition
        for kernel in kernels_for(size):
            if kernel in ONLY_TINY:
                continue
            got = run_or_refuse(used, inputs, kernel, where)
            if got is None:
                continue
            on = f"attend on kernel {kernel!r} with {where}"
            _same(c, f"{on}: the output", got[0], result.out, tolerance)
            if got[0].dtype != dtype:
                fail(c.reported, c.method, f"{on}: the output is {got[0].dtype}, expected the dtype of v")
            if not got[0].requires_grad:
                continue
            tensors = [*inputs, *used.learned().values()]
            slopes = _gradients(used, got[0].float().sum(), tensors, f"kernel {kernel!r}", where)
            for name, x in zip((*KEYS, *used.learned()), slopes, strict=True):
                if not bool(x.isfinite().all()) and _should_be_finite(exact, inputs, name, x, where):
                    place = tuple((~x.isfinite()).nonzero()[0].tolist())
                    fail(
                        c.reported, c.method, f"{on}: the gradient of {name} is {number(x[place].item())} at {place}, "
                        "expected finite numbers"
                    )  # fmt: skip


def _should_be_finite(c: Composition, inputs: Sequence[Tensor], name: str, got: Tensor, where: str) -> bool:
    """Whether the definition gives a gradient well inside the range of the dtype."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    named = dict(zip(KEYS, wide, strict=True)) | c.learned()
    total = attention(c, wide[0], wide[1], wide[2]).out.sum()
    (want,) = _gradients(c, total, [named[name]], "the definition", where)
    return float(want.abs().max()) < torch.finfo(got.dtype).max / 64


# --- masked keys ------------------------------------------------------------------------------------------------------


def check_masked(c: Composition, size: Size) -> None:
    """NaN and infinity in keys and values that are masked for all queries change neither output nor gradients."""
    assert c.mask is not None
    idle = ~visible_pairs(c.mask, size.whole, size.grid).any(2).any(1).expand(size.batch, -1)
    if not bool(idle.any()):
        return
    c, where = c.of(converted(c.thing, torch.float64)), describe(c, size, torch.float64)
    slope = normal(size.batch, size.heads, size.queries, size.dim_v, seed=11)
    q, k, v = triple(size, torch.float64)
    k, v = (x.masked_fill(idle[:, None, :, None], 0) for x in (k, v))
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    spoilt = [torch.where(idle[:, None, :, None], bad[torch.arange(x.shape[3]) % 3], x) for x in (k, v)]
    for kernel in kernels_for(size):
        if kernel == "reference":  # its loops skip masked keys
            continue
        results = []
        for tensors in ((q, k, v), (q, *spoilt)):
            inputs = [x.clone().requires_grad_() for x in tensors]
            made = run_or_refuse(c, inputs, kernel, where)
            if made is None:
                break
            slopes = []
            if made[0].requires_grad:
                total = (made[0] * slope).sum()
                slopes = _gradients(c, total, [*inputs, *c.learned().values()], f"kernel {kernel!r}", where)
            results.append([made[0], *slopes])
        if len(results) < 2:
            continue
        names = ["the output", *(f"the gradient of {name}" for name in (*KEYS, *c.learned()))]
        for name, clean, got in zip(names, *results, strict=False):
            if (wrong := difference(got, clean, 1e-9 * max(1.0, float(clean.detach().abs().max())))) is not None:
                fail(
                    c.reported, c.method, f"attend on kernel {kernel!r} with {where}: NaN in keys and values "
                    f"masked for all queries changes {name} to {number(wrong.got)} at {wrong.place}, "
                    f"expected {number(wrong.want)}"
                )  # fmt: skip


# --- statistics -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_measure(c: Composition, size: Size) -> None:
    """Entropy and received attention of `qkv.measure` equal those of the weights by definition."""
    if isinstance(c.normalizer, SumToOne) and c.normalizer.sample:
        return  # it would sample other keys
    c, where = c.of(converted(c.thing, torch.float64)), describe(c, size, torch.float64)
    q, k, v = triple(size, torch.float64)
    result = by_definition(c, (q, k, v), where)
    with calling(c.reported, c.method, f"measure with {where}"):
        try:
            got = measure(q, k, v, **c.arguments())
        except InputError as error:
            if bool((result.weights < 0).any()) and "negative weights" in str(error):
                return
            raise
    total = result.weights.sum(-1, keepdim=True)
    shares = result.weights / torch.where(total == 0, 1.0, total)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    tolerance = 1e-7 + 2.0**16 * result.eps * result.condition
    for name, mine, want in (("entropy", got.entropy, entropy), ("received", got.received, result.weights.sum(-2))):
        _same(c, f"measure with {where}: {name}", mine, want, tolerance)


def _pickled(thing: object) -> Any:
    return pickle.loads(pickle.dumps(thing))


@torch.no_grad()
def check_copies(thing: object, result: Callable[[Any], Tensor], what: str) -> None:
    """Copies by pickle and copy.deepcopy can be made, have the same learned tensors and give the same `result`."""
    before, name = result(thing), type(thing).__name__
    ways: list[tuple[str, Callable[[Any], Any]]] = [("pickle", _pickled)]
    if can_be_copied(thing):
        ways.append(("copy.deepcopy", deepcopy))
    for way, copied in ways:
        try:
            made = copied(thing)
        except Exception as error:
            raise CheckFailed(
                f"{name}: {way} raised {type(error).__name__}: {str(error).strip()}; expected a copy: "
                "the class and every function among its attributes must be defined at the top level of a module"
            ) from error
        if type(made) is not type(thing):
            raise CheckFailed(f"{name}: {way} made an object of class {type(made).__name__}, expected {name}")
        if list(learned_tensors(made)) != list(learned_tensors(thing)):
            raise CheckFailed(
                f"{name}: {way} made an object with the learned tensors {list(learned_tensors(made))}, "
                f"expected {list(learned_tensors(thing))}"
            )
        if (wrong := difference(result(made), before)) is not None:
            raise CheckFailed(f"{name}: {way} made an object whose {what} differs: {wrong}")


def check_output_of_copies(c: Composition, size: Size) -> None:
    """Copies of the object under examination give the same output of `attend`."""
    tensors, where = triple(size, torch.float64), f"{size}, float64"

    def output(thing: Any) -> Tensor:
        made = run(c.of(converted(thing, torch.float64)), tensors, "eager", where)
        assert made is not None
        return made[0]

    check_copies(c.thing, output, "output")


# --- all laws of `attend` ---------------------------------------------------------------------------------------------


def masked(c: Composition, size: Size) -> list[Composition]:
    """The composition without a mask, with holes and a query without visible keys, and causal with padding."""
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
    check_output_of_copies(plain, first)
