"""Positions of the keys that a query attends to: their mean distance from it, and their spread."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.statistics.base import Statistic, WeightTile


class Distance(Statistic):
    """The mean distance between a query and the keys it attends to, by weight.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[Distance()])
    >>> [round(n, 3) for n in result.own["distance"][0, 0].tolist()]
    [0.0, 0.5, 1.0, 1.5]
    """

    name, label, unit, highest, logarithmic, one_text = "distance", "Distance", "tokens", 20.0, True, True
    definition = "mean distance to the keys, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * tile.distances.abs()).double().sum(-1)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total / torch.where(mass > 0, mass, 1.0)


class Spread(Statistic):
    """The standard deviation of the positions of the keys that a query attends to, by weight.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[Spread()])
    >>> [round(n, 3) for n in result.own["spread"][0, 0].tolist()]
    [0.0, 0.5, 0.816, 1.118]
    """

    name, label, unit, highest, logarithmic, parts = "spread", "Spread", "tokens", 20.0, True, 2
    definition = "standard deviation of the keys' positions, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        steps = tile.distances.double()
        return torch.stack([(tile.weights * steps**n).sum(-1) for n in (1, 2)])

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        mean, square = total / torch.where(mass > 0, mass, 1.0)
        return (square - mean.square()).clamp(min=0).sqrt()
