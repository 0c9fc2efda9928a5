"""Output and statistics of a softmax call with few scores, from the weights of the whole call at once.

This is faster for short texts, and for one new token against a cache: there, the operations that
`qkv.statistics.one_pass` makes for each tile cost more than the arithmetic. Both add to the same sums.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.sizes import sizes
from qkv._engine.sweep import Block, Group, Tile, workspace
from qkv._engine.tiles import LOG2_E, MASKED_SCORE, ScoreTiles
from qkv.masks import FULL, PARTIAL
from qkv.statistics.one_pass import LOWEST, log2_scores
from qkv.statistics.reduce import Request, RowsState, StatisticsReducer
from qkv.statistics.sums import Sums

ONE_QUERY = 64  # the limit is so much higher for one query, whose weights are no more than its statistics
SPARSE = 0.5  # a window with a smaller share of the keys has empty tiles, which `one_pass` skips


def supports(call: Call, request: Request) -> bool:
    """Whether a call that `one_pass` supports is small enough."""
    (b, h, n_queries, _), n_keys = call.q.shape, call.k.shape[2]
    most = sizes(call.q.device).at_once * (ONE_QUERY if n_queries == 1 else 1)
    if b * h * n_queries * n_keys > most or len(set(request.firsts)) > 1:
        return False
    band = None if call.mask is None else call.mask.band
    return n_queries > 1 or band is None or band[1] - band[0] >= SPARSE * n_keys


def attend_and_add(call: Call, request: Request, sums: Sums, *, output: bool) -> tuple[Tensor | None, Tensor]:
    """Add the statistics of all rows to `sums`; returns the output, if it is wanted, and the log-sum-exp, ≥ float32."""
    (b, _, n_queries, _), (_, key_heads, n_keys, _) = call.q.shape, call.k.shape
    tiles = ScoreTiles(call, slice(0, b), slice(0, key_heads))
    rows, columns = slice(0, n_queries), slice(0, n_keys)
    status = max(PARTIAL, tiles.block_status(call.mask, n_queries, n_keys)[0][0]) if call.mask is not None else FULL
    group = Group(tiles, [rows], [columns], [[status]])
    reducer = _AtOnce(request, sums)
    reducer.count_band(call)
    with workspace() as space:
        block = Block(group, 0, rows)
        state = reducer.begin(reducer.start(group, reducer.prepare(group), [0]), block)
        return reducer.whole(state, Tile(block, range(1), status, space), output=output)


class _AtOnce(StatisticsReducer):
    def whole(self, rows: RowsState, tile: Tile, *, output: bool) -> tuple[Tensor | None, Tensor]:
        """Add a tile that is the whole call."""
        tiles, masked = tile.group.tiles, tile.masked()
        self.add_visible(rows, tile)
        scores = log2_scores(tile, None)
        if masked is not None:
            scores.masked_fill_(masked, LOWEST)
        if tiles.call.biases:
            scores.clamp_(min=LOWEST)  # a bias may mask pairs with −inf
        maximum = scores.amax(-1).clamp_(min=MASKED_SCORE)
        weights = torch.exp2(scores.sub_(maximum[..., None]), out=tile.buffer("weights"))
        moments = weights.double() @ _powers(tile.shape[3], weights.device)
        norm = torch.linalg.vector_norm(weights, dim=-1)
        empty = moments[..., 0] == 0
        lse2, factor, shift = self._normalizer(tile, maximum, moments[..., 0].masked_fill(empty, 1), empty)
        weights.mul_(factor.to(weights.dtype)[..., None])
        out = None
        if output:
            values = tiles.v if masked is None else tile.group.visible(tiles.v, masked)
            out = tiles.weigh(weights, values).masked_fill(empty[..., None], 0)
        if rows.counted is not None:
            counted = rows.counted[..., 0]
            factor, shift, norm = (x.masked_fill(~counted, 0) for x in (factor, shift, norm))
            moments = moments.masked_fill(~rows.counted, 0)
            for x in (weights, scores):
                x.masked_fill_(~rows.counted, 0)  # a query of padding may be NaN
        total, first, second = (moments * factor[..., None]).unbind(-1)
        log2_sum = torch.mul(weights, scores, out=scores).sum(-1) + shift * total
        position = torch.arange(rows.start, rows.stop, dtype=torch.float64, device=total.device)
        distance = self.sign(rows, tile) * (first - position * total)
        shape = (total, -log2_sum, (norm * factor).square(), first, second, distance)
        self.sums.by_query[: len(shape)] += torch.stack(shape)
        self.add(rows, tile, weights, total)
        lse = (lse2 * math.log(2)).to(weights.dtype)
        return out, lse

    def _normalizer(self, tile: Tile, maximum: Tensor, total: Tensor, empty: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log-sum-exp in base 2, the factor of the weights, and its log2, from maxima and sums, in float64."""
        tiles = tile.group.tiles
        log2_total = torch.log2(total)
        lse2 = (maximum + log2_total).masked_fill(empty, -torch.inf)
        sink = tiles.of(tiles.call.sink)
        if sink is None:
            return lse2, total.reciprocal().masked_fill_(empty, 0), -log2_total
        sink2 = sink.double().expand_as(lse2) * LOG2_E
        lse2 = torch.logaddexp2(lse2, sink2)
        shift = (maximum - lse2).masked_fill(empty, 0)
        sink_mass = torch.exp2(sink2 - lse2).masked_fill(sink2 == -torch.inf, 0)
        self.sums.sink_mass = sink_mass.to(tiles.dtype)
        return lse2, torch.exp2(shift).masked_fill_(empty, 0), shift


@functools.lru_cache(maxsize=8)
def _powers(n: int, device: torch.device) -> Tensor:
    """1, j and j² of every key j, (n, 3)."""
    with torch.inference_mode(False):
        keys = torch.arange(n, dtype=torch.float64, device=device)
        return torch.stack([torch.ones_like(keys), keys, keys.square()], 1)
