"""`attend` for compilers: `torch.ops.qkv.attention`, an operator of torch, so that they need not trace the kernels.

The native library serves it, and other kernels where the library cannot. It has shapes for fake and meta tensors, and a
gradient, so torch.compile and torch.export keep it in one graph. The first use of `qkv.attend` registers it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qkv.compat import autocast_dtype
from qkv.engine.call import Call, at_least_float32, zero_masked_nonfinite
from qkv.kernels import attention, native, tiled
from qkv.kernels.native_call import is_finite
from qkv.masks import Dense, Grid, Mask, Window
from qkv.masks.convert import parts
from qkv.native import LIBRARY
from qkv.normalizers import Softmax
from qkv.partial import Partial
from qkv.scores import Dot

COMPILED = LIBRARY.exists()
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? sink, SymInt? before, SymInt? after, float scale"
LEAST_PAIRS = 2**21  # with fewer pairs of a query and a key, the operator costs more than the library gains on torch


def _call(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, sink: Tensor | None, before: int | None, after: int | None,
    scale: float,
) -> Call:  # fmt: skip
    far = q.shape[2] + k.shape[2]
    mask: Mask | None = None
    if before is not None or after is not None:
        mask = Window(far if before is None else before + 1, far if after is None else after)
    if keep is not None:
        padding = Dense(keep[:, None, None])
        mask = padding if mask is None else mask & padding
    return Call.of(q, k, v, mask, (), Dot(scale), Softmax(sink=sink))


@torch.library.custom_op(
    "qkv::attention", mutates_args=(), device_types="cpu", schema=f"({INPUTS}) -> (Tensor, Tensor)"
)
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, sink: Tensor | None, before: int | None, after: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, nq, dv) and the log-sum-exp (b, h, nq) of softmax attention.

    `keep` (b, nk) or (1, nk) is True where a key is not padding; `sink` are logits of attention sinks, (h,) or (b, h,
    nq). `before` and `after` are how many keys before and after its own position a query may attend to; all if None.
    The last query is at the last key.
    """
    with torch.no_grad():
        result = attention(_call(q, k, v, keep, sink, before, after, scale))
        assert result.lse is not None
        return result.out.contiguous(), result.lse.contiguous()


@attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=at_least_float32(q.dtype))


@torch.library.custom_op(
    "qkv::attention_gradients", mutates_args=(), device_types="cpu",
    schema=f"(Tensor grad, Tensor grad_lse, Tensor out, Tensor lse, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def attention_gradients(
    grad: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v and the sink (empty without one), given those of the results of `attention`."""
    q, k, v, _, sink, *_ = arguments
    with torch.no_grad():
        call = _call(*arguments)
        by_library = native.unsupported_reason(call) is None and is_finite(call)
        if not by_library and call.mask is not None:
            q, _ = zero_masked_nonfinite(q, k[:, :, :0], call.mask, call.grid, call.normalizer)
            call = _call(q, *arguments[1:])
        names = {"q", "k", "v", "sink"} - ({"sink"} if sink is None else set())
        with _autograd():
            gradients = (native if by_library else tiled).gradients(call, Partial(out, lse), grad, grad_lse, names)
        inputs = {"q": q, "k": k, "v": v, "sink": q.new_empty(0) if sink is None else sink}
        dq, dk, dv, dsink = (
            gradients[name].to(x.dtype).reshape(x.shape).contiguous() if name in gradients else x
            for name, x in inputs.items()
        )
        return dq, dk, dv, dsink


@contextmanager
def _autograd() -> Iterator[None]:
    """Let autograd run inside an operator, where torch excludes it: the tiled kernel finds its gradients by it."""
    key = torch._C.DispatchKey.AutogradFunctionality
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


@attention_gradients.register_fake
def _(
    grad: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, _, sink, *_ = arguments
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _save(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, keep, sink, *ctx.options = inputs
    ctx.save_for_backward(*output, q, k, v, keep, sink)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    saved, options = ctx.saved_tensors, ctx.options
    dq, dk, dv, dsink = torch.ops.qkv.attention_gradients(grad, grad_lse, *saved, *options)
    return dq, dk, dv, None, None if saved[-1] is None else dsink, None, None, None


attention_operator.register_autograd(_backward, setup_context=_save)


def is_faster(q: object, k: object) -> bool:
    """Return whether compiled code computes a plain or causal call faster by the operator than by torch's SDPA."""
    if not (COMPILED and isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4):
        return False
    if torch.compiler.is_exporting() or q.dtype != torch.float32 or autocast_dtype(q) is not None:
        return False
    return q.shape[2] > 1 and q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] >= LEAST_PAIRS


def traced(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, sink: Tensor | float | None, scale: float | None,
) -> Tensor | None:  # fmt: skip
    """Return the output of the operator, or None if its arguments cannot describe the call."""
    if not all(isinstance(x, Tensor) and x.ndim == 4 and x.device.type in ("cpu", "meta") for x in (q, k, v)):
        return None
    (b, h, n_queries, d), (_, key_heads, n_keys, _) = q.shape, v.shape
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point() or h % max(key_heads, 1):
        return None
    if k.shape != (b, key_heads, n_keys, d) or v.shape[0] != b or 0 in q.shape or 0 in v.shape:
        return None
    if (dtype := autocast_dtype(q)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-2] != 1:
            return None
        mask = Dense(mask)
    grid = Grid.of(n_queries, n_keys, b, h, q.device)
    if mask is not None:
        if any(factor.band is None and type(factor) is not Dense for factor in mask.factors()):
            return None
        mask.check(grid)
    (low, high), keep, others = parts(mask, grid)
    if others or low > 0 or high < 0:
        return None
    if sink is not None and not isinstance(sink, Tensor):
        sink = q.new_full((h,), float(sink), dtype=torch.float32)
    before, after = (None if math.isinf(x) else math.floor(x) for x in (high, -low))
    out: Tensor = torch.ops.qkv.attention(q, k, v, keep, sink, before, after, d**-0.5 if scale is None else scale)[0]
    return out
