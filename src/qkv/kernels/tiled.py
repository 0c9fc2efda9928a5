"""The tiled kernel: attention of any composition, tile by tile in plain tensor operations; linear memory, any device.

Softmax is computed online over tiles of scores (Rabe & Staats 2021, arXiv:2112.05682), pointwise weights are summed
over tiles, and other normalizers whose weights sum to one are solved on panels of a few whole rows. The backward
computes the scores again, see `qkv.engine.backward`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qkv.biases import ByQuery, clipped
from qkv.engine.backward import RowSlopes, WeightGradients, add_sink_gradients, finite, zeros
from qkv.engine.call import Call, Result, RowState, at_least_float32, detached
from qkv.engine.level import level_of_rows, level_slopes, pointwise, sink_slope, solve_rows
from qkv.engine.sizes import sizes
from qkv.engine.tiles import Block, Reducer, State, Tile, groups, gumbel, reduce_tiles, uniform
from qkv.engine.transforms import NEEDS, Need, Results, differentiable_call, unmet
from qkv.normalizers import LOG2_E, Normalizer, Pointwise
from qkv.partial import Partial, sink_gradient

OFFERS: tuple[Need, ...] = tuple(need for need in NEEDS if need not in ("transforms", "tensors in closures"))


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    return unmet(call, OFFERS)


def forward(call: Call) -> Result:
    """Compute attention in linear memory, differentiable in every tensor of the call and through the lse."""
    compute = functools.partial(_compute, training=call.needs_grad)
    return Result(*differentiable_call(call, compute, _backward, "tiled"))


def row_state(call: Call) -> RowState:
    """Return the row state of a call, from a tiled forward: enough to compute any tile of its weights."""
    return forward_tiles(detached(call))


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Return gradients of a softmax call over some of the keys, given `whole`, the result over all; at least float32.

    `whole` may include other keys and a sink; `grad` and `grad_lse` are its gradients. `wanted` names tensors of the
    call.
    """
    row_state = (whole.lse, None, None, None)
    return _backward(detached(call, learned=True), (whole.out, whole.lse), row_state, (grad, grad_lse), wanted)


# --- forward ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class ForwardState(RowState):
    """The row state of a forward pass with its output, (b, h, nq, …) in float32 or better, for the backward."""

    out: Tensor
    mean: Tensor | None = None
    """Mean of the values, weighted by −∂ weight / ∂ level; None where it equals `out`."""


def _compute(call: Call, *, training: bool) -> tuple[Results, Results]:
    """Return out and lse, and what the backward needs besides."""
    state = forward_tiles(call, training=training)
    lse = state.level if call.normalizer.has_lse else None
    return (state.out.to(call.v.dtype), lse), (state.level, state.total, state.chosen, state.mean)


def forward_tiles(call: Call, *, training: bool = False) -> ForwardState:
    """Return the output and row state of a call; `training` also computes `mean`, for the backward."""
    b, h, n_queries, _ = call.q.shape
    zeros = call.q.new_zeros(b, h, n_queries, dtype=at_least_float32(call.q.dtype))
    normalizer = call.normalizer
    reducer: type[_Softmax] | type[_Pointwise] | type[_Panels] = _Softmax
    state = ForwardState(out=zeros[..., None].expand(-1, -1, -1, call.v.shape[3]).clone())
    if isinstance(normalizer, Pointwise):
        reducer, state.total = _Pointwise, torch.zeros_like(zeros) if normalizer.divide == "sum" else None
    elif normalizer.has_lse:
        state.level = torch.zeros_like(zeros)
    else:
        reducer, state.level = _Panels, torch.zeros_like(zeros)
        state.mean = torch.zeros_like(state.out) if training else None
        state.chosen = torch.full_like(zeros, -1, dtype=torch.long) if normalizer.one_key else None
    distance_mass = None
    if call.values is not None:
        distance_mass = ByQuery(zeros.new_zeros(b, h, n_queries, call.values.shape[1]), call.grid.offset)
    reduce_tiles(groups(call), reducer(state, distance_mass))
    _finish(call, state, distance_mass)
    return state


def _finish(call: Call, state: ForwardState, distance_mass: ByQuery | None) -> None:
    """Turn what the tiles have added up into output and row state."""
    if distance_mass is not None:
        assert call.values is not None
        state.out += distance_mass.tensor @ call.values.to(distance_mass.tensor)
    if state.total is not None:
        state.total.masked_fill_(state.total.abs() < torch.finfo(state.total.dtype).tiny, 1)
        state.out /= state.total[..., None]
    if call.divisor is not None:
        state.out /= call.divisor[..., None]
    if call.normalizer.has_lse:
        assert state.level is not None
        if call.sink is not None:
            part = Partial(state.out, state.level).with_sink(call.sink)
            state.out, state.level = part.out, part.lse


def dropped(tile: Tile) -> Tensor:
    """Return the dropout factor of each weight of a tile: 0, or 1 / (1 − p)."""
    call = tile.group.tiles.call
    stays = uniform(call.seed, tile.region, call.grid) >= call.dropout_p
    return stays.to(tile.group.tiles.dtype).div_(1 - call.dropout_p)


@dataclass(eq=False)
class _Forward(Reducer[State]):
    """Base of the forward reducers."""

    state: ForwardState
    distance_mass: ByQuery | None
    """Accumulates weights by clipped distance, for `RelativePosition` with values."""


class _Attention(_Forward["_Sums"]):
    """Accumulates weights @ values over tiles."""

    def begin(self, block: Block) -> _Sums:
        tiles = block.group.tiles
        zeros = tiles.q.new_zeros(*block.shape, tiles.v.shape[2])
        return _Sums(block, zeros, tiles.q.new_full(block.shape, -torch.inf), tiles.q.new_zeros(block.shape))

    def _add(self, sums: _Sums, tile: Tile, weights: Tensor, values: Tensor) -> None:
        if tile.group.tiles.call.dropout_p:
            weights = weights * dropped(tile)
        folded = weights.reshape(len(values), -1, weights.shape[3])
        sums.out.view(len(values), -1, sums.out.shape[3]).baddbmm_(folded, values)
        if self.distance_mass is not None:
            self.distance_mass.add_gradient(self.distance_mass.tensor, tile.region, weights)


@dataclass(eq=False)
class _Sums:
    """Accumulators of one block of queries; `top` and `total` are the running maximum and sum of a softmax."""

    block: Block
    out: Tensor
    top: Tensor
    total: Tensor


class _Softmax(_Attention):
    def tile(self, sums: _Sums, tile: Tile) -> None:
        scores, masked = tile.scores()
        values = tile.group.tiles.v[:, tile.columns]
        if masked is not None:
            scores.masked_fill_(masked, -torch.inf)
            values = tile.group.visible(values, masked)
        new = torch.maximum(sums.top, scores.amax(-1))
        safe = new.clamp(min=torch.finfo(new.dtype).min)  # −inf − −inf would be NaN
        weights = scores.sub_(safe[..., None]).mul_(LOG2_E).exp2_()  # base 2: MKL's exp is slow on some processors
        shrink = torch.exp(sums.top - safe)
        sums.total = sums.total * shrink + weights.sum(-1)
        sums.out *= shrink[..., None]
        if self.distance_mass is not None:
            self.distance_mass.tensor[tile.block.at] *= shrink[..., None]
        self._add(sums, tile, weights, values)
        sums.top = new

    def end(self, sums: _Sums) -> None:
        assert self.state.level is not None
        at, visible = sums.block.at, sums.total != 0  # True for NaN: it must propagate
        total = torch.where(visible, sums.total, 1.0)
        self.state.out[at] = sums.out / total[..., None]
        self.state.level[at] = torch.where(visible, sums.top + torch.log(total), -torch.inf)
        if self.distance_mass is not None:
            self.distance_mass.tensor[at] /= total[..., None]


class _Pointwise(_Attention):
    def tile(self, sums: _Sums, tile: Tile) -> None:
        normalizer = tile.group.tiles.call.normalizer
        assert isinstance(normalizer, Pointwise)
        scores, masked = tile.scores()
        if masked is not None and not (normalizer.zero_at_minus_infinity or normalizer.is_identity):
            scores.masked_fill_(masked, 0)  # masked scores may be NaN or outside the function's domain
        weights, values = pointwise(normalizer, scores), tile.group.tiles.v[:, tile.columns]
        if masked is not None:
            weights.masked_fill_(masked, 0)
            values = tile.group.visible(values, masked)
        if self.state.total is not None:
            self.state.total[tile.block.at] += weights.sum(-1)
        self._add(sums, tile, weights, values)

    def end(self, sums: _Sums) -> None:
        self.state.out[sums.block.at] = sums.out


@dataclass(eq=False)
class _Panel:
    """The scores of a few whole rows, without empty tiles."""

    block: Block
    columns: list[slice] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    visible: list[Tensor] = field(default_factory=list)
    """Which keys are visible to any row of the panel."""
    dropped: list[Tensor] = field(default_factory=list)
    noise: list[Tensor] = field(default_factory=list)


class _Panels(_Forward[_Panel]):
    """Normalizers whose level is solved on whole rows: computes them on panels of a few rows."""

    def blocks(self, block: Block) -> Iterator[Block]:
        tiles = block.group.tiles
        width = sum(block.group.columns[c].stop - block.group.columns[c].start for c, _ in block.status)
        height = max(1, sizes(tiles.q.device).panel // (math.prod(tiles.shape) * max(width, 1)))
        for start in range(block.rows.start, block.rows.stop, height):
            yield Block(block.group, block.index, slice(start, min(start + height, block.rows.stop)))

    def begin(self, block: Block) -> _Panel:
        return _Panel(block)

    def tile(self, panel: _Panel, tile: Tile) -> None:
        call = tile.group.tiles.call
        scores, masked = tile.scores()
        panel.columns.append(tile.columns)
        panel.scores.append(scores.clone() if masked is None else scores.masked_fill(masked, -torch.inf))
        everything = torch.ones(tile.shape[3], dtype=torch.bool, device=scores.device)
        panel.visible.append(everything if masked is None else ~masked.all(2).all(1).all(0))
        if call.dropout_p:
            panel.dropped.append(dropped(tile))
        if call.normalizer.one_key and call.normalizer.sample:
            panel.noise.append(gumbel(call.seed, tile.region, call.grid))

    def end(self, panel: _Panel) -> None:
        block, state = panel.block, self.state
        tiles, call, at = block.group.tiles, block.group.tiles.call, block.at
        normalizer, sink = call.normalizer, tiles.of(call.sink)
        assert state.level is not None
        if sink is not None:
            sink = sink.expand(*tiles.shape, call.q.shape[2])[..., block.rows]
        if not panel.columns:
            if sink is not None:
                state.level[at] = level_of_rows(normalizer, sink[..., None])
            return
        scores, visible = torch.cat(panel.scores, -1), torch.cat(panel.visible)
        keys = torch.cat([torch.arange(cols.start, cols.stop, device=call.q.device) for cols in panel.columns])
        first, last = panel.columns[0].start, panel.columns[-1].stop
        values = tiles.v[:, first:last] if last - first == len(keys) else tiles.v[:, keys]
        if not (block.group.finite or visible.all()):
            values = torch.where(visible[:, None], values, 0.0)
        level, weights = solve_rows(normalizer, scores, sink)
        state.level[at] = level
        dropout = torch.cat(panel.dropped, -1) if panel.dropped else None
        level_weights = None
        if state.mean is not None:
            level_weights = _normalized_level_slopes(normalizer, scores, level, weights, sink)
            level_weights = level_weights if dropout is None else level_weights * dropout
            state.mean[at] = tiles.weigh(level_weights, values)
        if normalizer.one_key:
            best = (scores + torch.cat(panel.noise, -1) if panel.noise else scores).argmax(-1, keepdim=True)
            empty = (scores == -torch.inf).all(-1, keepdim=True)
            assert state.chosen is not None
            state.chosen[at] = keys[best[..., 0]].masked_fill(empty[..., 0], -1)
            weights = torch.zeros_like(scores).scatter_(-1, best, 1.0).masked_fill_(empty, 0)
        elif dropout is not None:
            weights = weights * dropout
        state.out[at] = tiles.weigh(weights, values)
        if self.distance_mass is not None:
            self._add_distance_mass(block, keys, weights, level_weights)

    def _add_distance_mass(self, block: Block, keys: Tensor, weights: Tensor, level_weights: Tensor | None) -> None:
        """Add weights by clipped distance, and the share of `mean` that comes from the values by distance."""
        call, distance_mass = block.group.tiles.call, self.distance_mass
        assert distance_mass is not None
        assert call.values is not None
        mass, positions = distance_mass.tensor[block.at], call.grid.rows(block.rows.start, block.rows.stop)
        index = clipped(positions[:, None], keys, distance_mass.reach).expand(*mass.shape[:3], -1)
        mass.scatter_add_(3, index, weights)
        if level_weights is not None and self.state.mean is not None:
            level_mass = torch.zeros_like(mass).scatter_add_(3, index, level_weights)
            table = call.values[block.group.tiles.heads if len(call.values) > 1 else slice(None)]
            self.state.mean[block.at] += level_mass @ table.to(level_mass)


def _normalized_level_slopes(
    normalizer: Normalizer, scores: Tensor, level: Tensor, weights: Tensor, sink: Tensor | None
) -> Tensor:
    """Return −∂ weight / ∂ level of each key, divided by the sum over the row, sink included."""
    level_weights = weights if normalizer.has_lse else level_slopes(normalizer, scores, level, weights)
    total = level_weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink_slope(normalizer, sink, level)[..., None]
    return level_weights / torch.where(total == 0, 1.0, total)


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward(call: Call, results: Results, more: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
    """Return gradients of the tensors named in `wanted`, at least float32, given those of the output and the lse."""
    (out, _), (level, total, chosen, mean), (grad, grad_lse) = results, more, grads
    out = out.to(at_least_float32(call.q.dtype))
    grad, totals = torch.zeros_like(out) if grad is None else grad.to(out.dtype), zeros(call, wanted)
    if "sink" in totals and call.normalizer.has_lse:
        assert call.sink is not None
        assert level is not None
        totals["sink"] = sink_gradient(call.sink, Partial(out, level), grad, grad_lse)
    scaled = grad
    for divisor in (total, call.divisor):
        scaled = scaled if divisor is None else scaled / divisor[..., None]
    inner = None
    if not isinstance(call.normalizer, Pointwise) or call.normalizer.divide == "sum":
        inner = (scaled * (out if mean is None else mean)).sum(-1)
        inner = inner if grad_lse is None else inner - grad_lse
    level = finite(level)
    if call.sink is not None and not call.normalizer.has_lse:
        assert level is not None
        assert inner is not None
        add_sink_gradients(call, level, -inner, totals)
    distance_slopes = distance_mass = None
    if call.values is not None:
        distance_slopes = ByQuery(scaled @ call.values.to(out).transpose(-1, -2), call.grid.offset)
        distance_mass = ByQuery(torch.zeros_like(distance_slopes.tensor), call.grid.offset)
    reduce_tiles(groups(call), Gradients(level, totals, scaled, inner, distance_slopes, distance_mass))
    if chosen is not None and "v" in totals:  # of hard attention
        b, key_heads, _, dv = totals["v"].shape
        index = chosen.clamp(min=0).view(b, key_heads, -1)
        slope = torch.where(chosen[..., None] >= 0, grad, 0.0).reshape(b, key_heads, -1, dv)
        totals["v"].scatter_add_(2, index[..., None].expand_as(slope), slope)
    if "values" in totals:
        assert distance_mass is not None
        by_distance = distance_mass.tensor
        if chosen is not None:
            index = clipped(call.grid.rows(0, call.grid.n_queries), chosen, distance_mass.reach)[..., None]
            taken = (chosen[..., None] >= 0).to(by_distance)
            by_distance = torch.zeros_like(by_distance).scatter_(3, index, taken)
        totals["values"] = torch.einsum("bhqr,bhqd->hrd", by_distance, scaled).sum_to_size(totals["values"].shape)
    return totals


@dataclass(eq=False)
class Gradients(WeightGradients):
    """Backward of attention: the gradient of a weight is dO·v, and the values get weightsᵀ·dO."""

    grad: Tensor
    """Gradient of the output, divided by the divisor of the weights, if there is one."""
    inner: Tensor | None
    """Gradient through the level, subtracted from every weight of the row: rowsum(dO ∘ O) − d lse for softmax."""
    distance_slopes: ByQuery | None = None
    """dO times the value vector of each clipped distance, for `RelativePosition` with values."""
    distance_mass: ByQuery | None = None
    """Accumulator of the weights by clipped distance, likewise."""

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
