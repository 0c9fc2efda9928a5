"""Random rounding errors (stochastic arithmetic), from which the tolerances are estimated.

The formula calls a `Rounding` after every step. `EXACT` does nothing. `Random` changes each number by about one unit of
its relative precision, forward and backward. The effect on a result measures its condition number at this input, for
any composition, and the error of a kernel may be a small multiple of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Rounding:
    """Exact arithmetic, and the base of `Random`."""

    exact = True

    def leaf(self, x: Tensor) -> Tensor:
        """An input, in float64: its products cancel, so that the error of their sum exceeds its own precision."""
        return x

    def stored(self, x: Tensor) -> Tensor:
        """A tensor that is stored in the dtype of the inputs, as is its gradient."""
        return x

    def used(self, x: Tensor) -> Tensor:
        """One of several uses of an input, whose gradient is stored in the dtype of the inputs."""
        return x

    def product(self, x: Tensor) -> Tensor:
        """Scores of a product score, before biases."""
        return x

    def scores(self, x: Tensor) -> Tensor:
        """Scores after a bias."""
        return x

    def cancelling(self, y: Tensor, x: Tensor, slope: float | Tensor = 1.0) -> Tensor:
        """y, a function of x whose derivative is a difference of terms of size `slope`, which cancel.

        For example, the derivative of y = tanh x is 1 − y².
        """
        return y

    def level(self, x: Tensor, solved: Tensor | None) -> Tensor:
        """Log-sum-exp or level of rows; `solved` is the condition number of a level found by search."""
        return x

    def from_level(self, x: Tensor, level: Tensor) -> Tensor:
        """Scores whose difference from the level is rounded."""
        return x

    def sums_to_one(self, x: Tensor, total: Tensor) -> Tensor:
        """Weights at a level found by search, which a kernel may divide by their `total`, 1 but for rounding."""
        return x

    def weights(self, x: Tensor) -> Tensor:
        return x

    def row_gradient(self, size: Tensor) -> Tensor:
        """Error of the number that a backward computes for each row, Σ grad · out, given `size` = Σ |grad · out|."""
        return torch.zeros_like(size)


EXACT = Rounding()


@dataclass(frozen=True)
class Sizes:
    """Relative precision of each kind of step."""

    work: float
    """Precision of sums and functions."""
    stored: float
    """Precision of tensors in the dtype of the inputs."""
    weights: float
    """Precision of weights, and of gradients of scores."""
    product: float
    """Precision of the product of queries and keys."""
    tiny: float
    """The smallest normal number."""


class Random(Rounding):
    """Random rounding errors of the given sizes."""

    exact = False

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        self.sizes, self.generator = sizes, generator

    def _signs(self, x: Tensor) -> Tensor:
        """Random numbers in ±[0.5, 1.5]: never 0, and errors of different steps do not cancel exactly."""
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
        # A relative error of a sum is an absolute error of its logarithm.
        size = (1 + x.detach().abs()) * self.sizes.work
        if solved is not None:
            size = size + 8 * self.sizes.work * solved
        # Gradients, including that of the level, use the weights at the stored level.
        return self._by(x, size, torch.where(size.isfinite(), size, 0.0).clamp(max=1))

    def from_level(self, x: Tensor, level: Tensor) -> Tensor:
        return self._by(x, (x - level).detach().abs() * self.sizes.work, torch.tensor(0.0))

    def sums_to_one(self, x: Tensor, total: Tensor) -> Tensor:
        # All weights fall as the level increases, so the product does not cancel the error of the weights themselves.
        return torch.where(total > 0, x * total, x)

    def weights(self, x: Tensor) -> Tensor:
        lost = self.sizes.tiny * (self._signs(x) > 0)  # only upwards, so that no weight becomes negative
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
