"""Atomic file writes."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from qkv.errors import InputError


def write_atomically(path: Path, data: bytes | memoryview | str) -> None:
    """Write a file atomically: to a temporary file in the same folder, which is then renamed. Text is UTF-8.

    A reader never sees a partial file, and several processes may write the same path at once.

    Raises:
        InputError: if the folder does not exist, or the path is a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder) / "x", "é")
    ...     [(p.name, p.read_bytes()) for p in Path(folder).iterdir()]
    [('x', b'\\xc3\\xa9')]
    """
    if not path.parent.is_dir():
        raise InputError(f"path: the folder {str(path.parent)!r} does not exist; create it first")
    if path.is_dir():
        raise InputError(f"path: {str(path)!r} is a folder; expected the name of a file")
    unfinished = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
