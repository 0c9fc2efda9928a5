"""The cost of gradients of statistics, compared with the backward of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import qkv
from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.timing import THREADS

TOKENS, HEADS, DIM = 4096, 8, 64
CAUSAL = qkv.masks.Causal()


def statistics_gradients(repeats: int = 9) -> dict[str, Any]:
    """Causal softmax, 8 heads × 64, float32, 4,096 tokens: backward passes alone, and forward and backward."""
    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, generator=generator).requires_grad_() for _ in range(3))
    weights = torch.randn(3, 1, HEADS, TOKENS, generator=generator)
    slope = torch.randn(1, HEADS, TOKENS, DIM, generator=generator)

    def attention(kernel: str) -> Tensor:
        return (qkv.attend(q, k, v, mask=CAUSAL, kernel=kernel) * slope).sum()

    def statistics(*names: str) -> Tensor:
        found = qkv.measure(q, k, mask=CAUSAL, differentiable=True)
        return torch.stack([(getattr(found, n) * x).sum() for n, x in zip(names, weights, strict=False)]).sum()

    ways: dict[str, Callable[[], Tensor]] = {
        "attend": lambda: attention("auto"),
        "attend, tiled": lambda: attention("tiled"),
        "entropy": lambda: statistics("entropy"),
        "entropy + received + sink": lambda: statistics("entropy", "received", "sink"),
    }
    made = {name: run() for name, run in ways.items()}

    def backward(name: str) -> None:
        leaves = (q, k, v) if name.startswith("attend") else (q, k)
        torch.autograd.grad(made[name], leaves, retain_graph=True)

    def both(name: str) -> None:
        leaves = (q, k, v) if name.startswith("attend") else (q, k)
        torch.autograd.grad(ways[name](), leaves)

    alone = alternating({name: lambda name=name: backward(name) for name in ways}, repeats)  # type: ignore[misc]
    together = alternating({name: lambda name=name: both(name) for name in ways}, repeats)  # type: ignore[misc]
    result: dict[str, Any] = {"seconds": {"backward": alone, "both": together}}
    for name in ("entropy", "entropy + received + sink"):
        for base in ("attend", "attend, tiled"):
            result[f"time: {name} / {base}, backward"] = median_ratio(alone, name, base)
            result[f"time: {name} / {base}, forward and backward"] = median_ratio(together, name, base)
    return result
