"""Files from strangers: the sizes that a file declares are compared with a limit before anything is allocated.

Readers raise ValueError with the reason, and `read_zip` also errors of zipfile. `reading`, or the caller, turns them
into an `InputError` that names argument and file.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.errors import InputError, first_line, refusing

if TYPE_CHECKING:
    import numpy as np

SPARE = 128 * 2**20
"""Bytes that any file may take in memory."""
RATIO = 100
"""A file may take this many times its size on disk."""
DEPTH = 100
"""Levels of nesting in JSON and TOML."""
DIRECTORY = 4 * 2**20
"""Bytes of the list of members in a zip file, enough for about 40,000 members."""
TEXT = 2**20
"""Bytes of a TOML file, whose parser is slow."""
CONFIG = 4 * 2**20
"""Bytes of a JSON file of a model that is no vocabulary."""
MOST_LISTS = 2**20
"""Lists and objects of a vocabulary; the largest known ones have half a million merges."""
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")
PIECE = 2**20
"""Bytes that are read at a time."""
OBJECT, ARRAY, ENTRY = 240, 96, 64
"""Bytes that a parsed object, array, and entry of either take at most."""

_allowed: ContextVar[int | None] = ContextVar("max_size", default=None)


@contextmanager
def max_size(size: int | str | None) -> Iterator[None]:
    """Set how much memory a file that is opened inside may take.

    Profiles, surveys, models and other files are checked before they are loaded, because they may come from strangers.
    A file whose declared contents are larger than the limit raises `InputError`. By default the limit is 100 times the
    size of the file on disk, or 128 MiB if that is more, but never more than the memory that is free. On the command
    line ``--max-size`` does the same.

    Args:
        size: bytes, or a text such as ``"500 MB"`` or ``"8 GiB"``; None for the default.

    Raises:
        InputError: if `size` is not a size.

    >>> import qkv
    >>> with qkv.max_size("8 GB"):
    ...     profile = qkv.Profile.load("large.qkv.zip")  # doctest: +SKIP
    """
    token = _allowed.set(None if size is None else in_bytes(size))
    try:
        yield
    finally:
        _allowed.reset(token)


def allow(size: str | None) -> None:
    """Set the limit of the option ``--max-size`` for the rest of a command."""
    if size is not None:
        _allowed.set(in_bytes(size, "--max-size"))


def in_bytes(size: int | str, argument: str = "size") -> int:
    """The number of bytes of a text such as "500 MB"; raises `InputError` for any other text.

    >>> in_bytes("500 MB"), in_bytes("2 GiB"), in_bytes(7)
    (500000000, 2147483648, 7)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) *(?:([KMGT])(i?))?B?", str(size).strip(), re.IGNORECASE)
    if isinstance(size, bool) or not match or float(match[1]) == 0:
        raise InputError(f"{argument} is {size!r}, expected bytes, such as 500MB, 8GB or 2GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper()))


def limit(stored: int = 0, ratio: int = RATIO) -> int:
    """The bytes of memory that a file of `stored` bytes may take."""
    given = _allowed.get()
    return min(max(SPARE, ratio * stored), free_memory()) if given is None else given


def free_memory() -> int:
    """Bytes of memory that this process can still use; on systems other than Linux, all that the machine has."""
    free = [sys.maxsize]
    with suppress(AttributeError, OSError, ValueError):
        free.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError, ValueError, KeyError):  # of a container, if it has a limit; cached files can be dropped
        group = Path("/sys/fs/cgroup")
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(used["inactive_file"]) + int(used["active_file"])
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()) + cached)
    return max(0, min(free))


TRUSTED = "if you trust it, raise the limit with --max-size or qkv.max_size"


class SizeError(ValueError):
    """A file declares more than the limit."""


class Budget:
    """The memory that one file may take: `ratio` times its size on disk or `SPARE`. `take` adds up what it declares."""

    def __init__(self, stored: int, ratio: int = RATIO) -> None:
        self.stored, self.limit, self.declared = stored, limit(stored, ratio), 0

    def take(self, size: int) -> None:
        """Add a declared size; raises `SizeError` if the sum exceeds the limit."""
        self.declared += size
        if size < 0 or self.declared > self.limit:
            raise SizeError(
                f"it is {shown(self.stored)} and declares contents of {shown(self.declared)}, more than the limit of "
                f"{shown(self.limit)}; {TRUSTED}"
            )


def shown(size: int) -> str:
    """A size for people.

    >>> shown(2_600_000), shown(2**40)
    ('2.5 MiB', '1.0 TiB')
    """
    for power, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB")):
        if size < 1024 ** (power + 1):
            return f"{size / 1024**power:,.{min(power, 1)}f} {unit}"
    return "over 1,024 TiB"


# --- text, JSON, TOML -------------------------------------------------------------------------------------------------


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file; raises OSError, or ValueError if there are more than the limit or, without one, `most`."""
    most = limit() if most is None or _allowed.get() is not None else most
    data = bytearray()
    with path.open("rb") as file:
        while len(data) <= most and (piece := file.read(PIECE)):  # a device or a pipe has no size to look at
            data += piece
    if len(data) > most:
        raise SizeError(f"it is larger than the limit of {shown(most)}; {TRUSTED}")
    return bytes(data)


def load_json(path: Path) -> Any:
    """The contents of a JSON file; raises ValueError, or OSError if the file cannot be read."""
    return parse_json(read_bytes(path))


def check_json_files(folder: Path) -> None:
    """Check all JSON files of a model, for libraries that read them without a limit.

    Vocabularies may be large, and are left to the tokenizer, unless they have far more lists than one has merges.
    """
    for file in sorted(folder.glob("*.json")):
        if file.name in VOCABULARIES:
            data = read_bytes(file)
            if data.count(b"[") + data.count(b"{") > MOST_LISTS and _allowed.get() is None:
                raise SizeError(f"{file.name} has more than {MOST_LISTS:,} lists and objects; {TRUSTED}")
        else:
            try:
                parse_json(read_bytes(file, CONFIG))
            except SizeError:
                raise
            except ValueError as error:
                raise ValueError(f"{file.name} is not a JSON file: {first_line(error)}") from error


def parse_json(data: bytes | str) -> Any:
    """Parse JSON of bounded size and depth.

    >>> parse_json('{"layers": 2}')
    {'layers': 2}
    """
    text = data if isinstance(data, str) else data.decode("utf-8")
    entries = OBJECT * text.count("{") + ARRAY * text.count("[") + ENTRY * text.count(",")
    Budget(len(text), ratio=1).take(len(text) + entries)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_nested(value)
    return value


TOO_DEEP = f"it is nested more than {DEPTH} levels deep"


def check_nested(found: Any) -> None:
    """Raise ValueError if lists and dictionaries are nested too deeply, or a string has half a surrogate pair."""
    level = [found]
    for _ in range(DEPTH + 1):
        strings = [x for x in level if isinstance(x, str)]
        strings += [key for x in level if isinstance(x, dict) for key in x]
        "".join(strings).encode()  # UnicodeEncodeError is a ValueError
        level = [y for x in level if isinstance(x, dict | list) for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def check_version(found: Any, newest: int) -> None:
    """Raise ValueError if a file has a ``format_version`` above `newest`; files without one have version 1.

    >>> check_version({"format_version": 2}, 1)
    Traceback (most recent call last):
    ValueError: it has format version 2, but this version of qkv reads versions up to 1: update qkv
    """
    version = found.get("format_version", 1)
    if type(version) is not int or not 1 <= version <= newest:
        raise ValueError(
            f"it has format version {version!r}, but this version of qkv reads versions up to {newest}: update qkv"
        )


@contextmanager
def reading(target: object, what: str) -> Iterator[None]:
    """Inside, any error means that a file that should be `what` cannot be read: an `InputError` with its first line."""
    # A damaged file can be wrong anywhere; safetensors, xarray and zlib have errors of their own.
    damaged = refusing(f"path: {str(target)!r} cannot be read ({{}}): it is not {what}, or is damaged")
    absent = (FileNotFoundError, PermissionError, IsADirectoryError)
    with damaged, refusing(f"path: cannot read {str(target)!r} ({{}})", *absent):
        yield


# --- zip --------------------------------------------------------------------------------------------------------------


class _File(io.FileIO):
    """A file whose single reads are bounded: `zipfile` reads the list of members whole, whatever its size."""

    most = DIRECTORY

    def read(self, size: int | None = -1, /) -> bytes | None:  # type: ignore[override]
        if size is not None and size > self.most:
            raise ValueError("its list of members is too long")
        return super().read(size)


def read_zip(source: Path | io.BytesIO, needed: str) -> tuple[dict[str, bytes], Budget]:
    """The members of a zip file, or of the bytes of one, by name, and what is left of the memory that it may take.

    Nothing is written to disk, and no member is inflated beyond its declared size, or if there is none of the name
    `needed`. Checksums are verified.
    """
    if isinstance(source, io.BytesIO):
        return _members(source, source.getbuffer().nbytes, needed)
    with _File(source) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        return _members(file, status.st_size, needed)


def _members(file: _File | io.BytesIO, stored: int, needed: str) -> tuple[dict[str, bytes], Budget]:
    entries, budget = dict[str, bytes](), Budget(stored)
    with zipfile.ZipFile(file) as archive:  # which raises errors of zlib, struct and others, OSError for a wrong offset
        if isinstance(file, _File):
            file.most = sys.maxsize
        for member in archive.infolist():
            budget.take(member.file_size)
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.filename in entries:
                raise ValueError(f"its member {member.filename[:80]!r} is compressed in another way, or is there twice")
            entries[member.filename] = b""
        if needed not in entries:
            raise ValueError(f"it has no member {needed!r}")
        for member in archive.infolist():
            with archive.open(member) as opened:
                data = opened.read(member.file_size + 1)  # `read()` would inflate everything before it is cut
            if len(data) != member.file_size:
                raise ValueError(f"its member {member.filename[:80]!r} is truncated")
            entries[member.filename] = data
    return entries, budget


def parse_array(data: bytes) -> np.ndarray:
    """The array in the bytes of a .npy file; raises ValueError unless it has exactly the size that it declares."""
    import numpy as np

    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array has another format than NumPy's version 1.0")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    stored = data[file.tell() :]
    if by_column or dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(stored):
        raise ValueError(f"an array declares {dtype} of shape {str(shape)[:80]} and has {len(stored)} bytes")
    return np.frombuffer(stored, dtype).reshape(shape).copy()
