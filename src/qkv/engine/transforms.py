"""What a call needs of a kernel, and kernels with a backward of their own.

A kernel names in `OFFERS` what of the table `NEEDS` it can do; `unmet` finds the first need of a call that it does not
offer. What is particular to a kernel, such as its device and dtypes, is in its own `unsupported_reason`. `plan` and
docs/matrix.md show these reasons.

Under transforms of torch.func only the eager kernel works, because it consists of plain tensor operations; the other
kernels implement their own backward, which gives an error for second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from qkv.engine.call import Call, detached
from qkv.engine.modes import transforming
from qkv.errors import InputError


def transformed(call: Call) -> bool:
    """Return whether a torch.func transform is active, or a tensor of the call carries a forward-mode tangent."""
    if not transforming():
        return False
    if peek_interpreter_stack() is not None:
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in call.tensors().values())


def under_vmap(call: Call) -> bool:
    """Return whether torch.func.vmap maps a tensor of the call, and not its tangents alone, as in jacfwd."""
    functorch, tensors = torch._C._functorch, [*call.tensors().values()]
    while tensors and not any(map(functorch.is_batchedtensor, tensors)):
        tensors = [functorch.get_unwrapped(x) for x in tensors if functorch.is_functorch_wrapped_tensor(x)]
    return bool(tensors)


Need = Literal[
    "weights that are no softmax", "pairwise scores", "biases", "vectors by distance", "dropout", "drawn keys",
    "gradients", "transforms", "tensors in closures",
]  # fmt: skip


NEEDS: dict[Need, Callable[[Call], str | None]] = {
    "weights that are no softmax": lambda call: (
        None if call.normalizer.has_lse else f"the weights are a softmax, not {type(call.user.normalizer).__name__}"
    ),
    "pairwise scores": lambda call: (
        None if call.pairwise is None else f"the score {type(call.pairwise).__name__} is not a product of query and key"
    ),
    "biases": lambda call: "it has no biases" if call.biases else None,
    "vectors by distance": lambda call: None if call.values is None else "it has no values that depend on the distance",
    "dropout": lambda call: "dropout acts on weights, which it never forms" if call.dropout_p else None,
    "drawn keys": lambda call: (
        f"it does not sample, and {type(call.normalizer).__name__}(sample=True) does"
        if call.normalizer.sample
        else None
    ),
    "gradients": lambda call: (
        "it has no gradients; detach the inputs or use torch.no_grad()" if call.needs_grad else None
    ),
    "transforms": lambda call: (
        "it has no derivatives in torch.func transforms and in forward mode; eager does" if transformed(call) else None
    ),
    "tensors in closures": lambda call: call.untracked,
}


def unmet(call: Call, offers: Collection[Need]) -> str | None:
    """Say why a kernel with these offers cannot serve a call; None if it offers all that the call needs."""
    for need, find in NEEDS.items():
        if need not in offers and (why := find(call)) is not None:
            return why
    return None


class _OnceDifferentiable(torch.autograd.Function):
    """Identity on a gradient that depends on `sources`, whose own backward raises an error."""

    @staticmethod
    def forward(ctx: Any, error: InputError, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.error = error
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise ctx.error


def once_differentiable(
    kernel: str | InputError, grads: Sequence[Tensor | None], inputs: Iterable[Tensor]
) -> Sequence[Tensor | None]:
    """Mark the gradients that a backward returns: under ``create_graph=True``, differentiating them raises an error.

    `kernel` is the error, or the name of a kernel, for which the error recommends the eager one.
    """
    if not torch.is_grad_enabled():
        return grads
    sources, error = [x for x in inputs if x.requires_grad], kernel
    if not isinstance(kernel, InputError):
        error = InputError(
            f"kernel {kernel!r} has only first derivatives, but second ones were requested; pass kernel='eager'"
        )
    return [None if x is None else _OnceDifferentiable.apply(error, x, *sources) for x in grads]


Results = tuple[Any, ...]
"""Tensors, or None."""
Gradients = Callable[[dict[str, Tensor], Results, Results, Results, set[str]], dict[str, Tensor]]
"""Takes the tensors by name, the results, what was kept besides, the gradients of the results, and the names of the
tensors that need gradients; returns these gradients by name."""
Compute = Callable[[Call], tuple[Results, Results]]
"""Takes a call without gradients; returns results, and what the backward needs besides."""
Backward = Callable[[Call, Results, Results, Results, set[str]], dict[str, Tensor]]
"""As `Gradients`, with a call instead of its tensors."""


def differentiable_call(call: Call, compute: Compute, backward: Backward, kernel: str | InputError) -> Any:
    """Return the results of `compute`, differentiable in the tensors of the call; `kernel` as in `differentiable`."""
    if not call.needs_grad:
        return compute(detached(call))[0]
    # Learned tensors inside user-defined objects are used directly; `saved_tensors` checks their versions.
    plain = detached(call, learned=True)

    def gradients(tensors: dict[str, Tensor], *saved: Any) -> dict[str, Tensor]:
        return backward(detached(plain.with_tensors(tensors), learned=True), *saved)

    return differentiable(call.tensors(), lambda: compute(detached(call)), gradients, kernel)


def differentiable(
    tensors: Mapping[str, Tensor], compute: Callable[[], tuple[Results, Results]], gradients: Gradients,
    kernel: str | InputError,
) -> Any:  # fmt: skip
    """Return the results of `compute`, differentiable in the tensors; it also returns what `gradients` needs besides.

    `kernel` is the name of the kernel, or the error for second derivatives.
    """
    return _Differentiable.apply(compute, gradients, kernel, list(tensors), *tensors.values())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], tuple[Results, Results]], gradients: Gradients, kernel: object,
        names: list[str], *tensors: Tensor,
    ) -> Results:  # fmt: skip
        results, more = compute()
        ctx.save_for_backward(*tensors, *results, *more)
        ctx.gradients, ctx.kernel, ctx.names, ctx.n_results = gradients, kernel, names, len(results)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Results:
        n, saved = len(ctx.names), ctx.saved_tensors
        tensors, results, more = saved[:n], saved[n : n + ctx.n_results], saved[n + ctx.n_results :]
        named = dict(zip(ctx.names, tensors, strict=True))
        needed = {name for name, need in zip(ctx.names, ctx.needs_input_grad[-n:], strict=True) if need}
        with torch.no_grad():
            gradients = ctx.gradients(named, results, more, grads, needed)
            back = [
                gradients[name].to(x.dtype) if name in needed and name in gradients else None
                for name, x in named.items()
            ]
        return *(None,) * 4, *once_differentiable(ctx.kernel, back, [x for x in (*tensors, *grads) if x is not None])
