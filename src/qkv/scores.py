"""Scores: how much a query and a key have to do with each other, before masking and normalising."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkv.errors import InputError


@dataclass(frozen=True)
class Dot:
    """Dot product times `scale`; 1/√d when None (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    >>> Dot().factor(64)
    0.125
    >>> Dot(scale=1.0).factor(64)
    1.0
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise InputError(f"Dot: scale is {self.scale}, expected a finite number or None for 1/√d")

    def factor(self, head_dim: int) -> float:
        """What the dot product of two vectors of `head_dim` entries is multiplied by."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale
