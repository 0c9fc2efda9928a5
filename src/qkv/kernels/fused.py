"""The fused kernel: torch's FlashAttention (bfloat16, float16) and memory-efficient attention (float32) on CUDA.

Both return the log-sum-exp, so a sink merges exactly and the backward of torch gets the whole row's output and
log-sum-exp. One launch serves all heads and batch items. The operators are private to torch: on the first call of a
dtype on a card, a small call and its gradients are compared with the formula, and the kernel is refused if they differ.
(Dao 2023, arXiv:2307.08691; Rabe & Staats 2021, arXiv:2112.05682.)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from qkv.engine.call import Call
from qkv.engine.sizes import GPUS, INTERPRETED, LARGEST_HEAD, has_triton
from qkv.engine.transforms import Need, Results, differentiable_call, unmet
from qkv.masks import Causal, Mask, Window
from qkv.normalizers import Softmax
from qkv.partial import Partial, sink_gradient
from qkv.results import Result
from qkv.scores import Dot

MULTIPLE = 8  # head dimensions are padded to a multiple of it
CAUSAL_FROM_BOTTOM_RIGHT = 2  # torch's number for it in `_efficient_attention_forward`
EVERYTHING = (-math.inf, math.inf)


OFFERS: tuple[Need, ...] = ("gradients",)


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    q, v, device = call.q, call.v, call.q.device
    band = EVERYTHING if call.mask is None else call.mask.band
    if device.type not in GPUS:
        return f"tensors are on {device.type}; it calls torch's CUDA kernels"
    if (why := unmet(call, OFFERS)) is not None:
        return why
    if band is None:
        return f"the mask {type(call.mask).__name__} is neither causal nor a window"
    if band != EVERYTHING and (q.shape[2] > call.k.shape[2] or not band[0] <= 0 <= band[1]):
        return "some query may have no visible key, for which torch's kernels give no defined result"
    if not q.dtype == call.k.dtype == v.dtype or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"queries are {q.dtype} and values {v.dtype}, expected float32, bfloat16 or float16"
    if q.dtype == torch.float32 and band not in (EVERYTHING, (0, math.inf)):
        return "torch's float32 kernel has no windows"
    if max(q.shape[3], v.shape[3]) > LARGEST_HEAD - MULTIPLE:  # a gradient of the lse needs one dimension more
        return f"the head dimension is {max(q.shape[3], v.shape[3])}, more than {LARGEST_HEAD - MULTIPLE}"
    return _wrong(device, q.dtype)


def forward(call: Call) -> Result:
    """Compute attention in linear memory, differentiable in q, k, v and the sink, and through the lse."""
    return Result(*differentiable_call(call, _compute, _backward, "fused"))


def _compute(call: Call) -> tuple[Results, Results]:
    """Return out and lse, including the sink, and what the backward needs besides."""
    q, k, v, scale, band = _prepared(call)
    out, lse, *random = _attend(q, k, v, scale, band)
    part = Partial(out, lse) if call.sink is None else _with_sink(out, lse, call.sink)
    return (part.out[..., : call.v.shape[3]], part.lse), tuple(random)


def with_key_lse(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Compute out, the log-sum-exp of the keys alone, and that with the sink, without gradients."""
    q, k, v, scale, band = _prepared(call)
    out, key_lse, *_ = _attend(q, k, v, scale, band)
    part = Partial(out, key_lse) if call.sink is None else _with_sink(out, key_lse.clone(), call.sink)
    return part.out[..., : call.v.shape[3]], key_lse.contiguous(), part.lse.contiguous()


def _backward(call: Call, results: Results, random: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
    (out, lse), (grad, grad_lse) = results, grads
    q, k, v, scale, band = _prepared(call)
    d, slope = q.shape[3], torch.zeros_like(out) if grad is None else grad
    tensors = [_pad(x, d) for x in (slope, q, k, v, out)]
    if grad_lse is not None:
        # More dimensions turn the kernel's rowsum(grad·out) into rowsum(grad·out) − grad_lse, which is exactly
        # the contribution of a gradient of the log-sum-exp; q, k and v are 0 there.
        tensors = [_pad(x, d + MULTIPLE) for x in tensors]
        tensors[0][..., d], tensors[4][..., d] = grad_lse.to(slope.dtype), -1
    dq, dk, dv = _gradients(tensors, lse, random, scale, band)
    dq = dq if call.scale > 0 else dq * _sign(call.scale)
    gradients = {"q": dq[..., : call.q.shape[3]], "k": dk[..., : call.k.shape[3]], "v": dv[..., : call.v.shape[3]]}
    if call.sink is not None:
        gradients["sink"] = sink_gradient(call.sink, Partial(out, lse), slope, grad_lse)
    return gradients


def _prepared(call: Call) -> tuple[Tensor, Tensor, Tensor, float, tuple[float, float]]:
    """Return queries, keys and values of one head dimension, the scale and the band, as torch's kernels take them."""
    scale, band = call.scale, EVERYTHING if call.mask is None else call.mask.band
    size = -(-max(call.q.shape[3], call.v.shape[3]) // MULTIPLE) * MULTIPLE
    q, k, v = (_pad(x, size) for x in (call.q, call.k, call.v))
    if scale <= 0:  # the kernels find the maximum of a row before they multiply by the scale
        q, scale = q * _sign(scale), abs(scale) or 1.0
    assert band is not None
    return q, k, v, scale, band


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _pad(x: Tensor, size: int) -> Tensor:
    x = x if x.shape[3] == size else torch.nn.functional.pad(x, (0, size - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()


SINK_ROWS = 16  # queries for each program of the kernel that merges a sink


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Partial:
    """Return the result with a sink merged into it, in place: one launch if Triton is there."""
    if not (has_triton() and (out.is_cuda or INTERPRETED)):
        return Partial(out, lse).with_sink(sink, in_place=True)
    b, h, n_queries, d = out.shape
    logits = sink.expand(b, h, n_queries)
    _sink_kernel()[(-(-n_queries // SINK_ROWS), b * h)](
        out, lse, logits, h, n_queries, d, *out.stride()[:3], *lse.stride(), *logits.stride(),
        ROWS=SINK_ROWS, D=1 << (d - 1).bit_length(),
    )  # fmt: skip
    return Partial(out, lse)


@functools.cache
def _sink_kernel() -> Any:
    from qkv.kernels.fused_sink import merge_sink

    return merge_sink


# --- torch's private operators, with (b, n, h, d) as they take it -----------------------------------------------------


def _windows(band: tuple[float, float]) -> dict[str, int]:
    """Return FlashAttention's names of a band: how many keys a query sees on each side; all if a name is absent."""
    sides = {"window_size_left": band[1], "window_size_right": -band[0]}
    return {} if band == (0, math.inf) else {side: int(n) for side, n in sides.items() if n != math.inf}


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, band: tuple[float, float]) -> tuple[Tensor, ...]:
    """Return out, lse, and what the backward needs besides."""
    causal, n_queries, n_keys = band == (0, math.inf), q.shape[2], k.shape[2]
    if q.dtype == torch.float32:
        k, v = _repeated(q, k, v)
        out, lse, *random = _OPERATORS["efficient"](
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, None, n_queries, n_keys, 0.0,
            CAUSAL_FROM_BOTTOM_RIGHT if causal else 0, True, scale=scale,
        )[:4]  # fmt: skip
        return out.transpose(1, 2), lse[..., :n_queries], *random
    out, lse, *random = _OPERATORS["flash"](
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, n_queries, n_keys, 0.0, causal, False, scale=scale,
        **_windows(band),
    )[:4]  # fmt: skip
    return out.transpose(1, 2), lse, *random


def _gradients(
    tensors: list[Tensor], lse: Tensor, random: Results, scale: float, band: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v; `tensors` are the gradient of the output, q, k, v and the output."""
    grad, q, k, v, out = tensors
    causal, n_queries, (_, key_heads, n_keys, _) = band == (0, math.inf), q.shape[2], k.shape
    if q.dtype == torch.float32:
        keys, values = _repeated(q, k, v)
        lse = torch.nn.functional.pad(lse, (0, -n_queries % 32), value=math.inf)  # as the forward aligns it
        grads = _OPERATORS["efficient backward"](
            *(x.transpose(1, 2) for x in (grad, q, keys, values)), None, out.transpose(1, 2), None, None, n_queries,
            n_keys, lse, 0.0, *random, CAUSAL_FROM_BOTTOM_RIGHT if causal else 0, False, scale=scale,
        )[:3]  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk.unflatten(1, (key_heads, -1)).sum(2), dv.unflatten(1, (key_heads, -1)).sum(2)
    grads = _OPERATORS["flash backward"](
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse.contiguous(), None, None, n_queries, n_keys, 0.0,
        causal, *random, scale=scale, **_windows(band),
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values for every query head, which the float32 kernel needs."""
    share = q.shape[1] // k.shape[1]
    return (k, v) if share == 1 else (k.repeat_interleave(share, 1), v.repeat_interleave(share, 1))


_OPERATORS: dict[str, Any] = {  # None for one that this torch lacks: then the comparison below refuses the kernel
    "flash": getattr(torch.ops.aten, "_flash_attention_forward", None),
    "flash backward": getattr(torch.ops.aten, "_flash_attention_backward", None),
    "efficient": getattr(torch.ops.aten, "_efficient_attention_forward", None),
    "efficient backward": getattr(torch.ops.aten, "_efficient_attention_backward", None),
}


@functools.cache
def _wrong(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what is wrong with torch's kernels for a dtype on a card, found by a small call; None if they are right."""
    problem = difference(device, dtype)
    return None if problem is None else f"torch's fused kernels for {dtype} on this card are not usable: {problem}"


ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference of an output or a gradient of about 1; a wrong alignment or scale makes one of 0.1 or more."""


def difference(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what first differs from the formula for each mask, with grouped heads, a sink and a gradient of the lse."""
    masks: list[Mask | None] = [None, Causal()] + ([] if dtype == torch.float32 else [Window(6), Window(8, ahead=3)])
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():  # in any caller's context
        for mask in masks:
            generator = torch.Generator().manual_seed(0)
            q, k, v = (
                torch.randn(2, heads, n, 16, generator=generator).to(device, dtype).requires_grad_()
                for heads, n in ((4, 37), (2, 45), (2, 45))
            )
            sink = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device, requires_grad=True)
            try:
                result = forward(Call.of(q, k, v, mask, None, Dot(0.3), Softmax(sink=sink)))
                got = _with_gradients(*result, q, k, v, sink)
            except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
            want = _with_gradients(*_formula(q, k, v, sink, 0.3, mask), q, k, v, sink)
            for name, one, other in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, want, strict=True):
                off = float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1))
                if not off <= ALLOWED[dtype]:
                    return f"{name} is off by {off:.2g} for the mask {mask}"
    return None


def _with_gradients(out: Tensor, lse: Tensor, *of: Tensor) -> list[Tensor]:
    """Return the output, lse and the gradients of a loss that depends on both."""
    slope = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    loss = (out * slope).sum() + (lse * torch.linspace(0, 1, lse.shape[2], device=lse.device).to(lse.dtype)).sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, of))]


def _formula(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, scale: float, mask: Mask | None) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp in float64, with all scores formed."""
    share = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = scale * q.double() @ keys.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask.dense(q.shape[2], k.shape[2]).to(q.device), -math.inf)
    lse = torch.logaddexp(scores.logsumexp(-1), sink.double()[:, None].expand(scores.shape[:3]))
    return torch.exp(scores - lse[..., None]) @ values, lse
