"""The entropy of a query's attention weights."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.statistics.base import Statistic, WeightTile


class Entropy(Statistic):
    """How evenly a query's weights are spread, in nats: 0 on one key, ln n over n equal ones.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[Entropy()])
    >>> [round(n, 3) for n in result.own["entropy"][0, 0].tolist()]
    [0.0, 0.693, 1.099, 1.386]
    """

    name, label, unit, highest = "entropy", "Entropy", "nats", 14.0
    definition = "−Σ a ln a of the query's weights a, which add up to 1 over the keys"

    def tile(self, tile: WeightTile) -> Tensor:
        return -(tile.weights * tile.log_weights).sum(-1)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        safe = torch.where(mass > 0, mass, 1.0)
        return torch.where(mass > 0, total / safe + safe.log(), 0.0).clamp(min=0)
