"""Normalizers other than softmax on FlexAttention, by the logarithms of their weights.

If score_mod returns ln w(s), the numerators of FlexAttention's softmax are the weights, and exp(lse) is their sum, so
Σ w v = out · exp(lse). A weight of 0 becomes a score of −inf, whose derivative is 0: right for weights that are never
negative, because a differentiable one has its minimum there.

A `SumToOne` normalizer needs its level first. The search of `qkv.normalizers.level` finds it; each step is one call,
whose lse is ln Σ w. The level enters the last call as a constant. By the implicit function theorem its gradient is
−mean · d(Σ w), where `mean` averages the values by −∂w/∂level; it is added to the output as a term that is 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.engine.call import Call, detached, user_defined
from qkv.engine.sizes import GPUS
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.normalizers.base import weights_of
from qkv.normalizers.level import TOLERANCE, level_slopes, raise_no_level, root
from qkv.partial import Partial

COMPOSITIONS = 256  # limit of compiled kernels
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes the score of a pair, and its batch item, head, query and key."""
Attend = Callable[[Call, ScoreMod | None], Partial]
"""FlexAttention of a call's queries, keys, values and mask, with this score_mod."""


def unsupported_reason(call: Call) -> str | None:
    """Why the weights of a call's normalizer cannot be computed from their logarithms, or None if they can."""
    normalizer, name = call.normalizer, type(call.given.normalizer).__name__
    if isinstance(normalizer, SumToOne) and normalizer.one_key:
        return f"{name} takes the value of one key, and it sums over keys"
    if isinstance(normalizer, Pointwise) and not normalizer.nonnegative:
        return f"it takes logarithms of weights, and {name} does not declare that its weights are nonnegative"
    if call.needs_grad and normalizer.tensors():
        return f"it has no gradients for tensors inside the weight of {name}"
    return _not_elementwise(call) if user_defined(normalizer) else None


def _not_elementwise(call: Call) -> str | None:
    """Why `weight` cannot be called for single scores, as a score_mod is; None if it can."""
    normalizer, ones = call.normalizer, torch.ones(2, device=call.q.device)

    def weight(score: Tensor, level: Tensor) -> Tensor:
        return _weight(normalizer, score, level if isinstance(normalizer, SumToOne) else None)

    def falls(score: Tensor, level: Tensor) -> Tensor:
        made: Tensor = torch.func.jvp(lambda at: weight(score, at), (level,), (torch.ones_like(level),))[0]
        return made

    name, probe = type(normalizer).__name__, falls if call.needs_grad else weight
    try:
        shape = torch.func.vmap(probe)(ones, ones).shape
        if shape == ones.shape and call.q.device.type in GPUS:
            with recompiling():
                torch.compile(probe, backend="eager", fullgraph=True)(ones[0], ones[0])
    except Exception as error:  # whatever a user's function, or the tracing of it, raises
        line = (str(error).strip().splitlines() or [""])[0]
        return f"weight of {name} does not take single scores, traced: {type(error).__name__}: {line}"
    if shape != ones.shape:
        return f"weight of {name} has parameters for each head, and a score_mod takes single scores"
    return None


@contextlib.contextmanager
def recompiling() -> Iterator[None]:
    """Raise torch's limit of 8 compiled variants, which is meant for one function, not for a library.

    Numbers, such as the width of a window or the scale, are constants of a variant: torch 2.11 cannot compile a mask or
    a scale that it was given as variables.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(
        recompile_limit=COMPOSITIONS,
        accumulated_recompile_limit=4 * COMPOSITIONS,
        specialize_int=True,
        specialize_float=True,
    ):
        yield


def pointwise(call: Call, final: ScoreMod, attend: Attend) -> Float[Tensor, "b h nq dv"]:
    """Output of a `Pointwise` normalizer; `final` gives the scores that its weights depend on."""
    normalizer = call.normalizer
    assert isinstance(normalizer, Pointwise)
    part = attend(call, _log_weight(normalizer, final))
    if normalizer.divide == "sum":
        nothing = part.lse < math.log(torch.finfo(part.lse.dtype).tiny)  # the sum is 0
        return part.out.masked_fill(nothing[..., None], 0)
    log_total = part.lse if call.divisor is None else part.lse - torch.log(call.divisor)
    out = part.out.masked_fill((part.lse == -torch.inf)[..., None], 0)
    return (out.to(log_total.dtype) * torch.exp(log_total)[..., None]).to(out.dtype)


def sum_to_one(call: Call, final: ScoreMod, attend: Attend) -> Float[Tensor, "b h nq dv"]:
    """Output of a `SumToOne` normalizer; `final` gives the scores that its weights depend on."""
    normalizer = call.normalizer
    assert isinstance(normalizer, SumToOne)
    with torch.no_grad():
        still = detached(call, learned=True)
        level = _level(still, final, attend)
    part = attend(call, _log_weight(normalizer, final, level))
    total = torch.exp(part.lse)
    out = part.out.masked_fill((part.lse == -torch.inf)[..., None], 0).to(total.dtype)
    if call.sink is not None:
        keys, total = total, total + _at_sink(call, level)
        out = out * (keys / torch.where(total == 0, 1.0, total))[..., None]
    if call.needs_grad:
        mean = _mean(still, final, level, attend).to(total.dtype)
        out = out - (mean - out).detach() * (total - total.detach())[..., None]
    return out.to(part.out.dtype)


def _level(call: Call, final: ScoreMod, attend: Attend) -> Float[Tensor, "b h nq"]:
    """The level of each query, at which its weights and that of the sink sum to one; 0 for fully masked queries."""
    normalizer = call.normalizer
    assert isinstance(normalizer, SumToOne)
    few = call.v[..., :1]  # only log-sum-exps are needed
    narrow = call.with_tensors({"v": few})
    start = attend(narrow, final).lse
    start = start if call.sink is None else torch.logaddexp(start, call.sink)
    empty = start == -torch.inf
    start = start.masked_fill(empty, 0)

    def total(level: Tensor) -> Tensor:
        keys = torch.exp(attend(narrow, _log_weight(normalizer, final, level)).lse)
        return keys if call.sink is None else keys + _at_sink(call, level)

    tolerance = TOLERANCE * torch.finfo(start.dtype).eps
    level, _, sure = root(total, start, torch.ones_like(start), empty, tolerance)
    if not bool(sure.all()):
        raise_no_level(normalizer, start, level, total(level), sure)
    return level


def _mean(call: Call, final: ScoreMod, level: Tensor, attend: Attend) -> Float[Tensor, "b h nq dv"]:
    """Mean of the values, weighted by −∂ weight / ∂ level; the sink's value is 0."""
    normalizer = call.normalizer
    assert isinstance(normalizer, SumToOne)
    with torch.no_grad():
        part = attend(call, _log_weight(normalizer, final, level, falling=True))
        out = part.out.masked_fill((part.lse == -torch.inf)[..., None], 0)
        if call.sink is None:
            return out
        column = call.sink.expand_as(level)[..., None]
        falls = level_slopes(normalizer, column, level, weights_of(normalizer, column, level))[..., 0]
        keys = torch.exp(part.lse)
        return out * (keys / torch.where(keys == 0, 1.0, keys + falls))[..., None].to(out.dtype)


def _at_sink(call: Call, level: Tensor) -> Float[Tensor, "b h nq"]:
    """The weight of the sink at a level."""
    assert call.sink is not None
    return weights_of(call.normalizer, call.sink.expand_as(level)[..., None], level)[..., 0]


def _log_weight(
    normalizer: Normalizer, final: ScoreMod, level: Tensor | None = None, *, falling: bool = False
) -> ScoreMod:
    """A score_mod that returns ln w(s), or with `falling` ln −∂w/∂level; −inf for a weight of 0 and a score of −inf."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = final(score, b, h, i, j)
        row = None if level is None else level[b, h, i]
        masked = score == -torch.inf
        score = torch.where(masked, torch.zeros_like(score) if row is None else row, score)
        if falling:
            # torch.func.grad gives wrong numbers inside a score_mod (torch 2.13); forward mode is right.
            weight = -torch.func.jvp(lambda at: _weight(normalizer, score, at), (row,), (torch.ones_like(score),))[1]
        else:
            weight = _weight(normalizer, score, row)
        zero = masked | (weight == 0)
        return torch.where(zero, -torch.inf, torch.log(torch.where(zero, 1.0, weight))).to(score.dtype)

    return score_mod


def _weight(normalizer: Normalizer, score: Tensor, level: Tensor | None) -> Tensor:
    if level is None:
        assert isinstance(normalizer, Pointwise)
        return normalizer.weight(score)
    assert isinstance(normalizer, SumToOne)
    return normalizer.weight(score, level)
