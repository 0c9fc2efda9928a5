"""Block-sparse flash attention on CPU: torch's fused kernel, called on the non-empty blocks of a mask.

The stock kernel computes dense, causal or tensor-masked attention and returns the log-sum-exp. A mask is decomposed
into few rectangular calls: full rectangles need no mask tensor, repeated patterns (a sliding window) become one call
over strided views, and the partial results merge exactly. The backward runs over the same blocks: the gradient of a
block is exact because the stock backward gets the *global* output and log-sum-exp. (Dao 2023, arXiv:2307.08691; the
identities are in docs/design.md.)
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from qkv._engine.call import Call, Result, at_least_float32
from qkv._engine.tiles import all_finite, zero_masked_keys
from qkv._engine.transforms import REASON, kernel_once_differentiable, transformed, transforming
from qkv.biases import Additive
from qkv.kernels.flash.blocks import DenseBlock, GatheredBlock, ScratchBuffer
from qkv.kernels.flash.decompose import RowBlock, decompose
from qkv.masks import Grid
from qkv.partial import Partial, merge, sink_gradient

Decompositions = list[list[RowBlock]]

SHORT = 64  # with fewer keys, the stock kernel may return 0 for a query that is NaN or infinite


def unsupported_reason(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    if call.q.device.type != "cpu":
        return f"tensors are on {call.q.device.type}; it calls torch's CPU kernel"
    if not _stock_kernel_works():
        return f"torch {torch.__version__} lacks the flash kernel for CPU that it calls"
    if call.dropout_p:
        return "dropout acts on weights, which it never forms"
    if not call.normalizer.has_lse:
        return f"its weights are a softmax, not {type(call.given.normalizer).__name__}"
    if call.q.dtype != call.v.dtype:
        return f"the score projects queries to {call.q.dtype}, but values are {call.v.dtype}"
    if call.pairwise is not None:
        return f"the score {type(call.pairwise).__name__} is not a product of query and key"
    if call.reshaped is not None:
        return f"the bias {type(call.reshaped).__name__} is not additive"
    if call.values is not None:
        return "it has no values that depend on the distance"
    if torch.is_grad_enabled() and any(x.requires_grad for bias in call.biases for x in bias.tensors().values()):
        return "the stock kernel has no gradient for a bias"
    if transformed(call):
        return REASON
    return call.untracked


def forward(call: Call) -> Result:
    """Attention in memory linear in the sequence, differentiable in q, k, v, the sink, and through the lse."""
    d, dv = call.q.shape[3], call.v.shape[3]
    q, k, v = (_pad(x, max(d, dv)) for x in (call.q, call.k, call.v))  # the stock kernel has one head dimension
    if call.factor <= 0:  # the stock causal kernel masks before scaling: −inf · 0 is NaN, −inf · −1 is +inf
        q, call = q * _sign(call), replace(call, factor=abs(call.factor) or 1.0)
    sink = call.sink
    if call.needs_grad:
        part = Partial(*_Flash.apply(q, k, v, sink, call))
    else:
        part, _ = _forward(q, k, v, sink, call, training=False)
    return Result(part.out[..., :dv], part.lse)


def _sign(call: Call) -> int:
    """Sign of the factor of q·k: −1, 0 or 1. Queries can be multiplied by it without rounding."""
    return (call.factor > 0) - (call.factor < 0)


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor | None:
    """Dot-product softmax attention by one call of torch's SDPA, or None if `forward` would need more than that.

    It only checks whether it applies; `Call.of` reports wrong arguments.
    """
    if not all(isinstance(x, Tensor) and x.ndim == 4 and x.device.type == "cpu" for x in (q, k, v)):
        return None
    (b, h, n_queries, d), (_, hkv, n_keys, _) = q.shape, k.shape
    fits = k.shape == v.shape and k.shape[0] == b and k.shape[3] == d and h % max(hkv, 1) == 0
    if not fits or 0 in q.shape or 0 in k.shape or not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        return None
    if (causal and n_queries not in (1, n_keys)) or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    compiling = torch.compiler.is_compiling()
    if not compiling and transforming():
        return None
    if not compiling and (not _stock_kernel_works() or (n_keys < SHORT and not all_finite(q))):
        return None
    causal = causal and n_queries > 1
    attention = torch.nn.functional.scaled_dot_product_attention
    if n_queries == 1 and h != hkv:  # the query heads of a group become queries of one key head
        return attention(q.reshape(b, hkv, h // hkv, d), k, v, scale=scale).reshape(b, h, 1, d)
    return attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=h != hkv)


def _pad(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


# --- the stock kernel: the only use of torch's private operators ------------------------------------------------------


@functools.cache
def _stock_kernel_works() -> bool:
    """Whether this build of torch has the operators, and they behave as this file assumes."""
    try:
        q, k = torch.ones(1, 1, 2, 8), torch.arange(32.0).view(1, 1, 4, 8) / 32
        out, lse = _stock(q, k, k, causal=False, scale=1.0, added=None)
        grads = _stock_backward(out, q, k, k, out, lse, causal=False, scale=1.0, added=None)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(torch.allclose(lse, k.sum(-1).logsumexp(-1, keepdim=True).expand(1, 1, 2))) and len(grads) == 3


def _stock(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(*map(_dense, (q, k, v)), 0.0, causal, attn_mask=added, scale=scale)
    return out, lse


def _stock_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, causal: bool, scale: float, added: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(*map(_dense, (grad, q, k, v, out)), lse, 0.0, causal, attn_mask=added, scale=scale)


def _dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, which the operators assume without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --- forward and backward ---------------------------------------------------------------------------------------------


class _Flash(torch.autograd.Function):
    """out and lse, including the sink, for q, k, v with equal head dimensions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        part, decompositions = _forward(q, k, v, sink, call, training=True)
        ctx.save_for_backward(q, k, v, sink, part.out, part.lse)
        ctx.decompositions, ctx.call = decompositions, call
        ctx.set_materialize_grads(False)
        return part.out, part.lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return None, None, None, None, None
        with torch.no_grad():
            slope = torch.zeros_like(out) if grad is None else grad
            grad_sink = None
            if sink is not None:
                grad_sink = sink_gradient(sink, Partial(out, lse), slope, grad_lse)
            grads = _gradients(slope, grad_lse, q, k, v, Partial(out, lse), ctx.decompositions, ctx.call)
            given = (*(g.to(q.dtype) for g in grads), grad_sink)
        return *kernel_once_differentiable(
            "flash", given, [x for x in (q, k, v, sink, grad, grad_lse) if x is not None]
        ), None


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of q, k, v of a call over a subset of the keys, given `whole`, the result over all keys; ≥ float32.

    `whole` may include other keys and a sink; `grad` and `grad_lse` are its gradients. `wanted` is a subset of q, k, v.
    """
    d, dv = call.q.shape[3], call.v.shape[3]
    q, k, v, out, grad = (_pad(x, max(d, dv)) for x in (call.q, call.k, call.v, whole.out, grad))
    sign = _sign(call)  # as in `forward`
    if sign != 1:
        q, call = q * sign, replace(call, factor=abs(call.factor) or 1.0)
    decompositions = [list(row_blocks) for row_blocks in decompose(call, training=True)]
    dq, dk, dv_ = _gradients(grad, grad_lse, q, k, v, Partial(out, whole.lse), decompositions, call)
    return {"q": dq[..., :d] * sign, "k": dk[..., :d], "v": dv_[..., :dv]}


def _gradients(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, whole: Partial,
    decompositions: Decompositions, call: Call,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v with equal head dimensions, in float32 or better."""
    d, out = q.shape[3], whole.out
    if grad_lse is not None:
        # An extra dimension turns the kernel's rowsum(grad·out) into rowsum(grad·out) − grad_lse, which is exactly the
        # contribution of a gradient of the log-sum-exp; q, k and v are 0 there.
        q, k, v = (_pad(x, d + 1) for x in (q, k, v))
        out = torch.cat([out, -torch.ones_like(out[..., :1])], -1)
        grad = torch.cat([grad, grad_lse[..., None].to(grad.dtype)], -1)
    dq, dk, dv = _fold_backward(grad, q, k, v, out, whole.lse, decompositions, call)
    return dq[..., :d], dk[..., :d], dv[..., :d]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, *, training: bool
) -> tuple[Partial, Decompositions]:
    """Attention over all blocks, including the sink; and the decomposition."""
    decompositions = [list(row_blocks) for row_blocks in decompose(call, training=training)]
    part = _fold(q, k, v, decompositions, call)
    return (part if sink is None else part.with_sink(sink, in_place=True)), decompositions


def _fold(q: Tensor, k: Tensor, v: Tensor, decompositions: Decompositions, call: Call) -> Partial:
    clean, buffers = _no_nan_to_mask(decompositions, k, v), (ScratchBuffer(), ScratchBuffer())
    if any(isinstance(block[0], GatheredBlock) for row_blocks in decompositions for block in row_blocks):
        k, v = k.contiguous(), v.contiguous()
    first = decompositions[0]
    if len(decompositions) == len(first) == 1 and _covers(first[0], call.grid):
        return merge(*[_attend(part, q, k, v, call, buffers, clean=clean) for part in first[0]])
    covered = sum(block[0].rows_covered(len(q)) for block in first)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=at_least_float32(q.dtype))
    if covered < len(q) * q.shape[2]:
        out.zero_()
        lse.fill_(-torch.inf)
    for row_blocks in decompositions:
        for block in row_blocks:
            whole = merge(*[_attend(part, q, k, v, call, buffers, clean=clean) for part in block])
            if row_blocks is not first:
                whole = merge(Partial(block[0].rows_of(out), block[0].rows_of(lse)), whole, out=whole)
            block[0].put(out, whole.out)
            block[0].put(lse, whole.lse)
    return Partial(out, lse)


def _no_nan_to_mask(decompositions: Decompositions, k: Tensor, v: Tensor) -> bool:
    """Whether masked keys and values need not be zeroed: there are no mask tensors, or all entries are finite."""
    parts = itertools.chain.from_iterable(block for row_blocks in decompositions for block in row_blocks)
    return all(part.visible is None for part in parts) or all_finite(k, v)


def _covers(block: RowBlock, grid: Grid) -> bool:
    part = block[0]
    return (
        isinstance(part, DenseBlock)
        and part.count == 1
        and not part.flipped
        and part.batch == slice(None)
        and part.rows == slice(0, grid.n_queries)
    )


def _attend(
    part: DenseBlock | GatheredBlock,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    buffers: tuple[ScratchBuffer, ScratchBuffer],
    *,
    clean: bool,
) -> Partial:
    added, masked = _additive_mask(part, call)
    k, v = (_keys_or_values(part, x, buffer, clean=clean) for x, buffer in zip((k, v), buffers, strict=True))
    rows = part.rows_of(q)
    if part.size[0] == 1 and added is None and rows.shape[1] > k.shape[1]:
        # The query heads of a group become queries of one key head, so that its keys are read once.
        folded = rows.reshape(*k.shape[:2], -1, rows.shape[3])
        out, lse = _stock(folded, k, v, causal=False, scale=_scale(call), added=None)
        out, lse = out.reshape(rows.shape), lse.reshape(rows.shape[:3])
    else:
        out, lse = _stock(rows, k, v, causal=part.causal, scale=_scale(call), added=added)
    if k.shape[2] < SHORT and not all_finite(rows):
        lost = ~rows.isfinite().all(-1)
        lse = lse.masked_fill(lost, torch.nan)
        out = out.masked_fill(lost[..., None], torch.nan)
    if masked is not None:  # the stock kernel returns lse = 0 for fully masked rows
        lse = lse.masked_fill(masked, -torch.inf)
        out = out.masked_fill(masked[..., None], 0)
    return Partial(out, lse)


def _fold_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, decompositions: Decompositions, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    wide = at_least_float32(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    lse = lse.masked_fill(lse == -torch.inf, 0)  # fully masked rows: e^(−∞ − 0) = 0
    clean, buffers = _no_nan_to_mask(decompositions, k, v), (ScratchBuffer(), ScratchBuffer())
    for part in itertools.chain.from_iterable(block for row_blocks in decompositions for block in row_blocks):
        added, _ = _additive_mask(part, call)
        keys, values = (
            _keys_or_values(part, x, buffer, clean=clean) for x, buffer in zip((k, v), buffers, strict=True)
        )
        slope, queries, known, level = (part.rows_of(x) for x in (grad, q, out, lse))
        grads = _stock_backward(
            slope, queries, keys, values, known, level, causal=part.causal, scale=_scale(call), added=added
        )
        part.add_rows(dq, grads[0])
        part.add_keys(dk, grads[1])
        part.add_keys(dv, grads[2])
    return dq, dk, dv


def _keys_or_values(part: DenseBlock | GatheredBlock, x: Tensor, buffer: ScratchBuffer, *, clean: bool) -> Tensor:
    """Keys or values of a block; zero where masked for all its queries, unless everything is finite (`clean`)."""
    x = part.keys_of(x, buffer)
    return x if clean else zero_masked_keys(x, part.visible)


def _scale(call: Call) -> float:
    return call.factor / call.normalizer.temperature


def _additive_mask(part: DenseBlock | GatheredBlock, call: Call) -> tuple[Tensor | None, Bool[Tensor, "b h q"] | None]:
    """The additive mask of a block (0 or a bias where visible, −inf elsewhere), and its fully masked rows."""
    if part.pattern is not None:
        return part.pattern, None
    dtype = at_least_float32(call.q.dtype)
    added = None
    for bias in call.biases:
        assert isinstance(bias, Additive)
        tile = part.bias(bias, call.grid, dtype)
        added = tile if added is None else added + tile
    if added is not None and call.normalizer.temperature != 1:
        added = added / call.normalizer.temperature
    if part.visible is not None:
        zero = torch.zeros((), dtype=dtype) if added is None else added
        added = torch.where(part.visible, zero, -torch.inf)
    if added is None:
        return None, None
    if call.biases:  # a bias of −inf also masks
        none = (added == -torch.inf).all(-1)
        masked = none if none.any() else None
    else:
        masked = part.masked_rows
    return added.expand(*added.shape[:2], *part.size), masked
