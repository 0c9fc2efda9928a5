"""Counts kernel launches and memory traffic for docs/gpu.md and docs/scale.md, without a card.

PYTHONPATH=. .venv/bin/python docs/make_launches.py   writes the tables, in about 20 seconds

Operations of torch are counted while they run on the CPU, with the tile sizes of CUDA. The Triton kernels are recorded,
not run: their traffic is that of their arguments, each read or written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import make_tables
import torch
from torch import Tensor

from benchmarks.launches import Card, Launches
from qkv import masks
from qkv.engine.call import Call, RowState
from qkv.engine.sizes import BY_DEVICE
from qkv.statistics import PrefixSinkScores
from qkv.statistics.measure import measured, row_state, sweep

HEADS, KEY_HEADS, D = 8, 2, 128
LENGTHS = (2048, 4096)
SURVEY: dict[str, Any] = {"mass": {"local_mass": masks.Window(17, ahead=16)}, "statistics": [PrefixSinkScores(64)]}
STREAMING = masks.Window(1020) | masks.Prefix(4)
PROFILE: dict[str, Any] = {
    "mass": SURVEY["mass"] | {"streaming": STREAMING},
    "statistics": SURVEY["statistics"],
    "bins": 128,
}
FLOP, PEAK = 1.45e20, 989e12  # of the estimate in docs/scale.md; per second of one GPU, dense bfloat16
PAIRS, BANDWIDTH = 64 * 80 * 4096 // 2, 4e12  # pairs for each token in the estimate of docs/scale.md; bytes a second


@dataclass(frozen=True)
class Cost:
    launches: int
    bytes: int


@contextmanager
def like_a_card() -> Iterator[None]:
    """The CPU has the tile sizes of CUDA, on one thread."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        stack.enter_context(mock.patch.dict(BY_DEVICE, cpu=BY_DEVICE["cuda"]))
        yield


def tensors(n: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, n, D) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def by_tiles(settings: dict[str, Any], n: int, *, output: bool) -> Cost:
    """Statistics by tiles of torch operations; of the second call, because the first one keeps patterns of masks."""
    call = Call.of(*tensors(n), masks.Causal())
    rows = row_state(call)
    with like_a_card():
        for _ in range(2):
            with Launches() as found:
                measured(call, output=True, **settings) if output else sweep(call, rows, **settings)
    return Cost(found.count, found.bytes)


def by_triton(settings: dict[str, Any], n: int, *, output: bool) -> Cost:
    """Statistics by the Triton kernels, and the output if wanted."""
    call = Call.of(*tensors(n, "meta"), masks.Causal())
    for _ in range(2):  # small tensors of numbers are kept on the device
        with Card() as found:
            if output:
                measured(call, output=True, **settings)
            else:
                sweep(call, RowState(torch.empty(call.q.shape[:3], device="meta")), **settings)
    return Cost(found.count, found.bytes)


def page_on_gpus() -> list[str]:
    """The table of docs/gpu.md: launches of the statistics by length."""
    lines = ["| causal, 8 heads | computed by | " + " | ".join(f"{n:,} tokens" for n in LENGTHS) + " |"]
    lines.append("|---|---|" + "---:|" * len(LENGTHS))
    rows: dict[tuple[str, str], list[int]] = {}
    for name, settings in (("output and statistics", {}), ("the same with map and masses", PROFILE)):
        rows[name, "Triton kernels"] = [by_triton(settings, n, output=True).launches for n in LENGTHS]
    rows[name, "tiles of torch operations"] = [by_tiles(PROFILE, n, output=True).launches for n in LENGTHS]
    for names, numbers in rows.items():
        lines.append(f"| {' | '.join(names)} | " + " | ".join(f"{x:,}" for x in numbers) + " |")
    return lines


def of_a_survey() -> dict[str, Cost]:
    """Costs of the statistics of a survey, given the log-sum-exp."""
    n = LENGTHS[-1]
    return {
        "Triton kernels": by_triton(SURVEY, n, output=False),
        "tiles of torch operations": by_tiles(SURVEY, n, output=False),
    }


def bytes_per_pair(cost: Cost) -> float:
    """Bytes for each visible pair of query and key of a head."""
    return cost.bytes / (HEADS * LENGTHS[-1] * (LENGTHS[-1] + 1) / 2)


def milliseconds(cost: Cost) -> float:
    """Time of the memory traffic for one token of the estimate in docs/scale.md."""
    return 1e3 * bytes_per_pair(cost) * PAIRS / BANDWIDTH


def page_on_surveys(costs: dict[str, Cost]) -> list[str]:
    """The table of docs/scale.md: launches and traffic of the statistics."""
    lines = [
        f"| statistics of a layer: {HEADS} heads × {D}, {LENGTHS[-1]:,} tokens, causal, bfloat16 | launches "
        "| bytes for each pair | ms for each token of the estimate |",
        "|---|---:|---:|---:|",
    ]
    for name, cost in costs.items():
        lines.append(f"| {name} | {cost.launches:,} | {bytes_per_pair(cost):.3g} | {milliseconds(cost):.2g} |")
    return lines


def page_on_hours(costs: dict[str, Cost]) -> list[str]:
    """The table of docs/scale.md: GPU-hours of the estimate."""
    kept = json.loads((make_tables.RESULTS / "survey.json").read_text())
    (ratio,) = (value for name, value in kept.items() if name.startswith("throughput"))
    uses = (0.3, 0.4, 0.5)
    plain = [FLOP / (use * PEAK) / 3600 for use in uses]
    rows = {
        f"plain forward, GPU-hours ({PEAK / 1e12:,.0f} Tflop/s)": plain,
        **{
            f"with the memory traffic of the {name}": [x + 1e6 * milliseconds(cost) / 3600 for x in plain]
            for name, cost in costs.items()
        },
        f"with the ratio measured above (plain hours / {ratio:.3f})": [hours / ratio for hours in plain],
    }
    lines = [
        "| at utilisation | " + " | ".join(f"{use:.0%}".replace("%", " %") for use in uses) + " |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{x:,.0f}" for x in row) + " |" for name, row in rows.items()]
    return lines


def write() -> None:
    """Write all tables."""
    costs = of_a_survey()
    for name, tables in {
        "gpu.md": {"launches": page_on_gpus()},
        "scale.md": {"traffic": page_on_surveys(costs), "hours": page_on_hours(costs)},
    }.items():
        page = make_tables.DOCS / name
        page.write_text(make_tables.filled(page.read_text(), "make_launches.py", tables))


if __name__ == "__main__":
    write()
