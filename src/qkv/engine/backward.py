"""Tiled backward pass of attention, and of any other function of the attention weights.

Scores are recomputed tile by tile, as in FlashAttention. A row's *level* is its normalizer state (the log-sum-exp of a
softmax, the threshold of an entmax). At a fixed level, a weight depends only on its own score; the gradient through the
level is one number per query, by the implicit function theorem (for softmax it is FlashAttention's rowsum(dO ∘ O)). So
one pass over the tiles serves all normalizers: it takes the gradient with respect to the weights to the scores, and
from there to queries, keys, biases, sinks and learned tensors. `Gradients` is the backward of attention; the backward
of statistics is another subclass of `WeightGradients`.

A "slope" here is a gradient with respect to the weights or scores of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.biases import AdditiveBias, ByQuery, clipped
from qkv.engine.call import Call, at_least_float32
from qkv.engine.forward import ForwardState, dropped
from qkv.engine.level import TileWeights
from qkv.engine.tile_loop import Block, Group, Reducer, Tile, groups, reduce_tiles
from qkv.engine.tiles import MASKED_SCORE
from qkv.normalizers import Pointwise
from qkv.partial import Partial, sink_gradient


def backward(
    call: Call, state: ForwardState, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]
) -> dict[str, Tensor]:
    """Return gradients of the tensors named in `wanted`, at least float32, given those of the output and the lse."""
    wide = at_least_float32(call.q.dtype)
    grad, out = grad.to(wide), state.out.to(wide)
    totals = zeros(call, wanted)
    if "sink" in totals and call.normalizer.has_lse:
        assert call.sink is not None
        assert state.level is not None
        totals["sink"] = sink_gradient(call.sink, Partial(out, state.level), grad, grad_lse)
    scaled = grad
    for divisor in (state.total, call.divisor):
        scaled = scaled if divisor is None else scaled / divisor[..., None]
    inner = None
    if not isinstance(call.normalizer, Pointwise) or call.normalizer.divide == "sum":
        inner = (scaled * (out if state.mean is None else state.mean)).sum(-1)
        inner = inner if grad_lse is None else inner - grad_lse
    level = finite(state.level)
    if call.sink is not None and not call.normalizer.has_lse:
        assert level is not None
        assert inner is not None
        add_sink_gradients(call, level, -inner, totals)
    distance_slopes = distance_mass = None
    if call.values is not None:
        distance_slopes = ByQuery(scaled @ call.values.to(wide).transpose(-1, -2), call.grid.offset)
        distance_mass = ByQuery(torch.zeros_like(distance_slopes.tensor), call.grid.offset)
    reduce_tiles(groups(call), Gradients(level, scaled, inner, totals, distance_slopes, distance_mass))
    if state.chosen is not None and "v" in totals:
        _add_chosen(state.chosen, grad, totals["v"])
    if "values" in totals:
        assert distance_mass is not None
        by_distance = distance_mass.tensor
        if state.chosen is not None:
            index = clipped(call.grid.rows(0, call.grid.n_queries), state.chosen, distance_mass.reach)[..., None]
            chosen = (state.chosen[..., None] >= 0).to(by_distance)
            by_distance = torch.zeros_like(by_distance).scatter_(3, index, chosen)
        totals["values"] = torch.einsum("bhqr,bhqd->hrd", by_distance, scaled).sum_to_size(totals["values"].shape)
    return totals


def zeros(call: Call, wanted: set[str]) -> dict[str, Tensor]:
    """Return the gradient accumulators for the tensors of `call` named in `wanted`, in float32 or better."""
    wide = at_least_float32(call.q.dtype)
    return {name: x.new_zeros(x.shape, dtype=wide) for name, x in call.tensors().items() if name in wanted}


def finite(level: Tensor | None) -> Tensor | None:
    """Return the level, with a large finite number for fully masked rows, at which all weights are 0."""
    return None if level is None else level.masked_fill(level == -torch.inf, -MASKED_SCORE)  # e^(s − ∞) = 0


def _add_chosen(chosen: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add the gradient of the values that hard attention chose to `total`."""
    b, dv = len(grad), grad.shape[3]
    index = chosen.clamp(min=0).view(b, total.shape[1], -1)
    slope = torch.where(chosen[..., None] >= 0, grad, 0.0).reshape(b, total.shape[1], -1, dv)
    total.scatter_add_(2, index[..., None].expand_as(slope), slope)


def add_sink_gradients(call: Call, level: Tensor, slope: Tensor, totals: dict[str, Tensor]) -> None:
    """Add the gradients that pass through the sink's weight, given the gradient of that weight, (b, h, nq).

    In attention the sink is a key whose value is 0.
    """
    assert call.sink is not None
    column = call.sink.expand_as(level)[..., None].clone()  # shortcuts may overwrite it
    names = [name for name in call.learned if name in totals and name.startswith("normalizer ")]
    weigh = TileWeights(call.normalizer, [call.learned[name] for name in names])
    masked = column == -torch.inf
    weigh.weights(column, level, masked if masked.any() else None)
    at_sink, gradients = weigh.slopes(slope[..., None].clone())
    if "sink" in totals:
        totals["sink"] += at_sink[..., 0].masked_fill(masked[..., 0], 0).sum_to_size(call.sink.shape)
    _add(totals, names, gradients)


def _add(totals: dict[str, Tensor], names: list[str], gradients: Sequence[Tensor | None]) -> None:
    for name, x in zip(names, gradients, strict=True):
        if x is not None:
            totals[name] += x


@dataclass(eq=False)
class RowSlopes:
    """State of one block of queries: inputs that its tiles share, and the gradient of the queries."""

    block: Block
    q: Tensor
    level: Tensor | None
    weigh: TileWeights
    names: list[str]
    """Learned tensors of the normalizer that need gradients."""


class WeightGradients(Reducer[RowSlopes]):
    """Backpropagates gradients of the weights to all tensors of a call. Subclasses implement `slope_at_weights`.

    Args:
        level: level of each row, finite.
        totals: gradient accumulators, by the names of the call's tensors.
    """

    def __init__(self, level: Tensor | None, totals: dict[str, Tensor]) -> None:
        self.level, self.totals = level, totals

    def slope_at_weights(self, rows: RowSlopes, tile: Tile, weights: Tensor, masked: Tensor | None) -> Tensor:
        """Return the gradient of each weight of a tile, at a fixed level, minus the row's gradient through the level.

        The caller overwrites the result. An implementation must not change `weights`.
        """
        raise NotImplementedError

    def weigh(self, rows: RowSlopes, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Return weights of a tile before any division, and the masked pairs."""
        scores, masked = tile.scores()
        return rows.weigh.weights(scores, rows.level, masked), masked

    def of_group(self, name: str, group: Group) -> Tensor | None:
        """Return the gradient of the group's keys or values, (key heads, nk, d); None if it is not wanted."""
        total, tiles = self.totals.get(name), group.tiles
        return None if total is None else total[tiles.batch, tiles.key_heads].view(len(tiles.k), *total.shape[2:])

    def begin(self, block: Block) -> RowSlopes:
        tiles = block.group.tiles
        names = self._learned(tiles.call, "normalizer")
        return RowSlopes(
            block,
            torch.zeros_like(tiles.q[:, :, block.rows]).flatten(1, 2),
            None if self.level is None else self.level[block.at],
            TileWeights(tiles.call.normalizer, [tiles.call.learned[name] for name in names]),
            names,
        )

    def tile(self, rows: RowSlopes, tile: Tile) -> None:
        group = tile.group
        weights, masked = self.weigh(rows, tile)
        slope = self.slope_at_weights(rows, tile, weights, masked)
        if masked is not None and not rows.weigh.shortcut:
            slope.masked_fill_(masked, 0)
        slope, gradients = rows.weigh.slopes(slope)
        _add(self.totals, rows.names, gradients)
        if masked is not None:
            slope.masked_fill_(masked, 0)
        if "shift" in self.totals:
            shift = tile.region.of(self.totals["shift"][..., None])
            shift += slope.sum_to_size(shift.shape)
        slope = self._through_biases(tile, slope, masked)
        keys = group.tiles.k[:, tile.columns]
        keys = keys if masked is None else group.visible(keys, masked)
        self._through_product(rows, tile, slope, masked, keys)

    def end(self, rows: RowSlopes) -> None:
        if "q" in self.totals:
            call = rows.block.group.tiles.call
            scale = call.scale if call.pairwise is None else 1
            self.totals["q"][rows.block.at] = rows.q.view(*rows.block.shape, -1) * scale

    def _learned(self, call: Call, of: str) -> list[str]:
        """Return names of learned tensors of the score or the normalizer that need gradients."""
        return [name for name in call.learned if name.startswith(of) and name in self.totals]

    def _through_biases(self, tile: Tile, slope: Tensor, masked: Tensor | None) -> Tensor:
        """Backpropagate from the final scores to q·k, and add the gradients of the biases."""
        tiles, rows, cols = tile.group.tiles, tile.rows, tile.columns
        call = tiles.call
        if call.normalizer.temperature != 1 and not tiles.linear:
            slope = slope / call.normalizer.temperature
        if not call.biases:
            return slope
        region, before = tile.region, []
        if not all(isinstance(bias, AdditiveBias) for bias in call.biases):
            score = tiles.product(rows, cols)
            score = score if masked is None or tile.group.finite else score.masked_fill(masked, 0)
            for bias in call.biases:
                before.append(score)
                score = tiles.apply(bias, score, rows, cols)
        for i, bias in reversed(list(enumerate(call.biases))):
            tensors = bias.tensors()
            names = [name for name in tensors if f"bias {i} {name}" in self.totals]
            if isinstance(bias, AdditiveBias) and bias.add_gradient is not None:
                for name in names:
                    bias.add_gradient(self.totals[f"bias {i} {name}"], region, slope)
                continue
            learned = [tensors[name] for name in names]
            slope, *gradients = bias.gradients(before[i] if before else slope, region, slope, learned)  # type: ignore[assignment]
            slope = torch.zeros_like(before[i]) if slope is None else slope
            _add(self.totals, [f"bias {i} {name}" for name in names], gradients)
            slope = slope if masked is None else slope.masked_fill(masked, 0)
        return slope

    def _through_product(self, rows: RowSlopes, tile: Tile, slope: Tensor, masked: Tensor | None, keys: Tensor) -> None:
        tiles, cols, score = tile.group.tiles, tile.columns, tile.group.tiles.call.pairwise
        total = self.of_group("k", tile.group)
        if score is None:
            folded = slope.reshape(len(keys), -1, slope.shape[3])
            rows.q.baddbmm_(folded, keys)
            if total is not None:  # `tiles.q` includes the scale
                total[:, cols].baddbmm_(folded.transpose(1, 2), tiles.q[:, :, tile.rows].flatten(1, 2))
            return
        q, k = tiles.queries_and_keys(tile.rows, cols)
        if masked is not None and not tile.group.finite:
            q = q.masked_fill(masked.all(-1, keepdim=True), 0)
            k = k.masked_fill(masked.all(-2)[..., None], 0)
        names = self._learned(tiles.call, "score")
        of_q, of_k, *gradients = score.gradients(q, k, slope, [tiles.call.learned[name] for name in names])
        if of_q is not None:
            rows.q += of_q.view(rows.q.shape)
        if of_k is not None and total is not None:
            total[:, cols] += of_k.view(len(total), tiles.group, *of_k.shape[2:]).sum(1)
        _add(self.totals, names, gradients)


class Gradients(WeightGradients):
    """Backward of attention: the gradient of a weight is dO·v, and the values get weightsᵀ·dO.

    Args:
        level: level of each row, finite.
        grad: gradient of the output, divided by the divisor of the weights, if there is one.
        inner: gradient through the level, subtracted from every weight of the row: rowsum(dO ∘ O) − d lse for softmax.
        totals: gradient accumulators, by the names of the call's tensors.
        distance_slopes: dO times the value vector of each clipped distance, for `RelativePosition` with values.
        distance_mass: accumulator of the weights by clipped distance, likewise.
    """

    def __init__(
        self,
        level: Tensor | None,
        grad: Tensor,
        inner: Tensor | None,
        totals: dict[str, Tensor],
        distance_slopes: ByQuery | None = None,
        distance_mass: ByQuery | None = None,
    ) -> None:
        super().__init__(level, totals)
        self.grad, self.inner, self.distance_slopes, self.distance_mass = grad, inner, distance_slopes, distance_mass

    def slope_at_weights(self, rows: RowSlopes, tile: Tile, weights: Tensor, masked: Tensor | None) -> Tensor:
        tiles, cols, at = tile.group.tiles, tile.columns, tile.block.at
        call, values = tiles.call, tiles.v[:, cols]
        values = values if masked is None else tile.group.visible(values, masked)
        grad = self.grad[at].reshape(len(values), -1, values.shape[2])
        dropout = dropped(tile) if call.dropout_p else None
        if not call.normalizer.one_key:
            met = weights if dropout is None else weights * dropout
            if (total := self.of_group("v", tile.group)) is not None:
                total[:, cols].baddbmm_(met.reshape(len(values), -1, met.shape[3]).transpose(1, 2), grad)
            if self.distance_mass is not None:
                self.distance_mass.add_gradient(self.distance_mass.tensor, tile.region, met)
        slope = tile.buffer("slope")
        torch.bmm(grad, values.transpose(1, 2), out=slope.view(len(values), -1, tile.shape[3]))
        if self.distance_slopes is not None:
            slope += self.distance_slopes.tile(tile.region)
        if dropout is not None:
            slope *= dropout
        return slope if self.inner is None else slope.sub_(self.inner[at][..., None])
