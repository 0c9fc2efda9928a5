"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes | memoryview | str) -> None:
    """Write a file under a temporary name and rename it; several processes may do so at once. Text is UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "x", "é")
    ...     [(p.name, p.read_bytes()) for p in Path(folder).iterdir()]
    [('x', b'\\xc3\\xa9')]
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
