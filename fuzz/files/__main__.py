"""The command ``python -m fuzz.files``: opens damaged files of every format; see --help."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from fuzz.files.formats import FORMATS, write
from fuzz.files.isolate import Report, run

AT_ONCE = 25  # cases per child process


def main(cases: int = 1000, seed: int = 0, case: int | None = None, start: int = 0, most: int = 20) -> int:
    """Open damaged and hostile files of every format that qkv reads, each in a process of its own.

    A file must be refused with one sentence or loaded, within 2 s of processor time and 200 MB, without warnings,
    output and changes to files. A failure is printed with the command that reproduces it. The exit status is 1 if any
    case fails.

    Args:
        cases: number of cases.
        seed: random seed of all cases.
        case: number of a single case to run; prints what was done to the file, and all that is known of the outcome.
        start: number of the first case.
        most: stop after this many failed cases.
    """
    console = Console(highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as folder:
        valid = Path(folder)
        write(valid)
        warm_up(valid)
        if case is not None:
            [report] = run(seed, [case], valid)
            console.print(report, soft_wrap=True)
            return int(report.failed)
        found: list[Report] = []
        began = time.perf_counter()
        spans = [range(n, min(n + AT_ONCE, start + cases)) for n in range(start, start + cases, AT_ONCE)]
        for span in track(spans, "fuzz.files", console=console, transient=True):
            for report in run(seed, span, valid):
                found.append(report)
                if report.failed:
                    command = f"python -m fuzz.files --seed {seed} --case {report.case.number}"
                    console.print(f"{command}  {report}", soft_wrap=True)
            if sum(report.failed for report in found) >= most:
                break
    _summary(console, found, time.perf_counter() - began)
    return int(any(report.failed for report in found))


def warm_up(valid: Path) -> None:
    """Open every valid file once, so that children find all modules loaded."""
    for form in FORMATS.values():
        form.open(valid)


def _summary(console: Console, found: list[Report], seconds: float) -> None:
    failed = sum(report.failed for report in found)
    slowest, largest = max(r.seconds for r in found), max(r.grown for r in found)
    console.print(
        f"{len(found)} cases, {failed} failed; at most {slowest:.1f} s and {largest / 1e6:.0f} MB; "
        f"{len(found) / seconds:.0f} cases per second"
    )
    outcomes = Counter((report.case.format, report.outcome) for report in found)
    for name in FORMATS:
        counts = ", ".join(f"{outcome} {n}" for (form, outcome), n in sorted(outcomes.items()) if form == name)
        console.print(f"  {name:<13} {counts}")


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
