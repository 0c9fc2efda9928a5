"""Writes the results of benchmarks to files; the measuring functions are in `benchmarks.mechanisms.timing`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.mechanisms.timing import machine
from qkv._files import write_atomically

RESULTS = Path(__file__).parent / "results"
THREADS = 2


def save(name: str, result: dict[str, Any]) -> Path:
    """Write one benchmark's result with the machine it ran on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_atomically(path, json.dumps({"machine": machine(THREADS), **result}, indent=1) + "\n")
    return path
