"""The native kernel: softmax attention on CPU by the compiled library, forward and backward in one pass each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qkv._engine.call import Call, Result, detached
from qkv._engine.transforms import REASON, kernel_once_differentiable, transformed, transforming
from qkv.biases import SoftCap
from qkv.native import binding
from qkv.native.binding import Arguments, Gradients, library, prepared, run
from qkv.partial import Partial

CPU = torch.device("cpu")
PLAIN = (Tensor, torch.nn.Parameter)
LEAST_PAIRS = 2**16  # with fewer pairs of a query and a key, torch's kernel is faster


def unsupported_reason(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    if transformed(call):
        return REASON
    if (why := binding.unsupported_reason(call)) is not None:
        return why
    if call.needs_grad:
        if any(x.requires_grad for bias in call.biases for x in bias.tensors().values()):
            return "the library has no gradient for a bias"
        if any(isinstance(bias, SoftCap) for bias in call.biases[:-1]):
            return "the library has gradients of a soft cap only if it is the last step of the scores"
    return call.untracked


def forward(call: Call) -> Result | None:
    """Attention in memory linear in the sequence, differentiable in q, k, v, the sink, and through the lse.

    None if a score or an output is not finite.
    """
    with torch.no_grad():
        found = binding.forward(call)
    if found is None or not call.needs_grad:
        return None if found is None else Result(*found)
    out, lse = _Attention.apply(call.q, call.k, call.v, call.sink, call, found)
    return Result(out, lse)


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor | None:
    """Dot-product softmax attention without a `Call`, or None if `forward` would need one, or another kernel is faster.

    NaN and infinity in the inputs reach the output or the log-sum-exp of a row, and then the result is None as well.
    """
    if torch.compiler.is_compiling() or not all(type(x) in PLAIN and x.ndim == 4 for x in (q, k, v)):
        return None
    (b, h, n_queries, d), (_, key_heads, n_keys, dv) = q.shape, v.shape
    if not q.dtype == k.dtype == v.dtype == torch.float32 or not q.device == k.device == v.device == CPU:
        return None
    if not (k.shape == (b, key_heads, n_keys, d) and v.shape[0] == b) or 0 in q.shape or 0 in v.shape or h % key_heads:
        return None
    tracked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if b * h * n_queries * n_keys < LEAST_PAIRS or n_queries < 2:
        return None
    if max(d, dv) > binding.LARGEST_HEAD or (causal and n_queries > n_keys) or isinstance(library(), str):
        return None
    if transforming() or torch._C._len_torch_dispatch_stack() > 0 or torch.is_autocast_enabled("cpu"):
        return None
    scale = d**-0.5 if scale is None else scale
    found = _plain(q, k, v, causal, scale)
    if found is None or not tracked:
        return None if found is None else found[0]
    out: Tensor = _Plain.apply(q, k, v, causal, scale, found)
    return out


def _arguments(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor, lse: Tensor) -> Arguments:
    (b, h, n_queries, d), (_, key_heads, n_keys, dv) = q.shape, v.shape
    return Arguments(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), b=b, h=h, hkv=key_heads, nq=n_queries, nk=n_keys, d=d, dv=dv,
        qs=q.stride()[:3], ks=k.stride()[:3], vs=v.stride()[:3], scale=scale, threads=torch.get_num_threads(),
        low=0 if causal else -n_queries - n_keys, high=n_queries + n_keys, bin_q=1, bin_k=1, out=out.data_ptr(),
        lse=lse.data_ptr(),
    )  # fmt: skip


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(3) == 1 else x.contiguous() for x in tensors]


@torch.no_grad()
def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    q, k, v = _rows_contiguous(q, k, v)
    out, lse = torch.empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3])
    finite = run(library().qkv_attend, _arguments(q, k, v, causal, scale, out, lse), q, k)  # type: ignore[union-attr]
    return (out, lse) if finite else None


class _Plain(torch.autograd.Function):
    """The output that `_plain` found, with gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, found: tuple[Tensor, Tensor]
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *found)
        ctx.causal, ctx.scale = causal, scale
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (out, lse) = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        with torch.no_grad():
            q, k, v, rows = _rows_contiguous(*tensors, grad)
            grads = tuple(torch.empty(x.shape) for x in tensors)
            scores = Gradients(
                call=_arguments(q, k, v, ctx.causal, ctx.scale, out, lse), grad_out=rows.data_ptr(),
                gs=rows.stride()[:3], **{f"d{name}": x.data_ptr() for name, x in zip("qkv", grads, strict=True)},
            )  # fmt: skip
            run(library().qkv_gradients, scores, q, k)  # type: ignore[union-attr]
        return *kernel_once_differentiable("native", grads, (*tensors, grad)), None, None, None


def gradients_of(
    call: Call,
    lse: Tensor,
    *,
    out: Tensor | None = None,
    grad: Tensor | None = None,
    arguments: Mapping[str, Any] | None = None,
    **more: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients of q, k, v and the sink, in float32; v's only if there is one of the output.

    Args:
        call: the attention call.
        lse: its log-sum-exp, (b, h, nq), perhaps over more keys than those of the call.
        out: its output, if `grad` is given.
        grad: the gradient of the output.
        arguments: fields of `binding.Arguments` for the queries that count and the ranges of masses.
        **more: fields of `binding.Gradients`: gradients of the lse and of statistics, and the statistics.
    """
    made = prepared(call)
    tensors = {"lse": lse.float().contiguous(), "out": None if out is None else out.float().contiguous()}
    if grad is not None:
        grad = grad.float()
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
    given = {name: x.float().contiguous() for name, x in more.items() if x is not None}
    found = {name: torch.empty(x.shape) for name, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    if grad is None:
        del found["v"]
    if call.sink is not None:
        found["sink"] = torch.empty(call.q.shape[:3])
    scores = Gradients(
        call=made.with_tensors(**tensors, **(arguments or {})),
        grad_out=None if grad is None else grad.data_ptr(),
        gs=(0, 0, 0) if grad is None else grad.stride()[:3],
        cap=_cap(call),
        **{name: x.data_ptr() for name, x in given.items()},
        **{"dsinks" if name == "sink" else f"d{name}": x.data_ptr() for name, x in found.items()},
    )
    run(library().qkv_gradients, scores, call.q, call.k)  # type: ignore[union-attr]
    if call.sink is not None:
        found["sink"] = found["sink"].sum_to_size(call.sink.shape)
    return found


def _cap(call: Call) -> float:
    """The soft cap of a call in base 2, or 0."""
    last = call.biases[-1] if call.biases else None
    return last.cap * math.log2(math.e) / call.normalizer.temperature if isinstance(last, SoftCap) else 0.0


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of q, k, v of a call over a subset of the keys, given `whole`, the result over all keys; float32.

    `whole` may include other keys and a sink; `grad` and `grad_lse` are its gradients. `wanted` is a subset of q, k, v.
    """
    return gradients_of(detached(call), whole.lse, out=whole.out, grad=grad, grad_lse=grad_lse)


class _Attention(torch.autograd.Function):
    """The output and log-sum-exp that `forward` found, with gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, found: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, sink, *found)
        ctx.call = detached(call)
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return (None,) * 6
        with torch.no_grad():
            call = replace(ctx.call, q=q, k=k, v=v, sink=sink)
            found = {"v": torch.zeros_like(v)} | gradients_of(call, lse, out=out, grad=grad, grad_lse=grad_lse)
            inputs = {"q": q, "k": k, "v": v, "sink": sink}
            grads = tuple(None if x is None else found[name].to(x.dtype) for name, x in inputs.items())
        return (
            *kernel_once_differentiable("native", grads, [x for x in (q, k, v, sink, grad, grad_lse) if x is not None]),
            None,
            None,
        )
