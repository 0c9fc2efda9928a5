"""Ratios of norms and magnitudes, which are averaged by their logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

TINY = 1e-9
"""A number below it counts as this much, so that every ratio has a logarithm."""


def ratio(above: float, below: float) -> float:
    """One number divided by another.

    >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
    (0.25, 1.0)
    """
    return max(float(above), TINY) / max(float(below), TINY)


def geometric(ratios: Sequence[float]) -> float:
    """The geometric mean.

    >>> geometric([0.5, 2.0])
    1.0
    """
    return geometric_mean([max(x, TINY) for x in ratios])
