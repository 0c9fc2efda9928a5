"""The cost of one head's attention map against a forward pass, and of a part of the map against the whole.

python -m benchmarks.map_speed [TOKENS]               100,000 unless given; writes results/map.json
python -m benchmarks.map_speed attention|picture TOKENS   once, in this process alone; prints JSON: seconds, peak, base
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from benchmarks.mechanisms.timing import alone, alternating, median_ratio, resident, timed
from benchmarks.timing import THREADS, save
from qkv.engine import Call
from qkv.kernels import attention
from qkv.masks import Causal
from qkv.statistics.maps import HeadMap
from qkv.statistics.measure import row_state

TOKENS, DIM, SIZE = 100_000, 64, (1024, 1024)


def call_of(tokens: int) -> Call:
    """One head, causal, float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, DIM, generator=generator) for _ in range(3))
    return Call.of(q, k, v, Causal())


def maps(tokens: int = TOKENS, repeats: int = 3) -> dict[str, Any]:
    """A forward pass, the whole map at 1,024², and fully visible windows, each a 16th of the previous one.

    The log-sum-exp is known beforehand, as it is when a model has run.
    """
    torch.set_num_threads(THREADS)
    call = call_of(tokens)
    found = attention(call)
    head = HeadMap(call, row_state(call, found.lse))
    windows = {
        side: (slice(tokens - side, tokens), slice(0, side)) for side in (tokens // 2, tokens // 8, tokens // 32)
    }
    jobs = {"attention": lambda: attention(call), "whole": lambda: head.pooled(size=SIZE)}
    jobs |= {f"{side} × {side}": (lambda w=w: head.pooled(w[0], w[1], SIZE)) for side, w in windows.items()}  # type: ignore[misc]
    seconds = alternating(jobs, repeats)
    per_pair = {f"{side} × {side}": statistics.median(seconds[f"{side} × {side}"]) / side**2 for side in windows}
    per_pair["whole"] = statistics.median(seconds["whole"]) / (tokens * (tokens + 1) / 2)
    memory = {job: alone("benchmarks.map_speed", job, tokens) for job in ("attention", "picture")}
    return {
        "tokens": tokens,
        "seconds": seconds,
        "time: whole picture of 1,024² / forward": median_ratio(seconds, "whole", "attention"),
        "nanoseconds per visible pair": {name: 1e9 * x for name, x in per_pair.items()},
        "memory: bytes above the idle process": {job: m["peak"] - m["base"] for job, m in memory.items()},
        "memory: of all weights, which are never there": 4 * tokens**2,
    }


def alone_here(job: str, tokens: int) -> dict[str, float]:
    """The seconds of one job, with its inputs."""
    torch.set_num_threads(THREADS)
    run = {"attention": attention, "picture": lambda c: HeadMap(c, row_state(c)).pooled(size=SIZE)}[job]
    run(call_of(512))  # warm-up: lazy imports are not what we measure
    base = resident("VmRSS")
    seconds = timed(lambda: run(call_of(tokens)))
    return {"seconds": seconds, "peak": resident(), "base": base}


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(alone_here(sys.argv[1], int(sys.argv[2]))))
        return
    result = maps(int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS)
    print(json.dumps(result, indent=1))
    print(save("map", result))


if __name__ == "__main__":
    main()
