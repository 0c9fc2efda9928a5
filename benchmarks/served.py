"""What qkv-vllm adds to requests of vLLM, in an environment that has it: python -m benchmarks.served MODEL.

Batches alternate between an engine as it is without the plugin, the plugin with no request that asks, with one that
asks, and with all. Printed are medians of the ratios of the engine process's processor time and of time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

PROMPT, NEW, REQUESTS, TURNS = 256, 64, 4, 5
ASK = {"qkv": "profile"}


def main(model: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    from qkv_vllm.plugin import RECORDER, register

    register()
    settings: dict[str, Any] = {"qkv": {}}
    llm = LLM(model, max_model_len=1024, enforce_eager=True, enable_prefix_caching=False, additional_config=settings)
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    runner = core.model_executor.driver_worker.worker.model_runner
    recorder = getattr(runner, RECORDER)
    followed = {layer.name: layer.module.impl.forward for layer in recorder.layers}
    ids = np.random.default_rng(0).integers(100, 10000, (REQUESTS, PROMPT)).tolist()

    def batch(asking: int, *, plugin: bool = True) -> tuple[float, float]:
        vars(runner).pop(RECORDER, None)
        for layer in recorder.layers:
            vars(layer.module.impl).pop("forward", None)
        if plugin:
            setattr(runner, RECORDER, recorder)
            for layer in recorder.layers:
                layer.module.impl.forward = followed[layer.name]
        params = [
            SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, extra_args=ASK if i < asking else None)
            for i in range(REQUESTS)
        ]
        began = time.process_time(), time.perf_counter()
        llm.generate([{"prompt_token_ids": x} for x in ids], params, use_tqdm=False)
        return time.process_time() - began[0], time.perf_counter() - began[1]

    jobs: dict[str, Callable[[], tuple[float, float]]] = {
        "without the plugin": lambda: batch(0, plugin=False),
        "none asks": lambda: batch(0),
        "one asks": lambda: batch(1),
        "all ask": lambda: batch(REQUESTS),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for turn in range(TURNS + 1):
        for name in [*jobs][:: 1 if turn % 2 else -1]:
            found = jobs[name]()
            if turn:  # the first is a warm-up
                times[name].append(found)
    plain = times["without the plugin"]
    print(f"{REQUESTS} requests of {PROMPT} tokens and {NEW} new ones, {TURNS} turns")
    for name, found in times.items():
        processor, wall = (median(x[i] / y[i] for x, y in zip(found, plain, strict=True)) for i in range(2))
        seconds = median(x[1] for x in found)
        print(f"{name}: processor time {processor:.3f}, time {wall:.3f}, {seconds:.2f} s")


if __name__ == "__main__":
    main(sys.argv[1])
