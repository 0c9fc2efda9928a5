"""Checks that torch's private CUDA kernels do what `fused` assumes: a small call and its gradients by the formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference of an output or a gradient of about 1; a wrong alignment or scale makes one of 0.1 or more."""


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float, tuple[float, float]], tuple[Tensor, Tensor]]
"""Takes q, k, v, a sink, the scale and a band; returns the output and the log-sum-exp."""


def difference(attend: Attend, device: torch.device, dtype: torch.dtype) -> str | None:
    """What of `attend` differs first, or None: for each mask, with grouped heads, a sink and a gradient of the lse."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():  # whoever calls
        return _difference(attend, device, dtype)


def _difference(attend: Attend, device: torch.device, dtype: torch.dtype) -> str | None:
    bands = [(-math.inf, math.inf), (0, math.inf)] + ([] if dtype == torch.float32 else [(0, 5), (-3, 7)])
    for band in bands:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(2, heads, n, 16, generator=generator).to(device, dtype).requires_grad_()
            for heads, n in ((4, 37), (2, 45), (2, 45))
        )
        sink = torch.tensor([[[0.5], [-1.0], [2.0], [0.0]]], device=device, requires_grad=True)
        try:
            got = _gradients(*attend(q, k, v, sink, 0.3, band), q, k, v, sink)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        want = _gradients(*_formula(q, k, v, sink, 0.3, band), q, k, v, sink)
        for name, one, other in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, want, strict=True):
            off = float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1))
            if not off <= ALLOWED[dtype]:
                return f"{name} is off by {off:.2g} for the band {band}"
    return None


def _gradients(out: Tensor, lse: Tensor, *of: Tensor) -> list[Tensor]:
    """Output, lse and the gradients of a loss that depends on both."""
    slope = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    loss = (out * slope).sum() + (lse * torch.linspace(0, 1, lse.shape[2], device=lse.device).to(lse.dtype)).sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, of))]


def _formula(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, scale: float, band: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, with all scores formed."""
    share, (n_queries, n_keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    keys, values = (x.double().repeat_interleave(share, 1) for x in (k, v))
    back = torch.arange(n_queries)[:, None] + n_keys - n_queries - torch.arange(n_keys)
    masked = ((back < band[0]) | (back > band[1])).to(q.device)
    scores = (scale * q.double() @ keys.transpose(2, 3)).masked_fill(masked, -math.inf)
    lse = torch.logaddexp(scores.logsumexp(-1), sink.double().expand(scores.shape[:3]))
    return torch.exp(scores - lse[..., None]) @ values, lse
