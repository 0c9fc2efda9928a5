"""Objects as a user writes them: one method each, nothing else of the package overridden."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from qkv.biases import AdditiveBias, Bias
from qkv.cache import Evicting, Held
from qkv.masks import Grid, Mask, Region
from qkv.normalizers import Pointwise, SumToOne
from qkv.scores import Pairwise, Product
from qkv.statistics import Statistic, WeightTile

HEADS = 4


def by_head(low: float, high: float) -> nn.Parameter:
    """A learned number for each head, which broadcasts against (b, heads, nq, nk)."""
    return nn.Parameter(torch.linspace(low, high, HEADS, dtype=torch.float64)[:, None, None])


class Square(Pointwise):
    """Not injective: its slope does not follow from its weight."""

    def weight(self, scores: Tensor) -> Tensor:
        return scores**2


class Share(Pointwise):
    divide = "sum"

    def weight(self, scores: Tensor) -> Tensor:
        return scores**2 + 0.1


class Ramp(Pointwise):
    """With a learned slope for each head."""

    divide = "keys"

    def __init__(self) -> None:
        self.steepness = by_head(0.5, 1.5)

    def weight(self, scores: Tensor) -> Tensor:
        return softplus(scores * self.steepness.to(scores))


class SoftplusSquared(SumToOne):
    """Its weight depends on score and level separately, so that −∂w/∂level is not ∂w/∂s."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return softplus(1.5 * scores - level) ** 2


class HeavyTail(SumToOne, nn.Module):
    """A module, with a learned power for each head."""

    def __init__(self, **asked: object) -> None:
        super().__init__(**asked)  # type: ignore[arg-type]
        self.power = by_head(2.0, 4.0)

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return (1 + softplus(level - scores)) ** -self.power.to(scores)


class Exponential(SumToOne):
    """Softmax, by its definition alone."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(scores - level)


class Manhattan(Pairwise):
    """With a learned width for each head."""

    def __init__(self) -> None:
        self.width = by_head(0.5, 2.0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1) * self.width.to(q)


class Tripled(Product):
    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return 3 * q, k


class Squeeze(Bias):
    """A function of the score and of the distance, with a learned number."""

    def __init__(self) -> None:
        self.size = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def apply(self, scores: Tensor, region: Region) -> Tensor:
        return self.size.to(scores) * torch.tanh(scores) - 0.01 * (region.queries - region.keys).abs()


class Slope(AdditiveBias):
    """With a learned slope for each head."""

    def __init__(self) -> None:
        self.slope = by_head(0.01, 0.1)

    def tile(self, region: Region) -> Tensor:
        return -self.slope * (region.queries - region.keys).abs()


class Diagonals(Mask):
    """Every third key at or before the query's own."""

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return (q >= k) & ((q - k) % 3 != 1)


class Heavy(Statistic):
    name, label, unit, highest, logarithmic = "heavy", "Heavy keys", "keys", 20.0, True
    definition = "number of keys with a tenth of the weight or more"

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights >= 0.1).sum(-1)


class Taken(Statistic):
    """The largest weight that any query puts on a key; another merge than the sum."""

    name, over, share, definition = "taken", "key", True, "the largest weight that a query puts on the key"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.amax(-2)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def by_head(self, values: np.ndarray, counted: np.ndarray) -> np.ndarray:
        return np.asarray(np.nanmax(np.where(counted[:, None, None], values, np.nan), -1))


class MeanAttention(Evicting):
    """A policy: the attention received per query that could attend; it changes its arguments."""

    name = "mean"

    def worth(self, held: Held) -> Tensor:
        return held.received.div_(held.queries)
