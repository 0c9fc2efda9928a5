"""The level at which the weights of a row sum to one, by bisection, with the implicit derivative."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Weights of scores at the level of their rows."""
DOUBLINGS = 60  # most doublings until the bracket contains the root
HALVINGS = 200  # most bisection steps: more than a float64 has bits
CLOSE = 1e-13  # tolerance of the sum of the weights


class Rows:
    """Scores of rows, their masked entries, and an optional sink."""

    def __init__(self, weigh: Weigh, scores: Tensor, masked: Tensor, sink: Tensor | None) -> None:
        self.weigh, self.scores, self.masked, self.sink = weigh, scores, masked, sink
        self.empty = masked.all(-1, keepdim=True) if sink is None else torch.zeros_like(masked[..., :1])

    def weights(self, level: Tensor) -> Tensor:
        """Weights of the keys; masked scores are replaced by the level, so that no derivative is NaN."""
        at = torch.where(self.masked, level.detach(), self.scores)
        return self.weigh(at, level).masked_fill(self.masked, 0)

    def sink_weight(self, level: Tensor) -> Tensor | None:
        return None if self.sink is None else self.weigh(self.sink, level)

    def total(self, level: Tensor) -> Tensor:
        """Sum of all weights of each row, (…, 1)."""
        total = self.weights(level).sum(-1, keepdim=True)
        sink = self.sink_weight(level)
        return total if sink is None else total + sink


def level_of(rows: Rows, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The level of each row, (…, 1), differentiable; and −∂ level / ∂ (sum of the weights), its condition number.

    `near` is the level of almost the same rows, from which Newton's method starts.
    """
    with torch.no_grad():
        found = bisected(rows) if near is None else _near(rows, near)
    falls = _falls(rows, found)
    flat = rows.empty | (falls == 0)
    per_sum = torch.where(flat, 0.0, -1 / torch.where(flat, 1.0, falls))
    # The sum is 1 for any scores, so an increase of the sum at a fixed level increases the level.
    total = rows.total(found)
    return found + (total - total.detach()) * per_sum, per_sum


def bisected(rows: Rows) -> Tensor:
    """The level by bisection, until no float64 number lies between the ends of the bracket."""
    top = rows.scores.detach().masked_fill(rows.masked, -torch.inf).amax(-1, keepdim=True)
    if rows.sink is not None:
        top = torch.maximum(top, rows.sink.detach())
    top = top.masked_fill(rows.empty, 0)
    low, high = top - 1, top + 1
    for n in range(DOUBLINGS):
        short = (rows.total(low) < 1) & ~rows.empty
        if not short.any():
            break
        low = torch.where(short, low - 2.0**n, low)
    for n in range(DOUBLINGS):
        long = (rows.total(high) > 1) & ~rows.empty
        if not long.any():
            break
        high = torch.where(long, high + 2.0**n, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if bool(((middle == low) | (middle == high)).all()):
            break
        above = rows.total(middle) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return high.masked_fill(rows.empty, 0)


def _near(rows: Rows, level: Tensor) -> Tensor:
    for _ in range(4):
        off = (rows.total(level) - 1).masked_fill(rows.empty, 0)
        if bool((off.abs() <= CLOSE).all()):
            return level
        falls = _falls(rows, level)
        step = off / torch.where(falls == 0, -1.0, falls)
        if not step.isfinite().all():
            break
        level = level - step
    return bisected(rows)


def _falls(rows: Rows, level: Tensor) -> Tensor:
    """∂ (sum of the weights) / ∂ level."""
    at = level.detach().requires_grad_()
    with torch.enable_grad():
        total = Rows(rows.weigh, rows.scores.detach(), rows.masked, _detached(rows.sink)).total(at).sum()
    if not total.requires_grad:
        return torch.zeros_like(level)
    return torch.autograd.grad(total, at)[0]


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
