"""The cost of profiling, compared with the plain forward and with forming the weights, and its memory by length."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.one_run import HEADS, inputs, plain, profiled, swept
from benchmarks.timing import THREADS
from qkv.bench.run import slope
from qkv.bench.timing import alone, alternating, median_ratio
from qkv.profiler.capture.models import random_gpt2

TOKENS, LAYERS = 8192, 6


def against_plain(repeats: int = 5) -> dict[str, Any]:
    """GPT-2 shape, 6 layers × 6 heads × 64, float32, 8,192 tokens: profile / plain SDPA forward, eager / profile.

    ``swept`` is a profile of what one sweep gives; what it lacks of a whole one are sinks, kinds of heads with their
    probes, geometry, hidden states and small maps.
    """
    torch.set_num_threads(THREADS)
    model, ids = random_gpt2(TOKENS, layers=LAYERS, heads=HEADS), inputs(TOKENS)
    jobs = {"plain": plain, "swept": swept, "profile": profiled}
    seconds = alternating({name: lambda job=job: job(model, ids) for name, job in jobs.items()}, repeats)  # type: ignore[misc]
    more = [(whole - part) / bare for bare, part, whole in zip(*(seconds[name] for name in jobs), strict=True)]
    del model
    memory = {job: alone("benchmarks.one_run", job, TOKENS, LAYERS) for job in ("plain", "profile", "eager")}
    return {
        "tokens": TOKENS,
        "seconds": seconds | {"eager": [memory["eager"]["seconds"]]},
        "peak": {job: m["peak"] for job, m in memory.items()},
        "time: profile / plain": median_ratio(seconds, "profile", "plain"),
        "time: swept / plain (≤ 1.6)": median_ratio(seconds, "swept", "plain"),
        "time: what a profile has beyond / plain (≤ 0.3)": statistics.median(more),
        "memory: profile / plain (≤ 1.2)": memory["profile"]["peak"] / memory["plain"]["peak"],
        "time: eager / profile (≥ 8)": memory["eager"]["seconds"] / memory["profile"]["seconds"],
        "memory: eager / profile (≥ 12)": memory["eager"]["peak"] / memory["profile"]["peak"],
    }


def against_length(lengths: tuple[int, ...] = (8192, 16384, 32768, 65536)) -> dict[str, Any]:
    """One layer, up to 65,536 tokens: memory above the idle process, and its fitted exponent."""
    runs = {n: alone("benchmarks.one_run", "profile", n, 1) for n in lengths}
    grown = {n: run["peak"] - run["base"] for n, run in runs.items()}
    return {
        "grown": grown,
        "seconds": {n: run["seconds"] for n, run in runs.items()},
        "exponent of memory (≤ 1.1)": slope(grown),
    }
