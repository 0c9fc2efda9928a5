"""A soft cap on scores."""

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

    def gradients(
        self, before: Tensor, region: Region, slope: Tensor, learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return (slope * (1 - torch.tanh(before / self.cap).square()),)

    def part(self, region: Region) -> SoftCap:
        return self

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap
