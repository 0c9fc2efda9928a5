"""The attention that each key receives, and the numbers of visible keys and visible queries."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.statistics.base import Statistic, WeightTile


def _visible(tile: WeightTile) -> Tensor:
    return torch.ones_like(tile.weights) if tile.visible is None else tile.visible.expand_as(tile.weights).double()


class Received(Statistic):
    """The attention that a key receives: the sum of the weights that all queries put on it.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[Received()])
    >>> [round(n, 3) for n in result.own["received"][0, 0].tolist()]
    [2.083, 1.083, 0.583, 0.25]
    """

    name, label, unit, over, highest, logarithmic = "received", "Received", "queries", "key", 20.0, True
    definition = "sum of the weights that all queries put on the key"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.double().sum(-2)


class Visible(Statistic):
    """The number of keys that a query may attend to.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[Visible()])
    >>> [round(n, 3) for n in result.own["visible"][0, 0].tolist()]
    [1.0, 2.0, 3.0, 4.0]
    """

    name, label, unit, highest, logarithmic = "visible", "Visible keys", "keys", 20.0, True
    definition = "how many keys the query may attend to"

    def tile(self, tile: WeightTile) -> Tensor:
        return _visible(tile).sum(-1)


class VisibleQueries(Statistic):
    """The number of queries that may attend to a key.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[VisibleQueries()])
    >>> [round(n, 3) for n in result.own["visible_queries"][0, 0].tolist()]
    [4.0, 3.0, 2.0, 1.0]
    """

    name, label, unit, over, highest, logarithmic = "visible_queries", "Visible queries", "queries", "key", 20.0, True
    definition = "how many queries may attend to the key"

    def tile(self, tile: WeightTile) -> Tensor:
        return _visible(tile).sum(-2)
