"""The cost of profiling, compared with the plain forward and with forming the weights, and its memory by length."""

from __future__ import annotations

import copy
from typing import Any

import torch

from benchmarks.mechanisms.run import slope
from benchmarks.mechanisms.timing import alone, alternating, median_ratio
from benchmarks.one_run import HEADS, from_weights, inputs, plain, profiled
from benchmarks.timing import THREADS
from qkv.models.loading import random_gpt2

TOKENS, LAYERS = 8192, 6


def against_plain(repeats: int = 5) -> dict[str, Any]:
    """GPT-2 shape, 6 layers × 6 heads × 64, float32, 8,192 tokens: profile / plain SDPA forward, eager / profile.

    The model has been probed before; its probes, once a model, take as long as a forward with about 1,000 tokens.
    """
    torch.set_num_threads(THREADS)
    model, ids = random_gpt2(TOKENS, layers=LAYERS, heads=HEADS), inputs(TOKENS)
    jobs = {"plain": plain, "profile": profiled}
    seconds = alternating({name: lambda job=job: job(model, ids) for name, job in jobs.items()}, repeats)  # type: ignore[misc]
    del model
    memory = {job: alone("benchmarks.one_run", job, TOKENS, LAYERS) for job in ("plain", "profile", "eager")}
    return {
        "tokens": TOKENS,
        "seconds": seconds | {"eager": [memory["eager"]["seconds"]]},
        "peak": {job: m["peak"] for job, m in memory.items()},
        "time: profile / plain": median_ratio(seconds, "profile", "plain"),
        "memory: profile / plain": memory["profile"]["peak"] / memory["plain"]["peak"],
        "time: eager / profile": memory["eager"]["seconds"] / memory["profile"]["seconds"],
        "memory: eager / profile": memory["eager"]["peak"] / memory["profile"]["peak"],
    }


def of_short_texts(repeats: int = 9) -> dict[str, Any]:
    """GPT-2's size, 12 layers × 12 heads × 64, float32: profile / plain SDPA forward, and eager with the statistics."""
    torch.set_num_threads(THREADS)
    model = random_gpt2(1024, layers=12, heads=12)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")  # type: ignore[operator]
    result: dict[str, Any] = {}
    for tokens in (32, 128, 512):
        ids = inputs(tokens)
        seconds = alternating(
            {
                "plain": lambda ids=ids: plain(model, ids),  # type: ignore[misc]
                "profile": lambda ids=ids: profiled(model, ids),  # type: ignore[misc]
                "weights": lambda ids=ids: from_weights(eager, ids),  # type: ignore[misc]
            },
            repeats,
        )
        result[f"time: profile / plain, {tokens} tokens"] = median_ratio(seconds, "profile", "plain")
        result[f"time: weights and their statistics / plain, {tokens} tokens"] = median_ratio(
            seconds, "weights", "plain"
        )
    return result


def against_length(lengths: tuple[int, ...] = (8192, 16384, 32768, 65536)) -> dict[str, Any]:
    """One layer, up to 65,536 tokens: memory above the idle process, and its fitted exponent."""
    runs = {n: alone("benchmarks.one_run", "profile", n, 1) for n in lengths}
    grown = {n: run["peak"] - run["base"] for n, run in runs.items()}
    return {
        "grown": grown,
        "seconds": {n: run["seconds"] for n, run in runs.items()},
        "exponent of memory": slope(grown),
    }
