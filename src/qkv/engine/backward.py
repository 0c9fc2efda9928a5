"""Tiled backward pass of attention, and of any other function of the attention weights.

Scores are recomputed tile by tile, as in FlashAttention. A row's *level* is its normalizer state (the log-sum-exp of a
softmax, the threshold of an entmax). At a fixed level, a weight depends only on its own score; the gradient through the
level is one number per query, by the implicit function theorem (for softmax it is FlashAttention's rowsum(dO ∘ O)). So
one pass over the tiles serves all normalizers: it takes the gradient with respect to the weights to the scores, and
from there to queries, keys, biases, sinks and learned tensors. The backward of the tiled kernel and that of statistics
are subclasses of `WeightGradients`.

A "slope" here is a gradient with respect to the weights or scores of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv._contract import gradients_of
from qkv.biases import AdditiveBias
from qkv.engine.call import Call, at_least_float32
from qkv.engine.level import TileWeights
from qkv.engine.tiles import MASKED_SCORE, Block, Group, Reducer, Tile


def zeros(call: Call, wanted: set[str]) -> dict[str, Tensor]:
    """Return the gradient accumulators for the tensors of `call` named in `wanted`, in float32 or better."""
    wide = at_least_float32(call.q.dtype)
    return {name: x.new_zeros(x.shape, dtype=wide) for name, x in call.tensors().items() if name in wanted}


def finite(level: Tensor | None) -> Tensor | None:
    """Return the level, with a large finite number for fully masked rows, at which all weights are 0."""
    return None if level is None else level.masked_fill(level == -torch.inf, -MASKED_SCORE)  # e^(s − ∞) = 0


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


@dataclass(eq=False)
class WeightGradients(Reducer[RowSlopes]):
    """Backpropagates gradients of the weights to all tensors of a call. Subclasses implement `slope_at_weights`."""

    level: Tensor | None
    """The level of each row, finite."""
    totals: dict[str, Tensor]
    """Gradient accumulators, by the names of the call's tensors."""

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
            with torch.enable_grad():
                if isinstance(bias, AdditiveBias):
                    added = bias.added(region)
                    gradients = gradients_of(added, learned, slope.sum_to_size(added.shape))
                else:
                    score = before[i].detach().requires_grad_()
                    of_score, *of_learned = gradients_of(bias.apply(score, region), (score, *learned), slope)
                    slope, gradients = torch.zeros_like(score) if of_score is None else of_score, tuple(of_learned)
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
        learned = [tiles.call.learned[name] for name in names]
        with torch.enable_grad():
            q, k = (x.detach().requires_grad_() for x in (q, k))
            of_q, of_k, *gradients = gradients_of(score.scores(q, k), (q, k, *learned), slope)
        if of_q is not None:
            rows.q += of_q.view(rows.q.shape)
        if of_k is not None and total is not None:
            total[:, cols] += of_k.view(len(total), tiles.group, *of_k.shape[2:]).sum(1)
        _add(self.totals, names, gradients)
