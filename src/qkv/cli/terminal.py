"""Helpers of the commands for short runs: lines that name the written files, timings, and a pause of the collector."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def print_line(label: str, text: str | Path, *, main: bool = False) -> None:
    """Print a label and a text that is never wrapped, so that paths can be copied; dim, unless it is the `main` one."""
    from rich.console import Console
    from rich.text import Text

    label = f"{label:<8} "
    line = Text.assemble((label, "bold"), str(text)) if main else Text(f"{label}{text}", "dim")
    Console(highlight=False).print(line, soft_wrap=True)


def duration(seconds: float) -> str:
    """A rough duration, for estimates.

    >>> duration(20), duration(400), duration(8000)
    ('20 s', '7 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, for code that makes many objects and little garbage.

    Importing the libraries and drawing figures takes a fifth less time with it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Stopwatch:
    """Wall-clock seconds of the parts of a command, each from the end of the part before.

    >>> watch = Stopwatch()
    >>> watch.lap("loading")
    >>> watch.lap("measuring")
    >>> print(watch)
    0.0 s: loading 0.0, measuring 0.0
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the seconds since the last call to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"
