"""Files of the commands: text files that they read, the folder that they write to, and standard output."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qkv._addresses import scheme_of
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
def folder(path: Path, *, resumes: bool = False) -> Iterator[None]:
    """Create a folder for results and check that it is writable before the work starts.

    If the work fails, the folder is removed if it is new and empty. If the disk is full or lost, the error is one
    sentence, and the files that the command has written so far are removed.

    Args:
        path: the folder.
        resumes: the command continues an interrupted call: its files stay.
    """
    if scheme_of(path) is not None:
        raise InputError(f"--out is {str(path)!r}, expected a folder on this machine; only qkv survey takes addresses")
    created = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        before = set(path.iterdir())
    except OSError as error:
        raise InputError(f"--out: cannot write to {path} ({error.strerror})") from error
    try:
        yield
    except BaseException as error:
        failed = error if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) else None
        lost = failed is not None and _is_in(failed.filename, path)
        if lost and not resumes:
            _remove(path, before)
        if created:
            with suppress(OSError):  # it is not empty, or lost
                path.rmdir()
        if failed is None or not lost:
            raise
        kept = "; what is finished is kept, and the same command continues" if resumes else ""
        raise InputError(f"--out: cannot write to {path} ({failed.strerror}){kept}") from error


def _is_in(name: object, path: Path) -> bool:
    """Whether the file of an OSError is in a folder; True if the error names none, as when a disk is full."""
    return name is None or (
        isinstance(name, str | os.PathLike) and Path(name).absolute().is_relative_to(path.absolute())
    )


def _remove(path: Path, before: set[Path]) -> None:
    """Remove the files in a folder that were not there before, if it still exists."""
    with suppress(OSError):
        for file in set(path.iterdir()) - before:
            if file.is_file():
                file.unlink()


def discard_output() -> None:
    """Redirect standard output to the null device: Python would flush it at exit, and fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
