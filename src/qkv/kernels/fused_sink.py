"""A Triton kernel that merges an attention sink into an output and its log-sum-exp, in one launch and in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_sink(
    out, lse, sink, heads, n_queries, d,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln, stride_sb, stride_sh, stride_sn,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of one head by e^lse / (e^lse + e^sink), and replace lse by the logarithm of that sum."""
    head = tl.program_id(1)
    batch, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    rows, of_d = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, D)
    inside = rows < n_queries
    at_lse = lse + batch * stride_lb + h * stride_lh + rows * stride_ln
    keys = tl.load(at_lse, mask=inside, other=0.0)
    logit = tl.load(sink + batch * stride_sb + h * stride_sh + rows * stride_sn, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(keys, logit)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)  # ∞ − ∞ would be NaN
    of_keys = tl.exp(keys - top)
    total = of_keys + tl.exp(logit - top)
    none = total == 0.0  # no visible key, and no sink
    total = tl.where(none, 1.0, total)
    tl.store(at_lse, tl.where(none, float("-inf"), top + tl.log(total)), mask=inside)
    at_out = out + batch * stride_ob + h * stride_oh + rows[:, None] * stride_on + of_d[None, :]
    used = inside[:, None] & (of_d[None, :] < d)
    numbers = tl.load(at_out, mask=used, other=0.0).to(tl.float32)
    tl.store(at_out, (numbers * (of_keys / total)[:, None]).to(out.dtype.element_ty), mask=used)
