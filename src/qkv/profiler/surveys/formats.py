"""Read the texts of one file as a stream: plain text, JSON lines, Parquet, WebDataset tar, each also compressed."""

from __future__ import annotations

import gzip
import importlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any

from qkv.errors import InputError
from qkv.profiler.surveys.corpus import BLANK, FIELD, LINES, Document, document_of_bytes, document_of_line

COMPRESSED, PARQUET, TAR = (".zst", ".zstd", ".gz"), (".parquet",), (".tar",)
BUFFER = 2**20
ROWS = 256
"""Rows of a Parquet file that are read at a time."""

Texts = Iterator[Document]


def streams_only(name: str) -> bool:
    """True for the name of a file that only `documents` can read."""
    return PurePosixPath(name.lower()).suffix in (*COMPRESSED, *PARQUET, *TAR)


def documents(file: IO[bytes], name: str, size: int, low: int, high: int) -> Texts:
    """The texts of a file that begin at a position from `low` to before `high`, which may be outside the file.

    Every text has a position from 0 to `size`, so ranges that cover these share a file among several readers. Lines
    begin at their first byte. The groups of rows of a Parquet file are spread over it evenly. Everything else begins
    at 0, because it can only be read from the start.

    Args:
        file: the file, which can seek.
        name: its name, whose ending tells the format.
        size: its number of bytes.
        low: first position.
        high: end of the positions.

    >>> [d.text for d in documents(io.BytesIO(b'{"text": "a"}\\n{"text": "b"}\\n'), "x.jsonl", 28, 1, 28)]
    ['b']
    """
    path = PurePosixPath(name.lower())
    ending, of_text = path.suffix, _of_format(path.suffix)
    if ending in LINES:
        yield from _lines(file, name, low, high)
    elif ending in PARQUET:
        yield from _rows(file, name, size, low, high)
    elif low <= 0 < high:
        if ending in COMPRESSED:
            file, of_text = _decompressed(file, ending, name), _of_format(PurePosixPath(path.stem).suffix)
        yield from of_text(file, name)


def _of_format(ending: str) -> Callable[[IO[bytes], str], Texts]:
    """The reader of a whole file, which need not be able to seek."""
    if ending in PARQUET:
        return _compressed_parquet
    return _numbered_lines if ending in LINES else _members if ending in TAR else _whole


def _whole(file: IO[bytes], name: str) -> Texts:
    yield document_of_bytes(name, file.read())


def _lines(file: IO[bytes], name: str, low: int, high: int) -> Texts:
    """Lines that begin in the range; they are named by the position of their first byte."""
    at = max(low - 1, 0)
    file.seek(at)
    if low > 0:
        at += len(file.readline())  # the end of the line that begins before the range
    while at < high and (line := file.readline()):
        yield from document_of_line(f"{name}@{at}", line)
        at += len(line)


def _numbered_lines(file: IO[bytes], name: str) -> Texts:
    for at, line in enumerate(file, start=1):
        yield from document_of_line(f"{name}:{at}", line)


def _rows(file: IO[bytes], name: str, size: int, low: int, high: int) -> Texts:
    table = _arrow("parquet", name).ParquetFile(file)
    if FIELD not in table.schema_arrow.names:
        columns = ", ".join(table.schema_arrow.names)
        raise InputError(f"corpus has {name} without a column {FIELD!r}, expected one of texts; it has {columns}")
    groups, row = table.num_row_groups, 0
    for group in range(groups):
        if low <= size * group // groups < high:
            at = row
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[FIELD]):
                for text in batch.column(0).to_pylist():
                    yield of_value(f"{name}:{at + 1}", text)
                    at += 1
        row += table.metadata.row_group(group).num_rows


class _Member(tarfile.TarInfo):
    """A member of a whole archive. By itself, tarfile takes a damaged or missing header for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"the archive is cut off or damaged: {error}") from error


def _members(file: IO[bytes], name: str) -> Texts:
    """The texts of a tar: members .txt, and the field "text" of members .json, as WebDataset names them."""
    with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # else tarfile would collect them all
            if not member.isfile():
                continue
            inner, ending = f"{name}/{member.name}", PurePosixPath(member.name.lower()).suffix
            if ending not in (".txt", ".json"):
                yield Document(inner, member.size, reason="member of a tar that is neither .txt nor .json")
                continue
            content = archive.extractfile(member)
            data = content.read() if content else b""
            if ending == ".txt":
                yield document_of_bytes(inner, data)
            else:
                yield from document_of_line(inner, data or b"{}")


def _compressed_parquet(file: IO[bytes], name: str) -> Texts:
    raise InputError(f"corpus has {name}, expected Parquet files as they are: they are compressed inside")


def of_value(name: str, text: Any, column: str = FIELD) -> Document:
    """The text that is the value of a row in this column, or the reason why it is none."""
    if not isinstance(text, str):
        return Document(name, 0, reason=f"no text in {column!r}")
    return Document(name, len(text.encode()), text=text, reason=None if text.strip() else BLANK)


def _decompressed(file: IO[bytes], ending: str, name: str) -> IO[bytes]:
    if ending == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    arrow = _arrow("", name)
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd"), BUFFER)


def _arrow(module: str, name: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}".rstrip("."))
    except ImportError as error:
        raise InputError(f"corpus has {name}, which needs the package pyarrow: pip install 'qkv[cloud]'") from error
