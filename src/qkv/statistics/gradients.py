"""Statistics with gradients, in linear memory: a statistic is a function of the weights, as the output is.

With dA the slopes at the weights, dS = A ∘ (dA − rowsum(A ∘ dA)) for a softmax, and the like for any normalizer: the
backward of attention with another dA. For softmax the row sums are known from the statistics themselves (that of the
entropy is 0, for it does not change when all weights of a row do), but for one product of the weights with the
gradients of `received`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv._engine.backward import add_sink_gradients, finite, summed, zeros
from qkv._engine.call import Call, at_least_float32, detached
from qkv._engine.row_state import RowState
from qkv._engine.sweep import groups, reduce_tiles, tile_size
from qkv._engine.transforms import once_differentiable, transformed
from qkv.errors import InputError
from qkv.kernels import opaque
from qkv.masks import Dense, Mask, Prefix
from qkv.normalizers import Pointwise, SumToOne
from qkv.statistics.products import weights_matmul
from qkv.statistics.slopes import LevelSlopes, Places, Slopes, StatisticsGradients
from qkv.statistics.sums import Statistics

DIFFERENTIABLE = (
    "entropy", "effective_keys", "distance", "sink", "self_", "previous", "next_", "sink_mass", "lse", "received",
)  # fmt: skip
"""Fields of `Statistics` that carry gradients, beside every `mass`; the others are detached."""
ON_KEYS = {"sink": "first", "self_": 0, "previous": -1, "next_": 1}
"""Those that are weights on one key: the first of the text, or one so far from the query."""
TOTAL = "mass on all keys\0"
UNTRACKED = ("v", "values")  # tensors of a call that no statistic depends on

Measure = Callable[..., tuple[RowState, Statistics]]


def unsupported_reason(call: Call) -> str | None:
    """Why the statistics of a call have no gradients, or None if they have."""
    if isinstance(call.normalizer, SumToOne) and call.normalizer.one_key:
        return f"{type(call.normalizer).__name__} chooses one key, and a choice has no derivative"
    if transformed(call):
        return "statistics have no derivatives in torch.func transforms and in forward mode"
    return call.untracked


@opaque
def with_gradients(
    call: Call,
    measured: Measure,
    *,
    mass: Mapping[str, Mask] | None,
    first: int | Int[Tensor, " b"],
    queries: Bool[Tensor, "b nq"] | None,
) -> Statistics:
    """The statistics of a call, with gradients of its tensors.

    Args:
        call: made with gradients enabled.
        measured: finds what the rows of a call know and its statistics, without gradients.
        mass: as in `measure`.
        first: as in `measure`.
        queries: as in `measure`.

    Raises:
        InputError: if they have none.
    """
    why = unsupported_reason(call)
    if why is not None:
        raise InputError(f"measure: differentiable=True, but {why}; expected differentiable=False")
    tensors = {name: x for name, x in call.tensors().items() if name not in UNTRACKED}
    masks = dict(mass or {})
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())):
        with torch.no_grad():
            return measured(call, mass=masks, first=first, queries=queries)[1]
    firsts = [first] * len(call.q) if isinstance(first, int) else first.tolist()
    measured = partial(measured, first=first, queries=queries)
    run = _Run(detached(call, learned=True), measured, Places(firsts, masks), queries, list(tensors))
    made = _Measured.apply(run, *tensors.values())
    assert run.found is not None
    new = dict(zip(run.names, made, strict=True))
    of_masses = {name: new.pop(f"mass {name}") for name in masks}
    return replace(run.found, mass=of_masses, **new)


@dataclass(eq=False)
class _Run:
    """What the backward has to know beside tensors, and what the forward found."""

    call: Call
    measured: Measure
    places: Places
    queries: Tensor | None
    inputs: list[str]
    """Names of the tensors of the call that may want gradients."""
    names: tuple[str, ...] = ()
    """Of the statistics that are returned."""
    found: Statistics | None = None


class _Measured(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        call, masks = detached(run.call), run.places.mass
        rows, found = run.measured(call, mass={**masks, TOTAL: Prefix(call.k.shape[2])})
        made = {name: getattr(found, name) for name in DIFFERENTIABLE}
        made |= {f"mass {name}": found.mass[name] for name in masks}
        made = {name: x.clone() for name, x in made.items() if x is not None}  # lse is what the rows know
        run.names, run.found = tuple(made), found
        seen = found.visible_queries > 0
        ctx.save_for_backward(*tensors, rows.level, rows.total, found.mass[TOTAL], seen, *made.values())
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(made.values())

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        names = run.inputs
        tensors, (level, total, mass, seen, *made) = ctx.saved_tensors[: len(names)], ctx.saved_tensors[len(names) :]
        if all(x is None for x in given):
            return (None,) * (1 + len(names))
        with torch.no_grad():
            call = detached(run.call.with_tensors(dict(zip(names, tensors, strict=True))), learned=True)
            wanted = {name for name, need in zip(names, ctx.needs_input_grad[1:], strict=True) if need}
            found = dict(zip(run.names, made, strict=True))
            asked = {name: x for name, x in zip(run.names, given, strict=True) if x is not None}
            grads = _gradients(call, RowState(level, total), mass, seen, found, asked, run, wanted)
            back = [grads[name].to(x) if name in wanted else None for name, x in zip(names, tensors, strict=True)]
        error = InputError(
            "second derivatives were asked for of statistics, which have only first ones; "
            "expected create_graph=False, or statistics of weights that attend(…, return_weights=True) forms"
        )
        return None, *once_differentiable(error, tuple(back), [x for x in (*tensors, *given) if x is not None])


def _gradients(
    call: Call, rows: RowState, mass: Tensor, seen: Tensor, found: dict[str, Tensor], grads: dict[str, Tensor],
    run: _Run, wanted: set[str],
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of the tensors of a call, from those of its statistics `found`; `mass` is that of each row."""
    wide = at_least_float32(call.q.dtype)
    dead = torch.zeros_like(mass, dtype=torch.bool) if rows.level is None else rows.level == -torch.inf
    if run.queries is not None:
        call = replace(call, mask=_and_queries(call.mask, run.queries))
        dead = dead | ~run.queries[:, None]
    grads = {name: x.to(wide) for name, x in grads.items()}
    received = grads.pop("received", None)
    grads = {name: x.masked_fill(dead, 0) for name, x in grads.items()}
    received = None if received is None else received.masked_fill(~seen, 0)
    level, at_sink = finite(rows.level), grads.pop("sink_mass", None)
    slopes = _slopes(found, grads, mass)
    slopes.received = received
    totals = zeros(call, wanted)
    normalizer, size = call.normalizer, tile_size(call)
    given = (rows, level, slopes, run.places)
    inner = None
    if normalizer.has_lse or (isinstance(normalizer, Pointwise) and normalizer.divide == "sum"):
        inner = _mean_of_slopes(call, rows, found, grads, received)
        inner = inner if at_sink is None else inner + at_sink * found["sink_mass"]
    elif isinstance(normalizer, SumToOne):
        reducer = LevelSlopes(call, *given, {}, size)
        reduce_tiles(groups(call, size), reducer, call.q.device)
        inner = reducer.mean(call, at_sink)
    if inner is not None:
        slopes.constant = slopes.constant - inner
    if call.sink is not None:
        assert inner is not None
        assert level is not None
        at_sink = (-inner if at_sink is None else at_sink - inner).masked_fill(dead, 0)
        if not normalizer.has_lse:
            add_sink_gradients(call, level, at_sink, totals)
        elif "sink" in totals:
            weight = torch.exp(call.sink - level)  # 0 in a row that not even the sink has
            totals["sink"] = (weight * at_sink).sum_to_size(call.sink.shape)
    reduce_tiles(groups(call, size), StatisticsGradients(call, *given, totals, size), call.q.device)
    return summed(call, totals)


def _and_queries(mask: Mask | None, queries: Tensor) -> Mask:
    counted = Dense(queries[:, None, :, None])
    return counted if mask is None else mask & counted


def _slopes(found: dict[str, Tensor], grads: dict[str, Tensor], mass: Tensor) -> Slopes:
    """∂L/∂A from the gradients of statistics that queries have, at a fixed level."""
    lived = mass.abs() >= torch.finfo(mass.dtype).tiny  # other rows have statistics of 0
    total = torch.where(lived, mass, 1.0)
    per_mass = torch.where(lived, 1 / total, 0.0)
    slopes = Slopes(torch.zeros_like(mass), per_mass=per_mass)
    for name, where in ON_KEYS.items():
        if name in grads and isinstance(where, int):
            slopes.near[where] = grads[name]
    slopes.first = grads.get("sink")
    slopes.mass = {name.removeprefix("mass "): x for name, x in grads.items() if name.startswith("mass ")}
    if "entropy" in grads:  # −(ln a + H) / M, where a = A / M
        given = grads["entropy"] * per_mass
        slopes.log = -given
        slopes.constant += given * (torch.log(total.abs()) - found["entropy"])
    if "effective_keys" in grads:  # 2 (p − p² a) / M
        given = 2 * grads["effective_keys"] * found["effective_keys"] * per_mass
        slopes.share = -given * found["effective_keys"]
        slopes.constant += given
    if "distance" in grads:  # (|p − j| − D) / M
        slopes.distance = grads["distance"] * per_mass
        slopes.constant -= slopes.distance * found["distance"]
    return slopes


def _mean_of_slopes(
    call: Call, rows: RowState, found: dict[str, Tensor], grads: dict[str, Tensor], received: Tensor | None
) -> Tensor:
    """Σ_j A_ij ∂L/∂A_ij less the gradient of the lse.

    Entropy, effective_keys and distance add nothing: a row that is multiplied by a number keeps them.
    """
    inner = torch.zeros_like(found["entropy"])
    for name, x in grads.items():
        if name == "lse":
            inner -= x
        elif name in ON_KEYS or name.startswith("mass "):
            inner += x * found[name]
    if received is not None:
        inner += weights_matmul(call, rows, received[..., None])[..., 0]
    return inner
