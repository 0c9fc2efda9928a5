"""Entropy of a query's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.statistics.base import Statistic, WeightTile


class Entropy(Statistic):
    """How evenly a query's weights are spread, in nats: 0 on one key, ln n over n equal ones."""

    name, label, unit, highest = "entropy", "Entropy", "nats", 14.0
    definition = "−Σ a ln a of the query's weights a, which add up to 1 over the keys"

    def tile(self, tile: WeightTile) -> Tensor:
        return -(tile.weights * tile.log_weights).sum(-1)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        safe = torch.where(mass > 0, mass, 1.0)
        return torch.where(mass > 0, total / safe + safe.log(), 0.0).clamp(min=0)
