"""Measurement: alternating repeats in one process for time, a fresh process for memory."""

from __future__ import annotations

import json
import math
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from qkv.errors import InputError


def alternating(
    jobs: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    most: int | None = None,
    seconds: float = 0.0,
    once: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of every job, `repeats` times each, in rounds, so that a slow moment of the machine affects all jobs.

    Rounds continue up to `most` times until `seconds` have passed. A warm-up round does not count; but a job that takes
    more than `once` seconds in it, and again when repeated, is not run further, and its first time is the result. Each
    round has a random order, because caches and the allocator depend on the job that ran before.
    """
    first = {name: timed(job) for name, job in jobs.items()}
    slow = {name for name, x in first.items() if x > once and timed(jobs[name]) > once}
    times = {name: [first[name]] if name in slow else [] for name in jobs}
    order = [name for name in jobs if name not in slow]
    shuffle, started, turn = random.Random(0).shuffle, time.perf_counter(), 0
    while order and (turn < repeats or (turn < (most or 0) and time.perf_counter() - started < seconds)):
        shuffle(order)
        for name in order:
            times[name].append(timed(jobs[name]))
        turn += 1
    return times


def timed(job: Callable[[], object]) -> float:
    """Seconds that one run of `job` takes."""
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def wait(device: str) -> None:
    """Wait until a card has computed what was launched on it."""
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(job: Callable[[], object]) -> int:
    """Peak of the memory on a CUDA card during `job`, in bytes, without what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def median_ratio(seconds: Mapping[str, list[float]], job: str, base: str) -> float:
    """Median over rounds of the time of `job` divided by that of `base` in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[job], seconds[base], strict=True))


def alone(module: str, *arguments: object) -> dict[str, Any]:
    """Run ``python -m module arguments`` in a fresh process; it prints one line of JSON last."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"module is {module}, but {' '.join(command)} failed:\n{done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def resident(which: str = "VmHWM") -> int:
    """Resident memory of this process in bytes (Linux): ``VmHWM`` is the peak, ``VmRSS`` the current value."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise InputError("memory is read from /proc/self/status, which this system does not have")
    line = next(x for x in status.read_text().splitlines() if x.startswith(which))
    return int(line.split()[1]) * 1024


def machine(threads: int, device: str = "cpu") -> dict[str, str]:
    """The hardware and software of this measurement, for the results file."""
    model = platform.processor() or platform.machine()
    cpuinfo, capability = Path("/proc/cpuinfo"), torch.backends.cpu.get_cpu_capability()
    if cpuinfo.exists():
        capability = "AMX" if " amx_bf16 " in cpuinfo.read_text() else capability
        names = [x.split(":", 1)[1].strip() for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0] if names else model
    card = {"card": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)} if device == "cuda" else {}
    return card | {
        "cpu": model,
        "threads": str(threads),
        "torch": torch.__version__,
        "capability": capability,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
