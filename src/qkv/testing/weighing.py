"""Weights of a normalizer by definition: the level of a row by bisection, differentiated implicitly.

From Σ_j w(s_j, level) = 1 follows that the level moves by −(Σ ∂w/∂s ds) / (Σ ∂w/∂level).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.testing.report import calling, check_returned, fail, number

STEPS = 200  # most steps of a bisection; it ends when no number lies between the two ends of the bracket
FARTHEST = 2.0**40  # largest distance of the level from the largest score


def weigh(normalizer: Normalizer, at: Tensor, level: Tensor | None = None) -> Tensor:
    """`weight` at scores (and the level of their rows), with a check of its result."""
    with calling(normalizer, "weight", f"called for scores of shape {tuple(at.shape)}"):
        if isinstance(normalizer, SumToOne):
            assert level is not None
            made = normalizer.weight(at, level)
        else:
            assert isinstance(normalizer, Pointwise)
            made = normalizer.weight(at)
    return check_returned(normalizer, "weight", made, at.shape, at.dtype, f"scores of {at.dtype}")


def pointwise(normalizer: Pointwise, final: Tensor, shown: Tensor, visible_keys: Tensor) -> Tensor:
    """Weights of final scores, divided by keys or by their sum as the normalizer defines; 0 at masked pairs."""
    with calling(normalizer, "shift", "called"):
        shift = normalizer.shift(lambda: visible_keys, final.new_empty(0))
    if shift is not None:
        final = final + shift[..., None]
    weights = torch.where(shown, weigh(normalizer, torch.where(shown, final, 0.0)), 0.0)
    if normalizer.divide == "sum":
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
    return weights / visible_keys[..., None] if normalizer.divide == "keys" else weights


def sum_to_one(
    normalizer: SumToOne, final: Tensor, shown: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights and level; the derivative of the level follows from the implicit function theorem."""
    if sink is not None:  # treated as one more key, without a value
        final = torch.cat([final, sink[..., None]], -1)
        shown = torch.cat([shown, sink.detach()[..., None] != -torch.inf], -1)
    level = bisect(normalizer, final.detach(), shown)
    empty = ~shown.any(-1)
    start = level.detach().requires_grad_()
    with torch.enable_grad():
        total = _total(normalizer, final.detach(), shown, start)
        (falls,) = torch.autograd.grad(total.sum(), start)
    total = _total(normalizer, final, shown, level)
    moved = torch.where(falls == 0, 0.0, (total.detach() - total) / torch.where(falls == 0, 1.0, falls))
    level = level + torch.where(empty, 0.0, moved)
    weights = _weights(normalizer, final, shown, level)
    keys = shown.shape[-1] - (sink is not None)
    return weights[..., :keys], level.masked_fill(empty, -torch.inf)


def _weights(normalizer: SumToOne, final: Tensor, shown: Tensor, level: Tensor) -> Tensor:
    row = level[..., None]
    return torch.where(shown, weigh(normalizer, torch.where(shown, final, row.detach()), row), 0.0)


def _total(normalizer: SumToOne, final: Tensor, shown: Tensor, level: Tensor) -> Tensor:
    return _weights(normalizer, final, shown, level).sum(-1)


@torch.no_grad()
def bisect(normalizer: SumToOne, final: Tensor, shown: Tensor) -> Tensor:
    """The level at which the visible weights of each row sum to one; 0 for fully masked rows."""
    empty = ~shown.any(-1)
    top = torch.where(shown, final, -torch.inf).amax(-1).masked_fill(empty, 0)

    def total(level: Tensor) -> Tensor:
        sums = _total(normalizer, final, shown, level)
        if bool(sums.isnan().any()):
            place = tuple(sums.isnan().nonzero()[0].tolist())
            near = f"a largest score of {number(top[place].item())} and level {number(level[place].item())}"
            fail(normalizer, "weight", f"the weights of a query with {near} sum to nan, expected numbers of 0 or more")
        return sums

    def end(sign: int) -> Tensor:
        """One end of the bracket: a level at which the sum is at least 1 (sign −1), or at most 1 (sign 1)."""
        level, step = top + sign, 1.0
        while True:
            sums = total(level)
            short = ((sums < 1) if sign < 0 else (sums > 1)) & ~empty
            if not bool(short.any()):
                return level
            step *= 2
            if step > FARTHEST:
                _unreachable(normalizer, sums, short, shown, below=sign < 0)
            level = level + torch.where(short, sign * step, 0.0)

    low, high = end(-1), end(1)
    for _ in range(STEPS):
        middle = low + (high - low) / 2
        if bool(((middle == low) | (middle == high)).all()):
            break
        above = total(middle) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    sums = torch.stack([total(low), total(high)])
    jumps = ((sums[0] - sums[1]).abs() > 1e-6) & ~empty
    if bool(jumps.any()):
        place = tuple(jumps.nonzero()[0].tolist())
        fail(
            normalizer, "weight", f"the weights of a query sum to {number(sums[0][place].item())} just below level "
            f"{number(high[place].item())} and to {number(sums[1][place].item())} just above, expected a weight that "
            "is continuous in the level"
        )  # fmt: skip
    return torch.where(empty, 0.0, low + (high - low) / 2)


def _unreachable(normalizer: SumToOne, sums: Tensor, short: Tensor, shown: Tensor, *, below: bool) -> None:
    place = tuple(short.nonzero()[0].tolist())
    what = f"the weights of a query with {int(shown[place].sum())} visible keys sum to {number(sums[place].item())}"
    if below:
        fail(normalizer, "weight", f"{what} at the most, however low the level, expected a sum that passes 1")
    fail(normalizer, "weight", f"{what} at the least, however high the level, expected weights that fall to 0")


def one_key(soft: Tensor, final: Tensor, shown: Tensor) -> Tensor:
    """One-hot weights on the visible key with the largest score, with the gradient of the soft weights."""
    best = torch.where(shown, final.detach(), -torch.inf).argmax(-1, keepdim=True)
    one = torch.zeros_like(soft).scatter(-1, best, 1.0) * shown.any(-1, keepdim=True)
    return soft + (one - soft).detach()
