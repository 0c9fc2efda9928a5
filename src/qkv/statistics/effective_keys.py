"""The effective number of keys of a query (participation ratio)."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.statistics.base import Statistic, WeightTile


class EffectiveKeys(Statistic):
    """The effective number of keys that share a query's weight (participation ratio, Rényi-2 perplexity).

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[EffectiveKeys()])
    >>> [round(n, 3) for n in result.own["effective_keys"][0, 0].tolist()]
    [1.0, 2.0, 3.0, 4.0]
    """

    name, label, unit, highest, logarithmic = "effective_keys", "Effective keys", "keys", 20.0, True
    definition = "1 / Σ a²: how many keys share the weight"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.double().square().sum(-1)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return torch.where(total > 0, mass.square() / torch.where(total > 0, total, 1.0), 0.0)
