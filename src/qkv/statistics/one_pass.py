"""Output and statistics of a softmax call in one pass: each score is computed once and exponentiated once.

The weights of a block of rows are kept until their log-sum-exp is known (online softmax: Milakov & Gimelshein 2018,
arXiv:1805.02867), and then normalized in place. A kernel pass for the log-sum-exp and a sweep over all tiles would
compute the scores twice.

This is faster for short texts, and for one new token against a cache: there, the operations that
`qkv.statistics.one_pass` makes for each tile cost more than the arithmetic. Both add to the same sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.sweep import Block, Tile, Workspace, reduce_tiles, row_blocks
from qkv._engine.tiles import LOG2_E, MASKED_SCORE
from qkv._engine.transforms import transformed
from qkv.statistics.reduce import KeySums, Request, RowsState, StatisticsReducer
from qkv.statistics.sums import Sums

LOWEST = torch.finfo(torch.float32).min / 4  # score of a masked pair, far below `MASKED_SCORE`: the first maximum
FEW_SCORES = 2**19  # so few that a second thread costs more than it saves
HIGHEST = 30  # log2 of the largest weight before normalization: the sum of a row's squares must not overflow


def supports(call: Call, sums: Sums) -> bool:
    """Whether `attend_and_add` computes this call and these statistics."""
    return (
        call.normalizer.has_lse
        and not call.dropout_p
        and call.values is None
        and not sums.user_statistics  # they need logarithms of final weights
        and not transformed(call)
    )


def attend_and_add(call: Call, request: Request, sums: Sums, *, output: bool) -> tuple[Tensor | None, Tensor]:
    """Add the statistics of all rows to `sums`; returns the output, if it is wanted, and the log-sum-exp, ≥ float32."""
    b, h, n_queries, _ = call.q.shape
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    lse = call.q.new_empty(b, h, n_queries, dtype=dtype)
    out = call.q.new_empty(b, h, n_queries, call.v.shape[3], dtype=dtype) if output else None
    if call.sink is not None:
        sums.sink_mass = torch.zeros_like(lse)
    batched = len(set(request.firsts)) == 1  # a group has one first key
    few = lse.numel() * call.k.shape[2] <= FEW_SCORES
    reducer = _OnePass(request, sums, out, lse)
    reducer.count_band(call)
    groups = row_blocks(call, batched=batched, single_threaded=few)
    reduce_tiles(groups, reducer, call.q.device, single_threaded=few)
    return out, lse


@dataclass(eq=False)
class _RowBlock:
    """The state of one block of queries, and its tiles so far, in base 2."""

    rows: RowsState
    maximum: Tensor
    """Running maximum, subtracted from the scores (b, h, rows); raised only if a score exceeds it by far."""
    total: Tensor
    """Sum of exp2(score − running maximum)."""
    settled: bool = False
    """Whether every row has seen a key, so that its running maximum is that of a score."""
    tiles: list[Tile] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    maxima: list[Tensor] = field(default_factory=list)
    """The running maximum that the weights of each tile are relative to."""


class _OnePass(StatisticsReducer):
    def __init__(self, request: Request, sums: Sums, out: Tensor | None, lse: Tensor) -> None:
        super().__init__(request, sums)
        self.out, self.lse = out, lse
        self.final = out is not None or sums.bins is not None or request.queries is not None
        """Whether final weights are needed, and not only their sums."""

    def begin(self, job: KeySums, block: Block) -> _RowBlock:  # type: ignore[override]
        rows, q = super().begin(job, block), block.group.tiles.q
        return _RowBlock(rows, q.new_full(block.shape, MASKED_SCORE), q.new_zeros(block.shape))

    def tile(self, state: _RowBlock, tile: Tile) -> None:  # type: ignore[override]
        self.add_visible(state.rows, tile)
        scores, masked = log2_scores(tile, state.maximum if state.settled else None), tile.masked()
        if masked is not None:
            tile.group.tiles.mask_(scores, masked, tile.rows, tile.columns, LOWEST)
        if tile.group.tiles.call.biases:
            scores.clamp_(min=LOWEST)  # a bias may mask pairs with −inf
        if not state.settled:
            maximum = torch.maximum(state.maximum, scores.amax(-1))
            scores.sub_(maximum[..., None])
            self._raise(state, maximum)
            state.settled = bool((maximum > MASKED_SCORE).all())
        elif scores.amax() > HIGHEST:  # never in a block with a NaN query, which does not settle
            above = scores.amax(-1).clamp_(min=0)
            scores.sub_(above[..., None])
            self._raise(state, state.maximum + above)
        weights = tile.space.buffer(f"weights {len(state.tiles)}", tile.shape, scores)
        torch.exp2(scores, out=weights)
        start, sign = tile.columns.start - state.rows.start, self.sign(state.rows, tile)
        state.total += state.rows.sums.store(weights, scores, scores, start, sign)
        state.tiles.append(tile)
        state.weights.append(weights)
        state.maxima.append(state.maximum)

    @staticmethod
    def _raise(state: _RowBlock, maximum: Tensor) -> None:
        state.total *= torch.exp2(state.maximum - maximum)
        state.maximum = maximum

    def end(self, state: _RowBlock, space: Workspace) -> None:  # type: ignore[override]
        rows, block = state.rows, state.rows.block
        tiles, empty = block.group.tiles, state.total == 0
        total, log2_total = state.total.masked_fill(empty, 1), torch.log2(state.total)
        empty_lse, sink = torch.full_like(total, -torch.inf), tiles.of(tiles.call.sink)
        if sink is not None and self.sums.sink_mass is not None:
            empty_lse = sink.to(tiles.dtype).expand(*tiles.shape, tiles.call.q.shape[2])[..., block.rows]
            above = empty_lse * LOG2_E - state.maximum
            log2_total = torch.logaddexp2(log2_total, above)
            total = total + torch.exp2(above)
            of_empty = (empty_lse > -torch.inf).to(total)
            self.sums.sink_mass[block.at] = torch.where(empty, of_empty, torch.exp2(above - log2_total))
        lse = (state.maximum + torch.log2(state.total)) * math.log(2)
        self.lse[block.at] = torch.where(empty, empty_lse, torch.logaddexp(lse, empty_lse))
        out = None if self.out is None else self.out[block.at]
        if state.tiles:
            self._normalize(state, total, log2_total, out)
        elif out is not None:
            out.zero_()
        super().end(rows, space)

    def _normalize(self, state: _RowBlock, total: Tensor, log2_total: Tensor, out: Tensor | None) -> None:
        """Divide the kept weights by their sum, with the sink, and add them to the statistics and the output."""
        rows, tiles, empty = state.rows, state.rows.block.group.tiles, state.total == 0
        shifts: dict[int, Tensor] = {}  # log2 of the factors, by running maximum
        factors: dict[int, Tensor] = {}
        for maximum in state.maxima:
            if id(maximum) not in shifts:
                below = maximum - state.maximum
                shifts[id(maximum)] = below - log2_total
                factors[id(maximum)] = (torch.exp2(below) / total).masked_fill_(empty, 0)
        counted = factors
        if rows.counted is not None:
            counted = {key: x.masked_fill(~rows.counted[..., 0], 0) for key, x in factors.items()}
        keys = [id(maximum) for maximum in state.maxima]
        totals = rows.sums.normalize([counted[key] for key in keys], [shifts[key] for key in keys])
        sums = None
        if out is not None:
            sums = tiles.q.new_zeros(len(tiles.v), math.prod(out.shape[:3]) // len(tiles.v), out.shape[3])
        for tile, weights, key, of_rows in zip(state.tiles, state.weights, keys, totals, strict=True):
            if not self.final:
                self.add(rows, tile, weights, of_rows, factors[key])
                continue
            weights.mul_(factors[key][..., None])
            if sums is not None:
                masked, values = tile.masked(), tiles.v[:, tile.columns]
                values = values if masked is None else tile.group.visible(values, masked)
                sums.baddbmm_(weights.view(*sums.shape[:2], -1), values)
            if rows.counted is not None:
                weights.masked_fill_(~rows.counted, 0)
            self.add(rows, tile, weights, of_rows)
        if out is not None and sums is not None:
            out.copy_(sums.view(out.shape).masked_fill_(empty[..., None], 0))


def log2_scores(tile: Tile, maximum: Tensor | None) -> Tensor:
    """Final scores in base 2, less the running maximum (b, h, rows)."""
    tiles, out = tile.group.tiles, tile.buffer("scores")
    if not tiles.linear:
        scores = tiles.scores(tile.rows, tile.columns, out).mul_(LOG2_E)
        return scores if maximum is None else scores.sub_(maximum[..., None])
    q, keys = tiles.q[:, :, tile.rows].flatten(1, 2), tiles.k[:, tile.columns].transpose(1, 2)
    folded = out.view(len(tiles.k), -1, out.shape[3])
    if maximum is None:
        torch.baddbmm(folded, q, keys, beta=0, alpha=LOG2_E, out=folded)
    else:
        torch.baddbmm(maximum.reshape(*folded.shape[:2], 1), q, keys, beta=-1, alpha=LOG2_E, out=folded)
    return out
