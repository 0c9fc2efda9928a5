"""The folder of a survey, on a disk or as objects through fsspec: settings, finished shards, and their merged result.

Files are written under another name, then renamed, so a file is whole or not there. Merged shards have the same bytes,
whoever computed them.
"""

from __future__ import annotations

import io
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from qkv._files import filesystem, local, scheme_of, write_atomically
from qkv._untrusted import parse_json
from qkv.errors import InputError, first_line, refusing, renamed
from qkv.profiler.surveys.data import Survey, differing

SETTINGS, SHARDS, RESULT = "survey.json", "shards", "survey.qkv.zip"
_SHARD = re.compile(r"(\d{4})\.qkv\.zip")


class Folder:
    """The folder at a path, or at an address of fsspec; it may not exist yet. Every file in it is whole or not there.

    >>> folder = Folder("memory://survey")
    >>> _ = folder.open({"shards": 2, "definition": {"quantities": {}}})
    >>> folder.write_shard(1, b"a shard")
    >>> folder.finished()
    {1}
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.address = os.fspath(address)
        self.path = Path(local(address)) if scheme_of(address) is None else None
        """The folder, if it is on this machine."""
        self._files, root = filesystem(address, "out")
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self.address

    def finished(self) -> set[int]:
        """Numbers of the finished shards."""
        with self._failing("read the folder"), suppress(FileNotFoundError):
            self._files.invalidate_cache()  # other processes write, too
            names = (path.rpartition("/")[2] for path in self._files.ls(f"{self._root}/{SHARDS}", detail=False))
            return {int(found[1]) for found in map(_SHARD.fullmatch, names) if found}
        return set()

    def settings(self) -> dict[str, Any] | None:
        """The settings of the survey in this folder; None if it has none."""
        data = self._read(SETTINGS)
        if data is None:
            return None
        with self._failing("use the folder", f"{SETTINGS}: "):
            found: dict[str, Any] = parse_json(data)
            found["definition"]["quantities"].items()
        return found

    def open(self, settings: dict[str, Any]) -> Folder:
        """Create the folder, or continue the survey in it."""
        new = self.settings() is None
        with self._failing("use the folder"):
            if self.path is not None:
                (self.path / SHARDS).mkdir(parents=True, exist_ok=True)
            if new:
                self._write(SETTINGS, (json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode())
        before = self.settings()  # another process may have written it at the same time
        if (found := differing(before or {}, settings)) is not None:
            name, was, now = found
            other = "of another corpus" if name == "corpus" else f"with other settings: {name} was {was} and is {now}"
            raise InputError(
                f"out is {self.address!r}, which has a survey {other}; expected the same one, or another folder"
            )
        return self

    def discard_unfinished(self) -> None:
        """Remove what killed processes left in a folder of this machine; called while no other process writes."""
        for unfinished in () if self.path is None else (self.path / SHARDS).glob(".*.tmp"):
            with suppress(OSError):
                unfinished.unlink()

    def shard(self, number: int) -> Survey:
        """Load a finished shard."""
        try:
            return Survey.load(io.BytesIO(self._read(_name(number)) or b""))
        except InputError as error:
            raise InputError(
                f"{error} ({_name(number)} in {self.address}); delete it and run the same command again"
            ) from error

    def write_shard(self, number: int, data: bytes) -> None:
        """Write a finished shard."""
        self.write(_name(number), data, f"shard {number}")

    def write_result(self, data: bytes) -> None:
        """Write the merged survey."""
        self.write(RESULT, data, "the result")

    def write(self, name: str, data: bytes, what: str) -> None:
        """Write a file; `what` it is goes into the error."""
        try:
            self._write(name, data)
        except Exception as error:  # each backend has its own types of errors
            raise InputError(
                f"out: cannot write {what} to {self.address} ({first_line(error)}); {len(self.finished())} shards are "
                "finished and kept: run the same command again when it can be written"
            ) from error

    def _write(self, name: str, data: bytes) -> None:
        if self.path is not None:
            return write_atomically(self.path / name, data)
        unfinished = f"{self._root}/.{uuid.uuid4().hex}.tmp"
        self._files.pipe_file(unfinished, data)
        return self._files.mv(unfinished, f"{self._root}/{name}")

    def _read(self, name: str) -> bytes | None:
        with self._failing(f"read {name} in"), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
            return data
        return None

    def _failing(self, to: str, of: str = "") -> AbstractContextManager[None]:
        """Inside, any error means that one cannot do this: each backend has its own types of errors."""
        return refusing(f"out: cannot {to} {self.address!r} ({of}{{}})")


def _name(number: int) -> str:
    return f"{SHARDS}/{number:04}.qkv.zip"


class Incomplete(Exception):  # noqa: N818  # named like StopIteration, after the event
    """Raised when shards of a survey are missing; finished shards are kept."""


def merge_folders(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Survey:
    """Merge the shards that several processes wrote to one folder or several.

    The result has the same bytes as the survey of a single process. Shards are only read.

    Args:
        folders: folders of the same survey: same model, corpus and settings. Together they have every shard once.
        out: folder for ``survey.qkv.zip``; by default the first of `folders`.

    >>> import tempfile
    >>> from qkv.profiler import survey
    >>> with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
    ...     for folder, part in ((a, "0/2"), (b, "1/2")):
    ...         _ = survey("qkv-mini", ["import os", "import sys"], out=folder, shards=2, only_shards=part)
    ...     merge_folders([a, b])
    Survey('qkv-mini', 2 documents, 6 tokens)
    """
    sources = [Folder(address) for address in folders]
    if not sources:
        raise InputError("folders is empty, expected at least one folder of a survey")
    settings = _common_settings(sources)
    where: dict[int, Folder] = {}
    for folder in sources:
        for number in sorted(folder.finished()):
            if number in where:
                raise InputError(
                    f"folders have shard {number} twice, in {where[number].address!r} and in {folder.address!r}; name "
                    "each folder once, or delete one of the two copies"
                )
            where[number] = folder
    check_complete(where, settings["shards"], f"in {', '.join(repr(f.address) for f in sources)}")
    result = merge_shards({number: where[number] for number in range(settings["shards"])}, settings)
    target = sources[0] if out is None else Folder(out).open(settings)
    target.write_result(result.packed())
    return result


def merge_shards(where: Mapping[int, Folder], settings: dict[str, Any]) -> Survey:
    """Merge shards, given the folder of each, in the order of their numbers, so that the sketches are reproducible."""
    result: Survey | None = None
    for number in sorted(where):
        part = where[number].shard(number)
        if part.record["shards"] != [label(settings, number)] or differing(part.definition, settings["definition"]):
            raise InputError(
                f"out is {where[number].address!r}, whose file of shard {number} belongs to another survey "
                f"({', '.join(part.record['shards'])}); delete it and run the same command again"
            )
        result = part if result is None else result.merge(part)
    assert result is not None
    if not result.groups and len(where) == settings["shards"]:
        raise InputError(
            f"texts has no text that can be surveyed; left out: {', '.join(sorted(result.record['skipped']))}"
        )
    return result


def check_complete(finished: Iterable[int], shards: int, where: str, numbers: Iterable[int] | None = None) -> None:
    """Raise `Incomplete` if any of `numbers` (by default all shards) is not finished; `where` ends the sentence."""
    missing = sorted({*(range(shards) if numbers is None else numbers)} - {*finished})
    if missing:
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise Incomplete(
            f"{len(missing)} of {shards} shards are missing ({names}) {where}; run the command of the survey again: it "
            f"computes missing shards only (--only-shards {missing[0]}/{shards} computes the first)"
        )


def _common_settings(folders: Sequence[Folder]) -> dict[str, Any]:
    with renamed(out="folders"):
        all_settings = [folder.settings() for folder in folders]
    for folder, settings in zip(folders, all_settings, strict=True):
        if settings is None:
            raise InputError(
                f"folders has {folder.address!r}, which has no survey, expected folders written by qkv survey"
            )
        if (difference := differing(all_settings[0] or {}, settings)) is not None:
            name, one, other = difference
            raise InputError(
                f"folders has surveys that differ: {name} is {one} in {folders[0].address!r} and {other} in "
                f"{folder.address!r}; expected the same model, corpus and settings"
            )
    return all_settings[0] or {}


def label(settings: dict[str, Any], number: int) -> str:
    """The name of a shard in the record of a survey."""
    return f"shard {number} of {settings['shards']} of the corpus {settings['corpus'][:12]}"
