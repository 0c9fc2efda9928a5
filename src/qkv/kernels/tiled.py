"""Attention of any composition, tile by tile in plain tensor operations: linear memory, any device.

Softmax is the online one over tiles of scores (Rabe & Staats 2021, arXiv:2112.05682); pointwise weights just add up;
other weights that sum to one are found on panels of a few whole rows. The backward makes each tile again rather than
keeping it: at a fixed level (log-sum-exp, threshold) a weight depends on its own score only, and what the level does to
a row is one number a query (by the implicit function theorem), so one pass over the tiles serves all normalizers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkv._engine import noise
from qkv._engine.call import Call, Result, detached
from qkv._engine.row_state import Rows
from qkv._engine.threads import each
from qkv._engine.tiles import HIDDEN, LOG2_E, PAIRS, ScoreTiles, harmless, heads_together, spans, without_unseen
from qkv._engine.transforms import REASON, once, transformed
from qkv.biases import Additive
from qkv.biases.tensors import ByQuery, clipped
from qkv.masks import EMPTY, PARTIAL, Region, Tiles
from qkv.normalizers import Pointwise, SumToOne
from qkv.normalizers.base import weights_of
from qkv.normalizers.level import level_of_rows
from qkv.normalizers.tile import TileWeights, level_slopes, pointwise, solved
from qkv.partial import Partial, sink_gradient

TILE = 256
HEADS = 8  # heads worked on together: a tile of all of them should stay in cache
PANEL = 2**20  # scores of whole rows held at once


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    if transformed(call):
        return REASON
    return call.untracked


def run(call: Call) -> Result:
    """Attention in memory linear in the sequence, differentiable in every tensor of the call and through the lse."""
    if not call.needs_grad:
        found = _forward(detached(call))
        return Result(found.out.to(call.v.dtype), found.lse)
    tensors = call.tensors()
    out, lse = _Tiled.apply(call, list(tensors), *tensors.values())
    return Result(out, lse if call.normalizer.has_lse else None)


def settle(call: Call) -> Rows:
    """What every query knows of its scores after a forward: enough to make any of its weights alone."""
    found = _forward(detached(call))
    return Rows(found.level, found.total, found.chosen)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, names: list[str], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        found = _forward(detached(call), training=True)
        out = found.out.to(call.v.dtype)
        ctx.save_for_backward(*tensors, out, found.level, found.mean, found.total, found.chosen)
        ctx.call, ctx.names = call, names
        ctx.set_materialize_grads(False)
        lse = found.lse
        if lse is None:
            lse = out.new_empty(0)
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, level_, mean, total, chosen = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * (2 + len(tensors))
        with torch.no_grad():
            slope = torch.zeros_like(out) if grad is None else grad
            # Tensors that users' objects hold are theirs still: `saved_tensors` has seen that nobody changed them.
            call = detached(ctx.call.with_tensors(dict(zip(ctx.names, tensors, strict=True))), own=True)
            found = _Found(out, level_, mean, total, chosen)
            wanted = {name for name, need in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if need}
            grads = _backward(call, found, slope, grad_lse, wanted)
            given = tuple(
                grads[name].to(x.dtype) if name in wanted else None for name, x in zip(ctx.names, tensors, strict=True)
            )
        return None, None, *once("tiled", given, [x for x in (*tensors, grad, grad_lse) if x is not None])


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of a softmax call that is part of a larger one, whose out and lse are `whole`; at least float32.

    `whole` may have seen other keys, and a sink; `grad` and `grad_lse` are of it. `wanted` names tensors of the call.
    """
    return _backward(detached(call, own=True), _Found(whole.out, whole.lse), grad, grad_lse, wanted)


@dataclass(eq=False)
class _Found:
    """What a forward leaves, (b, h, nq, …) in float32 or better."""

    out: Tensor
    level: Tensor | None = None
    """Log-sum-exp or threshold of each row."""
    mean: Tensor | None = None
    """Mean of the values by the slopes of the weights in the level, where that is not `out`."""
    total: Tensor | None = None
    """Sum of the weights, where that is what they are divided by."""
    chosen: Tensor | None = None
    """The key of each row, in hard attention; −1 for none."""
    lse: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Group:
    """One batch item and the heads of it that are worked on together."""

    tiles: ScoreTiles
    rows: list[slice]
    columns: list[slice]
    kinds: list[list[int]]
    clean: bool
    """Whether its keys and values are harmless where they are hidden."""

    def at(self, rows: slice) -> tuple[slice, slice, slice]:
        return self.tiles.batch, self.tiles.heads, rows


def _groups(call: Call) -> list[_Group]:
    b, h, n_queries, d = call.q.shape
    key_heads, n_keys = call.k.shape[1:3]
    together = heads_together(call, HEADS)
    size, most = _tile_size(call), min(together * (h // key_heads), h)
    if call.by_head and most > HEADS:  # a tile of all heads should stay in cache, too
        size = max(8, size // 2 ** math.ceil(math.log2(most / HEADS) / 2))
    if call.pairwise is not None:
        size = min(size, max(8, math.isqrt(PAIRS // (d * most))))
    groups = []
    for item in range(b):
        for heads in spans(key_heads, together):
            tiles = ScoreTiles(call, slice(item, item + 1), heads)
            rows, columns = list(spans(n_queries, size)), list(spans(n_keys, size))
            clean = harmless(tiles.k, tiles.v)
            groups.append(_Group(tiles, rows, columns, tiles.classes(call.mask, size), clean))
    return groups


def _tile_size(call: Call) -> int:
    """`TILE`, or a quarter of it where that leaves out much of what the mask hides."""
    if call.mask is None or call.q.shape[2] < 4 * TILE:
        return TILE

    def shown(size: int) -> float:
        tiles = Tiles.of(call.grid, size, size)
        assert call.mask is not None
        return float((call.mask.classify(tiles, call.grid) != EMPTY).double().mean())

    small = max(1, TILE // 4)
    return small if shown(small) < 0.6 * shown(TILE) else TILE


# --- forward ----------------------------------------------------------------------------------------------------------


def _forward(call: Call, *, training: bool = False) -> _Found:
    """What the rows find; for a backward of weights that sum to one, also `mean`."""
    b, h, n_queries, _ = call.q.shape
    zeros = call.q.new_zeros(b, h, n_queries, dtype=torch.promote_types(call.q.dtype, torch.float32))
    normalizer = call.normalizer
    found = _Found(zeros[..., None].expand(-1, -1, -1, call.v.shape[3]).clone())
    if isinstance(normalizer, Pointwise):
        rows_of, found.total = _pointwise_rows, torch.zeros_like(zeros) if normalizer.divide == "sum" else None
    elif normalizer.has_lse:
        rows_of, found.level = _softmax_rows, torch.zeros_like(zeros)
    else:
        assert isinstance(normalizer, SumToOne)
        rows_of, found.level = _panel_rows, torch.zeros_like(zeros)
        found.mean = torch.zeros_like(found.out) if training else None
        found.chosen = torch.full_like(zeros, -1, dtype=torch.long) if normalizer.one_key else None
    near = None
    if call.values is not None:
        near = ByQuery(zeros.new_zeros(b, h, n_queries, call.values.shape[1]), call.grid.offset)
    groups, desk = _groups(call), _Desk()
    jobs = [(group, row) for group in groups for row in reversed(range(len(group.rows)))]  # long rows first
    each(lambda job: rows_of(job[0], job[1], found, near, desk), jobs, call.q.device)
    if near is not None:
        assert call.values is not None
        found.out += near.tensor @ call.values.to(near.tensor)
    if found.total is not None:
        found.total.masked_fill_(found.total.abs() < torch.finfo(found.total.dtype).tiny, 1)
        found.out /= found.total[..., None]
    if call.divisor is not None:
        found.out /= call.divisor[..., None]
    if normalizer.has_lse:
        assert found.level is not None
        if call.sink is not None:
            part = Partial(found.out, found.level).with_sink(call.sink)
            found.out, found.level = part.out, part.lse
        found.lse = found.level
    return found


class _Desk(threading.local):
    """Buffers of one thread: fresh memory for each tile would cost as much as its arithmetic."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = math.prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = like.new_empty(size)
        return self.kept[name][:size].view(shape)


def _tile(group: _Group, rows: slice, cols: slice, kind: int, desk: _Desk) -> tuple[Tensor, Tensor | None]:
    """Final scores of a tile, shifted, and which of them are hidden."""
    tiles = group.tiles
    shape = (*tiles.shape, rows.stop - rows.start, cols.stop - cols.start)
    scores = tiles.scores(rows, cols, desk.buffer("scores", shape, tiles.q))
    shift = tiles.of(tiles.call.shift)
    if shift is not None:
        scores = scores.add_((shift[..., rows] if shift.shape[2] > 1 else shift)[..., None])
    hidden = tiles.hidden(rows, cols) if kind == PARTIAL else None
    if tiles.call.biases and not tiles.call.normalizer.zero_at_minus_infinity:
        gone = scores == -torch.inf
        hidden = gone if hidden is None else hidden | gone
    return scores, hidden


def _kept(group: _Group, rows: slice, cols: slice) -> Tensor:
    """What weights of a tile are multiplied by in dropout: 0, or 1 / (1 − p)."""
    call = group.tiles.call
    kept = noise.uniform(call.seed, group.tiles.region(rows, cols), call.grid) >= call.dropout_p
    return kept.to(group.tiles.dtype).div_(1 - call.dropout_p)


def _softmax_rows(group: _Group, r: int, found: _Found, near: ByQuery | None, desk: _Desk) -> None:
    tiles, rows = group.tiles, group.rows[r]
    shape = (*tiles.shape, rows.stop - rows.start)
    top, total = tiles.q.new_full(shape, -torch.inf), tiles.q.new_zeros(shape)
    acc = tiles.q.new_zeros(*shape, tiles.v.shape[2])
    for cols, kind in zip(group.columns, group.kinds[r], strict=True):
        if kind == EMPTY:
            continue
        scores, hidden = _tile(group, rows, cols, kind, desk)
        values = tiles.v[:, cols]
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
            values = _visible(group, values, hidden)
        new = torch.maximum(top, scores.amax(-1))
        safe = new.clamp(min=torch.finfo(new.dtype).min)  # −inf − −inf would be NaN
        weights = scores.sub_(safe[..., None]).mul_(LOG2_E).exp2_()  # base 2: MKL's exp is slow on some processors
        shrink = torch.exp(top - safe)
        total = total * shrink + weights.sum(-1)
        acc *= shrink[..., None]
        if near is not None:
            near.tensor[group.at(rows)] *= shrink[..., None]
        _add(group, rows, cols, weights, values, acc, near)
        top = new
    seen = total != 0  # NaN is not nothing
    total = torch.where(seen, total, 1.0)
    found.out[group.at(rows)] = acc / total[..., None]
    assert found.level is not None
    found.level[group.at(rows)] = torch.where(seen, top + torch.log(total), -torch.inf)
    if near is not None:
        near.tensor[group.at(rows)] /= total[..., None]


def _add(
    group: _Group, rows: slice, cols: slice, weights: Tensor, values: Tensor, acc: Tensor, near: ByQuery | None
) -> None:
    """Add weights · values of a tile to `acc`, and what they are worth by distance to `near`."""
    if group.tiles.call.dropout_p:
        weights = weights * _kept(group, rows, cols)
    folded = weights.reshape(len(values), -1, weights.shape[3])
    acc.view(len(values), -1, acc.shape[3]).baddbmm_(folded, values)
    if near is not None:
        near.add_gradient(near.tensor, group.tiles.region(rows, cols), weights)


def _pointwise_rows(group: _Group, r: int, found: _Found, near: ByQuery | None, desk: _Desk) -> None:
    tiles, rows = group.tiles, group.rows[r]
    normalizer = tiles.call.normalizer
    assert isinstance(normalizer, Pointwise)
    ordinary = normalizer.zero_at_minus_infinity or normalizer.is_identity
    acc = tiles.q.new_zeros(*tiles.shape, rows.stop - rows.start, tiles.v.shape[2])
    for cols, kind in zip(group.columns, group.kinds[r], strict=True):
        if kind == EMPTY:
            continue
        scores, hidden = _tile(group, rows, cols, kind, desk)
        if hidden is not None and not ordinary:
            scores.masked_fill_(hidden, 0)  # what is masked may be NaN, or outside what the function is for
        weights, values = pointwise(normalizer, scores), tiles.v[:, cols]
        if hidden is not None:
            weights.masked_fill_(hidden, 0)
            values = _visible(group, values, hidden)
        if found.total is not None:
            found.total[group.at(rows)] += weights.sum(-1)
        _add(group, rows, cols, weights, values, acc, near)
    found.out[group.at(rows)] = acc


def _panel_rows(group: _Group, r: int, found: _Found, near: ByQuery | None, desk: _Desk) -> None:
    tiles, call = group.tiles, group.tiles.call
    shown = [(cols, kind) for cols, kind in zip(group.columns, group.kinds[r], strict=True) if kind != EMPTY]
    normalizer, sink = call.normalizer, tiles.of(call.sink)
    assert isinstance(normalizer, SumToOne)
    assert found.level is not None
    if sink is not None:
        sink = sink.expand(*tiles.shape, call.q.shape[2])
    if not shown:
        if sink is not None:
            found.level[group.at(group.rows[r])] = level_of_rows(normalizer, sink[..., group.rows[r], None])
        return
    width = sum(cols.stop - cols.start for cols, _ in shown)
    height = max(1, PANEL // (math.prod(tiles.shape) * width))
    keys = torch.cat([torch.arange(cols.start, cols.stop, device=call.q.device) for cols, _ in shown])
    first, last = shown[0][0].start, shown[-1][0].stop
    whole = slice(first, last) if last - first == width else None
    for start in range(group.rows[r].start, group.rows[r].stop, height):
        rows = slice(start, min(start + height, group.rows[r].stop))
        panel, kept, seen = [], [], tiles.k.new_zeros(width, dtype=torch.bool)
        noises, at = [], 0
        for cols, kind in shown:
            scores, hidden = _tile(group, rows, cols, kind, desk)
            size = cols.stop - cols.start
            panel.append(scores.clone() if hidden is None else scores.masked_fill(hidden, -torch.inf))
            seen[at : at + size] = True if hidden is None else ~hidden.all(2).all(1).all(0)
            at += size
            if call.dropout_p:
                kept.append(_kept(group, rows, cols))
            if normalizer.one_key and normalizer.sample:
                noises.append(noise.gumbel(call.seed, tiles.region(rows, cols), call.grid))
        scores = torch.cat(panel, -1)
        values = tiles.v[:, whole] if whole is not None else tiles.v[:, keys]
        if not (group.clean or seen.all()):
            values = torch.where(seen[:, None], values, 0.0)
        at_rows = group.at(rows)
        level, weights = solved(normalizer, scores, None if sink is None else sink[..., rows])
        found.level[at_rows] = level
        kept_all = torch.cat(kept, -1) if kept else None
        if found.mean is not None:
            falls = weights if normalizer.has_lse else level_slopes(normalizer, scores, level, weights)
            total = falls.sum(-1, keepdim=True)
            if sink is not None:
                column = sink[..., rows, None]
                weight = weights_of(normalizer, column, level)
                total = total + level_slopes(normalizer, column, level, weight)
            falls = falls / torch.where(total == 0, 1.0, total)
            soft = falls if kept_all is None else falls * kept_all
            found.mean[at_rows] = tiles.weigh(soft, values)
        if normalizer.one_key:
            best = (scores + torch.cat(noises, -1) if noises else scores).argmax(-1, keepdim=True)
            empty = (scores == -torch.inf).all(-1, keepdim=True)
            assert found.chosen is not None
            found.chosen[at_rows] = keys[best[..., 0]].masked_fill(empty[..., 0], -1)
            weights = torch.zeros_like(scores).scatter_(-1, best, 1.0).masked_fill_(empty, 0)
        elif kept_all is not None:
            weights = weights * kept_all
        found.out[at_rows] = tiles.weigh(weights, values)
        if near is not None:
            mean = ByQuery(torch.zeros_like(near.tensor[at_rows]), near.offset + rows.start)
            at = 0
            for cols, _ in shown:
                part = slice(at, at + cols.stop - cols.start)
                near.add_gradient(near.tensor, tiles.region(rows, cols), weights[..., part])
                if found.mean is not None:
                    mean.add_gradient(mean.tensor, _local(rows, cols), soft[..., part])
                at = part.stop
            if found.mean is None:
                continue
            assert call.values is not None
            table = tiles.of(call.values[None])
            assert table is not None
            found.mean[at_rows] += mean.tensor @ table[0].to(mean.tensor)


def _local(rows: slice, cols: slice) -> Region:
    """Columns of some rows that are counted from the first of them."""
    return Region(slice(0, rows.stop - rows.start), cols)


def _visible(group: _Group, x: Tensor, hidden: Tensor) -> Tensor:
    """Keys or values (key heads, k, d) of a tile, zero where no query of it may look, if that matters."""
    return x if group.clean else without_unseen(x[None], ~hidden)[0]


# --- backward ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Backward:
    """What all tiles of a backward read and add to."""

    level: Tensor | None
    grad: Tensor
    """Of the output, divided by what the weights are divided by."""
    inner: Tensor | None
    """What the level of a row does to the slope of each of its scores."""
    totals: dict[str, Tensor]
    near: ByQuery | None = None
    mass: ByQuery | None = None
    lock: Any = field(default_factory=threading.Lock)


def _backward(call: Call, found: _Found, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    wide = torch.promote_types(call.q.dtype, torch.float32)
    grad, out = grad.to(wide), found.out.to(wide)
    totals = {name: torch.zeros_like(x, dtype=wide) for name, x in call.tensors().items() if name in wanted}
    if "sink" in totals and call.normalizer.has_lse:
        assert call.sink is not None
        assert found.level is not None
        totals["sink"] = sink_gradient(call.sink, Partial(out, found.level), grad, grad_lse)
    if "shift" in totals:
        totals["shift"] = torch.zeros(call.q.shape[:3], dtype=wide, device=grad.device)
    scaled = grad
    for divisor in (found.total, call.divisor):
        scaled = scaled if divisor is None else scaled / divisor[..., None]
    inner = None
    if not isinstance(call.normalizer, Pointwise) or call.normalizer.divide == "sum":
        inner = (scaled * (out if found.mean is None else found.mean)).sum(-1)
        inner = inner if grad_lse is None else inner - grad_lse
    level_ = found.level
    if level_ is not None:
        level_ = level_.masked_fill(level_ == -torch.inf, -HIDDEN)  # such rows see nothing: e^(s − ∞) = 0
    if call.sink is not None and not call.normalizer.has_lse:
        assert level_ is not None
        assert inner is not None
        _add_sink_gradients(call, level_, inner, totals)
    state = _Backward(level_, scaled, inner, totals)
    if call.values is not None:
        table = call.values.to(wide)
        state.near = ByQuery(scaled @ table.transpose(-1, -2), call.grid.offset)
        state.mass = ByQuery(torch.zeros_like(state.near.tensor), call.grid.offset)
    groups, desk = _groups(call), _Desk()
    shares = -(-torch.get_num_threads() // len(groups)) if grad.device.type == "cpu" else 1
    # Each job adds up gradients of keys and values of its own; they are then added in a fixed order, so that the same
    # call gives the same bits.
    jobs = [_Job(group, rows) for group in groups for s in range(shares) if (rows := range(len(group.rows))[s::shares])]
    each(lambda job: job.run(state, desk), jobs, grad.device)
    for job in jobs:
        job.collect(totals)
    if found.chosen is not None and "v" in totals:
        _add_chosen(found.chosen, grad, totals["v"])
    if "values" in totals:
        assert state.mass is not None
        mass = state.mass.tensor
        if found.chosen is not None:
            mass = _chosen_distances(call, found.chosen, mass)
        totals["values"] = torch.einsum("bhqr,bhqd->hrd", mass, scaled).sum_to_size(totals["values"].shape)
    if "shift" in totals:
        assert call.shift is not None
        totals["shift"] = totals["shift"].sum_to_size(call.shift.shape)
    return totals


def _add_chosen(chosen: Tensor, grad: Tensor, total: Tensor) -> None:
    """Gradient of the values that hard attention chose."""
    b, dv = len(grad), grad.shape[3]
    index = chosen.clamp(min=0).view(b, total.shape[1], -1)
    given = torch.where(chosen[..., None] >= 0, grad, 0.0).reshape(b, total.shape[1], -1, dv)
    total.scatter_add_(2, index[..., None].expand_as(given), given)


def _chosen_distances(call: Call, chosen: Tensor, like: Tensor) -> Tensor:
    index = clipped(call.grid.rows(0, chosen.shape[2]), chosen, like.shape[3] // 2)
    return torch.zeros_like(like).scatter_(3, index[..., None], (chosen[..., None] >= 0).to(like))


def _add_sink_gradients(call: Call, level: Tensor, inner: Tensor, totals: dict[str, Tensor]) -> None:
    """The sink takes weight(sink, level), which no value meets: its slope is that of a key of value 0."""
    assert call.sink is not None
    column = call.sink.expand_as(level)[..., None].clone()  # a shortcut may work in place
    names = [name for name in call.own if name in totals and name.startswith("normalizer ")]
    weigh = TileWeights(call.normalizer, [call.own[name] for name in names])
    hidden = column == -torch.inf
    weigh.weights(column, level, hidden if hidden.any() else None)
    slope, found = weigh.slopes(-inner[..., None])
    if "sink" in totals:
        totals["sink"] += slope[..., 0].masked_fill(hidden[..., 0], 0).sum_to_size(call.sink.shape)
    for name, x in zip(names, found, strict=True):
        if x is not None:
            totals[name] += x


@dataclass(eq=False)
class _Job:
    """Some rows of a group, and the gradients of its keys, its values and learned tensors that they give."""

    group: _Group
    rows: range
    dk: Tensor | None = None
    dv: Tensor | None = None
    learned: dict[str, Tensor] = field(default_factory=dict)

    def run(self, state: _Backward, desk: _Desk) -> None:
        tiles = self.group.tiles
        self.dk, self.dv = torch.zeros_like(tiles.k), torch.zeros_like(tiles.v)
        for r in self.rows:
            self._run_rows(r, state, desk)

    def collect(self, totals: dict[str, Tensor]) -> None:
        tiles = self.group.tiles
        for name, x in (("k", self.dk), ("v", self.dv)):
            if name in totals:
                assert x is not None
                inside = totals[name][tiles.batch, tiles.key_heads]
                inside += x.view(inside.shape)
        for name, x in self.learned.items():
            totals[name] += x

    def _add_learned(self, names: list[str], found: Sequence[Tensor | None], state: _Backward) -> None:
        for name, x in zip(names, found, strict=True):
            if x is not None:
                if name not in self.learned:
                    self.learned[name] = torch.zeros_like(state.totals[name])
                self.learned[name] += x

    def _own(self, of: str, state: _Backward) -> list[str]:
        """Names of learned tensors of the score or the normalizer that want gradients."""
        return [name for name in self.group.tiles.call.own if name.startswith(of) and name in state.totals]

    def _run_rows(self, r: int, state: _Backward, desk: _Desk) -> None:
        group, tiles = self.group, self.group.tiles
        call, normalizer = tiles.call, tiles.call.normalizer
        rows, at = group.rows[r], group.at(group.rows[r])
        grad = state.grad[at].reshape(len(tiles.v), -1, tiles.v.shape[2])
        inner = None if state.inner is None else state.inner[at].reshape(len(tiles.v), -1, 1)
        level = None if state.level is None else state.level[at]
        dq = torch.zeros_like(tiles.q[:, :, rows]).flatten(1, 2)
        assert self.dk is not None
        assert self.dv is not None
        one_key = isinstance(normalizer, SumToOne) and normalizer.one_key
        names = self._own("normalizer", state)
        weigh = TileWeights(normalizer, [call.own[name] for name in names])
        for cols, kind in zip(group.columns, group.kinds[r], strict=True):
            if kind == EMPTY:
                continue
            shape = (*tiles.shape, rows.stop - rows.start, cols.stop - cols.start)
            scores, hidden = _tile(group, rows, cols, kind, desk)
            weights = weigh.weights(scores, level, hidden)
            values, keys = tiles.v[:, cols], tiles.k[:, cols]
            if hidden is not None:
                values, keys = _visible(group, values, hidden), _visible(group, keys, hidden)
            kept = _kept(group, rows, cols) if call.dropout_p else None
            if not one_key:
                met = weights if kept is None else weights * kept
                folded = met.reshape(len(values), -1, met.shape[3])
                self.dv[:, cols].baddbmm_(folded.transpose(1, 2), grad)
                if state.mass is not None:
                    with state.lock:
                        state.mass.add_gradient(state.mass.tensor, tiles.region(rows, cols), met)
            slope = desk.buffer("slope", shape, tiles.q)
            torch.bmm(grad, values.transpose(1, 2), out=slope.view(len(values), -1, shape[3]))
            if state.near is not None:
                slope += state.near.tile(tiles.region(rows, cols))
            if kept is not None:
                slope *= kept
            if inner is not None:
                slope.view(len(values), -1, shape[3]).sub_(inner)
            if hidden is not None and not weigh.shortcut:
                slope.masked_fill_(hidden, 0)
            slope, found = weigh.slopes(slope)
            self._add_learned(names, found, state)
            if hidden is not None:
                slope.masked_fill_(hidden, 0)
            if "shift" in state.totals:
                state.totals["shift"][at] += slope.sum(-1)
            slope = self._through_biases(rows, cols, slope, hidden, state)
            self._through_product(rows, cols, slope, hidden, keys, dq, state)
        if "q" in state.totals:
            scale = call.scale if call.pairwise is None else 1
            state.totals["q"][at] = dq.view(*tiles.shape, rows.stop - rows.start, -1) * scale

    def _through_biases(
        self, rows: slice, cols: slice, slope: Tensor, hidden: Tensor | None, state: _Backward
    ) -> Tensor:
        """The slope at the product, from that at the final scores; biases get theirs."""
        tiles = self.group.tiles
        call = tiles.call
        if call.normalizer.temperature != 1 and not tiles.linear:
            slope = slope / call.normalizer.temperature
        if not call.biases:
            return slope
        region, before = tiles.region(rows, cols), []
        if call.reshaped is not None:
            score = tiles.product(rows, cols)
            score = score if hidden is None or self.group.clean else score.masked_fill(hidden, 0)
            for bias in call.biases:
                before.append(score)
                score = tiles.apply(bias, score, rows, cols)
        for i, bias in reversed(list(enumerate(call.biases))):
            known = bias.tensors()
            names = [name for name in known if f"bias {i} {name}" in state.totals]
            if isinstance(bias, Additive) and bias.add_gradient is not None:
                for name in names:
                    with state.lock:
                        bias.add_gradient(state.totals[f"bias {i} {name}"], region, slope)
                continue
            learned = [known[name] for name in names]
            slope, *found = bias.gradients(before[i] if before else slope, region, slope, learned)  # type: ignore[assignment]
            slope = torch.zeros_like(before[i]) if slope is None else slope
            self._add_learned([f"bias {i} {name}" for name in names], found, state)
            slope = slope if hidden is None else slope.masked_fill(hidden, 0)
        return slope

    def _through_product(
        self, rows: slice, cols: slice, slope: Tensor, hidden: Tensor | None, keys: Tensor, dq: Tensor, state: _Backward
    ) -> None:
        tiles = self.group.tiles
        score = tiles.call.pairwise
        assert self.dk is not None
        if score is None:
            folded = slope.reshape(len(keys), -1, slope.shape[3])
            dq.baddbmm_(folded, keys)
            self.dk[:, cols].baddbmm_(folded.transpose(1, 2), tiles.q[:, :, rows].flatten(1, 2))  # q carries the scale
            return
        q, k = tiles.queries_and_keys(rows, cols)
        if hidden is not None and not self.group.clean:
            q = q.masked_fill(hidden.all(-1, keepdim=True), 0)
            k = k.masked_fill(hidden.all(-2)[..., None], 0)
        names = self._own("score", state)
        of_q, of_k, *found = score.gradients(q, k, slope, [tiles.call.own[name] for name in names])
        if of_q is not None:
            dq += of_q.view(dq.shape)
        if of_k is not None:
            self.dk[:, cols] += of_k.view(len(self.dk), tiles.group, *of_k.shape[2:]).sum(1)
        self._add_learned(names, found, state)
