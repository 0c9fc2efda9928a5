"""User-defined normalizers, scores, biases and masks: each defines one method and no shortcut.

Parameters are passed to the constructor, so that the formula can build the same object with float64 tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkv.biases import AdditiveBias, Bias
from qkv.masks import Mask
from qkv.normalizers import Pointwise, SumToOne
from qkv.scores import Pairwise, Product

# --- weights that depend on their own score alone ---------------------------------------------------------------------


class Square(Pointwise):
    """s²: the derivative is not a function of the weight, which is the same for s and −s."""

    def __init__(self, divide: str | None, temperature: float) -> None:
        self.divide, self.temperature = divide, temperature

    def weight(self, scores: Tensor) -> Tensor:
        return scores**2


class Cauchy(Pointwise):
    """1 / (1 + s²): not monotone, and 1 at a score of 0, which masked pairs must not get."""

    def __init__(self, divide: str | None, temperature: float) -> None:
        self.divide, self.temperature = divide, temperature

    def weight(self, scores: Tensor) -> Tensor:
        return 1 / (1 + scores**2)


class Slope(Pointwise):
    """softplus(rate · s), with a learned rate for each head, (heads, 1, 1)."""

    def __init__(self, rate: Tensor, divide: str | None, temperature: float) -> None:
        self.rate, self.divide, self.temperature = rate, divide, temperature

    def weight(self, scores: Tensor) -> Tensor:
        return nn.functional.softplus(self.rate * scores)


class Wave(Pointwise, nn.Module):
    """1.5 + sin(s + phase), a module with a learned phase for each head."""

    def __init__(self, phase: Tensor, divide: str | None, temperature: float) -> None:
        super().__init__()
        self.phase, self.divide, self.temperature = phase, divide, temperature

    def weight(self, scores: Tensor) -> Tensor:
        return 1.5 + torch.sin(scores + self.phase)


# --- weights that sum to one ------------------------------------------------------------------------------------------


class SoftplusSquared(SumToOne):
    """softplus(s − level)²: quadratic above the level, exponential below."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return nn.functional.softplus(scores - level) ** 2


class HeavyTail(SumToOne):
    """((t + √(t² + 4)) / 2)³ of t = s − level: falls as 1 / t³ below the level, as a Student distribution does."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(3 * torch.asinh((scores - level) / 2))


class Stretched(SumToOne):
    """exp(t / ⁴√(1 + t²)) of t = s − level: a stretched exponential, exp(−√|t|) far below the level."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        t = scores - level
        return torch.exp(t * (1 + t * t) ** -0.25)


class Sharp(SumToOne, nn.Module):
    """exp(rate · (s − level)), a module with a learned rate for each head, (heads, 1, 1)."""

    def __init__(self, rate: Tensor, **named: Any) -> None:
        super().__init__(**named)
        self.rate = rate

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(self.rate * (scores - level))


class Ratio(SumToOne):
    """(floor + s²) e^(−level), with a learned floor: no function of score − level."""

    def __init__(self, floor: Tensor, **named: Any) -> None:
        super().__init__(**named)
        self.floor = floor

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return (self.floor + scores**2) * torch.exp(-level)


# --- scores -----------------------------------------------------------------------------------------------------------


class Manhattan(Pairwise):
    """−Σ |q − k|."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


class Gaussian(Pairwise):
    """−rate · |q − k|², with a learned rate for each head, (heads, 1, 1)."""

    def __init__(self, rate: Tensor) -> None:
        self.rate = rate

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -self.rate * ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1)


class Squares(Product):
    """q · k + q² · k² in twice as many dimensions."""

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([q, q * q], -1), torch.cat([k, k * k], -1)


class Gained(Product):
    """gain · q · k, with a learned gain for each query head, (heads, 1, 1)."""

    def __init__(self, gain: Tensor) -> None:
        self.gain = gain

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * self.gain.to(q), k


# --- biases -----------------------------------------------------------------------------------------------------------


class Squash(Bias):
    """cap · arsinh(s / cap): logarithmic far from 0, independent of the position."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def apply(self, scores: Tensor, region: Any) -> Tensor:
        return self.cap * torch.asinh(scores / self.cap)


class Faded(Bias):
    """s · exp(−rate · |p − j|), with a learned rate for each head, (heads, 1, 1)."""

    def __init__(self, rate: Tensor) -> None:
        self.rate = rate

    def apply(self, scores: Tensor, region: Any) -> Tensor:
        return scores * torch.exp(-self.rate * (region.queries - region.keys).abs())


class Comb(Bias):
    """Masks with −inf every pair whose distance is 1 modulo `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def apply(self, scores: Tensor, region: Any) -> Tensor:
        return scores.masked_fill((region.queries - region.keys) % self.step == 1, -torch.inf)


class Slanted(AdditiveBias):
    """−rate · |p − j|, with a learned rate for each head; without the dimension of the batch."""

    def __init__(self, rate: Tensor) -> None:
        self.rate = rate

    def tile(self, region: Any) -> Tensor:
        return -self.rate * (region.queries - region.keys).abs()


class Ripple(AdditiveBias):
    """sin(0.3 p + 0.7 j), the same for all heads and batch items."""

    def tile(self, region: Any) -> Tensor:
        return torch.sin(0.3 * region.queries + 0.7 * region.keys)


class Table(AdditiveBias):
    """A learned tensor that broadcasts to (b, h, nq, nk)."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def tile(self, region: Any) -> Tensor:
        return region.of(self.table)


# --- masks ------------------------------------------------------------------------------------------------------------


class Stripes(Mask):
    """Visible where p + 2 j is not a multiple of `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Any) -> Tensor:
        return (q + 2 * k) % self.step != 0


class ByHead(Mask):
    """A different mask for every head and batch item."""

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Any) -> Tensor:
        return ((k + b) % (h + 2) != 1) & (k <= q + h)
