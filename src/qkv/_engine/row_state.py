"""The state of each row that its weights need: its level, its sum, the key it chose."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowState:
    """What a query needs to know of all its scores before one of them becomes a weight."""

    level: Float[Tensor, "b h nq"] | None = None
    """Of a `SumToOne` normalizer; log-sum-exp for softmax (−inf where nothing is visible)."""
    total: Float[Tensor, "b h nq"] | None = None
    """Sum of pointwise weights, where they are divided by it; 1 where it is 0."""
    chosen: Int[Tensor, "b h nq"] | None = None
    """The key that hard attention took; −1 for none."""
