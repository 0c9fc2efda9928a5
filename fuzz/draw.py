"""The random choices of one case, which depend only on its seed and number."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Draw:
    """A random generator for numbers, choices and tensors.

    >>> a, b = Draw(0, 7), Draw(0, 7)
    >>> a.integer(0, 99) == b.integer(0, 99), torch.equal(a.normal(3), b.normal(3))
    (True, True)
    """

    def __init__(self, seed: int, case: int, use: str = "") -> None:
        self._random = random.Random(f"{seed}/{case}/{use}")
        self.generator = torch.Generator().manual_seed(self._random.getrandbits(48))

    def chance(self, p: float) -> bool:
        return self._random.random() < p

    def choice(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def weighted(self, options: Mapping[T, float]) -> T:
        """One of the keys, with probability proportional to its value."""
        return self._random.choices(list(options), list(options.values()))[0]

    def some(self, options: Sequence[T], least: int, most: int) -> list[T]:
        return self._random.sample(options, min(len(options), self.integer(least, most)))

    def integer(self, low: int, high: int) -> int:
        """A random integer from low to high, inclusive."""
        return self._random.randint(low, high)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low

    def booleans(self, p: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < p
