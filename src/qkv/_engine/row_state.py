"""Row state: the per-query numbers from which any single weight of the row can be computed."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowState:
    """Per-query normalizer state: log-sum-exp or threshold, sum of the weights, or the chosen key."""

    level: Float[Tensor, "b h nq"] | None = None
    """State of a `SumToOne` normalizer: log-sum-exp for softmax (−inf for fully masked rows), threshold for entmax."""
    total: Float[Tensor, "b h nq"] | None = None
    """Sum of pointwise weights, if they are divided by it; 1 where the sum is 0."""
    chosen: Int[Tensor, "b h nq"] | None = None
    """The key chosen by hard attention; −1 for none."""
