"""The backward of attention, or of any function of its weights, tile by tile.

Each tile is made again rather than kept. At a fixed level (log-sum-exp, threshold) a weight depends on its own score
only, and what the level does to a row is one number a query (by the implicit function theorem), so one pass over the
tiles serves all normalizers: from slopes at the weights to slopes at the scores, and from there to queries, keys,
biases, sinks and learned tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.forward import Found, dropped
from qkv._engine.sweep import Block, Group, Reducer, Tile, groups, reduce_tiles
from qkv._engine.tiles import HIDDEN
from qkv._engine.workspace import Workspace
from qkv.biases import Additive
from qkv.biases.tensors import ByQuery, clipped
from qkv.normalizers import Pointwise, SumToOne
from qkv.normalizers.tile import TileWeights
from qkv.partial import Partial, sink_gradient


def backward(call: Call, found: Found, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of the call's tensors whose names are `wanted`, in float32 or better, from that of its output."""
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
    level = found.level
    if level is not None:
        level = level.masked_fill(level == -torch.inf, -HIDDEN)  # such rows see nothing: e^(s − ∞) = 0
    if call.sink is not None and not call.normalizer.has_lse:
        assert level is not None
        assert inner is not None
        _add_sink_gradients(call, level, inner, totals)
    near = mass = None
    if call.values is not None:
        near = ByQuery(scaled @ call.values.to(wide).transpose(-1, -2), call.grid.offset)
        mass = ByQuery(torch.zeros_like(near.tensor), call.grid.offset)
    reduce_tiles(groups(call), Gradients(level, scaled, inner, totals, near, mass), grad.device)
    if found.chosen is not None and "v" in totals:
        _add_chosen(found.chosen, grad, totals["v"])
    if "values" in totals:
        assert mass is not None
        by_distance = mass.tensor
        if found.chosen is not None:
            by_distance = _chosen_distances(call, found.chosen, by_distance)
        totals["values"] = torch.einsum("bhqr,bhqd->hrd", by_distance, scaled).sum_to_size(totals["values"].shape)
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
    masked = column == -torch.inf
    weigh.weights(column, level, masked if masked.any() else None)
    slope, found = weigh.slopes(-inner[..., None])
    if "sink" in totals:
        totals["sink"] += slope[..., 0].masked_fill(masked[..., 0], 0).sum_to_size(call.sink.shape)
    for name, x in zip(names, found, strict=True):
        if x is not None:
            totals[name] += x


@dataclass(eq=False)
class _Job:
    """Gradients of the keys, values and learned tensors of a group that some of its queries give."""

    k: Tensor
    v: Tensor
    learned: dict[str, Tensor] = field(default_factory=dict)

    def add(self, names: list[str], found: Sequence[Tensor | None], totals: dict[str, Tensor]) -> None:
        for name, x in zip(names, found, strict=True):
            if x is not None:
                if name not in self.learned:
                    self.learned[name] = torch.zeros_like(totals[name])
                self.learned[name] += x


@dataclass(eq=False)
class _Rows:
    """One block of queries: what its tiles need, and the gradient of the queries."""

    block: Block
    job: _Job
    q: Tensor
    grad: Tensor
    inner: Tensor | None
    level: Tensor | None
    weigh: TileWeights
    names: list[str]
    """Learned tensors of the normalizer that want gradients."""


class Gradients(Reducer[_Job, _Rows]):
    """Slopes at the weights, from the output's gradient, and all that they give.

    Args:
        level: of each row, finite.
        grad: of the output, divided by what the weights are divided by.
        inner: what the level of a row does to the slope of each of its scores.
        totals: what gradients are added to, by the names of the call's tensors.
        near: slopes of weights by distance, where values depend on that.
        mass: weights by distance are added to it.
    """

    over_queries = True

    def __init__(
        self,
        level: Tensor | None,
        grad: Tensor,
        inner: Tensor | None,
        totals: dict[str, Tensor],
        near: ByQuery | None = None,
        mass: ByQuery | None = None,
    ) -> None:
        self.level, self.grad, self.inner, self.totals = level, grad, inner, totals
        self.near, self.mass = near, mass
        self._lock = threading.Lock()

    def start(self, group: Group, shared: None, rows: Sequence[int]) -> _Job:
        return _Job(torch.zeros_like(group.tiles.k), torch.zeros_like(group.tiles.v))

    def begin(self, job: _Job, block: Block) -> _Rows:
        tiles, at = block.group.tiles, block.at
        names = self._own(tiles.call, "normalizer")
        return _Rows(
            block,
            job,
            torch.zeros_like(tiles.q[:, :, block.rows]).flatten(1, 2),
            self.grad[at].reshape(len(tiles.v), -1, tiles.v.shape[2]),
            None if self.inner is None else self.inner[at].reshape(len(tiles.v), -1, 1),
            None if self.level is None else self.level[at],
            TileWeights(tiles.call.normalizer, [tiles.call.own[name] for name in names]),
            names,
        )

    def tile(self, rows: _Rows, tile: Tile) -> None:
        group, tiles, cols = tile.group, tile.group.tiles, tile.columns
        job, weigh = rows.job, rows.weigh
        scores, masked = tile.scores()
        weights = weigh.weights(scores, rows.level, masked)
        values, keys = tiles.v[:, cols], tiles.k[:, cols]
        if masked is not None:
            values, keys = group.visible(values, masked), group.visible(keys, masked)
        slope = self._slope_at_weights(rows, tile, weights, values)
        if rows.inner is not None:
            slope.view(len(values), -1, tile.shape[3]).sub_(rows.inner)
        if masked is not None and not weigh.shortcut:
            slope.masked_fill_(masked, 0)
        slope, found = weigh.slopes(slope)
        job.add(rows.names, found, self.totals)
        if masked is not None:
            slope.masked_fill_(masked, 0)
        if "shift" in self.totals:
            self.totals["shift"][tile.block.at] += slope.sum(-1)
        slope = self._through_biases(job, tile, slope, masked)
        self._through_product(rows, tile, slope, masked, keys)

    def end(self, rows: _Rows, space: Workspace) -> None:
        if "q" in self.totals:
            call = rows.block.group.tiles.call
            scale = call.scale if call.pairwise is None else 1
            self.totals["q"][rows.block.at] = rows.q.view(*rows.block.shape, -1) * scale

    def finish(self, group: Group, job: _Job) -> None:
        for name, x in (("k", job.k), ("v", job.v)):
            if name in self.totals:
                inside = self.totals[name][group.tiles.batch, group.tiles.key_heads]
                inside += x.view(inside.shape)
        for name, x in job.learned.items():
            self.totals[name] += x

    def _own(self, call: Call, of: str) -> list[str]:
        """Names of learned tensors of the score or the normalizer that want gradients."""
        return [name for name in call.own if name.startswith(of) and name in self.totals]

    def _slope_at_weights(self, rows: _Rows, tile: Tile, weights: Tensor, values: Tensor) -> Tensor:
        """The slope at each weight, which is that of the output times the value; values get their gradient."""
        call, job, cols = tile.group.tiles.call, rows.job, tile.columns
        kept = dropped(tile) if call.dropout_p else None
        if not (isinstance(call.normalizer, SumToOne) and call.normalizer.one_key):
            met = weights if kept is None else weights * kept
            folded = met.reshape(len(values), -1, met.shape[3])
            job.v[:, cols].baddbmm_(folded.transpose(1, 2), rows.grad)
            if self.mass is not None:
                with self._lock:
                    self.mass.add_gradient(self.mass.tensor, tile.region, met)
        slope = tile.buffer("slope")
        torch.bmm(rows.grad, values.transpose(1, 2), out=slope.view(len(values), -1, tile.shape[3]))
        if self.near is not None:
            slope += self.near.tile(tile.region)
        if kept is not None:
            slope *= kept
        return slope

    def _through_biases(self, job: _Job, tile: Tile, slope: Tensor, masked: Tensor | None) -> Tensor:
        """The slope at the product, from that at the final scores; biases get theirs."""
        tiles, rows, cols = tile.group.tiles, tile.rows, tile.columns
        call = tiles.call
        if call.normalizer.temperature != 1 and not tiles.linear:
            slope = slope / call.normalizer.temperature
        if not call.biases:
            return slope
        region, before = tile.region, []
        if call.reshaped is not None:
            score = tiles.product(rows, cols)
            score = score if masked is None or tile.group.clean else score.masked_fill(masked, 0)
            for bias in call.biases:
                before.append(score)
                score = tiles.apply(bias, score, rows, cols)
        for i, bias in reversed(list(enumerate(call.biases))):
            known = bias.tensors()
            names = [name for name in known if f"bias {i} {name}" in self.totals]
            if isinstance(bias, Additive) and bias.add_gradient is not None:
                for name in names:
                    with self._lock:
                        bias.add_gradient(self.totals[f"bias {i} {name}"], region, slope)
                continue
            learned = [known[name] for name in names]
            slope, *found = bias.gradients(before[i] if before else slope, region, slope, learned)  # type: ignore[assignment]
            slope = torch.zeros_like(before[i]) if slope is None else slope
            job.add([f"bias {i} {name}" for name in names], found, self.totals)
            slope = slope if masked is None else slope.masked_fill(masked, 0)
        return slope

    def _through_product(self, rows: _Rows, tile: Tile, slope: Tensor, masked: Tensor | None, keys: Tensor) -> None:
        tiles, cols, job = tile.group.tiles, tile.columns, rows.job
        score = tiles.call.pairwise
        if score is None:
            folded = slope.reshape(len(keys), -1, slope.shape[3])
            rows.q.baddbmm_(folded, keys)
            job.k[:, cols].baddbmm_(
                folded.transpose(1, 2), tiles.q[:, :, tile.rows].flatten(1, 2)
            )  # q carries the scale
            return
        q, k = tiles.queries_and_keys(tile.rows, cols)
        if masked is not None and not tile.group.clean:
            q = q.masked_fill(masked.all(-1, keepdim=True), 0)
            k = k.masked_fill(masked.all(-2)[..., None], 0)
        names = self._own(tiles.call, "score")
        of_q, of_k, *found = score.gradients(q, k, slope, [tiles.call.own[name] for name in names])
        if of_q is not None:
            rows.q += of_q.view(rows.q.shape)
        if of_k is not None:
            job.k[:, cols] += of_k.view(len(job.k), tiles.group, *of_k.shape[2:]).sum(1)
        job.add(names, found, self.totals)
