"""Rounding errors drawn at random, for tolerances: how far may a result lie off if every step rounds?

The formula calls a `Rounding` after every step. `EXACT` does nothing. A `Random` one moves each number up or down by
about one unit of its relative precision, forward and backward; what that does to a result is its condition at this
input, whatever the composition, and a kernel may be wrong by a small multiple of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Rounding:
    """Exact arithmetic, and the base of inexact."""

    exact = True

    def leaf(self, x: Tensor) -> Tensor:
        """An input, in float64: products of it cancel, so that their sum is off by more than its own precision."""
        return x

    def stored(self, x: Tensor) -> Tensor:
        """A tensor that is kept in the dtype of the inputs, and so is its gradient."""
        return x

    def used(self, x: Tensor) -> Tensor:
        """One of several uses of an input, whose gradient is kept in the dtype of the inputs."""
        return x

    def product(self, x: Tensor) -> Tensor:
        """Scores of a product, before biases."""
        return x

    def scores(self, x: Tensor) -> Tensor:
        """Scores after a bias."""
        return x

    def cancelling(self, y: Tensor, x: Tensor, slope: float | Tensor = 1.0) -> Tensor:
        """y, a function of x whose derivative is a difference of terms as large as `slope`, which cancel.

        That of y = tanh x is 1 − y², for example.
        """
        return y

    def level(self, x: Tensor, solved: Tensor | None) -> Tensor:
        """Log-sum-exp or level of rows; `solved` is how much a search that ends within roundings leaves open."""
        return x

    def from_level(self, x: Tensor, level: Tensor) -> Tensor:
        """Scores whose difference from the level is rounded."""
        return x

    def weights(self, x: Tensor) -> Tensor:
        return x

    def row_gradient(self, size: Tensor) -> Tensor:
        """Error of the number that a backward keeps for each row, Σ grad · out, of which `size` is Σ |grad · out|."""
        return torch.zeros_like(size)


EXACT = Rounding()


@dataclass(frozen=True)
class Sizes:
    """Relative precision of each kind of step."""

    work: float
    """Of sums and functions."""
    stored: float
    """Of tensors in the dtype of the inputs."""
    weights: float
    """Of weights, and of the slopes of scores."""
    product: float
    """Of the product of queries and keys."""
    level: float
    """Absolute, of the logarithm of a sum of exponentials."""
    tiny: float
    """The smallest number that keeps its precision."""


class Random(Rounding):
    exact = False

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        self.sizes, self.generator = sizes, generator

    def _signs(self, x: Tensor) -> Tensor:
        """Numbers from −1.5 to −0.5 and from 0.5 to 1.5: never 0, and no two steps undo each other exactly."""
        numbers = torch.rand(x.shape, generator=self.generator, dtype=x.dtype).sub_(0.5).mul_(2)
        return numbers + 0.5 * numbers.sign()

    def _moved(self, x: Tensor, forward: float, backward: float) -> Tensor:
        return self._by(x, x.detach().abs() * forward, torch.tensor(backward))

    def _by(self, x: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        forward = torch.where(forward.isfinite(), forward, 0.0)
        moved: Tensor = _Moved.apply(x, forward * self._signs(x), 1 + backward * self._signs(x))
        return moved

    def leaf(self, x: Tensor) -> Tensor:
        off = x * self.sizes.work * self._signs(x)
        return x + torch.where(off.isfinite(), off, 0.0)

    def stored(self, x: Tensor) -> Tensor:
        return self._moved(x, self.sizes.stored, self.sizes.stored)

    def used(self, x: Tensor) -> Tensor:
        return self._moved(x, 0.0, self.sizes.stored)

    def product(self, x: Tensor) -> Tensor:
        return self._moved(x, self.sizes.product, self.sizes.weights)

    def scores(self, x: Tensor) -> Tensor:
        return self._moved(x, self.sizes.work, self.sizes.weights)

    def cancelling(self, y: Tensor, x: Tensor, slope: float | Tensor = 1.0) -> Tensor:
        return y + 2 * self.sizes.work * slope * self._signs(x) * (x - x.detach())

    def level(self, x: Tensor, solved: Tensor | None) -> Tensor:
        # A sum that is off by a relative error has a logarithm that is off by it absolutely.
        size = (1 + x.detach().abs()) * self.sizes.work + self.sizes.level
        if solved is not None:
            size = size + 8 * self.sizes.work * solved
        # Slopes are made from weights at the level as it is kept, the level's own included.
        return self._by(x, size, torch.where(size.isfinite(), size, 0.0).clamp(max=1))

    def from_level(self, x: Tensor, level: Tensor) -> Tensor:
        return self._by(x, (x - level).detach().abs() * self.sizes.work, torch.tensor(0.0))

    def weights(self, x: Tensor) -> Tensor:
        lost = self.sizes.tiny * (self._signs(x) > 0)  # upwards: no weight becomes negative
        return self._moved(x, self.sizes.weights, self.sizes.weights) + lost

    def row_gradient(self, size: Tensor) -> Tensor:
        return self.sizes.stored * size * self._signs(size)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x + by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None, None
