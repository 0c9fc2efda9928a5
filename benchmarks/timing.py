"""Writes the results of benchmarks to files; the measuring functions are in `benchmarks.mechanisms.timing`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.mechanisms.timing import machine
from qkv._files import write_atomically

RESULTS = Path(__file__).parent / "results"
THREADS = 2


MAIN_PROCESSOR = "AMD AVX512"


def processor(machine: Mapping[str, str]) -> str:
    """Return the kind of processor of a result: its maker and its widest instructions, such as "AMD AVX2"."""
    return f"{machine['cpu'].split()[0].removesuffix('(R)')} {machine['capability']}"


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result with the machine it ran on; results of other kinds of processors stand in folders of their own."""
    here = machine(THREADS)
    folder = RESULTS if (kind := processor(here)) == MAIN_PROCESSOR else RESULTS / kind
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_atomically(path, json.dumps({"machine": here, **result}, indent=1) + "\n")
    return path
