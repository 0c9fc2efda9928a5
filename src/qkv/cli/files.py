"""Files of the commands: text files that they read, the folder that they write to, and standard output."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qkv._addresses import scheme_of
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


def read(file: Path, called: str = "--file") -> str:
    """Read a UTF-8 text file, or standard input if its name is "-". Errors name the option `called`."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise InputError(f"{called}: cannot read {file} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{called}: {file} is not UTF-8 text") from error


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """Create a folder and check that it is writable before the work starts; if the work fails, remove it if empty."""
    if scheme_of(path) is not None:
        raise InputError(f"--out is {str(path)!r}, expected a folder on this machine; only qkv survey takes addresses")
    created = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"--out: cannot write to {path} ({error.strerror})") from error
    try:
        yield
    except BaseException:
        if created and not any(path.iterdir()):
            path.rmdir()
        raise


def discard_output() -> None:
    """Redirect standard output to the null device: Python would flush it at exit, and fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
