"""`SoftCap`, the logit soft-capping of Gemma 2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.biases.base import Bias
from qkv.errors import InputError
from qkv.masks import Region


@dataclass(frozen=True)
class SoftCap(Bias):
    """Scores bounded smoothly: cap · tanh(score / cap) (Gemma 2, arXiv:2408.00118, §2).

    >>> SoftCap(2.0).apply(torch.tensor([[[[1e9]]]]), Region(slice(0, 1), slice(0, 1))).item()
    2.0
    """

    cap: float
    by_score = True
    by_head = False

    def __post_init__(self) -> None:
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise InputError(f"SoftCap: cap is {self.cap}, expected a positive number")

    def apply(self, scores: Tensor, region: Region) -> Tensor:
        return torch.tanh(scores / self.cap) * self.cap

    def apply_(self, scores: Tensor, region: Region) -> Tensor:
        return self._tanh_(scores).mul_(self.cap)

    def gradients(
        self, before: Tensor, region: Region, slope: Tensor, learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        tanh = self._tanh_(before.clone())
        return (slope * tanh.square_().neg_().add_(1),)

    def _tanh_(self, scores: Tensor) -> Tensor:
        """tanh(score / cap), overwriting the scores; computed as m / (m + 2) with m = exp(2 score / cap) − 1.

        As exact as torch's tanh, and faster on CPU. The exponent is clamped at 60, where tanh is 1 in any dtype, so
        that m cannot overflow.
        """
        m = scores.mul_(2 / self.cap).clamp_(max=60).expm1_()
        return m.div_(m + 2)

    def part(self, region: Region) -> SoftCap:
        return self

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap
