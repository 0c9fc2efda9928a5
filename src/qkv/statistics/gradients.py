"""Gradients of statistics: through the weights of each tile, and through the normalizer's level.

A statistic is a function of the weights A of a call. Its derivative ∂L/∂A is a sum of few terms: a number for each
query, one for each key, multiples of ln A, of A and of the distance, and terms inside masks and on single keys. Each
tile of ∂L/∂A is computed together with its tile of weights; the rest is the backward pass of attention.

A statistic is a function of the weights, as the attention output is. With dA = ∂L/∂A, dS = A ∘ (dA − rowsum(A ∘ dA))
for softmax, and similarly for other normalizers: the backward pass of attention with a different dA. For softmax the
row sums follow from the statistics themselves (the entropy contributes 0, because it does not change when a row is
scaled), except for one product of the weights with the gradients of `received`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._engine.backward import Job, RowSlopes, WeightGradients, add_sink_gradients, finite, summed, zeros
from qkv._engine.call import Call, RowState, at_least_float32, detached
from qkv._engine.sweep import Group, Tile, Workspace, groups, reduce_tiles, tile_size
from qkv._engine.tiles import WeightTiles
from qkv._engine.transforms import once_differentiable, transformed
from qkv.errors import InputError
from qkv.kernels import opaque
from qkv.masks import EMPTY, FULL, Dense, Mask, Prefix
from qkv.native.statistics import statistics_gradients
from qkv.normalizers import Pointwise, SumToOne
from qkv.normalizers.base import weights_of
from qkv.normalizers.level import level_slopes
from qkv.statistics.products import weights_matmul
from qkv.statistics.reduce import Patterns
from qkv.statistics.sums import Statistics

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

    def start(self, group: Group) -> Job:
        job, tiles = super().start(group), group.tiles
        job.shared = _Heads(
            WeightTiles(tiles, self.rows),
            {name: tiles.block_status(self.places.mass[name], self.size) for name in self.slopes.mass},
            tiles.of(self.slopes.received),
            self.places.firsts[tiles.batch.start],
        )
        return job

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


DIFFERENTIABLE = (
    "entropy", "effective_keys", "distance", "sink", "self_", "previous", "next_", "sink_mass", "lse", "received",
)  # fmt: skip
"""Fields of `Statistics` that carry gradients, in addition to every `mass`; the others are detached."""
SINGLE_KEY = {"sink": "first", "self_": 0, "previous": -1, "next_": 1}
"""The statistics that are the weight on one key: the first of the text, or the key at this offset from the query."""
TOTAL = "mass on all keys\0"
UNTRACKED = ("v", "values")  # tensors of a call that no statistic depends on

MeasureCall = Callable[..., tuple[RowState, Statistics]]


def unsupported_reason(call: Call) -> str | None:
    """Why the statistics of a call cannot be differentiated, or None if they can."""
    if isinstance(call.normalizer, SumToOne) and call.normalizer.one_key:
        return f"{type(call.normalizer).__name__} selects one key, which has no derivative"
    if transformed(call):
        return "statistics support neither torch.func transforms nor forward-mode derivatives"
    return call.untracked


@opaque
def with_gradients(
    call: Call,
    measure_call: MeasureCall,
    *,
    mass: Mapping[str, Mask] | None,
    first: int | Int[Tensor, " b"],
    queries: Bool[Tensor, "b nq"] | None,
) -> Statistics:
    """The statistics of a call, differentiable with respect to its tensors.

    Args:
        call: the attention call, made with gradients enabled.
        measure_call: returns the normalizer state and the statistics of a call, without gradients.
        mass: as in `measure`.
        first: as in `measure`.
        queries: as in `measure`.
    """
    if (reason := unsupported_reason(call)) is not None:
        raise InputError(f"measure: differentiable=True, but {reason}; expected differentiable=False")
    tensors = {name: x for name, x in call.tensors().items() if name not in UNTRACKED}
    masks = dict(mass or {})
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())):
        with torch.no_grad():
            return measure_call(call, mass=masks, first=first, queries=queries)[1]
    firsts = [first] * len(call.q) if isinstance(first, int) else first.tolist()
    measure_call = partial(measure_call, first=first, queries=queries)
    context = _Context(detached(call, learned=True), measure_call, Places(firsts, masks), queries, list(tensors))
    outputs = _MeasureFunction.apply(context, *tensors.values())
    assert context.statistics is not None
    fields = dict(zip(context.names, outputs, strict=True))
    masses = {name: fields.pop(f"mass {name}") for name in masks}
    return replace(context.statistics, mass=masses, **fields)


@dataclass(eq=False)
class _Context:
    """The state that `_MeasureFunction` keeps between forward and backward, besides tensors."""

    call: Call
    measure_call: MeasureCall
    places: Places
    queries: Tensor | None
    inputs: list[str]
    """Names of the tensors of the call that may require gradients."""
    names: tuple[str, ...] = ()
    """Names of the returned statistics; set by the forward."""
    statistics: Statistics | None = None
    """All statistics, detached; set by the forward."""


class _MeasureFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: _Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        call, masks = detached(context.call), context.places.mass
        rows, statistics = context.measure_call(call, mass={**masks, TOTAL: Prefix(call.k.shape[2])})
        outputs = {name: getattr(statistics, name) for name in DIFFERENTIABLE}
        outputs |= {f"mass {name}": statistics.mass[name] for name in masks}
        outputs = {name: x.clone() for name, x in outputs.items() if x is not None}  # lse shares memory with rows.level
        context.names, context.statistics = tuple(outputs), statistics
        visible = statistics.visible_queries > 0
        ctx.save_for_backward(*tensors, rows.level, rows.total, statistics.mass[TOTAL], visible, *outputs.values())
        ctx.context = context
        ctx.set_materialize_grads(False)
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        context: _Context = ctx.context
        names = context.inputs
        tensors, saved = ctx.saved_tensors[: len(names)], ctx.saved_tensors[len(names) :]
        level, total, mass, visible, *outputs = saved
        if all(x is None for x in output_grads):
            return (None,) * (1 + len(names))
        with torch.no_grad():
            call = detached(context.call.with_tensors(dict(zip(names, tensors, strict=True))), learned=True)
            needed = {name for name, need in zip(names, ctx.needs_input_grad[1:], strict=True) if need}
            values = dict(zip(context.names, outputs, strict=True))
            grads = {name: x for name, x in zip(context.names, output_grads, strict=True) if x is not None}
            inputs = _input_gradients(call, RowState(level, total), mass, visible, values, grads, context, needed)
            back = [inputs[name].to(x) if name in needed else None for name, x in zip(names, tensors, strict=True)]
        error = InputError(
            "differentiable=True gives first derivatives of statistics, not second derivatives; "
            "expected create_graph=False, or statistics computed from the weights of attend(…, return_weights=True)"
        )
        return None, *once_differentiable(error, tuple(back), [x for x in (*tensors, *output_grads) if x is not None])


def _input_gradients(
    call: Call, rows: RowState, mass: Tensor, visible: Tensor, values: dict[str, Tensor], grads: dict[str, Tensor],
    context: _Context, needed: set[str],
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of the tensors of a call.

    Args:
        call: the attention call, detached.
        rows: its normalizer state.
        mass: the sum of the weights of each row.
        visible: True at keys that any query may attend to.
        values: the statistics, by name.
        grads: their gradients, by name.
        context: of the forward.
        needed: the names of the tensors whose gradients are returned.
    """
    wide = at_least_float32(call.q.dtype)
    empty = torch.zeros_like(mass, dtype=torch.bool) if rows.level is None else rows.level == -torch.inf
    if context.queries is not None:
        empty = empty | ~context.queries[:, None]
    grads = {name: x.to(wide).masked_fill(~visible if name == "received" else empty, 0) for name, x in grads.items()}
    if rows.level is not None and needed.isdisjoint(call.learned):
        found = statistics_gradients(
            call, values, grads, lse=rows.level, mass=mass, masks=context.places.mass, firsts=context.places.firsts,
            queries=context.queries, wanted=needed,
        )  # fmt: skip
        if found is not None:
            return found
    if context.queries is not None:
        call = replace(call, mask=_and_queries(call.mask, context.queries))
    received = grads.pop("received", None)
    level, at_sink = finite(rows.level), grads.pop("sink_mass", None)
    slopes = _slopes(values, grads, mass)
    slopes.received = received
    totals = zeros(call, needed)
    normalizer, size = call.normalizer, tile_size(call)
    arguments = (rows, level, slopes, context.places)
    inner = None
    if normalizer.has_lse or (isinstance(normalizer, Pointwise) and normalizer.divide == "sum"):
        inner = _mean_of_slopes(call, rows, values, grads, received)
        inner = inner if at_sink is None else inner + at_sink * values["sink_mass"]
    elif isinstance(normalizer, SumToOne):
        reducer = LevelSlopes(call, *arguments, {}, size)
        reduce_tiles(groups(call, size), reducer)
        inner = reducer.mean(call, at_sink)
    if inner is not None:
        slopes.constant = slopes.constant - inner
    if call.sink is not None:
        assert inner is not None
        assert level is not None
        at_sink = (-inner if at_sink is None else at_sink - inner).masked_fill(empty, 0)
        if not normalizer.has_lse:
            add_sink_gradients(call, level, at_sink, totals)
        elif "sink" in totals:
            weight = torch.exp(call.sink - level)  # the sink's own weight in each row
            totals["sink"] = (weight * at_sink).sum_to_size(call.sink.shape)
    reduce_tiles(groups(call, size), StatisticsGradients(call, *arguments, totals, size))
    return summed(call, totals)


def _and_queries(mask: Mask | None, queries: Tensor) -> Mask:
    counted = Dense(queries[:, None, :, None])
    return counted if mask is None else mask & counted


def _slopes(values: dict[str, Tensor], grads: dict[str, Tensor], mass: Tensor) -> Slopes:
    """∂L/∂A at a fixed level, from the gradients of the statistics that each query has."""
    nonempty = mass.abs() >= torch.finfo(mass.dtype).tiny  # the statistics of all other rows are constant 0
    total = torch.where(nonempty, mass, 1.0)
    per_mass = torch.where(nonempty, 1 / total, 0.0)
    slopes = Slopes(torch.zeros_like(mass), per_mass=per_mass)
    for name, offset in SINGLE_KEY.items():
        if name in grads and isinstance(offset, int):
            slopes.near[offset] = grads[name]
    slopes.first = grads.get("sink")
    slopes.mass = {name.removeprefix("mass "): x for name, x in grads.items() if name.startswith("mass ")}
    if "entropy" in grads:  # −(ln a + H) / M, where a = A / M
        grad = grads["entropy"] * per_mass
        slopes.log = -grad
        slopes.constant += grad * (torch.log(total.abs()) - values["entropy"])
    if "effective_keys" in grads:  # 2 (p − p² a) / M
        grad = 2 * grads["effective_keys"] * values["effective_keys"] * per_mass
        slopes.share = -grad * values["effective_keys"]
        slopes.constant += grad
    if "distance" in grads:  # (|p − j| − D) / M
        slopes.distance = grads["distance"] * per_mass
        slopes.constant -= slopes.distance * values["distance"]
    return slopes


def _mean_of_slopes(
    call: Call, rows: RowState, values: dict[str, Tensor], grads: dict[str, Tensor], received: Tensor | None
) -> Tensor:
    """Σ_j A_ij ∂L/∂A_ij minus the gradient of the lse.

    Entropy, effective_keys and distance contribute nothing: they do not change when a row is scaled.
    """
    inner = torch.zeros_like(values["entropy"])
    for name, x in grads.items():
        if name == "lse":
            inner -= x
        elif name in SINGLE_KEY or name.startswith("mass "):
            inner += x * values[name]
    if received is not None:
        inner += weights_matmul(call, rows, received[..., None])[..., 0]
    return inner
