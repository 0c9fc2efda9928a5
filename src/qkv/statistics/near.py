"""Weight on named keys: the first of the text, the query's own, its neighbours, and what a mask shows."""

from __future__ import annotations

from torch import Tensor

from qkv.masks import Mask
from qkv.statistics.base import Statistic, WeightTile


class At(Statistic):
    """The weight on the key a fixed number of tokens before the query."""

    share, one_text = True, True
    before = 0

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * (tile.distances == self.before)).sum(-1)


class Self(At):
    name, label, definition = "self", "Self", "weight on the query's own token"


class Previous(At):
    name, label, definition = "previous", "Previous token", "weight on the token one before"
    before = 1


class Next(At):
    name, label, definition = "next", "Next token", "weight on the token one after"
    before = -1


class Sink(Statistic):
    """The weight on the first token of the text (of the sequence, where nobody says which that is)."""

    name, label, share, definition = "sink", "First token", True, "weight on the first token of the text"

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * (tile.keys == 0)).sum(-1)


class Mass(Statistic):
    """The weight inside a mask.

    Args:
        name: of the statistic.
        mask: pairs inside it count.
        definition: in words.

    >>> import torch, qkv
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> two = Mass("two", qkv.masks.Window(2))
    >>> found = qkv.measure(q, k, mask=qkv.masks.Causal(), statistics=[two])
    >>> [round(x, 4) for x in found.own["two"][0, 0].tolist()]
    [1.0, 1.0, 0.6667, 0.5]
    """

    share = True

    def __init__(self, name: str, mask: Mask, definition: str = "") -> None:
        self.name, self.label, self.mask = name, name, mask
        self.definition = definition or f"weight inside {mask!r}"

    def tile(self, tile: WeightTile) -> Tensor:
        inside = self.mask.allowed(tile.region, tile.grid)
        return (tile.weights * inside).sum(-1)
