"""What keys receive from the queries, and who may see whom."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.statistics.base import Statistic, WeightTile


def _visible(tile: WeightTile) -> Tensor:
    return torch.ones_like(tile.weights) if tile.visible is None else tile.visible.expand_as(tile.weights).double()


class Received(Statistic):
    """All attention that a key gets."""

    name, label, unit, over, highest, logarithmic = "received", "Received", "queries", "key", 20.0, True
    definition = "sum of the weights that all queries put on the key"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.double().sum(-2)


class Visible(Statistic):
    name, label, unit, highest, logarithmic = "visible", "Visible keys", "keys", 20.0, True
    definition = "how many keys the query may attend to"

    def tile(self, tile: WeightTile) -> Tensor:
        return _visible(tile).sum(-1)


class Audience(Statistic):
    name, label, unit, over, highest, logarithmic = "audience", "Visible queries", "queries", "key", 20.0, True
    definition = "how many queries may attend to the key"

    def tile(self, tile: WeightTile) -> Tensor:
        return _visible(tile).sum(-2)
