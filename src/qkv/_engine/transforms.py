"""Detection of torch.func transforms and forward-mode differentiation, and an error for second derivatives.

Under these transforms only the eager kernel works, because it consists of plain tensor operations; the other kernels
implement their own backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkv._engine.call import Call
from qkv.errors import InputError

REASON = "it has no derivatives in torch.func transforms and in forward mode; eager does"


def transforming() -> bool:
    """Whether a torch.func transform is active, or a level of forward-mode differentiation is open."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def transformed(call: Call) -> bool:
    """Whether a torch.func transform is active, or a tensor of the call carries a forward-mode tangent."""
    if not transforming():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in call.tensors().values())


def mapped() -> bool:
    """Whether torch.func.vmap is among the active transforms."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(one.key() == torch._C._functorch.TransformType.Vmap for one in stack)


class _OnceDifferentiable(torch.autograd.Function):
    """Identity on gradients, whose own backward raises an error."""

    @staticmethod
    def forward(ctx: Any, error: InputError, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.error = error
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise ctx.error


def kernel_once_differentiable(
    kernel: str, grads: tuple[Tensor | None, ...], inputs: Iterable[Tensor]
) -> tuple[Tensor | None, ...]:
    """`once_differentiable` for the gradients of a kernel: its error recommends the eager kernel."""
    error = InputError(
        f"kernel {kernel!r} has only first derivatives, but second ones were requested; pass kernel='eager'"
    )
    return once_differentiable(error, grads, inputs)


def once_differentiable(
    error: InputError, grads: tuple[Tensor | None, ...], inputs: Iterable[Tensor]
) -> tuple[Tensor | None, ...]:
    """Mark the gradients that a backward returns: under ``create_graph=True``, differentiating them raises `error`."""
    if not torch.is_grad_enabled():
        return grads
    found = [x for x in grads if x is not None]
    sources = [x for x in inputs if x.requires_grad]
    marked = iter(_OnceDifferentiable.apply(error, len(found), *found, *sources))
    return tuple(None if x is None else next(marked) for x in grads)
