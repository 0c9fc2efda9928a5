"""Weights of a tile or of whole rows, and their derivatives, by a normalizer's shortcuts or by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.normalizers.base import Normalizer, Pointwise, SumToOne, checked_shape, unmasked, weights_of
from qkv.normalizers.level import level_of_rows, solve

CACHED = 2**17  # scores per call of a user-defined function, so that its temporaries fit in cache


def pointwise(normalizer: Pointwise, scores: Tensor) -> Tensor:
    """Weights of a tile, which overwrite its scores."""
    if overrides(normalizer, Pointwise, "weight_"):
        return checked_shape(normalizer, normalizer.weight_(scores), scores)
    rows = max(1, CACHED * scores.shape[-2] // scores.numel())
    for some in scores.split(rows, -2):
        some.copy_(checked_shape(normalizer, normalizer.weight(some), some))
    return scores


def solve_rows(normalizer: SumToOne, scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Level of whole rows with an optional sink, and the weights of the scores without the sink."""
    with_sink = scores if sink is None else torch.cat([scores, sink[..., None]], -1)
    if overrides(normalizer, SumToOne, "level_of"):
        level = level_of_rows(normalizer, with_sink)
        return level, weights_of(normalizer, scores, level)
    level, weights = solve(normalizer, with_sink)
    return level, weights if sink is None else weights[..., :-1]


def level_slopes(normalizer: SumToOne, scores: Tensor, level: Tensor, weights: Tensor) -> Tensor:
    """−∂ weight / ∂ level of whole rows; 0 for scores of −inf."""
    if overrides(normalizer, SumToOne, "slope_from_weights") and not normalizer.tensors():
        return normalizer.slope_from_weights(weights)  # such weights depend on score − level
    masked = scores == -torch.inf
    with torch.enable_grad():
        at = level[..., None].expand_as(scores).contiguous().requires_grad_()
        made = normalizer.weight(unmasked(scores, masked, level[..., None]), at)
    if not made.requires_grad:
        return torch.zeros_like(scores)
    (falls,) = torch.autograd.grad(made, at, -torch.ones_like(made), allow_unused=True)
    return torch.zeros_like(scores) if falls is None else falls.masked_fill_(masked, 0)


class TileWeights:
    """The weights of one tile, and then the vector-Jacobian product from weights to scores, at a fixed level.

    Uses a normalizer's shortcut if it has one, overwriting the scores; else autograd on its definition.
    """

    def __init__(self, normalizer: Normalizer, learned: list[Tensor]) -> None:
        self.normalizer, self.learned = normalizer, learned
        base = SumToOne if isinstance(normalizer, SumToOne) else Pointwise
        self.shortcut = overrides(normalizer, base, "slope_from_weights") and not normalizer.tensors()
        self.made: tuple[Tensor, Tensor] | Tensor

    def weights(self, scores: Tensor, level: Tensor | None, masked: Tensor | None) -> Tensor:
        """Weights of scores at the level of their rows, 0 where masked. May overwrite the scores."""
        normalizer = self.normalizer
        if self.shortcut:
            if isinstance(normalizer, Pointwise):
                weights = normalizer.weight_(scores)
            else:
                assert isinstance(normalizer, SumToOne)
                assert level is not None
                weights = normalizer.weight_(scores, level[..., None])
            self.made = weights if masked is None else weights.masked_fill_(masked, 0)
            return self.made
        row = level[..., None] if level is not None else None
        s = (scores if masked is None else unmasked(scores, masked, row)).detach().requires_grad_()
        with torch.enable_grad():
            if isinstance(normalizer, SumToOne):
                assert row is not None
                made = normalizer.weight(s, row)
            else:
                assert isinstance(normalizer, Pointwise)
                made = normalizer.weight(s)
            made = checked_shape(normalizer, made, s)
        self.made = s, made
        return made.detach() if masked is None else made.detach().masked_fill(masked, 0)

    def slopes(self, grad: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of the scores and learned tensors from those of the weights, which must be 0 where masked.

        May overwrite `grad`.
        """
        if not isinstance(self.made, tuple):
            assert isinstance(self.normalizer, Pointwise | SumToOne)
            return grad.mul_(self.normalizer.slope_from_weights(self.made)), [None] * len(self.learned)
        s, made = self.made
        if not made.requires_grad:
            return torch.zeros_like(s), [None] * len(self.learned)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(made, (s, *self.learned), grad, allow_unused=True)
        return torch.zeros_like(s) if found[0] is None else found[0], list(found[1:])
