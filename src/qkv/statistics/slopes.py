"""The backward pass of statistics: gradients of all tensors of a call, tile by tile.

A statistic is a function of the weights A of a call. Its derivative ∂L/∂A is a sum of few terms: a number for each
query, one for each key, multiples of ln A, of A and of the distance, and terms inside masks and on single keys. Each
tile of ∂L/∂A is computed together with its tile of weights; the rest is the backward pass of attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._engine.backward import Job, RowSlopes, WeightGradients
from qkv._engine.call import Call
from qkv._engine.row_state import RowState
from qkv._engine.sweep import Group, Tile
from qkv._engine.weight_tiles import WeightTiles
from qkv._engine.workspace import Workspace
from qkv.masks import EMPTY, FULL, Mask
from qkv.normalizers import SumToOne
from qkv.normalizers.base import weights_of
from qkv.normalizers.tile import level_slopes
from qkv.statistics.patterns import Patterns

OfQueries = Float[Tensor, "b h nq"]
SMALLEST_LOG2 = -2000.0  # exp2 of it is 0; finite, so that pairs with a bias of −inf do not overflow when multiplied


@dataclass(eq=False)
class Slopes:
    """The coefficients of ∂L/∂A_ij, the derivative at the final weight of query i and key j: a sum of these terms."""

    constant: OfQueries
    """Added to every key."""
    log: OfQueries | None = None
    """Multiplied by ln A_ij."""
    share: OfQueries | None = None
    """Multiplied by A_ij / mass_i."""
    per_mass: OfQueries | None = None
    """1 / mass_i."""
    distance: OfQueries | None = None
    """Multiplied by |p_i − j|."""
    near: dict[int, OfQueries] = field(default_factory=dict)
    """Added at key p_i + offset, by offset."""
    first: OfQueries | None = None
    """Added at the first key of the text."""
    mass: dict[str, OfQueries] = field(default_factory=dict)
    """Added inside a mask, by its name."""
    received: Float[Tensor, "b h nk"] | None = None
    """Added at every query, one for each key."""


@dataclass(frozen=True, eq=False)
class Places:
    """The keys that `sink` and the masses refer to."""

    firsts: Sequence[int]
    """The first key of the text of each batch item."""
    mass: Mapping[str, Mask]
    patterns: Patterns = field(default_factory=Patterns)


@dataclass(frozen=True, eq=False)
class _Heads:
    """Data that all tiles of a group share."""

    weights: WeightTiles
    statuses: dict[str, list[list[int]]]
    """Block status of the tiles in each mask of `mass`."""
    received: Tensor | None
    first: int


class StatisticsGradients(WeightGradients):
    """The reducer that adds the gradients of statistics to those of the call's tensors.

    Args:
        call: the attention call.
        rows: its normalizer state.
        level: `rows.level`, with finite numbers in fully masked rows.
        slopes: the coefficients of ∂L/∂A.
        places: the keys and masks that they refer to.
        totals: the gradients to add to, by the names of the call's tensors.
        size: tile size.
    """

    def __init__(
        self,
        call: Call,
        rows: RowState,
        level: Tensor | None,
        slopes: Slopes,
        places: Places,
        totals: dict[str, Tensor],
        size: int,
    ) -> None:
        super().__init__(level, totals)
        self.rows, self.slopes, self.places, self.size = rows, slopes, places, size
        divisors = [x for x in (rows.total, call.divisor) if x is not None]
        self.divisor = math.prod(divisors[1:], start=divisors[0]).expand(call.q.shape[:3]) if divisors else None

    def prepare(self, group: Group) -> _Heads:
        tiles = group.tiles
        return _Heads(
            WeightTiles(tiles, self.rows),
            {name: tiles.block_status(self.places.mass[name], self.size) for name in self.slopes.mass},
            tiles.of(self.slopes.received),
            self.places.firsts[tiles.batch.start],
        )

    def weigh(self, rows: RowSlopes, tile: Tile) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not (tile.group.tiles.call.normalizer.has_lse and rows.weigh.shortcut):
            return super().weigh(rows, tile)
        weights, log2 = tile.weights(rows.job.shared.weights)  # with logarithms, from one matrix product
        rows.weigh.made = weights
        if log2 is not None and not tile.group.tiles.linear:
            log2.clamp_(min=SMALLEST_LOG2)
        return weights, log2, tile.masked()

    def slope_at_weights(
        self, rows: RowSlopes, tile: Tile, weights: Tensor, log2: Tensor | None, masked: Tensor | None
    ) -> Tensor:
        at, cols, of, heads = tile.block.at, tile.columns, self.slopes, rows.job.shared
        divisor = None if self.divisor is None else self.divisor[at][..., None]
        weights = weights if divisor is None else weights / divisor
        if of.log is not None:
            if log2 is None:
                tiny = torch.finfo(weights.dtype).tiny
                log2 = torch.log2(torch.clamp(weights, min=tiny, out=tile.buffer("slope")), out=tile.buffer("slope"))
            slope = log2.mul_(of.log[at][..., None] * math.log(2)).add_(of.constant[at][..., None])
        else:
            slope = tile.buffer("slope").copy_(of.constant[at][..., None].expand_as(weights))
        if of.share is not None:
            assert of.per_mass is not None
            slope.addcmul_(weights * of.per_mass[at][..., None], of.share[at][..., None])
        if heads.received is not None:
            slope += heads.received[..., None, cols]
        self._add_places(tile, slope, heads)
        return slope if divisor is None else slope.div_(divisor)

    def _add_places(self, tile: Tile, slope: Tensor, heads: _Heads) -> None:
        """Add the terms of ∂L/∂A that depend on the positions of the keys."""
        at, cols, of, tiles = tile.block.at, tile.columns, self.slopes, tile.group.tiles
        start = tile.rows.start + tiles.call.grid.offset  # position of the first query
        if of.distance is not None:
            slope.addcmul_(self.places.patterns.distances(start, tile), of.distance[at][..., None])
        if of.first is not None and cols.start <= heads.first < cols.stop:
            slope[..., heads.first - cols.start] += of.first[at]
        for offset, x in of.near.items():
            shift = start + offset - cols.start
            if -slope.shape[2] < shift < slope.shape[3]:
                diagonal = torch.diagonal(slope, shift, -2, -1)
                begin = max(0, -shift)
                diagonal += x[at][..., begin : begin + diagonal.shape[-1]]
        for name, x in of.mass.items():
            mask, status = self.places.mass[name], heads.statuses[name][tile.block.index][tile.index]
            if status == FULL:
                slope += x[at][..., None]
            elif status != EMPTY:
                inside = self.places.patterns.inside(name, mask, tile, tile.columns)
                slope.addcmul_(inside, x[at][..., None])


class LevelSlopes(StatisticsGradients):
    """The effect of a row's level (threshold) on the gradient: the mean of ∂L/∂A, weighted by −∂A/∂level.

    `sum` and `falls` are sums over keys, (b, h, nq), once all tiles have been added; `falls` is −∂A/∂level.
    """

    def __init__(self, call: Call, *arguments: Any) -> None:
        super().__init__(call, *arguments)
        zeros = call.q.new_zeros(call.q.shape[:3], dtype=torch.float64)
        self.sum, self.falls = zeros, torch.zeros_like(zeros)

    def tile(self, rows: RowSlopes, tile: Tile) -> None:
        normalizer, weigh, at = tile.group.tiles.call.normalizer, rows.weigh, tile.block.at
        assert isinstance(normalizer, SumToOne)
        assert rows.level is not None
        weights, log2, masked = self.weigh(rows, tile)
        slope = self.slope_at_weights(rows, tile, weights, log2, masked)
        if isinstance(weigh.made, tuple):
            scores = weigh.made[0].detach()
            scores = scores if masked is None else scores.masked_fill(masked, -torch.inf)
            falls = level_slopes(normalizer, scores, rows.level, weights)
        else:
            falls = normalizer.slope_from_weights(weights)
            falls = falls if masked is None else falls.masked_fill(masked, 0)
        slope = slope if masked is None else slope.masked_fill_(masked, 0)
        self.falls[at] += falls.sum(-1)
        self.sum[at] += slope.mul_(falls).sum(-1)

    def end(self, rows: RowSlopes, space: Workspace) -> None:
        pass

    def finish(self, group: Group, job: Job) -> None:
        pass

    def mean(self, call: Call, at_sink: OfQueries | None) -> OfQueries:
        """The weighted mean, including a sink logit with gradient `at_sink`; 0 where no weight depends on the level."""
        total, sum_ = self.falls, self.sum
        if call.sink is not None:
            assert isinstance(call.normalizer, SumToOne)
            assert self.level is not None
            column = call.sink.expand_as(self.level)[..., None]
            weights = weights_of(call.normalizer, column, self.level)
            fall = level_slopes(call.normalizer, column, self.level, weights)[..., 0]
            total = total + fall
            sum_ = sum_ if at_sink is None else sum_ + fall * at_sink
        return (sum_ / torch.where(total == 0, 1.0, total)).to(self.slopes.constant)
