"""Checks of the level of `SumToOne`: weights are not negative, decrease in the level, and sum to one at some level."""

from __future__ import annotations

import torch

from qkv._contract import overrides
from qkv.normalizers import SumToOne
from qkv.testing.inputs import normal
from qkv.testing.report import calling, check_returned, difference, fail, number
from qkv.testing.weighing import bisect, weigh
from qkv.testing.weights import LEVELS, SCORES, at, each, first, levels, points


def check_levels(normalizer: SumToOne, heads: int) -> None:
    """Weights are not negative, decrease in the level, and can sum to one, for one visible key and for many."""
    level = levels(heads)
    scores = each(heads, *SCORES).expand(-1, -1, len(LEVELS), -1).contiguous()
    weights = weigh(normalizer, scores, level).detach()
    wrong = weights.isnan() | (weights < 0)
    if bool(wrong.any()):
        place = first(wrong)
        fail(
            normalizer,
            "weight",
            f"is {number(weights[place].item())} at {at(scores, level, place)}, expected 0 or more",
        )
    before, after = weights[:, :, :-1], weights[:, :, 1:]
    rises = after > before * (1 + 1e-12) + 1e-300
    if bool(rises.any()):
        place = first(rises)
        row, column = place[2:]
        fail(
            normalizer, "weight", f"rises from {number(before[place].item())} to {number(after[place].item())} at "
            f"score {number(SCORES[column])} as the level rises from {number(LEVELS[row])} to "
            f"{number(LEVELS[row + 1])}, expected a weight that decreases in the level"
        )  # fmt: skip
    flat = (weights[:, :, 0] == weights[:, :, -1]).all(-1)
    if bool(flat.any()):
        fail(
            normalizer, "weight", f"is the same at level {number(LEVELS[0])} and at level {number(LEVELS[-1])} for all "
            f"scores of head {first(flat)[1]}, expected a weight that decreases in the level"
        )  # fmt: skip
    for keys in (1, 2, 200):
        scores = 2 * normal(1, heads, 3, keys, seed=keys)
        bisect(normalizer, scores, torch.ones_like(scores, dtype=torch.bool))


def check_level_of(normalizer: SumToOne, heads: int) -> None:
    """`level_of` gives the level at which weights sum to one, and 0 for rows of −inf; `has_lse` implies exp."""
    if normalizer.has_lse:
        scores, level = points(normalizer, heads)
        assert level is not None
        made, want = weigh(normalizer, scores, level).detach(), torch.exp(scores - level)
        wrong = difference(made / want, torch.ones_like(want), 1e-9)
        if wrong is not None:
            place = wrong.place
            fail(
                normalizer, "has_lse", "is True, which means that the weight is exp(score − level), but it is "
                f"{number(made[place].item())} at {at(scores, level, place)}, expected {number(want[place].item())}"
            )  # fmt: skip
    if not overrides(normalizer, SumToOne, "level_of"):
        return
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        for keys in (1, 9, 300):
            scores = (2 * normal(2, heads, 5, keys, seed=keys)).to(dtype)
            scores[:, :, 1] = -torch.inf
            scores[:, :, 2, keys // 2 + 1 :] = -torch.inf
            with torch.no_grad(), calling(normalizer, "level_of", f"called for rows of {keys} scores"):
                result = normalizer.level_of(scores.clone())
            level = check_returned(normalizer, "level_of", result, scores.shape[:-1], dtype, f"rows of {keys} {dtype}")
            if bool((level[:, :, 1] != 0).any()):
                fail(
                    normalizer, "level_of", f"got {number(level[0, 0, 1].item())} for a row of −inf alone, "
                    "expected 0"
                )  # fmt: skip
            row, shown = level[..., None], scores != -torch.inf
            weights = torch.where(shown, weigh(normalizer, torch.where(shown, scores, row), row), 0.0)
            total = weights.detach().sum(-1)
            wrong = difference(total, shown.any(-1).to(dtype), tolerance)
            if wrong is not None:
                fail(
                    normalizer, "level_of", f"got {number(level[wrong.place].item())} for a row of {keys} scores in "
                    f"{dtype}, at which the weights sum to {number(wrong.got)}, expected a sum of {number(wrong.want)}"
                )  # fmt: skip
