"""The tiled kernel: attention of any composition by blocks of whole rows; linear memory, any device.

A block is computed again in the backward; autograd differentiates its weights: see `qkv.engine.rows`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qkv.engine.call import Call, RowState, at_least_float32, detached
from qkv.engine.rows import add_gradients, attend
from qkv.engine.tiles import Leaves
from qkv.engine.transforms import NEEDS, Need, Results, differentiable_call, unmet
from qkv.partial import Partial, sink_gradient
from qkv.results import Result

OFFERS: tuple[Need, ...] = tuple(need for need in NEEDS if need not in ("transforms", "tensors in closures"))


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    return unmet(call, OFFERS)


def forward(call: Call) -> Result:
    """Compute attention in linear memory, differentiable in every tensor of the call and through the lse."""
    return Result(*differentiable_call(call, _compute, _backward, "tiled"))


def row_state(call: Call) -> RowState:
    """Return the row state of a call: enough to compute any tile of its weights."""
    return attend(detached(call))[1]


def _compute(call: Call) -> tuple[Results, Results]:
    """Return out and lse, and the level and sum of the rows for the backward."""
    out, state = attend(call)
    return (out.to(call.v.dtype), state.level if call.normalizer.has_lse else None), (state.level, state.total)


def _backward(call: Call, results: Results, more: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
    """Return gradients of the tensors named in `wanted`, at least float32, given those of the output and the lse."""
    (out, lse), (level, total), (grad, grad_lse) = results, more, grads
    if call.normalizer.has_lse:
        return gradients(call, Partial(out, lse), torch.zeros_like(out) if grad is None else grad, grad_lse, wanted)
    leaves, divisor = Leaves(call, wanted), call.divisor if total is None else total
    grad = grad.to(at_least_float32(grad.dtype))
    grad = grad if divisor is None else grad / divisor[..., None]
    add_gradients(leaves, grad, None if total is None else -(grad * out).sum(-1), level=level)
    return leaves.totals


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Return gradients of a softmax call over some of the keys, given `whole`, the result over all; at least float32.

    `whole` may include other keys and a sink; `grad` and `grad_lse` are its gradients. `wanted` names tensors of the
    call. The effect of a weight on the log-sum-exp of its row is one number of the row, as in FlashAttention.
    """
    leaves = Leaves(replace(detached(call, learned=True), sink=None), wanted)
    lse = whole.lse.detach()  # a result that is saved for the backward has a history
    if call.sink is not None:
        leaves.totals["sink"] = sink_gradient(call.sink, whole, grad, grad_lse)
    inner = (grad * whole.out).sum(-1).to(lse.dtype)
    inner = inner if grad_lse is None else inner - grad_lse
    add_gradients(leaves, grad, -inner, lse=lse)
    return leaves.totals
