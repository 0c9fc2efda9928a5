"""Gradients of statistics: through the weights of each tile, and through the normalizer's level.

A statistic is a function of the weights A, as the attention output is. With dA = ∂L/∂A, dS = A ∘ (dA − rowsum(A ∘ dA))
for softmax, and similarly for other normalizers: the backward pass of attention with a different dA, which autograd
finds for each tile through the definitions of the statistics. For softmax the row sums follow from the statistics
themselves (the entropy contributes 0, because it does not change when a row is scaled), except for one product of the
weights with the gradients of `received`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.engine.backward import RowSlopes, WeightGradients, add_sink_gradients, finite, zeros
from qkv.engine.call import Call, Result, RowState, at_least_float32
from qkv.engine.level import level_slopes, sink_slope
from qkv.engine.tiles import Tile, groups, reduce_tiles, tile_size
from qkv.engine.transforms import Results, differentiable_call, transformed
from qkv.errors import InputError
from qkv.kernels import opaque
from qkv.masks import Dense, Mask
from qkv.native import binding
from qkv.native.kernel import statistics_gradients
from qkv.normalizers import SumToOne
from qkv.statistics.base import FIELDS, Mass, Statistic, WeightTile
from qkv.statistics.reduce import weights_matmul
from qkv.statistics.result import Statistics

OfQueries = Float[Tensor, "b h nq"]


@dataclass(eq=False)
class StatisticsGradients(WeightGradients):
    """The reducer that adds the gradients of statistics to those of the call's tensors.

    Each tile of ∂L/∂A is what autograd finds through the definitions of the statistics, plus a constant of the row.
    """

    call: Call
    rows: RowState
    slopes: Mapping[Statistic, Tensor]
    """The statistics, and the gradients of their totals."""
    constant: OfQueries
    """Added to ∂L/∂A of every key."""
    firsts: Sequence[int]
    """The first key of the text of each batch item."""

    def __post_init__(self) -> None:
        divisors = [x for x in (self.rows.total, self.call.divisor) if x is not None]
        self.divisor = math.prod(divisors[1:], start=divisors[0]).expand(self.call.q.shape[:3]) if divisors else None

    def slope_at_weights(self, rows: RowSlopes, tile: Tile, weights: Tensor, masked: Tensor | None) -> Tensor:
        batch, heads, queries = at = tile.block.at
        divisor = None if self.divisor is None else self.divisor[at][..., None]
        weights = weights if divisor is None else weights / divisor
        constant = self.constant[at][..., None]
        if not self.slopes:
            return (constant if divisor is None else constant / divisor).expand_as(weights).clone()
        with torch.enable_grad():
            # The logarithm of a weight of 0 has no finite derivative.
            leaf = weights.detach().clamp(min=torch.finfo(weights.dtype).tiny).requires_grad_()
            visible = None if masked is None else ~masked
            seen = WeightTile(leaf, tile.region, tile.group.tiles.call.grid, visible, None, self.firsts[batch.start])
            parts = {s: s.added(seen) for s in self.slopes}
            of = [self.slopes[s][batch, heads, queries if s.over == "query" else tile.columns] for s in parts]
            (slope,) = torch.autograd.grad([*parts.values()], leaf, [x.double() for x in of])
        slope = slope + constant
        return slope if divisor is None else slope.div_(divisor)


class LevelSlopes(StatisticsGradients):
    """The effect of a row's level (threshold) on the gradient: the mean of ∂L/∂A, weighted by −∂A/∂level.

    `sum` and `falls` are sums over keys, (b, h, nq), once all tiles have been added; `falls` is −∂A/∂level.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sum, self.falls = (self.call.q.new_zeros(self.call.q.shape[:3], dtype=torch.float64) for _ in range(2))

    def tile(self, rows: RowSlopes, tile: Tile) -> None:
        normalizer, weigh, at = tile.group.tiles.call.normalizer, rows.weigh, tile.block.at
        assert rows.level is not None
        weights, masked = self.weigh(rows, tile)
        slope = self.slope_at_weights(rows, tile, weights, masked)
        if isinstance(weigh.evaluated, tuple):
            scores = weigh.evaluated[0].detach()
            scores = scores if masked is None else scores.masked_fill(masked, -torch.inf)
            falls = level_slopes(normalizer, scores, rows.level, weights)
        else:
            falls = normalizer.slope_from_weights(weights)
            falls = falls if masked is None else falls.masked_fill(masked, 0)
        slope = slope if masked is None else slope.masked_fill_(masked, 0)
        self.falls[at] += falls.sum(-1)
        self.sum[at] += slope.mul_(falls).sum(-1)

    def mean(self, at_sink: OfQueries | None) -> OfQueries:
        """Return the weighted mean, with a sink logit of gradient `at_sink`; 0 where no weight depends on the level."""
        total, sum_ = self.falls, self.sum
        if self.call.sink is not None:
            assert self.level is not None
            fall = sink_slope(self.call.normalizer, self.call.sink, self.level)
            total = total + fall
            sum_ = sum_ if at_sink is None else sum_ + fall * at_sink
        return (sum_ / torch.where(total == 0, 1.0, total)).to(self.constant)


DIFFERENTIABLE = (
    "entropy", "effective_keys", "distance", "sink", "self_", "previous", "next_", "sink_mass", "lse", "received",
)  # fmt: skip
"""Fields of `Statistics` that carry gradients, in addition to every `mass`; the others are detached."""
SINGLE_KEY = ("sink", "self_", "previous", "next_")
"""The statistics that are the weight on one key."""
UNTRACKED = {"v", "values"}  # tensors of a call that no statistic depends on

MeasureCall = Callable[..., tuple[Result | None, RowState, Statistics]]


def in_one_pass(call: Call) -> bool:
    """Return whether one backward pass of the native library finds the gradients of output and statistics."""
    unsupported = binding.unsupported_reason(call) is not None or call.learned or call.untracked is not None
    return not unsupported and binding.is_finite(call)


def unsupported_reason(call: Call) -> str | None:
    """Return why the statistics of a call cannot be differentiated, or None if they can."""
    if call.normalizer.one_key:
        return f"{type(call.normalizer).__name__} selects one key, which has no derivative"
    if transformed(call):
        return "statistics support neither torch.func transforms nor forward-mode derivatives"
    return call.untracked


@opaque
def with_gradients(
    call: Call,
    measure_call: MeasureCall,
    *,
    output: bool = False,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
) -> tuple[Result | None, Statistics]:
    """Return the result of a call, if the `output` is wanted, and its statistics, differentiable in its tensors.

    `measure_call` is `measured`. The output is only for calls that are differentiated `in_one_pass`, without `mass`.
    """
    if (reason := unsupported_reason(call)) is not None:
        raise InputError(f"measure: differentiable=True, but {reason}; expected differentiable=False")
    masks = dict(mass or {})
    if not output:
        call = call.with_tensors({name: x.detach() for name, x in call.tensors().items() if name in UNTRACKED})
    result, rows, statistics = measure_call(call, output=output, mass=masks, first=first, queries=queries)
    if not call.needs_grad:
        return result, statistics
    firsts = [first] * len(call.q) if isinstance(first, int) else first.tolist()
    tracked = {name: getattr(statistics, name) for name in DIFFERENTIABLE}
    tracked |= {f"mass {name}": statistics.mass[name] for name in masks}
    tracked = {name: x.clone() for name, x in tracked.items() if x is not None}  # lse shares memory with rows.level
    tracked |= {} if result is None else {"out": result.out}
    saved = (rows.level, rows.total, statistics.row_sum, statistics.visible_queries > 0)

    def backward(call: Call, results: Results, more: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
        level, total, mass, visible = more
        values, of = ({n: x for n, x in zip(tracked, xs, strict=True) if x is not None} for xs in (results, grads))
        rows = RowState(level, total)
        return _input_gradients(call, rows, mass, visible, values, of, masks, firsts, queries, wanted)

    error = InputError(
        "statistics have first derivatives, not second derivatives; "
        "expected create_graph=False, or statistics computed from the weights of attend(…, return_weights=True)"
    )
    results = differentiable_call(call, lambda _: (tuple(tracked.values()), saved), backward, error)
    fields = dict(zip(tracked, results, strict=True))
    masses = {name: fields.pop(f"mass {name}") for name in masks}
    out = fields.pop("out", None)
    statistics = replace(statistics, mass=masses, **fields)
    return None if out is None else Result(out, statistics.lse), statistics


def _input_gradients(
    call: Call, rows: RowState, mass: Tensor, visible: Tensor, values: dict[str, Tensor], grads: dict[str, Tensor],
    masks: Mapping[str, Mask], firsts: Sequence[int], queries: Tensor | None, needed: set[str],
) -> dict[str, Tensor]:  # fmt: skip
    """Return gradients of the tensors of a detached call that are `needed`, given those of its statistics, `values`.

    `mass` is the sum of the weights of each row, and `visible` is True at keys that any query may attend to.
    """
    wide = at_least_float32(call.q.dtype)
    empty = torch.zeros_like(mass, dtype=torch.bool) if rows.level is None else rows.level == -torch.inf
    if queries is not None:
        empty = empty | ~queries[:, None]
    grad_out, out = grads.pop("out", None), values.pop("out", None)
    grads = {name: x.to(wide).masked_fill(~visible if name == "received" else empty, 0) for name, x in grads.items()}
    if rows.level is not None and needed.isdisjoint(call.learned):
        gradients = statistics_gradients(
            call, values, grads, lse=rows.level, mass=mass, masks=masks, firsts=firsts,
            queries=queries, wanted=needed, out=out, grad_out=grad_out,
        )  # fmt: skip
        if gradients is not None:
            return gradients
    assert grad_out is None, "the call was not one that is differentiated in one pass"
    if queries is not None:
        counted = Dense(queries[:, None, :, None])
        call = replace(call, mask=counted if call.mask is None else call.mask & counted)
    level, at_sink = finite(rows.level), grads.pop("sink_mass", None)
    slopes, constant = _slopes(values, grads, mass, masks)
    totals = zeros(call, needed)
    normalizer, size = call.normalizer, tile_size(call)
    inner = None
    if normalizer.has_lse or normalizer.divide == "sum":
        inner = _mean_of_slopes(call, rows, values, grads)
        inner = inner if at_sink is None else inner + at_sink * values["sink_mass"]
    elif isinstance(normalizer, SumToOne):
        reducer = LevelSlopes(level, {}, call, rows, slopes, constant, firsts)
        reduce_tiles(groups(call, size), reducer)
        inner = reducer.mean(at_sink)
    if inner is not None:
        constant = constant - inner
    if call.sink is not None:
        assert inner is not None
        assert level is not None
        at_sink = (-inner if at_sink is None else at_sink - inner).masked_fill(empty, 0)
        if not normalizer.has_lse:
            add_sink_gradients(call, level, at_sink, totals)
        elif "sink" in totals:
            weight = torch.exp(call.sink - level)  # the sink's own weight in each row
            totals["sink"] = (weight * at_sink).sum_to_size(call.sink.shape)
    reduce_tiles(groups(call, size), StatisticsGradients(level, totals, call, rows, slopes, constant, firsts))
    return totals


def _slopes(
    values: Mapping[str, Tensor], grads: Mapping[str, Tensor], mass: Tensor, masks: Mapping[str, Mask]
) -> tuple[dict[Statistic, Tensor], Tensor]:
    """Return statistics with the gradients of their totals, and that of the mass, from those of the values."""
    nonempty = mass.abs() >= torch.finfo(mass.dtype).tiny  # the statistics of all other rows are constant 0
    total = torch.where(nonempty, mass, 1.0)
    per_mass = torch.where(nonempty, 1 / total, 0.0)
    slopes, of_mass = dict[Statistic, Tensor](), torch.zeros_like(mass)
    for name, grad in grads.items():
        if name.startswith("mass "):
            slopes[Mass(name, masks[name.removeprefix("mass ")])] = grad
            continue
        if name == "lse":
            continue
        value, part = values[name], grad
        if name == "entropy":  # H = E / M + ln M, where E = −Σ A ln A
            part = grad * per_mass
            of_mass += part * (1 + torch.log(total.abs()) - value)
        elif name == "effective_keys":  # p = M² / S, where S = Σ A²
            part = -grad * (value.double() * per_mass).square()  # a square that float32 may not hold
            of_mass += 2 * grad * value * per_mass
        elif name == "distance":  # D = T / M, where T = Σ A |p − j|
            part = grad * per_mass
            of_mass -= part * value
        slopes[FIELDS[name]] = part
    return slopes, of_mass


def _mean_of_slopes(call: Call, rows: RowState, values: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Tensor:
    """Return Σ_j A_ij ∂L/∂A_ij minus the gradient of the lse.

    Entropy, effective_keys and distance contribute nothing: they do not change when a row is scaled.
    """
    inner = torch.zeros_like(values["entropy"])
    for name, x in grads.items():
        if name == "lse":
            inner -= x
        elif name in SINGLE_KEY or name.startswith("mass "):
            inner += x * values[name]
        elif name == "received":
            inner += weights_matmul(call, rows, x[..., None])[..., 0]
    return inner
