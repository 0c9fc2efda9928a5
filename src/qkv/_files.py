"""Atomic file writes, and files by address."""

from __future__ import annotations

import io
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkv._untrusted import Budget
from qkv.errors import InputError, refusing


def write_atomically(path: Path, data: bytes | memoryview | str) -> None:
    """Write a file atomically: to a temporary file in the same folder, which is then renamed. Text is UTF-8.

    A reader never sees a partial file, and several processes may write the same path at once.

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


def decoded(data: bytes) -> str | None:
    """The text of a file, in UTF-8, with ``\\n`` at the ends of its lines; None if it is binary.

    >>> decoded(b"\\xef\\xbb\\xbfa\\r\\nb"), decoded("a".encode("utf-16"))
    ('a\\nb', None)
    """
    with suppress(UnicodeDecodeError):
        return None if b"\0" in data else data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    return None


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # two letters or more, because C:/ is a drive; Path drops a slash
_LOCAL = ("file", "local")
IN_CLOUD = ("s3", "s3a", "gs", "gcs", "hf")
"""Schemes whose packages the extra ``cloud`` installs."""


def scheme_of(address: str | os.PathLike[str]) -> str | None:
    """The scheme of an address in lower case; None for a path on this machine, also after ``file://``.

    >>> scheme_of("s3://bucket/x"), scheme_of("folder/x"), scheme_of("file:///x")
    ('s3', None, None)
    """
    match = _SCHEME.match(os.fspath(address))
    scheme = match[1].lower() if match else None
    return None if scheme in _LOCAL else scheme


def local(address: str | os.PathLike[str]) -> str:
    """The path of an address on this machine, without ``file://``."""
    return re.sub(r"^(?:file|local)://", "", os.fspath(address), flags=re.IGNORECASE)


def filesystem(address: str | os.PathLike[str], argument: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    >>> filesystem("memory://x", "out")[1]
    '/x'
    """
    import fsspec

    text, scheme = os.fspath(address), scheme_of(address)
    if scheme is None:
        text = local(text)
    elif "://" not in text:
        raise InputError(f"{argument} is {text!r}, expected two slashes after {scheme}:, or a path on this machine")
    elif scheme not in fsspec.available_protocols():
        raise InputError(
            f"{argument} is {text!r}, but no storage is known for {scheme}://; expected s3://, gs://, hf://, "
            "memory://, another scheme of fsspec, or a path on this machine"
        )
    way_out = "pip install 'qkv[cloud]'" if scheme in IN_CLOUD else "install its package"
    missing = f"{argument} is {text!r}, but the package for {scheme}:// is missing ({{}}): {way_out}"
    with refusing(f"{argument} is {text!r}, which cannot be used ({{}})"), refusing(missing, ImportError):
        found: tuple[Any, str] = fsspec.core.url_to_fs(text)
    return found


def opened(address: str | os.PathLike[str], argument: str) -> Path | io.BytesIO:
    """The path of a file on this machine, or the content of one elsewhere."""
    if scheme_of(address) is None:
        return Path(local(address))
    files, path = filesystem(address, argument)
    with refusing(f"{argument}: cannot read {os.fspath(address)!r} ({{}})"):
        size = files.size(path) or 0
        Budget(size).take(size)
        return io.BytesIO(files.cat_file(path))
