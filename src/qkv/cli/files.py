"""Files of the commands: text files that they read, the folder that they write to, and standard output."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qkv._untrusted import read_bytes
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


def read(file: Path, called: str = "--file") -> str:
    """Read a UTF-8 text file, or standard input if its name is "-". Errors name the option `called`."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else read_bytes(file)
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise InputError(f"{called}: cannot read {file} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{called}: {file} is not UTF-8 text") from error
    except ValueError as error:
        raise InputError(f"{called}: cannot read {file}: {error}") from error


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """Create a folder and check that it is writable before the work starts; if the work fails, remove it if empty."""
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
