"""The folder of a survey: its settings, its finished shards and its result. Every file in it is written atomically."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkv._files import write_atomically
from qkv.errors import InputError
from qkv.profiler.surveys.data import Survey, differing
from qkv.profiler.surveys.quantities import with_current_texts

SETTINGS, SHARDS, RESULT = "survey.json", "shards", "survey.qkv.zip"
_SHARD = re.compile(r"(\d{4})\.qkv\.zip")


class Folder:
    """The folder at an address; it may not exist yet.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     folder = Folder(root)
    ...     _ = folder.open({"shards": 2, "definition": {"quantities": {}}})
    ...     folder.write_shard(1, b"a shard")
    ...     folder.finished()
    {1}
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.address = os.fspath(address)
        self.path = Path(address)

    def __str__(self) -> str:
        return self.address

    def finished(self) -> set[int]:
        """Numbers of the finished shards."""
        found = (_SHARD.fullmatch(path.name) for path in (self.path / SHARDS).glob("*.qkv.zip"))
        return {int(name[1]) for name in found if name}

    def settings(self) -> dict[str, Any] | None:
        """The settings of the survey in this folder; None if it has none.

        Raises:
            InputError: if they cannot be read.
        """
        try:
            if not (self.path / SETTINGS).exists():
                return None
            found: dict[str, Any] = json.loads((self.path / SETTINGS).read_bytes())
            found["definition"]["quantities"] = with_current_texts(found["definition"]["quantities"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"out: cannot use the folder {self.address!r} ({error})") from error
        return found

    def open(self, settings: dict[str, Any]) -> Folder:
        """Create the folder, or continue the survey in it.

        Raises:
            InputError: if it has a survey with other settings, or cannot be written.
        """
        if self.settings() is None:
            try:
                (self.path / SHARDS).mkdir(parents=True, exist_ok=True)
                write_atomically(self.path / SETTINGS, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
            except OSError as error:
                raise InputError(f"out: cannot use the folder {self.address!r} ({error})") from error
        before = self.settings()  # another process may have written it at the same time
        found = differing(before or {}, settings)
        if found is not None:
            name, was, now = found
            raise InputError(
                f"out is {self.address!r}, which has a survey with other settings: {name} was {was} and is {now}; "
                "expected the same settings, or another folder"
            )
        return self

    def discard_unfinished(self) -> None:
        """Remove what killed processes left; called while no other process writes."""
        for unfinished in (self.path / SHARDS).glob(".*.tmp"):
            with suppress(OSError):
                unfinished.unlink()

    def shard(self, number: int) -> Survey:
        """Load a finished shard."""
        try:
            return Survey.load(self.path / _name(number))
        except InputError as error:
            raise InputError(f"{error}; delete it and run the same command again") from error

    def shard_bytes(self, number: int) -> bytes | None:
        """The file of a shard; None if it is not finished."""
        path = self.path / _name(number)
        return path.read_bytes() if path.exists() else None

    def write_shard(self, number: int, data: bytes) -> None:
        """Write a finished shard."""
        self._write(_name(number), data, f"shard {number}")

    def result(self) -> Survey | None:
        """The merged survey; None if it is not written yet."""
        path = self.path / RESULT
        return Survey.load(path) if path.exists() else None

    def write_result(self, data: bytes) -> None:
        """Write the merged survey."""
        self._write(RESULT, data, "the result")

    def _write(self, name: str, data: bytes, what: str) -> None:
        path = self.path / name
        try:
            write_atomically(path, data)
        except OSError as error:
            raise InputError(
                f"out: cannot write {what} to {path} ({error.strerror}); {len(self.finished())} shards are finished "
                "and kept: run the same command again when there is space on the disk"
            ) from error


def _name(number: int) -> str:
    return f"{SHARDS}/{number:04}.qkv.zip"
