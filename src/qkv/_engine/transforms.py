"""Whether a call happens inside a transform of torch.func, or in forward-mode differentiation.

There only the eager kernel, which is plain tensor operations, can serve: the others have gradients of their own.
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
    """Whether a torch.func transform is at work, or a level of forward-mode differentiation is open."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def transformed(call: Call) -> bool:
    """Whether a torch.func transform is at work, or a tensor of the call carries a forward derivative."""
    if not transforming():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in call.tensors().values())


def mapped() -> bool:
    """Whether torch.func.vmap is among the transforms at work."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(one.key() == torch._C._functorch.TransformType.Vmap for one in stack)


class _OnceDifferentiable(torch.autograd.Function):
    """First derivatives as they are, which refuse to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, error: InputError, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.error = error
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise ctx.error


def kernel_once_differentiable(kernel: str, grads: tuple[Tensor | None, ...], inputs: Iterable[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients for the backward of a kernel to return, as `once_differentiable` has them."""
    error = InputError(
        f"second derivatives were asked for of attention on the kernel {kernel!r}, "
        "which has only first ones; pass kernel='eager', which has all"
    )
    return once_differentiable(error, grads, inputs)


def once_differentiable(
    error: InputError, grads: tuple[Tensor | None, ...], inputs: Iterable[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients for a backward to return: with ``create_graph=True``, differentiating them again raises `error`."""
    if not torch.is_grad_enabled():
        return grads
    found = [x for x in grads if x is not None]
    sources = [x for x in inputs if x.requires_grad]
    marked = iter(_OnceDifferentiable.apply(error, len(found), *found, *sources))
    return tuple(None if x is None else next(marked) for x in grads)
