"""Kernels with a backward of their own; detection of the derivatives that they lack, and an error for second ones.

Under these transforms only the eager kernel works, because it consists of plain tensor operations; the other kernels
implement their own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkv.engine.call import Call, detached
from qkv.errors import InputError


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


def once_differentiable(
    kernel: str | InputError, grads: tuple[Tensor | None, ...], inputs: Iterable[Tensor]
) -> tuple[Tensor | None, ...]:
    """Mark the gradients that a backward returns: under ``create_graph=True``, differentiating them raises an error.

    `kernel` is the error, or the name of a kernel, for which the error recommends the eager one.
    """
    if not torch.is_grad_enabled():
        return grads
    present = [x for x in grads if x is not None]
    sources = [x for x in inputs if x.requires_grad]
    error = kernel
    if not isinstance(kernel, InputError):
        error = InputError(
            f"kernel {kernel!r} has only first derivatives, but second ones were requested; pass kernel='eager'"
        )
    marked = iter(_OnceDifferentiable.apply(error, len(present), *present, *sources))
    return tuple(None if x is None else next(marked) for x in grads)


Results = tuple[Tensor | None, ...]
Compute = Callable[[Call], tuple[Results, Results]]
"""Takes a call without gradients; returns results, and what the backward needs besides."""
Backward = Callable[[Call, Results, Results, Results, set[str]], dict[str, Tensor]]
"""Takes the call, the results of `Compute` and what it kept, the gradients of the results, and the names of the tensors
that need gradients; returns these gradients by name."""


def differentiable(call: Call, compute: Compute, backward: Backward, kernel: str | InputError) -> Any:
    """The results of `compute`, differentiable in the tensors of the call.

    `kernel` is the name of the kernel, or the error for second derivatives.
    """
    tensors = call.tensors()
    return _Differentiable.apply(call, compute, backward, kernel, list(tensors), *tensors.values())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, compute: Compute, backward: Backward, kernel: object, names: list[str], *tensors: Tensor
    ) -> Results:
        results, more = compute(detached(call))
        ctx.save_for_backward(*tensors, *results, *more)
        # Learned tensors inside user-defined objects are used directly; `saved_tensors` checks their versions.
        ctx.call, ctx.gradients, ctx.kernel = detached(call, learned=True), backward, kernel
        ctx.names, ctx.n_results = names, len(results)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Results:
        n, saved = len(ctx.names), ctx.saved_tensors
        tensors, results, more = saved[:n], saved[n : n + ctx.n_results], saved[n + ctx.n_results :]
        needed = {name for name, need in zip(ctx.names, ctx.needs_input_grad[-n:], strict=True) if need}
        with torch.no_grad():
            call = detached(ctx.call.with_tensors(dict(zip(ctx.names, tensors, strict=True))), learned=True)
            gradients = ctx.gradients(call, results, more, grads, needed)
            back = tuple(
                gradients[name].to(x.dtype) if name in needed and name in gradients else None
                for name, x in zip(ctx.names, tensors, strict=True)
            )
        return *(None,) * 5, *once_differentiable(ctx.kernel, back, [x for x in (*tensors, *grads) if x is not None])
