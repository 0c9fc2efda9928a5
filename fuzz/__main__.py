"""The command ``python -m fuzz``: checks random compositions on every kernel against one dense formula; see --help."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fuzz.cases import case as make_case
from fuzz.compare import Report, check, check_some

AT_ONCE = 25  # cases per task of a process


def main(
    cases: int = 1000, seed: int = 0, case: int | None = None, jobs: int = 1, start: int = 0, most: int = 20
) -> int:
    """Check random compositions of mask, biases, score and normalizer on every kernel against one formula.

    Each case compares the output, the log-sum-exp, every gradient and every statistic of `qkv.measure` with a dense
    float64 formula that shares no code with the package. A failure is printed as one line with the command that
    reproduces it. The exit status is 1 if any case fails.

    Args:
        cases: number of cases.
        seed: random seed of all cases.
        case: number of a single case to run; prints its description and all differences.
        jobs: number of processes; each uses one thread, and two in a few cases.
        start: number of the first case.
        most: stop after this many failed cases.
    """
    console = Console(highlight=False)
    if case is not None:
        return _one(console, seed, case)
    found: list[Report] = []
    failed, began = 0, time.perf_counter()
    columns = (TextColumn("fuzz"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("fuzz", total=cases, failed=0)
        for reports in _reports(seed, start, cases, jobs):
            for report in reports:
                found.append(report)
                if report.mismatches:
                    failed += 1
                    command = f"python -m fuzz --seed {seed} --case {report.number}"
                    console.print(f"{command}  [red]{_escaped(str(report.mismatches[0]))}[/red]", soft_wrap=True)
            progress.update(task, completed=len(found), failed=failed)
            if failed >= most:
                break
    _summary(console, found, failed, time.perf_counter() - began)
    return int(failed > 0)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[").replace("\n", " ")[:400]


def _reports(seed: int, start: int, cases: int, jobs: int) -> Iterator[list[Report]]:
    """Reports in the order of completion."""
    spans = [range(n, min(n + AT_ONCE, start + cases)) for n in range(start, start + cases, AT_ONCE)]
    if jobs == 1:
        yield from (check_some(seed, span) for span in spans)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting: set[Future[list[Report]]] = {pool.submit(check_some, seed, span) for span in spans}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one(console: Console, seed: int, number: int) -> int:
    console.print(_escaped_text(make_case(seed, number).text), soft_wrap=True)
    report = check(seed, number)
    for kernel in sorted({*report.served, *report.refused}):
        console.print(f"  {kernel:<11} {'served' if report.served[kernel] else 'refused'}")
    if not report.mismatches:
        console.print(f"[green]{report.comparisons} comparisons agree[/green]")
        return 0
    for mismatch in report.mismatches:
        console.print(f"[red]{_escaped_text(str(mismatch))}[/red]", soft_wrap=True)
    return 1


def _escaped_text(text: str) -> str:
    return text.replace("[", r"\[")


def _summary(console: Console, found: list[Report], failed: int, seconds: float) -> None:
    served: Counter[str] = sum((report.served for report in found), Counter())
    refused: Counter[str] = sum((report.refused for report in found), Counter())
    comparisons = sum(report.comparisons for report in found)
    rate = len(found) / seconds
    console.print(f"{len(found)} cases, {comparisons} comparisons, {failed} cases failed; {rate:.0f} cases per second")
    for kernel in sorted({*served, *refused}):
        console.print(f"  {kernel:<11} served {served[kernel]:>6}   refused {refused[kernel]:>6}")


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
