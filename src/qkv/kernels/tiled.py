"""The tiled kernel: attention of any composition, tile by tile in plain tensor operations; linear memory, any device.

It wraps the forward and backward of `qkv._engine` in an autograd function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv._engine.backward import backward
from qkv._engine.call import Call, Result, RowState, detached
from qkv._engine.forward import ForwardState, forward_tiles
from qkv._engine.transforms import REASON, kernel_once_differentiable, transformed
from qkv.partial import Partial


def unsupported_reason(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    if transformed(call):
        return REASON
    return call.untracked


def forward(call: Call) -> Result:
    """Attention in memory linear in the sequence, differentiable in every tensor of the call and through the lse."""
    if not call.needs_grad:
        found = forward_tiles(detached(call))
        return Result(found.out.to(call.v.dtype), found.lse)
    tensors = call.tensors()
    out, lse = _Tiled.apply(call, list(tensors), *tensors.values())
    return Result(out, lse if call.normalizer.has_lse else None)


def row_state(call: Call) -> RowState:
    """The row state of a call, from a tiled forward: enough to compute any tile of its weights."""
    found = forward_tiles(detached(call))
    return RowState(found.level, found.total, found.chosen)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, names: list[str], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        found = forward_tiles(detached(call), training=True)
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
        *tensors, out, level, mean, total, chosen = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * (2 + len(tensors))
        with torch.no_grad():
            slope = torch.zeros_like(out) if grad is None else grad
            # Learned tensors inside user-defined objects are used directly; `saved_tensors` has checked their versions.
            call = detached(ctx.call.with_tensors(dict(zip(ctx.names, tensors, strict=True))), learned=True)
            found = ForwardState(out, level, mean, total, chosen)
            wanted = {name for name, need in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if need}
            grads = backward(call, found, slope, grad_lse, wanted)
            given = tuple(
                grads[name].to(x.dtype) if name in wanted else None for name, x in zip(ctx.names, tensors, strict=True)
            )
        return (
            None,
            None,
            *kernel_once_differentiable("tiled", given, [x for x in (*tensors, grad, grad_lse) if x is not None]),
        )


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of a softmax call over a subset of the keys, given `whole`, the result over all keys; at least float32.

    `whole` may include other keys and a sink; `grad` and `grad_lse` are its gradients. `wanted` names tensors of the
    call.
    """
    return backward(detached(call, learned=True), ForwardState(whole.out, whole.lse), grad, grad_lse, wanted)
