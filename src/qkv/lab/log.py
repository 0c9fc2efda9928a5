"""The metrics of a run: one line of JSON for each, appended as they come."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkv._files import write_whole
from qkv.errors import InputError


class Log:
    """Lines of a file, each an object with a ``step``; with a folder for TensorBoard, its scalars go there, too.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = Log(Path(folder) / "metrics.jsonl")
    ...     log.write({"step": 3, "loss": 2.5})
    ...     log.close()
    ...     read(log.path)
    [{'step': 3, 'loss': 2.5}]
    """

    def __init__(self, path: Path, *, resume_at: int = 0, tensorboard: Path | None = None) -> None:
        self.path = path
        _keep(path, resume_at)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path} ({error.strerror})") from error
        self._board = None if tensorboard is None else _board(tensorboard, resume_at)

    def write(self, line: Mapping[str, Any]) -> None:
        """One more line, on the disk when this returns to a crash of this program."""
        try:
            self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"cannot write {self.path} ({error.strerror})") from error
        if self._board is not None:
            for name, value in scalars(line):
                self._board.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """No more lines."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; one that was cut short by a crash ends them."""
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def scalars(entries: Mapping[str, Any], where: str = "") -> list[tuple[str, float]]:
    """Numbers by dotted name, those of nested mappings too; lists are left out."""
    out: list[tuple[str, float]] = []
    for name, value in entries.items():
        if isinstance(value, Mapping):
            out += scalars(value, f"{where}{name}/")
        elif isinstance(value, int | float) and name != "step":
            out.append((f"{where}{name}", float(value)))
    return out


def finite(value: Any) -> Any:
    """The same for JSON, which knows no NaN and no infinity: None."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep(path: Path, step: int) -> None:
    """Drop what was written after `step`, by a run that went on from there once before."""
    lines = [line for line in read(path) if line["step"] <= step] if step else []
    if not path.exists():
        return
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("--tensorboard needs tensorboard: pip install 'qkv[train]'") from error
    return SummaryWriter(str(folder), purge_step=step or None)
