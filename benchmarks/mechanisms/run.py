"""Run the benchmarks of `python -m benchmarks.mechanisms`: times of all contenders in turn, memory of qkv alone."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.mechanisms.contenders import MECHANISMS, Case, Mechanism, Run
from benchmarks.mechanisms.timing import allocated, alone, alternating, machine, timed, wait
from qkv._files import write_atomically
from qkv._untrusted import check_version, first_line, load_json
from qkv.errors import InputError, nearest

VERSION = 1  # of the file of results
ONCE = 5.0  # a contender whose first run takes more seconds than this is not repeated
LEAST, MOST = 3, 15  # repeats
DEVICES = ("cpu", "cuda")
SAMPLE = 0.002  # seconds: shorter jobs run several times for one measurement


def bench(
    mechanisms: Sequence[str],
    lengths: Sequence[int],
    *,
    heads: int = 8,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    queries: int | None = None,
    threads: int = 2,
    seconds: float = 2.0,
    memory: Sequence[int] = (),
    device: str = "cpu",
    on_cell: Callable[[str], None] = lambda what: None,
    path: Path | None = None,
) -> dict[str, Any]:
    """Median times of each mechanism and its rivals at each length, with ratios, exponents and goals.

    `queries` is the number of queries, of the last tokens: 1 for a step of decoding, None for all. A cell takes about
    `seconds`, or three rounds if that is longer. `memory` holds the lengths at which the memory of qkv is measured: on
    CPU in fresh processes, on CUDA as the peak of torch's allocator. With `path` the results are saved after each
    mechanism, together with those that the file already has from the same machine and settings, so that an interrupted
    run can be resumed.
    """
    unknown = [name for name in mechanisms if name not in MECHANISMS]
    if unknown:
        raise InputError(
            f"mechanism is {unknown[0]!r}, expected one of {', '.join(MECHANISMS)}{nearest(unknown[0], MECHANISMS)}"
        )
    if queries is not None and queries > min((*lengths, *memory)):
        raise InputError(f"queries is {queries}, expected at most {min((*lengths, *memory))}, the smallest length")
    untrained = [name for name in mechanisms if not MECHANISMS[name].trains]
    if backward and untrained:
        raise InputError(f"backward is True with mechanism {untrained[0]!r}, which has no backward; expected False")
    if device not in DEVICES:
        raise InputError(f"device is {device!r}, expected one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device is 'cuda', but torch {torch.__version__} finds no CUDA card; expected 'cpu', or a machine with one"
        )
    torch.set_num_threads(threads)
    result: dict[str, Any] = {
        "format_version": VERSION,
        "machine": machine(threads, device),
        "device": device,
        "heads": heads,
        "head_dim": 64,
        "dtype": str(dtype).removeprefix("torch."),
        "pass": "forward and backward" if backward else "forward",
        "lengths": list(lengths),
        "queries": queries,
    }
    rows = {} if path is None else _done(path, result)
    limit = _sgemm(device=device)
    for name in mechanisms:
        mechanism, cells = MECHANISMS[name], {}
        for n in lengths:
            on_cell(f"{name}, {n:,} tokens")
            case = Case(n, heads, dtype, backward, queries=queries, device=device)
            cells[n] = _cell(mechanism, case, seconds)
        grown = {}
        for n in memory:
            on_cell(f"{name}, memory at {n:,} tokens")
            grown[n] = _memory(name, Case(n, heads, dtype, backward, queries=queries, device=device))
        ours = {n: cell["seconds"]["qkv"] for n, cell in cells.items() if n >= 2048}
        rows[name] = {
            "what": mechanism.what,
            "cells": cells,
            "sgemm FLOP/s": limit,
            "memory": grown,
            "exponent of time": slope(ours),
            "exponent of memory": slope(grown),
            "goals": [
                {"rival": goal.rival, "at most": goal.at_most, "n": n, "got": cells[n]["ratios"][goal.rival]}
                for goal in mechanism.goals
                for n in lengths
                if queries is None and goal.backward == backward and n >= goal.n and goal.rival in cells[n]["ratios"]
            ],
        }
        result["mechanisms"] = {x: rows[x] for x in MECHANISMS if x in rows}
        if path is not None:
            save(result, path)
    return result


def _memory(name: str, case: Case) -> int:
    """Bytes that a mechanism needs besides its inputs: growth of a fresh process, or the peak on a card."""
    if case.device == "cpu":
        dtype = str(case.dtype).removeprefix("torch.")
        found = alone(
            "benchmarks.mechanisms.one", name, case.n, case.heads, dtype, int(case.backward), case.queries or 0
        )
        return int(found["grown"])
    q, k, v = case.tensors()
    job = MECHANISMS[name].ours(case, q, k, v)
    job = _with_backward(job, (q, k, v)) if case.backward else job
    job()  # the first call compiles kernels and fills caches
    return max(1, allocated(job))


def _done(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results already in the file; `InputError` unless their settings are the same, apart from the date."""
    if not path.exists():
        return {}
    before = load(path)
    for name, value in settings.items():
        known = before.get(name, 1 if name == "format_version" else None)
        if name == "machine" and isinstance(known, dict):
            known, value = known | {"date": ""}, value | {"date": ""}  # noqa: PLW2901
        if known != value:
            raise InputError(
                f"path is {str(path)!r}, which holds results of another {name} ({known}, now {value}); expected "
                "another name or folder"
            )
    return dict(before["mechanisms"])


def save(result: dict[str, Any], path: Path) -> None:
    """Write results as JSON."""
    write_atomically(path, json.dumps(result, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read a file written by `save`."""
    try:
        result: dict[str, Any] = load_json(path)
        check_version(result, VERSION)
        result.setdefault("device", "cpu")
        for row in result["mechanisms"].values():
            row["cells"] = {int(n): cell for n, cell in row["cells"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"path: {str(path)!r} has no results of mechanisms ({first_line(error)})") from error
    return result


def _cell(mechanism: Mechanism, case: Case, seconds: float) -> dict[str, Any]:
    q, k, v = case.tensors()
    jobs: dict[str, Run] = {"qkv": mechanism.ours(case, q, k, v)}
    for rival, contender in mechanism.rivals.items():
        job = contender(case, q, k, v)
        if job is not None:
            jobs[rival] = job
    if case.backward:
        jobs = {name: _with_backward(job, (q, k, v)) for name, job in jobs.items()}
    once = functools.partial(_repeat, jobs["qkv"], 1, case.device)
    once()
    number = max(1, round(SAMPLE / timed(once)))
    repeated = {name: functools.partial(_repeat, job, number, case.device) for name, job in jobs.items()}
    found = alternating(repeated, LEAST, most=MOST, seconds=seconds, once=ONCE)
    times = {name: [x / number for x in of] for name, of in found.items()}
    medians = {name: statistics.median(x) for name, x in times.items()}
    return {
        "seconds": medians,
        "ratios": {
            name: statistics.median(a / b for a, b in zip(times["qkv"], x, strict=False))
            for name, x in times.items()
            if name != "qkv"
        },
        "repeats": {name: len(x) for name, x in times.items()},
        "flops": mechanism.flops(case),
    }


def _repeat(job: Run, number: int, device: str) -> None:
    for _ in range(number):
        job()
    wait(device)


def _with_backward(job: Run, inputs: Iterable[Tensor]) -> Run:
    def run() -> Tensor:
        out = job()
        out.backward(torch.ones_like(out))
        for x in inputs:
            x.grad = None
        return out

    return run


def _sgemm(size: int = 2048, device: str = "cpu") -> float:
    """FLOP/s of one large float32 matrix product, by the faster of the two libraries that torch uses on CPU."""
    a, b = torch.randn(2, size, size, device=device)
    products: tuple[Run, ...] = (lambda: a @ b, lambda: torch.nn.functional.linear(a, b))
    wait(device)
    return 2 * size**3 / min(timed(functools.partial(_repeat, x, 1, device)) for x in products for _ in range(5))


def slope(values: Mapping[int, float]) -> float | None:
    """Least-squares slope of ln value against ln n; None with fewer than two lengths."""
    if len(values) < 2 or min(values.values()) <= 0:
        return None
    xs, ys = [math.log(n) for n in values], [math.log(v) for v in values.values()]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)
