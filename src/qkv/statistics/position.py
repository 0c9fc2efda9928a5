"""Where the keys are that a query attends to: how far away, and how far apart."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.statistics.base import Statistic, WeightTile


class Distance(Statistic):
    """How far a query looks, on average."""

    name, label, unit, highest, logarithmic, one_text = "distance", "Distance", "tokens", 20.0, True, True
    definition = "mean distance to the keys, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * tile.distances.abs()).double().sum(-1)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total / torch.where(mass > 0, mass, 1.0)


class Spread(Statistic):
    """How far apart the keys are that a query attends to."""

    name, label, unit, highest, logarithmic, parts = "spread", "Spread", "tokens", 20.0, True, 2
    definition = "standard deviation of the keys' positions, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        steps = tile.distances.double()
        return torch.stack([(tile.weights * steps**n).sum(-1) for n in (1, 2)])

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        mean, square = total / torch.where(mass > 0, mass, 1.0)
        return (square - mean.square()).clamp(min=0).sqrt()
