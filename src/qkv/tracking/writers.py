"""Where numbers of a training go: a CSV file, TensorBoard, Weights & Biases, trackio, or a writer of your own."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkv._files import write_atomically
from qkv._packages import require
from qkv.errors import InputError


class Writer:
    """Base of all writers. One method is required: `write`.

    >>> class Printed(Writer):
    ...     def write(self, step, numbers):
    ...         print(step, numbers)
    >>> Printed().write(100, {"sink_rate": 0.5})
    100 {'sink_rate': 0.5}
    """

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a training step."""
        raise NotImplementedError(f"{type(self).__name__} does not define write(step, numbers)")

    def close(self) -> None:
        """Called at the end of the training."""


class CSVWriter(Writer):
    """A CSV file with one row for each step; rows that are there already are kept, up to the step of the first new one.

    Args:
        file: its path; the folder is created.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._rows: list[dict[str, Any]] | None = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._rows is None:  # a resumed training
            self._rows = [row for row in self._read() if int(row["step"]) < step]
        self._rows.append({"step": step, **numbers})
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, names, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(self._rows)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, text.getvalue())

    def _read(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        with self.file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        if rows and not all((row.get("step") or "").isdigit() for row in rows):
            raise InputError(f"file {self.file} is not a table with a column step; expected a new file, or one of qkv")
        return rows


class TensorBoardWriter(Writer):
    """Event files of TensorBoard, under ``attention/``.

    Args:
        folder: where TensorBoard looks for them.
    """

    def __init__(self, folder: str | Path) -> None:
        require("TensorBoardWriter", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(f"attention/{name}", number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _RunWriter(Writer):
    """A library whose `log` adds numbers to the run that `init` began."""

    package = ""

    def __init__(self) -> None:
        import importlib

        try:
            self._log = importlib.import_module(self.package).log
        except ImportError as error:
            raise InputError(
                f"{type(self).__name__} needs {self.package}, which is not installed: pip install {self.package}"
            ) from error

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._log({f"attention/{name}": number for name, number in numbers.items()}, step=step)


class WandbWriter(_RunWriter):
    """The run of Weights & Biases that ``wandb.init`` began, under ``attention/``."""

    package = "wandb"


class TrackioWriter(_RunWriter):
    """The run that ``trackio.init`` began, under ``attention/``."""

    package = "trackio"
