"""What commands read and write: a text, a folder, standard output."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


def read(file: Path, called: str = "--file") -> str:
    """A text file; standard input if its name is "-". `called` is what the user typed it as."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise InputError(f"{called}: cannot read {file} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{called}: {file} is not UTF-8 text") from error


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """The folder, known to be writable before the work starts; gone again if it was made in vain."""
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"--out: cannot write to {path} ({error.strerror})") from error
    try:
        yield
    except BaseException:
        if made and not any(path.iterdir()):
            path.rmdir()
        raise


def forget_output() -> None:
    """What is still to be written goes nowhere, or Python would try once more at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
