"""The level of a row: found by search, by a closed form, and differentiated on a tile.

The search finds the root of log Σ w(s, level), which decreases in the level; for a softmax it is a straight line. It
takes secant steps, and bisects where these do not shrink the bracket. A sample of the keys gives the initial guess.
Converged rows stop moving, so a row's result does not depend on the others in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._contract import overrides
from qkv.engine.tiles import spans
from qkv.errors import InputError
from qkv.normalizers import Normalizer, Scores, SumToOne, checked_shape, weights_of

PerRow = Float[Tensor, "*n"]

STEPS = 200  # most steps of a search: bisection alone needs fewer
GROUP, STEP = 8, 32  # the initial guess samples two of this many keys, each this many after the last
FEW = 512  # with at most this many keys there is no initial guess from a sample
TOLERANCE = 4  # of log Σ w, in eps
JUMP = 0.01  # tolerance of log Σ w at a fully converged level: more is a discontinuity, not a rounding error
FARTHEST = 1e12  # largest distance of the level from the largest score, in units of 1 + |score|


def level_of_rows(normalizer: Normalizer, scores: Scores) -> PerRow:
    """Return the level of whole rows, −inf where masked and with a sink as one more score; 0 for fully masked rows.

    Not differentiable; see `solved_weights`.
    """
    with torch.no_grad():
        if overrides(normalizer, SumToOne, "level_of"):
            return normalizer.level_of(scores)
        return search_level(normalizer, scores)[0]


def search_level(normalizer: Normalizer, scores: Scores, space: Scores | None = None) -> tuple[PerRow, Scores]:
    """Return the level and weights of whole rows, by search; without gradients.

    With `space`, the weights are in it, and the scores may change where they are masked.
    """
    scores = scores.detach()
    top = scores.amax(-1)
    empty = top == -torch.inf
    weights = torch.empty_like(scores) if space is None else space
    scores = scores.clone() if space is None else scores
    rows = _MaskedRows(normalizer, scores, top)
    start = top.masked_fill(empty, 0)
    fall = torch.ones_like(start)
    if scores.shape[-1] > FEW:
        # Groups of keys some steps apart; the largest score of each, and another that stands for the rest of it.
        groups = scores[..., : scores.shape[-1] // (GROUP * STEP) * (GROUP * STEP)].unflatten(-1, (-1, GROUP, STEP))
        most = groups.amax(-2)
        other = torch.where(groups[..., 0, :] == most, groups[..., 1, :], groups[..., 0, :])
        sample = torch.cat([most, other], -1).flatten(-2)
        best, some = sample.amax(-1), weights.flatten()[: sample.numel()].view(sample.shape)
        sampled = _MaskedRows(normalizer, sample, best)

        def estimate(level: Tensor) -> Tensor:
            largest, rest = sampled.weights(level, some).unflatten(-1, (-1, 2, STEP)).sum((-3, -1)).unbind(-1)
            return largest + (GROUP - 1) * rest

        estimated, slope, sure = root(estimate, start, fall, best == -torch.inf, 1e-2)
        start, fall = torch.where(sure, estimated, start), torch.where(sure, slope, fall)

    def total(level: Tensor) -> Tensor:
        return rows.weights(level, weights).sum(-1)

    level, _, sure = root(total, start, fall, empty, TOLERANCE * torch.finfo(scores.dtype).eps)
    if not bool(sure.all()):
        raise_no_level(normalizer, top, level, weights.sum(-1), sure)
    return level, weights  # at the final level


class _MaskedRows:
    """Rows of scores with masked entries (−inf), whose weights are 0; it may overwrite the masked scores."""

    def __init__(self, normalizer: Normalizer, scores: Scores, top: PerRow) -> None:
        self.normalizer, self.scores = normalizer, scores
        self.masked: Tensor | None = None
        if normalizer.zero_at_minus_infinity:
            return
        where = (~(scores.flatten(0, -2).amin(0) > -torch.inf)).nonzero()[:, 0]
        if len(where):  # most columns of a panel are not masked
            self.columns = slice(int(where[0]), int(where[-1]) + 1)
            some = scores[..., self.columns]
            self.masked = some == -torch.inf
            some.copy_(torch.where(self.masked, top.masked_fill(top == -torch.inf, 0)[..., None], some))

    def weights(self, level: PerRow, out: Scores) -> Scores:
        """Return weights at the given levels, in `out`."""
        by_parts(self.normalizer, self.normalizer.weigh, self.scores, level, out)
        if self.masked is not None:
            out[..., self.columns].masked_fill_(self.masked, 0)
        return out


PART = 2**17  # scores whose weights are computed at once: several tensors of them fit in cache


def by_parts(
    normalizer: Normalizer, weigh: Callable[..., Scores], scores: Scores, level: PerRow | None, out: Scores
) -> Scores:
    """Return ``weigh(scores, level)`` in `out`, which may be the scores, computed for some of the queries at a time."""
    for rows in spans(scores.shape[-2], max(1, PART * scores.shape[-2] // scores.numel())):
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
    x, done = start, empty
    low, high = torch.full_like(x, -torch.inf), torch.full_like(x, torch.inf)  # total > 1 at low, < 1 at high
    before, y_before = x + torch.nan, x + torch.nan
    width = torch.ones_like(x)  # length of the last step
    span = torch.full_like(x, torch.inf)  # width of the bracket three steps ago
    for number in range(STEPS):
        y = torch.log(total(x))
        low, high = torch.where(y > 0, x, low), torch.where(y < 0, x, high)
        gap = high - low
        # The level has a relative rounding error, which log Σ w inherits times its slope, about 1.
        near = (y.abs() <= tolerance * (1 + x.abs() / 4)) | y.isnan() | empty
        done = done | near | (gap <= 2 * eps * x.abs() + tiny)
        slope_between = (y_before - y) / (x - before)
        fall = torch.where((slope_between > 0) & (slope_between < torch.inf) & ~done, slope_between, fall)
        lost = ~done & ((x - start).abs() > FARTHEST * (1 + start.abs()))
        if bool((done | lost).all()):
            break
        move = y / (fall if number == 0 else slope_between)  # secant step
        # Without a bracket the steps may grow; where the secant step is invalid, they double. A step of 0 counts as one
        # rounding error, else the doubling would never leave the level.
        forward = move * y
        move = torch.where((forward > 0) & (forward < torch.inf), move.abs().minimum(8 * width), 2 * width)
        beyond = x + torch.where(y > 0, move, -move)
        middle = low + gap / 2
        inside = (beyond > low) & (beyond < high)
        if number % 3 == 0:
            inside &= gap <= span / 2
            span = gap
        new = torch.where((gap < torch.inf) & ~inside, middle, beyond)
        new = torch.where(done | lost, x, new)
        width = torch.where(done, width, (new - x).abs().maximum(eps * x.abs() + tiny))
        before, y_before, x = x, y, new
    return x, fall, near | (done & (y.abs() <= JUMP))


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
    normalizer: Normalizer, scores: Scores, learned: Mapping[str, Tensor], level: PerRow | None = None,
    space: Scores | None = None,
) -> tuple[Scores, PerRow]:  # fmt: skip
    """Return the weights of whole rows, and their level, found if it is not known; −inf where masked.

    Differentiable in the scores and learned tensors, by the implicit function theorem; not with `space`, which is as of
    `search_level`.
    """
    if torch.is_grad_enabled() and (scores.requires_grad or learned):
        weights, level = _Solved.apply(normalizer, level, scores, *learned.values())
        return weights, level
    if level is None and not overrides(normalizer, SumToOne, "level_of"):
        level, weights = search_level(normalizer, scores, space)
        return weights, level
    level = level_of_rows(normalizer, scores) if level is None else level
    if space is None:
        return weights_of(normalizer, scores, level[..., None]), level
    return by_parts(normalizer, functools.partial(weights_of, normalizer), scores, level, space), level


class _Solved(torch.autograd.Function):
    """From Σ w(s, level) = 1: d level = (Σ ∂w/∂s ds) / (Σ −∂w/∂level)."""

    @staticmethod
    def forward(
        ctx: Any, normalizer: Normalizer, level: Tensor | None, scores: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        level = level_of_rows(normalizer, scores) if level is None else level.clone()
        ctx.normalizer = normalizer
        ctx.recorded = _recorded(normalizer, scores.detach(), level[..., None].expand_as(scores).detach())
        ctx.save_for_backward(scores, level, *learned)
        return ctx.recorded[2].detach(), level

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_level: Tensor) -> tuple[Tensor | None, ...]:
        scores, level, *learned = ctx.saved_tensors
        normalizer, again = ctx.normalizer, torch.is_grad_enabled()
        if again and learned:
            raise InputError(
                f"{type(normalizer).__name__}: create_graph is True, but a SumToOne normalizer with learned "
                "tensors has no second derivatives; expected create_graph=False"
            )
        s, at, weights = ctx.recorded
        if again:  # aliases give partial derivatives, since the level also depends on the scores
            s, at, weights = _recorded(normalizer, scores.view_as(scores), level[..., None].expand_as(scores))
        ones = torch.ones_like(weights)  # a weight depends on its own score alone, and so does its derivative
        slopes, rises = torch.autograd.grad(weights, (s, at), ones, create_graph=again, retain_graph=True)
        total = rises.sum(-1)
        through_level = (grad_level + (grad * rises).sum(-1)) / torch.where(total == 0, 1.0, total)
        of_weights = grad - through_level.masked_fill(total == 0, 0)[..., None]
        of_learned = torch.autograd.grad(weights, learned, of_weights, allow_unused=True) if learned else ()
        return None, None, slopes * of_weights, *of_learned


@torch.enable_grad()
def _recorded(normalizer: Normalizer, scores: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores and levels that require gradients, and their weights."""
    scores, level = (x if x.requires_grad else x.detach().requires_grad_() for x in (scores, level))
    return scores, level, weights_of(normalizer, scores, level)


def sink_weight(normalizer: Normalizer, sink: PerRow, level: PerRow) -> PerRow:
    """Return the weight of a sink at the level of each row."""
    return weights_of(normalizer, sink.expand_as(level)[..., None], level[..., None])[..., 0]


def sink_slope(normalizer: Normalizer, sink: PerRow, level: PerRow) -> PerRow:
    """Return −∂ weight / ∂ level of a sink at the level of each row."""
    _, at, weights = _recorded(normalizer, sink.expand_as(level)[..., None], level[..., None])
    return -torch.autograd.grad(weights, at, torch.ones_like(weights))[0][..., 0]
