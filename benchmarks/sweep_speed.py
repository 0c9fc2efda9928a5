"""The cost of the sweep of `qkv.measure`, compared with a flash pass, and of its parts, compared with alternatives."""

from __future__ import annotations

from typing import Any

import torch

import qkv
from benchmarks.attend_speed import tensors
from benchmarks.timing import THREADS
from qkv._engine.call import Call
from qkv.bench.timing import alternating, median_ratio
from qkv.statistics.measure import sweep


def sweep_and_its_parts(n: int = 8192, repeats: int = 5) -> dict[str, Any]:
    """Every statistic / one causal flash pass; and per tile of 6 × 256 × 256: exp / exp2, one product / three."""
    torch.set_num_threads(THREADS)
    q, k, v = tensors(n)
    call = Call.of(q, k, v, qkv.masks.Causal())
    _, lse = qkv.attend(q, k, v, mask=qkv.masks.Causal(), return_lse=True)
    passes = alternating(
        {"flash": lambda: qkv.attend(q, k, v, mask=qkv.masks.Causal()), "sweep": lambda: sweep(call, lse)}, repeats
    )
    tile, out = torch.randn(6, 256, 256), torch.empty(6, 256, 256)
    flat, columns = tile.view(-1, 256), torch.randn(256, 3)
    parts = alternating(
        {
            "exp": lambda: [torch.exp(tile, out=out) for _ in range(50)],
            "exp2": lambda: [torch.exp2(tile, out=out) for _ in range(50)],
            "one product": lambda: [flat @ columns for _ in range(50)],
            "three products": lambda: [torch.mv(flat, c) for _ in range(50) for c in columns.T],
        },
        repeats,
    )
    return {
        "time: sweep / flash pass": median_ratio(passes, "sweep", "flash"),
        "time: exp / exp2": median_ratio(parts, "exp", "exp2"),
        "time: one product with three columns / three with one": median_ratio(parts, "one product", "three products"),
        "seconds": passes,
    }
