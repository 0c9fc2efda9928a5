"""The progress bar of a training run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from qkv.lab.log import scalars


class Bar:
    """A progress bar with loss, tokens per second and the time left; shows nothing if standard error is no terminal."""

    def __init__(self, show: bool, name: str, done: int, steps: int) -> None:
        self._progress: Any = None
        if not (show and sys.stderr.isatty()):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[rate]} tokens/s"), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=steps, completed=done, loss="–", rate="–")

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, step: int, loss: float, rate: float) -> None:
        """Show the current step, loss and speed."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", rate=f"{rate:,.0f}")

    def print_evaluation(self, line: Mapping[str, Any]) -> None:
        """Print the first metrics of an evaluation above the bar."""
        if self._progress is not None:
            found = "  ".join(f"{name} {value:.4g}" for name, value in scalars(line["evaluation"])[:4])
            self._progress.console.print(f"[dim]step {line['step']:>6}  {found}[/dim]", highlight=False)
