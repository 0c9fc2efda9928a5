"""The folder of a survey, on this machine or at an address such as ``s3://…``: settings, finished shards and result."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

from qkv._files import reason, scheme_of
from qkv._untrusted import parse_json
from qkv.errors import InputError
from qkv.profiler.surveys.data import Survey, differing
from qkv.profiler.surveys.storage import Disk, Objects, Storage

SETTINGS, SHARDS, RESULT = "survey.json", "shards", "survey.qkv.zip"
_SHARD = re.compile(r"(\d{4})\.qkv\.zip")


class Folder:
    """The folder at an address; it may not exist yet. Every file in it is whole or not there.

    Args:
        address: a path, or an address of fsspec.

    >>> folder = Folder("memory://survey")
    >>> _ = folder.open({"shards": 2, "definition": {"quantities": {}}})
    >>> folder.write_shard(1, b"a shard")
    >>> folder.finished()
    {1}
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.address = os.fspath(address)
        self.storage: Storage = Disk(self.address) if scheme_of(address) is None else Objects(self.address)

    def __str__(self) -> str:
        return self.address

    @property
    def path(self) -> Path | None:
        """The folder, if it is on this machine."""
        return self.storage.root if isinstance(self.storage, Disk) else None

    def finished(self) -> set[int]:
        """Numbers of the finished shards."""
        try:
            names = self.storage.names(SHARDS)
        except Exception as error:  # each backend has its own types of errors
            raise InputError(f"out: cannot read the folder {self.address!r} ({reason(error)})") from error
        return {int(found[1]) for found in map(_SHARD.fullmatch, names) if found}

    def settings(self) -> dict[str, Any] | None:
        """The settings of the survey in this folder; None if it has none."""
        data = self._read(SETTINGS)
        if data is None:
            return None
        try:
            found: dict[str, Any] = parse_json(data)
            found["definition"]["quantities"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"out: cannot use the folder {self.address!r} ({SETTINGS}: {reason(error)})") from error
        return found

    def open(self, settings: dict[str, Any]) -> Folder:
        """Create the folder, or continue the survey in it."""
        new = self.settings() is None
        try:
            self.storage.create(SHARDS)
            if new:
                text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
                self.storage.write(SETTINGS, text.encode())
        except Exception as error:  # each backend has its own types of errors
            raise InputError(f"out: cannot use the folder {self.address!r} ({reason(error)})") from error
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
        self.storage.discard_unfinished(SHARDS)

    def shard(self, number: int) -> Survey:
        """Load a finished shard."""
        if self.path is not None:
            source: Any = self.path / _name(number)
        else:
            source = io.BytesIO(self.shard_bytes(number) or b"")
        try:
            return Survey.load(source)
        except InputError as error:
            where = "" if self.path is not None else f" (shard {number} in {self.address})"
            raise InputError(f"{error}{where}; delete it and run the same command again") from error

    def shard_bytes(self, number: int) -> bytes | None:
        """The file of a shard; None if it is not finished."""
        return self._read(_name(number))

    def write_shard(self, number: int, data: bytes) -> None:
        """Write a finished shard."""
        self.write(_name(number), data, f"shard {number}")

    def result(self) -> Survey | None:
        """The merged survey; None if it is not written yet."""
        data = self._read(RESULT)
        return None if data is None else Survey.load(io.BytesIO(data))

    def write_result(self, data: bytes) -> None:
        """Write the merged survey."""
        self.write(RESULT, data, "the result")

    def write(self, name: str, data: bytes, what: str) -> None:
        """Write a file; `what` it is goes into the error."""
        try:
            self.storage.write(name, data)
        except Exception as error:  # each backend has its own types of errors
            raise InputError(
                f"out: cannot write {what} to {self.address} ({reason(error)}); {len(self.finished())} shards are "
                "finished and kept: run the same command again when it can be written"
            ) from error

    def _read(self, name: str) -> bytes | None:
        try:
            return self.storage.read(name)
        except Exception as error:  # each backend has its own types of errors
            raise InputError(f"out: cannot read {name} in {self.address!r} ({reason(error)})") from error


def _name(number: int) -> str:
    return f"{SHARDS}/{number:04}.qkv.zip"
