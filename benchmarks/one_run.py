"""One forward of a GPT-2-shaped model in this process alone: plain, profiled, or eager with statistics from weights.

python -m benchmarks.one_run plain|profile|eager TOKENS LAYERS [REPEATS]   prints JSON: seconds, peak, base (bytes)
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import Tensor

from benchmarks.mechanisms.timing import resident
from benchmarks.timing import THREADS
from qkv.models.loading import random_gpt2
from qkv.runs.run import profile

HEADS = 6


def inputs(tokens: int) -> Tensor:
    return torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(0))


def plain(model: torch.nn.Module, ids: Tensor) -> None:
    with torch.no_grad():
        model(ids)


def profiled(model: torch.nn.Module, ids: Tensor) -> None:
    profile(model, ids, progress=False)


def from_weights(model: torch.nn.Module, ids: Tensor) -> None:
    """The same statistics without qkv: form all weights, and reduce them layer by layer."""
    n = ids.shape[1]
    position = torch.arange(n)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
        for a in attentions:
            torch.special.entr(a).sum(-1)
            a.sum(-2)
            _ = a[..., 0], a.diagonal(0, -2, -1), a.diagonal(-1, -2, -1), a.diagonal(1, -2, -1)
            mean = a @ position.float()
            _ = position - mean  # distance, causal
            (a @ position.float().square() - mean.square()).clamp(min=0).sqrt()
            1 / a.square().sum(-1)
            a.tril(8).triu(-8).sum(-1)


def main() -> None:
    job, tokens, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    repeats = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    torch.set_num_threads(THREADS)
    model = random_gpt2(tokens, layers=layers, heads=HEADS)
    if job == "eager":
        model.set_attn_implementation("eager")  # type: ignore[operator]
    run = {"plain": plain, "profile": profiled, "eager": from_weights}[job]
    run(model, inputs(256))  # warm-up: lazy imports are not what we measure
    base, seconds = resident("VmRSS"), []
    ids = inputs(tokens)
    for _ in range(repeats):
        started = time.perf_counter()
        run(model, ids)
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": statistics.median(seconds), "peak": resident(), "base": base}))


if __name__ == "__main__":
    main()
