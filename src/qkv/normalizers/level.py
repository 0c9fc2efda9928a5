"""The level of a `SumToOne` row: the number at which its weights sum to one, and its derivative.

The search works on log Σ w(s, level), which falls in the level; for a softmax it is a straight line. A secant method
does the steps, and bisection takes over where these do not shrink the bracket. A strided sample of the keys gives the
first guess. Rows that have converged stop moving, so a row's result does not depend on the others in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.contract import overrides
from qkv.errors import InputError
from qkv.normalizers.base import Scores, SumToOne, checked_shape, weights_of

Rows = Float[Tensor, "*n"]

STEPS = 200  # of a search, at most: bisection alone needs fewer
SAMPLE = 512  # keys of the sample that gives the first guess
JUMP = 0.01  # of log Σ w at a level to all its digits: more is a jump, not a rounding
FARTHEST = 1e12  # how far a search goes from the largest score before it gives up, in units of 1 + |score|


def level_of_rows(normalizer: SumToOne, scores: Scores) -> Rows:
    """The level of rows given whole, −inf where masked and a sink as one more score; 0 where nothing is visible.

    No gradient passes: see `differentiable_level`.
    """
    with torch.no_grad():
        if overrides(normalizer, SumToOne, "level_of"):
            return normalizer.level_of(scores)
        return solve(normalizer, scores)[0]


def solve(normalizer: SumToOne, scores: Scores) -> tuple[Rows, Scores]:
    """Level and weights of rows given whole, by search; without gradients.

    Raises:
        InputError: where no level makes the weights sum to one.
    """
    scores = scores.detach()
    top = scores.amax(-1)
    empty = top == -torch.inf
    hidden = scores == -torch.inf if bool(scores.amin() == -torch.inf) else None
    start = top.masked_fill(empty, 0)
    fall = torch.ones_like(start)
    step = scores.shape[-1] // SAMPLE
    if step > 1:
        sample = torch.cat([scores[..., ::step], top[..., None]], -1)
        sampled = None if hidden is None else torch.cat([hidden[..., ::step], empty[..., None]], -1)

        def estimate(level: Tensor) -> Tensor:
            weights = _weigh(normalizer, sample, level, sampled)
            return step * weights[..., :-1].sum(-1) + weights[..., -1]  # the largest score always counts

        start, fall = _root(normalizer, estimate, start, fall, empty, 1e-3)
    kept: list[Tensor] = []

    def total(level: Tensor) -> Tensor:
        kept[:] = [_weigh(normalizer, scores, level, hidden)]
        return kept[0].sum(-1, dtype=torch.float64).to(scores.dtype)

    level, _ = _root(normalizer, total, start, fall, empty, 4 * torch.finfo(scores.dtype).eps)
    return level, kept[0]  # the last weights are those of the last level


def _weigh(normalizer: SumToOne, scores: Scores, level: Rows, hidden: Bool[Tensor, "*n k"] | None) -> Scores:
    row = level[..., None]
    if hidden is None or normalizer.zero_at_minus_infinity:
        return checked_shape(normalizer, normalizer.weight(scores, row), scores)
    made = normalizer.weight(torch.where(hidden, row, scores), row)
    return checked_shape(normalizer, made, scores).masked_fill(hidden, 0)


def _root(
    normalizer: SumToOne, total: Callable[[Tensor], Tensor], start: Rows, fall: Rows, empty: Bool[Tensor, "*n"],
    tolerance: float,
) -> tuple[Rows, Rows]:  # fmt: skip
    """Where log `total` is 0 to within a tolerance, and how fast it falls there; `fall` is a guess of that.

    Rows that are `empty` stay where they are.
    """
    eps, tiny = torch.finfo(start.dtype).eps, torch.finfo(start.dtype).tiny
    x, done = start, empty
    low, high = torch.full_like(x, -torch.inf), torch.full_like(x, torch.inf)  # total > 1 at low, < 1 at high
    before, y_before = x + torch.nan, x + torch.nan
    width = torch.ones_like(x)  # of the last step
    span = torch.full_like(x, torch.inf)  # of the bracket, three steps ago
    for number in range(STEPS):
        y = torch.log(total(x))
        low, high = torch.where(y > 0, x, low), torch.where(y < 0, x, high)
        gap = high - low
        # A level is known to a rounding of its own size, and log Σ w to as much times its slope, about 1.
        done = done | (y.abs() <= tolerance * (1 + x.abs() / 4)) | y.isnan() | (gap <= 2 * eps * x.abs() + tiny)
        known = (y_before - y) / (x - before)
        fall = torch.where(known.isfinite() & (known > 0) & ~done, known, fall)
        if bool(done.all()):
            if bool((y.abs() > JUMP).masked_fill(empty, False).any()):
                break
            return x, fall
        bracketed = gap.isfinite()
        move = y / (fall if number == 0 else known)  # the secant
        # Without a bracket the steps may grow; where the secant says nothing, they double.
        move = torch.where(move.isfinite() & (move * y > 0), move.abs().minimum(8 * width), 2 * width)
        beyond = x + torch.where(y > 0, move, -move)
        middle = low + gap / 2
        inside = (beyond > low) & (beyond < high)
        if number % 3 == 0:
            inside &= gap <= span / 2
            span = gap
        new = torch.where(bracketed & ~inside, middle, beyond)
        new = torch.where(done, x, new)
        width = torch.where(done, width, (new - x).abs().clamp(min=tiny))
        if bool(((new - start).abs() > FARTHEST * (1 + start.abs())).any()):
            break
        before, y_before, x = x, y, new
    _refuse(normalizer, y, low, high, done)
    return x, fall


def _refuse(normalizer: SumToOne, y: Rows, low: Rows, high: Rows, done: Bool[Tensor, "*n"]) -> None:
    """Raise `InputError` for rows whose weights no level makes sum to one."""
    name = type(normalizer).__name__
    small, large = ~done & (low == -torch.inf), ~done & (high == torch.inf)
    if bool(small.any()):
        raise InputError(
            f"{name}: the weights of a query sum to {y[small].exp().max().item():.3g} at the most, whatever the "
            "level; expected a weight(scores, level) whose sum passes 1 as the level falls, for one visible key, too"
        )
    if bool(large.any()):
        raise InputError(
            f"{name}: the weights of a query sum to {y[large].exp().min().item():.3g} at the least, whatever the "
            "level; expected a weight(scores, level) that falls to 0 as the level rises"
        )
    raise InputError(f"{name}: no level was found at which the weights of a query sum to 1; is its weight continuous?")


def differentiable_level(normalizer: SumToOne, scores: Scores, learned: Mapping[str, Tensor]) -> Rows:
    """`level_of_rows` with gradients, of the scores and of learned tensors, by the implicit function theorem."""
    if not (torch.is_grad_enabled() and (scores.requires_grad or learned)):
        return level_of_rows(normalizer, scores)
    return _Level.apply(normalizer, scores, *learned.values())


class _Level(torch.autograd.Function):
    """From Σ w(s, level) = 1: d level = −(Σ ∂w/∂s ds) / (Σ ∂w/∂level)."""

    @staticmethod
    def forward(ctx: Any, normalizer: SumToOne, scores: Tensor, *learned: Tensor) -> Tensor:
        level = level_of_rows(normalizer, scores)
        ctx.save_for_backward(scores, level, *learned)
        ctx.normalizer = normalizer
        return level

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, level, *learned = ctx.saved_tensors
        again = torch.is_grad_enabled()
        if again and learned:
            raise InputError(
                f"{type(ctx.normalizer).__name__}: second derivatives were asked for, which a SumToOne normalizer "
                "with learned tensors does not have; expected create_graph=False"
            )
        with torch.enable_grad():
            # Aliases, so that each derivative is a partial one: the level depends on the scores, too.
            s, at = (x.view_as(x) if again else x.detach().requires_grad_() for x in (scores, level))
            if not s.requires_grad:
                s = s.detach().requires_grad_()
            total = weights_of(ctx.normalizer, s, at).sum(-1)
            (falls,) = torch.autograd.grad(total.sum(), at, create_graph=again, retain_graph=True)
            factor = torch.where(falls == 0, 0.0, -grad / torch.where(falls == 0, 1.0, falls))
            found = torch.autograd.grad(total, (s, *learned), factor, create_graph=again, allow_unused=True)
        return None, *found
