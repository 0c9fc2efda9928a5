"""The built-in statistics: one class each, whose definition the tiles of weights are added up with."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.masks import Dense, Grid, Mask, Prefix, Region, Window
from qkv.statistics.base import Statistic, WeightTile


def of_equal_keys(statistic: Statistic) -> list[float]:
    """Return the values of a statistic where each of four tokens attends equally to itself and those before it.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> qkv.measure(x, x, mask=qkv.masks.Causal(), statistics=[Self()]).own["self"].tolist()[0][0][:2]
    [1.0, 0.5]
    >>> of_equal_keys(Self())[:2]
    [1.0, 0.5]
    """
    grid = Grid.of(4, 4)
    weights = torch.ones(1, 1, 4, 4, dtype=torch.float64).tril() / torch.arange(1, 5)[:, None]
    tile = WeightTile(weights, Region(slice(0, 4), slice(0, 4)), grid, weights > 0)
    values = statistic.finish(statistic.added(tile), weights.sum(-1))
    return [round(x, 3) for x in values[0, 0].tolist()]


class Received(Statistic):
    """The attention that a key receives: the sum of the weights that all queries put on it.

    >>> of_equal_keys(Received())
    [2.083, 1.083, 0.583, 0.25]
    """

    name, label, unit, over, highest, logarithmic = "received", "Received", "queries", "key", 20.0, True
    definition = "sum of the weights that all queries put on the key"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.sum(-2, dtype=torch.float64)


class Visible(Statistic):
    """The number of keys that a query may attend to.

    >>> of_equal_keys(Visible())
    [1.0, 2.0, 3.0, 4.0]
    """

    name, label, unit, highest, logarithmic = "visible", "Visible keys", "keys", 20.0, True
    definition = "how many keys the query may attend to"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.counted.sum(-1).expand(tile.weights.shape[:3])


class VisibleQueries(Statistic):
    """The number of queries that may attend to a key.

    >>> of_equal_keys(VisibleQueries())
    [4.0, 3.0, 2.0, 1.0]
    """

    name, label, unit, over, highest, logarithmic = "visible_queries", "Visible queries", "queries", "key", 20.0, True
    definition = "how many queries may attend to the key"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.counted.sum(-2).expand(*tile.weights.shape[:2], -1)


class Entropy(Statistic):
    """How evenly a query's weights are spread, in nats: 0 on one key, ln n over n equal ones.

    >>> of_equal_keys(Entropy())
    [0.0, 0.693, 1.099, 1.386]
    """

    name, label, unit, highest = "entropy", "Entropy", "nats", 14.0
    definition = "−Σ a ln a of the query's weights a, which add up to 1 over the keys"

    def tile(self, tile: WeightTile) -> Tensor:
        return -(tile.weights * tile.log_weights).sum(-1)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        safe = torch.where(mass == 0, 1.0, mass)  # NaN is kept
        return torch.where(mass == 0, 0.0, total / safe + safe.log()).clamp(min=0)


class EffectiveKeys(Statistic):
    """The effective number of keys that share a query's weight (participation ratio, Rényi-2 perplexity).

    >>> of_equal_keys(EffectiveKeys())
    [1.0, 2.0, 3.0, 4.0]
    """

    name, label, unit, highest, logarithmic = "effective_keys", "Effective keys", "keys", 20.0, True
    definition = "1 / Σ a²: how many keys share the weight"

    def tile(self, tile: WeightTile) -> Tensor:
        return torch.linalg.vector_norm(tile.weights, dim=-1, dtype=torch.float64).square()

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return torch.where(total == 0, 0.0, mass.square() / torch.where(total == 0, 1.0, total))


class Distance(Statistic):
    """The mean distance between a query and the keys it attends to, by weight.

    >>> of_equal_keys(Distance())
    [0.0, 0.5, 1.0, 1.5]
    """

    name, label, unit, highest, logarithmic, one_text = "distance", "Distance", "tokens", 20.0, True, True
    definition = "mean distance to the keys, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * tile.distances.abs().to(tile.weights)).sum(-1, dtype=torch.float64)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total / torch.where(mass == 0, 1.0, mass)


class Spread(Statistic):
    """The standard deviation of the positions of the keys that a query attends to, by weight.

    >>> of_equal_keys(Spread())
    [0.0, 0.5, 0.816, 1.118]
    """

    name, label, unit, highest, logarithmic, parts = "spread", "Spread", "tokens", 20.0, True, 2
    definition = "standard deviation of the keys' positions, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        first, steps = tile.distances[:, :1].double().T, tile.keys.double() - tile.keys[0]
        mass, one, two = (tile.weights.double() @ torch.stack([steps**n for n in range(3)], 1)).unbind(-1)
        return torch.stack([first * mass - one, first.square() * mass - 2 * first * one + two])

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        mean, square = total / torch.where(mass == 0, 1.0, mass)
        return (square - mean.square()).clamp(min=0).sqrt()


class At(Statistic):
    """The weight on the key that is `before` tokens before the query; subclasses set `before`.

    >>> import torch, qkv
    >>> class TwoBack(At):
    ...     name, definition, before = "two_back", "weight on the token two before", 2
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> qkv.measure(x, x, statistics=[TwoBack()]).own["two_back"][0, 0].tolist()
    [0.0, 0.0, 0.25, 0.25]
    """

    share, one_text = True, True
    before = 0

    def tile(self, tile: WeightTile) -> Tensor:
        diagonal = tile.distances == self.before
        return (tile.weights * diagonal).sum(-1)


class Self(At):
    """The weight on the query's own token.

    >>> of_equal_keys(Self())
    [1.0, 0.5, 0.333, 0.25]
    """

    name, label, definition = "self", "Self", "weight on the query's own token"


class Previous(At):
    """The weight on the token one before.

    >>> of_equal_keys(Previous())
    [0.0, 0.5, 0.333, 0.25]
    """

    name, label, definition = "previous", "Previous token", "weight on the token one before"
    before, from_second = 1, True


class Next(At):
    """The weight on the token one after.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> qkv.measure(x, x, statistics=[Next()]).own["next"][0, 0].tolist()
    [0.25, 0.25, 0.25, 0.0]
    """

    name, label, definition = "next", "Next token", "weight on the token one after"
    before = -1


class Sink(Statistic):
    """The weight on the first token of the text: with padding on the left, the key that `first` of `measure` names.

    >>> of_equal_keys(Sink())
    [1.0, 0.5, 0.333, 0.25]
    """

    name, label, share, definition = "sink", "First token", True, "weight on the first token of the text"
    from_second = True

    def tile(self, tile: WeightTile) -> Tensor:
        column = tile.first - tile.region.columns.start
        return tile.weights[..., max(0, column) : max(0, column + 1)].sum(-1)


class PrefixSinkScores(Statistic):
    """The weight on a key, averaged over those of the first `length` queries of the text that may attend to it.

    `measure` returns those of the first `length` keys, as `Statistics.prefix_sink_scores`.

    Args:
        length: how many tokens of the text are its prefix.

    >>> of_equal_keys(PrefixSinkScores(2))[:2]
    [0.75, 0.5]
    """

    name, over, parts = "prefix_sink_scores", "key", 2
    definition = "mean weight that the first queries of the text put on the key"

    def __init__(self, length: int) -> None:
        if length < 1:
            raise InputError(f"length is {length}, expected at least 1 token of the prefix")
        self.length = length

    def __repr__(self) -> str:
        return f"PrefixSinkScores({self.length})"

    def tile(self, tile: WeightTile) -> Tensor:
        early = (tile.queries >= tile.first) & (tile.queries < tile.first + self.length)
        weights, counts = ((x * early).sum(-2, dtype=torch.float64) for x in (tile.weights, tile.counted))
        return torch.stack([weights, counts.expand_as(weights)])

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total[0] / total[1].clamp(min=1)


class Mass(Statistic):
    """The sum of a query's weights inside a mask.

    Args:
        name: name of the statistic.
        mask: the pairs whose weights are added up.
        definition: the definition in words.

    Raises:
        InputError: if `mask` is not a mask, and, when measured, if the mask does not fit the call.

    >>> import torch, qkv
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> two = Mass("two", qkv.masks.Window(2))
    >>> result = qkv.measure(q, k, mask=qkv.masks.Causal(), statistics=[two])
    >>> [round(x, 4) for x in result.own["two"][0, 0].tolist()]
    [1.0, 1.0, 0.6667, 0.5]
    """

    share = True

    def __init__(self, name: str, mask: Mask, definition: str = "") -> None:
        if not isinstance(mask, Mask):
            raise InputError(f"mask is {type(mask).__name__}, expected a mask from qkv.masks, such as Dense(tensor)")
        self.name, self.label, self.mask = name, name, mask
        self.definition = definition or f"weight inside {mask!r}"

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def tile(self, tile: WeightTile) -> Tensor:
        inside = self.mask.visible(tile.region, tile.grid)
        return (tile.weights * inside).sum(-1)


class Local(Mass):
    """The weight on the tokens around the query.

    Args:
        window: tokens at most this far away count, on either side.

    >>> of_equal_keys(Local(1))
    [1.0, 1.0, 0.667, 0.5]
    """

    one_text = True

    def __init__(self, window: int = 8) -> None:
        super().__init__("local", Window(window + 1, ahead=window), "weight on tokens at most `local_window` away")
        self.label = "Local window"


class Streaming(Mass):
    """The weight on the keys that a StreamingLLM cache keeps: the first of the text and the last before the query.

    Args:
        first: the first key of the text; one for each batch item where padding is on the left.
        n_keys: the number of keys, needed if `first` is a tensor.

    >>> of_equal_keys(Streaming())
    [1.0, 1.0, 1.0, 1.0]
    """

    one_text = True
    first_keys, last_keys = 4, 64

    def __init__(self, first: int | Tensor = 0, n_keys: int = 0) -> None:
        n_first, last = self.first_keys, Window(self.last_keys, ahead=self.last_keys - 1)
        if isinstance(first, int) or not first.any():
            mask = Prefix(n_first) | last
        else:
            after = torch.arange(n_keys, device=first.device) - first[:, None]
            mask = Dense(((after >= 0) & (after < n_first))[:, None, None]) | last
        super().__init__(
            "streaming_mass",
            mask,
            "weight on what a streaming cache keeps: the first `streaming_first` and last `streaming_last` keys",
        )
        self.label = "Streaming"


class RowSum(Statistic):
    """The sum of a query's weights.

    >>> import torch, qkv
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> qkv.measure(x, x, statistics=[RowSum()]).own["row_sum"][0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    name, definition = "row_sum", "sum of the query's weights"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.sum(-1, dtype=torch.float64)


FIELDS: dict[str, Statistic] = {
    "entropy": Entropy(), "sink": Sink(), "self_": Self(), "previous": Previous(), "next_": Next(),
    "distance": Distance(), "spread": Spread(), "effective_keys": EffectiveKeys(), "visible": Visible(),
    "received": Received(), "visible_queries": VisibleQueries(), "row_sum": RowSum(),
}  # fmt: skip
"""The statistics that `measure` always returns, by their field of `Statistics`."""
