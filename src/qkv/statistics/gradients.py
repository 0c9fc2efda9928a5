"""Gradients of statistics: autograd through their definitions, a block of whole rows at a time.

The native library computes those of a softmax of products on CPU in one pass, which also gives those of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.engine.call import Call, RowState, at_least_float32
from qkv.engine.rows import Rows, row_blocks, row_weights
from qkv.engine.tiles import Leaves, Tile
from qkv.engine.transforms import Results, differentiable_call, transformed
from qkv.errors import InputError
from qkv.kernels import native_call, opaque
from qkv.kernels.native import statistics_gradients
from qkv.masks import Dense, Mask
from qkv.results import Result, Statistics
from qkv.statistics.base import FIELDS, Extremes, Mass, WeightTile

DIFFERENTIABLE = (
    "entropy", "effective_keys", "distance", "sink", "self_", "previous", "next_", "sink_mass", "lse", "received",
    "max_logit",
)  # fmt: skip
"""Fields of `Statistics` that carry gradients, in addition to every `mass`; the others are detached."""
UNTRACKED = {"v", "values"}  # tensors of a call that no statistic depends on

MeasureCall = Callable[..., tuple[Result | None, RowState, Statistics]]


def in_one_pass(call: Call) -> bool:
    """Return whether one backward pass of the native library finds the gradients of output and statistics."""
    unsupported = native_call.unsupported_reason(call) is not None or call.learned or call.untracked is not None
    return not unsupported and native_call.is_finite(call)


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
    by_library = call.needs_grad and native_call.unsupported_reason(call) is None  # whose backward needs the argmax
    result, rows, statistics = measure_call(
        call, output=output, mass=masks, first=first, queries=queries, statistics=[Extremes()] if by_library else []
    )
    if not call.needs_grad:
        return result, statistics
    key = statistics.argmax
    statistics = replace(statistics, min_logit=None, argmax=None)
    firsts = [first] * len(call.q) if isinstance(first, int) else first.tolist()
    tracked = {name: getattr(statistics, name) for name in DIFFERENTIABLE}
    tracked |= {f"mass {name}": statistics.mass[name] for name in masks}
    tracked = {name: x.clone() for name, x in tracked.items() if x is not None}  # lse shares memory with rows.level
    tracked |= {} if result is None else {"out": result.out}
    saved = (rows.level, rows.total, statistics.row_sum, statistics.visible_queries > 0, key)

    def backward(call: Call, results: Results, more: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
        level, total, mass, visible, key = more
        values, of = ({n: x for n, x in zip(tracked, xs, strict=True) if x is not None} for xs in (results, grads))
        rows = RowState(level, total)
        return _input_gradients(call, rows, mass, visible, values, of, masks, firsts, queries, wanted, key)

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
    masks: Mapping[str, Mask], firsts: Sequence[int], queries: Tensor | None, needed: set[str], argmax: Tensor | None,
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
    if needed.isdisjoint(call.learned):
        gradients = statistics_gradients(
            call, values, grads, rows=rows, mass=mass, masks=masks, firsts=firsts,
            queries=queries, wanted=needed, out=out, grad_out=grad_out, argmax=argmax,
        )  # fmt: skip
        if gradients is not None:
            return gradients
    assert grad_out is None, "the call was not one that is differentiated in one pass"
    if queries is not None:
        counted = Dense(queries[:, None, :, None])
        call = replace(call, mask=counted if call.mask is None else call.mask & counted)
    leaves = Leaves(call, needed)
    for tiles in row_blocks(call, leaves, batched=len(set(firsts)) == 1):
        with torch.enable_grad():
            block = row_weights(tiles, None if rows.level is None else rows.level[tiles[0].at])
            results = _statistics(tiles, block, grads, masks, firsts)
        leaves.backward(*results)
    return leaves.totals


def _statistics(
    tiles: Sequence[Tile], rows: Rows, grads: Mapping[str, Tensor], masks: Mapping[str, Mask], firsts: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return the statistics of some rows by their definitions, with their gradients; those of keys for each tile."""
    batch, heads, _ = at = tiles[0].at
    seen, results, final = list[WeightTile](), list[tuple[Tensor, Tensor]](), rows.weights()
    smallest = torch.finfo(final[0].dtype).tiny
    for tile, weights in zip(tiles, final, strict=True):
        # The logarithm of a weight of 0 has no finite derivative.
        raised = weights + (weights.clamp(min=smallest) - weights).detach()
        visible = None if tile.masked is None else ~tile.masked
        seen.append(WeightTile(raised, tile.region, tile.call.grid, visible, None, firsts[batch.start]))
    mass = functools.reduce(torch.add, (x.sum(-1, dtype=torch.float64) for x in final))
    mass = mass.masked_fill(mass.abs() < smallest, 0)  # the statistics of such rows are constant
    for name, grad in grads.items():
        if name == "lse":
            assert rows.level is not None
            results.append((rows.level, grad[at]))
        elif name == "sink_mass":
            assert rows.sink_weight is not None
            results.append((rows.sink_weight, grad[at]))
        elif name == "max_logit":  # of the first key on ties, as `max` takes it
            largest, shift = torch.cat([x.masked_scores() for x in tiles], -1).max(-1)[0], tiles[0].part("shift")
            results.append((largest if shift is None else largest - shift, grad[at]))
        elif name == "received":
            results += [(FIELDS[name].added(x), grad[batch, heads, x.region.columns]) for x in seen]
        else:
            statistic = Mass(name, masks[name.removeprefix("mass ")]) if name.startswith("mass ") else FIELDS[name]
            total = functools.reduce(statistic.merge, map(statistic.added, seen))
            results.append((statistic.finish(total, mass), grad[at]))
    return results
