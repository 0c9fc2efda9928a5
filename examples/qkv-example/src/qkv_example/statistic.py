"""A statistic: how much of a query's attention goes to the older half of the text before it."""

from torch import Tensor

from qkv.statistics import Statistic, WeightTile


class Older(Statistic):
    """The weight on keys nearer to the beginning of the text than to the query."""

    name, label, share = "older", "Older half", True
    definition = "weight on the older half of the text before the query"
    one_text = True
    from_second = True

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * (2 * tile.keys < tile.queries)).sum(-1)
