"""Progress bars and spinners of everything slow, on standard error; a line now and then if it is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Step(Protocol):
    """Progress callback: `done` more units are finished; `of` sets their total, `note` the text behind the bar.

    It may be called from any thread.
    """

    def __call__(self, done: float, /, *, of: float | None = None, note: str | None = None) -> None: ...


class Bar:
    """A progress bar, called as a `Step`. Without a terminal it shows nothing."""

    def __init__(self, progress: Any = None, task: Any = None) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: float, /, *, of: float | None = None, note: str | None = None) -> None:
        if self._progress is None:
            return
        changed: dict[str, Any] = {} if note is None else {"note": note}
        if of is not None:
            changed |= {"total": of, "of": _total(of)}
        self._progress.update(self._task, advance=done, **changed)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._progress is not None:
            self._progress.console.print(line, style="dim", markup=False)


EVERY = 30.0
"""Seconds between two lines of progress in a log."""


class LogLines(Bar):
    """A progress bar in a log, which is no terminal: a line at most every `EVERY` seconds."""

    def __init__(self, name: str, unit: str, total: float | None, done: float) -> None:
        super().__init__()
        self._name, self._unit, self._of, self._done, self._before = name, unit, total, done, done
        self._began = self._printed = time.monotonic()

    def __call__(self, done: float, /, *, of: float | None = None, note: str | None = None) -> None:
        self._done += done
        self._of = self._of if of is None else of
        now = time.monotonic()
        if now - self._printed < EVERY:
            return
        self._printed, took = now, now - self._began
        parts = [f"{self._done:,.0f} {_total(self._of)}{self._unit}"] if self._unit else []
        if self._of and not self._unit:
            parts.append(f"{100 * self._done / self._of:.0f} %")
        parts += [*([note] if note else []), f"{took / 60:.1f} min so far"]
        if self._of and self._done > self._before:
            left = took * max(self._of - self._done, 0) / (self._done - self._before)
            parts.append(f"about {left / 60:.1f} min left")
        print(f"qkv: {self._name}: {', '.join(parts)}", file=sys.stderr, flush=True)


@contextmanager
def bar(name: str, unit: str = "", total: float | None = None, *, done: int = 0, show: bool = True) -> Iterator[Bar]:
    """A progress bar that disappears when it is closed.

    `name` says what is being done, and `unit` what is counted; without it no numbers are printed. The bar tells the
    time left from the `total`, if that is known, and the units that were `done` earlier.

    >>> with bar("profiling", "layers", 6) as step:
    ...     step(1)
    """
    if not (show and sys.stderr.isatty()):
        yield LogLines(name, unit, total, done) if show else Bar()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    texts = ["{task.description}", "{task.completed:,.0f} {task.fields[of]}" + unit, "{task.fields[note]}"]
    description, count, note = (TextColumn(text, markup=False) for text in texts)
    columns = (description, BarColumn(), *([count] if unit else []), note, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(), transient=True) as progress:
        yield Bar(progress, progress.add_task(name, total=total, completed=int(done), of=_total(total), note=""))


@contextmanager
def spinner(name: str) -> Iterator[None]:
    """A spinner, for work that cannot tell how far it has come."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.markup import escape

    with _console().status(escape(name)):
        yield


def say(line: str) -> None:
    """Print a remark on standard error, if it is a terminal."""
    if sys.stderr.isatty():
        _console().print(line, style="dim", markup=False)


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def _total(total: float | None) -> str:
    return "" if total is None else f"of {total:,.0f} "
