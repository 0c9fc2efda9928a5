"""Progress bars on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Step(Protocol):
    """Progress callback: `done` more units are finished; `of` sets the total. Thread-safe."""

    def __call__(self, done: float, /, *, of: float | None = None) -> None: ...


@contextmanager
def bar(what: str, unit: str, total: float | None = None, *, show: bool = True) -> Iterator[Step]:
    """Show a progress bar if standard error is a terminal; yields the callback that advances it.

    >>> with bar("following", "layers", 6) as step:
    ...     step(1)
    """
    if not (show and sys.stderr.isatty()):
        yield lambda done, of=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    count = TextColumn("{task.completed:,.0f} {task.fields[of]}{task.fields[unit]}")
    columns = TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, of="" if total is None else f"of {total:,.0f} ", unit=unit)

        def step(done: float, /, *, of: float | None = None) -> None:
            if of is not None:
                progress.update(task, total=of, of=f"of {of:,.0f} ")
            progress.advance(task, done)

        yield step
