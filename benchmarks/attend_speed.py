"""Times of `attend` compared with torch's SDPA and with FlexAttention compiled for CPU."""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import qkv
from benchmarks.mechanisms.run import slope
from benchmarks.mechanisms.timing import alone, alternating, median_ratio
from benchmarks.timing import THREADS

HEADS, DIM = 6, 64


def tensors(n: int, *, grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, n, DIM, requires_grad=grad) for _ in range(3)]


def window(processes: int = 5) -> dict[str, Any]:
    """`Window(256)` / FlexAttention compiled, forward, float32, 8,192 tokens: median over fresh processes.

    Where a process happens to get its memory moves the ratio by a tenth either way, more than repeats within one do.
    """
    runs = [alone("benchmarks.attend_speed") for _ in range(processes)]
    return {
        "largest difference": max(run["difference"] for run in runs),
        "time: Window(256) / FlexAttention": statistics.median(run["flex"] for run in runs),
        "time: Window(256) / dense causal SDPA": statistics.median(run["sdpa"] for run in runs),
        "runs": runs,
    }


def window_in_this_process(n: int = 8192, size: int = 256, repeats: int = 9) -> dict[str, Any]:
    """Ratios of `Window(size)` to FlexAttention with a block mask, and to dense causal SDPA."""
    torch.set_num_threads(THREADS)
    q, k, v = tensors(n)
    flex = torch.compile(flex_attention)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i - j < size)

    blocks = create_block_mask(near, None, None, n, n, device="cpu")
    with torch.no_grad():
        error = (flex(q, k, v, block_mask=blocks) - qkv.attend(q, k, v, mask=qkv.masks.Window(size))).abs().max()
        times = alternating(
            {
                "flex": lambda: flex(q, k, v, block_mask=blocks),
                "attend": lambda: qkv.attend(q, k, v, mask=qkv.masks.Window(size)),
                "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
            },
            repeats,
        )
    ratios = {name: median_ratio(times, "attend", name) for name in ("flex", "sdpa")}
    return {"difference": float(error), **ratios, "seconds": times}


def window_training(size: int = 256, repeats: int = 5) -> dict[str, Any]:
    """Forward and backward of `Window(256)`: time against length, fitted exponent (1 is O(n·w))."""
    torch.set_num_threads(THREADS)
    medians = {}
    for n in (4096, 8192, 16384, 32768):
        q, k, v = tensors(n, grad=True)

        def step(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            out = qkv.attend(q, k, v, mask=qkv.masks.Window(size))
            assert isinstance(out, torch.Tensor)
            out.sum().backward()

        times = sorted(alternating({"step": step}, repeats)["step"])
        medians[n] = times[len(times) // 2]
    return {"seconds": medians, "exponent of time": slope(medians)}  # type: ignore[arg-type]


def masks(n: int = 4096, repeats: int = 5) -> dict[str, Any]:
    """Masks that need several calls of torch's kernel / dense causal: forward, float32."""
    torch.set_num_threads(THREADS)
    q, k, v = tensors(n)
    m = qkv.masks
    documents = m.Document(torch.arange(n) // 700)
    asked = {
        "causal": m.Causal(),
        "prefix | causal": m.Prefix(100) | m.Causal(),
        "document & causal": documents & m.Causal(),
        "causal & right padding": m.Causal() & m.Padding([n - 96]),
        "causal & left padding": m.Causal() & m.Padding([n - 96], side="left"),
        "window & document": m.Window(256) & documents,
        "not causal": ~m.Causal(),
        "boolean tensor": torch.ones(n, n, dtype=torch.bool).tril(),
    }
    with torch.no_grad():
        jobs = {name: lambda mask=mask: qkv.attend(q, k, v, mask=mask) for name, mask in asked.items()}
        seconds = alternating(jobs, repeats)
    ratios = {name: median_ratio(seconds, name, "causal") for name in asked if name != "causal"}
    return {"time: mask / dense causal": ratios, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(window_in_this_process()))
