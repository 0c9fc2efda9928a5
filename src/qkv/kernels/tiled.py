"""The tiled kernel: attention of any composition, tile by tile in plain tensor operations; linear memory, any device.

It is the forward and backward of `qkv.engine`, as one differentiable function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.engine.backward import backward
from qkv.engine.call import Call, Result, RowState, detached
from qkv.engine.forward import ForwardState, forward_tiles
from qkv.engine.needs import NEEDS, Need, unmet
from qkv.engine.transforms import Results, differentiable_call
from qkv.partial import Partial

OFFERS: tuple[Need, ...] = tuple(need for need in NEEDS if need not in ("transforms", "tensors in closures"))


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    return unmet(call, OFFERS)


def forward(call: Call) -> Result:
    """Compute attention in linear memory, differentiable in every tensor of the call and through the lse."""
    if not call.needs_grad:
        state = forward_tiles(detached(call))
        return Result(state.out.to(call.v.dtype), state.lse)
    return Result(*differentiable_call(call, _compute, _backward, "tiled"))


def row_state(call: Call) -> RowState:
    """Return the row state of a call, from a tiled forward: enough to compute any tile of its weights."""
    return forward_tiles(detached(call))


def _compute(call: Call) -> tuple[Results, Results]:
    state = forward_tiles(call, training=True)
    return (state.out.to(call.v.dtype), state.lse), (state.level, state.total, state.chosen, state.mean)


def _backward(call: Call, results: Results, more: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
    (out, _), (grad, grad_lse) = results, grads
    assert out is not None
    level, total, chosen, mean = more
    state = ForwardState(level, total, chosen, out=out, mean=mean)
    return backward(call, state, torch.zeros_like(out) if grad is None else grad, grad_lse, wanted)


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Return gradients of a softmax call over some of the keys, given `whole`, the result over all; at least float32.

    `whole` may include other keys and a sink; `grad` and `grad_lse` are its gradients. `wanted` names tensors of the
    call.
    """
    return backward(detached(call, learned=True), ForwardState(whole.lse, out=whole.out), grad, grad_lse, wanted)
