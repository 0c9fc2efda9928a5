"""The level of a row: found by search, by a closed form, and differentiated on a tile.

The search finds the root of log Σ w(s, level), which decreases in the level; for a softmax it is a straight line. It
takes secant steps, and bisects where these do not shrink the bracket. On CPU the initial guess is the root of a sum
over few nodes instead of all scores (nodes.c). Converged rows stop moving, so a row's result does not depend on the
others in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._contract import overrides
from qkv.engine.modes import plain_torch
from qkv.engine.tiles import spans
from qkv.errors import InputError
from qkv.native.library import nodes_of_rows
from qkv.normalizers import Normalizer, Scores, SumToOne, checked_shape, weights_of

PerRow = Float[Tensor, "*n"]
EVERY = slice(None)

STEPS = 200  # most steps of a search: bisection alone needs fewer
FEW = 128  # with at most this many keys there is no initial guess
TOLERANCE = 16  # of log Σ w, in eps
JUMP = 0.01  # tolerance of log Σ w at a fully converged level: more is a discontinuity, not a rounding error
FARTHEST = 1e12  # largest distance of the level from the largest score, in units of 1 + |score|


def level_of_rows(normalizer: SumToOne, scores: Scores) -> PerRow:
    """Return the level of whole rows, −inf where masked and with a sink as one more score; 0 for fully masked rows.

    Not differentiable; see `solved_weights`.
    """
    with torch.no_grad():
        if overrides(normalizer, SumToOne, "level_of"):
            return normalizer.level_of(scores)
        return search_level(normalizer, scores)[0]


def search_level(
    normalizer: SumToOne, scores: Scores, space: Scores | None = None, cut: slice = EVERY
) -> tuple[PerRow, Scores]:
    """Return the level and weights of whole rows, by search; without gradients.

    With `space`, the weights are in it, and the scores may change where they are masked. Only scores in the columns
    `cut` may be masked.
    """
    scores = scores.detach()
    top = scores.amax(-1)
    empty = top == -torch.inf
    weights = torch.empty_like(scores) if space is None else space
    scores = scores.clone() if space is None else scores
    start = top.masked_fill(empty, 0)
    fall, tolerance = torch.ones_like(start), TOLERANCE * torch.finfo(scores.dtype).eps
    nodes = nodes_of_rows(scores) if scores.shape[-1] > FEW and plain_torch() else None
    if nodes is not None:
        at, counts = nodes

        def estimate(level: Tensor) -> Tensor:
            near = checked_shape(normalizer, normalizer.term(at, level[..., None]), at)
            return (near * counts).sum(-1).clamp(min=torch.finfo(at.dtype).tiny)

        estimated, slope, sure = root(estimate, start, fall, empty, tolerance)
        start, fall = torch.where(sure, estimated, start), torch.where(sure, slope, fall)
    masked = masked_columns(normalizer, scores, cut)
    fill_masked(scores, masked, start)

    def total(level: Tensor) -> Tensor:
        by_parts(normalizer, normalizer.term, scores, level, weights)
        fill_masked(weights, masked)
        return weights.sum(-1)

    level, _, sure = root(total, start, fall, empty, tolerance)
    if not bool(sure.all()):
        raise_no_level(normalizer, top, level, weights.sum(-1), sure)
    if overrides(normalizer, SumToOne, "term"):
        by_parts(normalizer, normalizer.weigh, scores, level, weights)
        fill_masked(weights, masked)
    return level, weights  # at the final level


Masked = tuple[slice, Bool[Tensor, "*n k"]]


def masked_columns(normalizer: Normalizer, scores: Scores, cut: slice) -> Masked | None:
    """Return which scores in the columns `cut` are masked; None if none is, or `weight` need not be kept from these."""
    masked = scores[..., cut] == -torch.inf
    if normalizer.zero_at_minus_infinity or not masked.numel():
        return None
    return (cut, masked) if bool(masked.any()) else None


def fill_masked(x: Scores, masked: Masked | None, value: PerRow | None = None) -> None:
    """Write the value of each row, or 0, where x is masked."""
    if masked is not None:
        columns, where = masked
        some = x[..., columns]
        some.masked_fill_(where, 0) if value is None else some.copy_(torch.where(where, value[..., None], some))


PART = 2**18  # scores whose weights are computed at once: several tensors of them fit in cache


def row_parts(scores: Scores) -> Iterator[slice]:
    """Return slices of the queries with at most `PART` scores each, or one query."""
    return spans(scores.shape[-2], max(1, PART * scores.shape[-2] // scores.numel()))


def by_parts(
    normalizer: Normalizer, weigh: Callable[..., Scores], scores: Scores, level: PerRow | None, out: Scores
) -> Scores:
    """Return ``weigh(scores, level)`` in `out`, which may be the scores, computed for some of the queries at a time."""
    for rows in row_parts(scores):
        some = scores[..., rows, :]
        weights = weigh(some, None if level is None else level[..., rows, None])
        out[..., rows, :] = checked_shape(normalizer, weights, some)
    return out


def root(
    total: Callable[[Tensor], Tensor], start: PerRow, fall: PerRow, empty: Bool[Tensor, "*n"], tolerance: float
) -> tuple[PerRow, PerRow, Bool[Tensor, "*n"]]:
    """Find the root of log `total` to within a tolerance, the negative slope there, and which rows converged.

    `fall` is an initial guess of the negative slope. Rows that are `empty` keep their start value.
    """
    eps, tiny = torch.finfo(start.dtype).eps, torch.finfo(start.dtype).tiny
    x, done, farthest = start, empty, FARTHEST * (1 + start.abs())
    low, high = torch.full_like(x, -torch.inf), torch.full_like(x, torch.inf)  # total > 1 at low, < 1 at high
    before, y_before = x + torch.nan, x + torch.nan
    width = torch.ones_like(x)  # length of the last step
    span = high  # width of the bracket three steps ago
    for number in range(STEPS):
        y = torch.log(total(x))
        rises, distance, size = y > 0, y.abs(), x.abs()
        low, high = torch.where(rises, x, low), torch.where(rises, high, x)
        gap, least = high - low, eps * size + tiny
        # The level has a relative rounding error, which log Σ w inherits times its slope, about 1.
        near = ~(distance > tolerance + tolerance / 4 * size)  # True for NaN
        done = done | near | (gap <= 2 * least)
        stopped = done | (size > farthest)
        if bool(stopped.all()):
            break
        slope = (y_before - y) / (x - before)  # NaN for a row that has stopped
        valid = (slope > 0) & (slope < torch.inf)
        fall = torch.where(valid, slope, fall)
        # Secant step. Without a bracket the steps may grow; where the secant step is invalid, they double. A step of 0
        # counts as one rounding error, else the doubling would never leave the level.
        move = (distance / fall).minimum(8 * width)
        move = move if number == 0 else torch.where(valid, move, 2 * width)
        beyond = x + torch.copysign(move, y)
        inside = (beyond > low) & (beyond < high)
        if number % 3 == 0:
            inside &= gap <= span / 2
            span = gap
        new = torch.where(inside | (gap == torch.inf), beyond, low + gap / 2)
        new = torch.where(stopped, x, new)
        width = (new - x).abs().maximum(least)
        before, y_before, x = x, y, new
    return x, fall, near | empty | (done & (distance <= JUMP))


def raise_no_level(normalizer: Normalizer, top: PerRow, level: PerRow, total: PerRow, sure: Bool[Tensor, "*n"]) -> None:
    """Raise `InputError` for rows without a level at which the weights sum to one."""
    name = type(normalizer).__name__
    small, large = ~sure & (total < 1 - JUMP), ~sure & (total > 1 + JUMP)
    far = (level - top).abs() > 1e6
    if bool((small & far).any()):
        raise InputError(
            f"{name}: weight sums to at most {total[small & far].max().item():.3g} over the keys of a query, at any "
            "level; expected a weight(scores, level) whose sum exceeds 1 at low levels, even for one visible key"
        )
    if bool((large & far).any()):
        raise InputError(
            f"{name}: weight sums to at least {total[large & far].min().item():.3g} over the keys of a query, at any "
            "level; expected a weight(scores, level) that falls to 0 as the level rises"
        )
    raise InputError(f"{name}: weight does not sum to 1 over the keys of a query at any level; is it continuous?")


def solved_weights(
    normalizer: SumToOne, scores: Scores, learned: Mapping[str, Tensor], level: PerRow | None = None,
    space: Scores | None = None, cut: slice = EVERY,
) -> tuple[Scores, PerRow]:  # fmt: skip
    """Return the weights of whole rows, and their level, found if it is not known; −inf where masked, inside of `cut`.

    Differentiable in the scores and learned tensors, by the implicit function theorem; not with `space`, which is as of
    `search_level`.
    """
    if torch.is_grad_enabled() and (scores.requires_grad or learned):
        weights, level = _Solved.apply(normalizer, level, cut, scores, *learned.values())
        return weights, level
    if level is None and not overrides(normalizer, SumToOne, "level_of"):
        level, weights = search_level(normalizer, scores, space, cut)
        return weights, level
    level = level_of_rows(normalizer, scores) if level is None else level
    if space is None:
        return weights_of(normalizer, scores, level[..., None]), level
    return by_parts(normalizer, functools.partial(weights_of, normalizer), scores, level, space), level


class _Solved(torch.autograd.Function):
    """From Σ t(s, level) = 1: d level = (Σ ∂t/∂s ds) / (Σ −∂t/∂level). The terms t are the weights by default."""

    @staticmethod
    def forward(
        ctx: Any, normalizer: SumToOne, level: Tensor | None, cut: slice, scores: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        level = level_of_rows(normalizer, scores) if level is None else level.clone()
        functions = _functions(normalizer)
        results = [[torch.empty_like(scores) for _ in range(3)] for _ in functions]
        for rows in row_parts(scores):
            some, at = scores[..., rows, :], level[..., rows]
            masked = masked_columns(normalizer, some, cut)
            if masked is not None:
                fill_masked(some := some.clone(), masked, at)
            for function, of_function in zip(functions, results, strict=True):
                for x, result in zip(of_function, _derivatives(normalizer, some, at, function), strict=True):
                    x[..., rows, :] = result
                    fill_masked(x[..., rows, :], masked)
        ctx.normalizer = normalizer
        ctx.save_for_backward(scores, level, *results[0][1:], *results[-1][1:], *learned)
        return results[0][0], level

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_level: Tensor) -> tuple[Tensor | None, ...]:
        scores, level, *derivatives = ctx.saved_tensors
        derivatives, learned = derivatives[:4], derivatives[4:]
        normalizer, again = ctx.normalizer, torch.is_grad_enabled()
        if again and learned:
            raise InputError(
                f"{type(normalizer).__name__}: create_graph is True, but a SumToOne normalizer with learned "
                "tensors has no second derivatives; expected create_graph=False"
            )
        functions = _functions(normalizer)
        if again:  # aliases give partial derivatives, since the level also depends on the scores
            s, at = scores.view_as(scores), level[..., None].expand_as(scores)
            numbers = [weights_of(normalizer, s, at, function) for function in functions]
            pairs = [torch.autograd.grad(x, (s, at), torch.ones_like(x), create_graph=True) for x in numbers]
            derivatives = [*pairs[0], *pairs[-1]]
        slopes, rises, term_slopes, term_rises = derivatives
        total = term_rises.sum(-1)
        through_level = (grad_level + (grad * rises).sum(-1)) / torch.where(total == 0, 1.0, total)
        through_level = through_level.masked_fill(total == 0, 0)[..., None]
        of_scores = slopes * grad - term_slopes * through_level
        of_terms = -through_level.expand_as(grad)
        upstream = [grad + of_terms] if len(functions) == 1 else [grad, of_terms]
        of_each = (
            _of_learned(normalizer, scores, level, x, learned, function)
            for x, function in zip(upstream, functions, strict=True)
        )
        return None, None, None, of_scores, *functools.reduce(_added, of_each)


def _functions(normalizer: Normalizer) -> list[Callable[..., Scores]]:
    """Return what gives the weights and, if others, the terms that sum to one."""
    terms = [normalizer.term] if isinstance(normalizer, SumToOne) and overrides(normalizer, SumToOne, "term") else []
    return [normalizer.weigh, *terms]


@torch.enable_grad()
def _derivatives(
    normalizer: Normalizer, scores: Scores, level: PerRow, function: Callable[..., Scores] | None = None
) -> tuple[Scores, Scores, Scores]:
    """Return weights (or terms) of scores, none of them masked, and their derivatives in the score and the level."""
    s, at = (x.detach().requires_grad_() for x in (scores, level[..., None].expand_as(scores)))
    weights = checked_shape(normalizer, (normalizer.weigh if function is None else function)(s, at), s)
    # A weight depends on its own score alone, and so does its derivative.
    slopes, rises = torch.autograd.grad(weights, (s, at), torch.ones_like(weights))
    return weights.detach(), slopes, rises


@torch.enable_grad()
def _of_learned(
    normalizer: Normalizer, scores: Scores, level: PerRow, grad: Scores, learned: Sequence[Tensor],
    function: Callable[..., Scores],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of learned tensors, given that of the weights (or terms) at a fixed level."""
    sums: list[Tensor | None] = [None] * len(learned)
    for rows in row_parts(scores) if learned else ():
        weights = weights_of(normalizer, scores[..., rows, :].detach(), level[..., rows, None].detach(), function)
        found = torch.autograd.grad(weights, learned, grad[..., rows, :], allow_unused=True)
        sums = _added(sums, list(found))
    return sums


def _added(sums: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    return [a if b is None else b if a is None else a + b for a, b in zip(sums, more, strict=True)]


def sink_weight(normalizer: Normalizer, sink: PerRow, level: PerRow) -> PerRow:
    """Return the weight of a sink at the level of each row."""
    return weights_of(normalizer, sink.expand_as(level)[..., None], level[..., None])[..., 0]


def sink_slope(normalizer: Normalizer, sink: PerRow, level: PerRow) -> PerRow:
    """Return −∂ weight / ∂ level of a sink at the level of each row."""
    sink = sink.expand_as(level)[..., None]
    masked = sink == -torch.inf
    _, _, rises = _derivatives(normalizer, torch.where(masked, level[..., None], sink), level)
    return -rises.masked_fill(masked, 0)[..., 0]
