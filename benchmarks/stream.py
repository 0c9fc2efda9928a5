"""Time and memory per token while 100,000 tokens stream through caches that evict keys, and one that keeps all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.mechanisms.timing import resident
from benchmarks.timing import THREADS
from qkv.cache import Cache, Full, HeavyHitters, Sinks, Sliding
from qkv.models.decoder import DecoderConfig, DecoderLM

TOKENS, BLOCK, BUDGET = 100_000, 1_000, 1_024
FULL_TOKENS = 20_000  # enough to show its growth
CACHES: dict[str, Callable[[], Cache]] = {
    "Sliding": lambda: Sliding(BUDGET),
    "Sinks": lambda: Sinks(4, BUDGET - 4),
    "HeavyHitters": lambda: HeavyHitters(BUDGET // 2, BUDGET // 2),
    "Full": lambda: Full(FULL_TOKENS),
}


def model() -> DecoderLM:
    """A small Llama: 4 layers, 8 query and 2 key heads of 32."""
    torch.manual_seed(0)
    config = DecoderConfig.llama(d_model=256, layers=4, heads=8, kv_heads=2, context=FULL_TOKENS)
    return DecoderLM(config).eval()


def stream() -> dict[str, Any]:
    """Milliseconds per token, bytes in caches and bytes of the process, for each thousand tokens."""
    torch.set_num_threads(THREADS)
    lm, found = model(), {}
    for name, make in CACHES.items():
        found[name] = _run(lm, make, FULL_TOKENS if name == "Full" else TOKENS)
    flat = {}
    for name, series in found.items():
        times = series["milliseconds a token"]
        filled = times[2 * BUDGET // BLOCK :]
        half = len(filled) // 2
        flat[name] = statistics.median(filled[half:]) / statistics.median(filled[:half])
    return {"time of the second half / the first, once full": flat, "block": BLOCK, "budget": BUDGET, "caches": found}


def _run(lm: DecoderLM, make: Callable[[], Cache], tokens: int) -> dict[str, list[float]]:
    state = lm.start(cache=make)
    token = torch.zeros(1, 1, dtype=torch.long)
    series: dict[str, list[float]] = {"milliseconds a token": [], "bytes in caches": [], "resident bytes": []}
    with torch.inference_mode():
        for _ in range(tokens // BLOCK):
            started = time.perf_counter()
            for _ in range(BLOCK):
                token = lm.step(token, state).argmax(-1, keepdim=True)
            series["milliseconds a token"].append((time.perf_counter() - started) / BLOCK * 1e3)
            series["bytes in caches"].append(state.nbytes)
            series["resident bytes"].append(resident("VmRSS"))
    return series
