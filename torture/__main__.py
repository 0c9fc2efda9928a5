"""The command ``python -m torture``: kills and faults for the commands that write results; see --help."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import qkv
from torture.faults import FAULTS, Skipped
from torture.kills import Reference, kill, reference
from torture.work import WORK, Work

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "torture.json"


def main(kills: int = 20, only: tuple[str, ...] = (), out: Path = RESULTS) -> int:
    """Kill commands at random moments, and take disks, folders and clocks away from them.

    After each kill no file under its final name may be half written, and the repeated command has to end with the same
    results as one that was never disturbed, byte for byte except for times. After each fault the command has to end
    with one sentence and exit code 2, or to go on. Finished cases are kept in the output file, so that an interrupted
    call continues. The exit status is 1 if any case has a problem.

    Args:
        kills: number of kills for each command.
        only: names of commands; all if you give none.
        out: JSON file with the results.
    """
    chosen = [work for work in WORK if not only or work.name in only]
    kept: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    kept |= {"qkv": qkv.__version__, "machine": platform.machine(), "run": f"{datetime.now(UTC):%Y-%m-%d}"}
    cases: dict[str, list[str] | str] = kept.setdefault("cases", {})
    todo = [(work, case) for work in chosen for case in _cases(kills) if f"{work.name}: {case}" not in cases]
    columns = (TextColumn("torture {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(highlight=False)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(todo))
        undisturbed: dict[str, Reference] = {}
        for work, case in todo:
            progress.update(task, description=f"{work.name}: {case}")
            if work.name not in undisturbed:
                undisturbed[work.name] = reference(work)
            found = _run(work, case, undisturbed[work.name])
            cases[f"{work.name}: {case}"] = found
            out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            for problem in found if isinstance(found, list) else ():
                console.print(f"{work.name}, {case}: {problem}", markup=False, soft_wrap=True)
            progress.advance(task)
    _print(console, chosen, cases, kills)
    return int(any(cases[f"{work.name}: {case}"] for work in chosen for case in _cases(kills)
                   if isinstance(cases[f"{work.name}: {case}"], list)))  # fmt: skip


def _cases(kills: int) -> Iterator[str]:
    yield from (f"kill {n}" for n in range(kills))
    yield from FAULTS


def _run(work: Work, case: str, undisturbed: Reference) -> list[str] | str:
    """The problems of a case, or why it was skipped."""
    if case.startswith("kill "):
        return kill(work, undisturbed, int(case.split()[1]))
    try:
        return FAULTS[case](work, undisturbed)
    except Skipped as reason:
        return f"skipped: {reason}"


def _print(console: Console, chosen: list[Work], cases: dict[str, Any], kills: int) -> None:
    table = Table("command", "kills", *FAULTS)
    for work in chosen:
        of = [cases[f"{work.name}: kill {n}"] for n in range(kills)]
        cells = [f"{sum(not x for x in of)} of {kills} right"]
        for fault in FAULTS:
            found = cases[f"{work.name}: {fault}"]
            cells.append(found if isinstance(found, str) else "; ".join(found) or "right")
        table.add_row(work.name, *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
