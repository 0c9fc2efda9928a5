"""Where the folder of a survey is stored: on a disk, or as objects through fsspec. A file is whole or not there."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from qkv._files import filesystem, local, write_atomically

COMPLETE = ".complete"
"""The ending of the marker of an object, which is written after it: JSON with its size and SHA-256."""


class Storage(Protocol):
    """Files by their names relative to a folder, with "/" between folders."""

    def names(self, folder: str) -> list[str]:
        """The names of the whole files in a folder, relative to it; none if it does not exist."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is no whole one."""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file, so that it is never seen in part."""

    def create(self, folder: str) -> None:
        """Create a folder, where folders have to be created."""

    def discard_unfinished(self, folder: str) -> None:
        """Remove what killed processes left in a folder."""


class Disk:
    """A folder of this machine. Files are written under another name, then renamed."""

    def __init__(self, address: str) -> None:
        self.root = Path(local(address))

    def names(self, folder: str) -> list[str]:
        return [path.name for path in (self.root / folder).glob("[!.]*")]

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        write_atomically(self.root / name, data)

    def create(self, folder: str) -> None:
        (self.root / folder).mkdir(parents=True, exist_ok=True)

    def discard_unfinished(self, folder: str) -> None:
        for unfinished in (self.root / folder).glob(".*.tmp"):
            with suppress(OSError):
                unfinished.unlink()


class Objects:
    """A prefix of an object store, or of another storage that fsspec knows.

    Stores cannot rename atomically, and not all show an object only when it is whole. So a marker is written after each
    object, and an object without a marker does not exist.
    """

    def __init__(self, address: str) -> None:
        self.files, root = filesystem(address, "out")
        self.root = root.rstrip("/")

    def names(self, folder: str) -> list[str]:
        self.files.invalidate_cache()  # other processes write, too
        try:
            found = self.files.ls(f"{self.root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        every = {path.rstrip("/").rpartition("/")[2] for path in found}
        return sorted(name for name in every if name + COMPLETE in every)

    def create(self, folder: str) -> None:
        """Stores have no folders."""

    def discard_unfinished(self, folder: str) -> None:
        """Objects without a marker are replaced when they are written again."""

    def read(self, name: str) -> bytes | None:
        self.files.invalidate_cache()
        try:
            marker = json.loads(self.files.cat_file(f"{self.root}/{name}{COMPLETE}"))
            data: bytes = self.files.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None
        if marker != _marker(data):
            raise ValueError(f"its content differs from {name}{COMPLETE}; delete both and run the same command again")
        return data

    def write(self, name: str, data: bytes) -> None:
        self.files.pipe_file(f"{self.root}/{name}", data)
        self.files.pipe_file(f"{self.root}/{name}{COMPLETE}", json.dumps(_marker(data)).encode())


def _marker(data: bytes) -> dict[str, int | str]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
