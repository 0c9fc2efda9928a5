"""Corpora that can be split into shards, and the texts in files of every format, unreadable ones sorted out."""

from __future__ import annotations

import gzip
import hashlib
import heapq
import importlib
import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import IO, Any

from qkv.errors import InputError

LINES = (".jsonl", ".ndjson")
FIELD = "text"
BINARY, BLANK = "no UTF-8 text", "empty"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or the reason why it cannot be surveyed."""

    name: str
    size: int
    """Bytes."""
    text: str | None = None
    reason: str | None = None
    """The reason why it is left out; None if it is a text."""


@dataclass(frozen=True)
class Part:
    """The texts of one shard."""

    size: int
    """About its number of bytes; 0 if it is not known in advance."""
    chunks: Callable[[], Iterator[Sequence[Document]]]
    """Reads the texts, in lists of those that are batched together."""


class Source(ABC):
    """A corpus that can be split into shards."""

    name: str
    fingerprint: str
    """Tells whether two corpora have the same texts."""

    @abstractmethod
    def shards(self, number: int) -> Sequence[Part]:
        """Split the texts into `number` shards, the same in every process."""


@dataclass(frozen=True)
class Corpus(Source):
    """Strings in a reproducible order; documents that cannot be surveyed are included, with the reason."""

    name: str
    documents: tuple[Document, ...]
    fingerprint: str
    """SHA-256 of the texts in their order."""

    def shards(self, number: int) -> list[Part]:
        """Split the documents into `number` shards of about the same size: each is added to the smallest shard.

        All texts of a shard are batched together.
        """
        checked_shards(number)
        parts: list[list[Document]] = [[] for _ in range(number)]
        filled = [(0, i) for i in range(number)]
        for document in self.documents:
            size, least = heapq.heappop(filled)
            parts[least].append(document)
            heapq.heappush(filled, (size + document.size, least))
        return [Part(sum(d.size for d in part), partial(iter, (tuple(part),))) for part in parts]


def checked_shards(number: int) -> None:
    """Raise `InputError` if a corpus cannot be split into so many shards."""
    if not 1 <= number <= 9999:
        raise InputError(f"shards is {number}, expected 1 to 9999")


def of_texts(texts: Iterable[str], name: str = "texts", *, unreadable: int = 0) -> Corpus:
    """A corpus of strings; `unreadable` further files count as documents that were left out.

    >>> [d.reason for d in of_texts(["a", " "]).documents]
    [None, 'empty']
    """
    found, state = list[Document](), hashlib.sha256()
    for at, text in enumerate([texts] if isinstance(texts, str) else texts):
        if not isinstance(text, str):
            raise InputError(f"corpus holds {type(text).__name__}, expected texts")
        data = text.encode(errors="surrogatepass")
        state.update(hashlib.sha256(data).digest())
        found.append(Document(f"{name} {at}", len(data), text=text, reason=None if text.strip() else BLANK))
    for _ in range(unreadable):
        state.update(hashlib.sha256().digest())
        found.append(Document(f"{name}: a file", 0, reason=BINARY))
    if all(d.reason is not None for d in found):
        reasons = ", ".join(sorted({d.reason for d in found if d.reason}))
        skipped = f"; {len(found):,} left out: {reasons}" if reasons else ""
        raise InputError(f"corpus has no text, expected at least one in {name or 'it'}{skipped}")
    return Corpus(name, tuple(found), state.hexdigest())


def document_of_line(name: str, line: bytes) -> Iterator[Document]:
    """The text in a line of JSON, or the reason why there is none; nothing for a blank line."""
    reason, text = _fault(line), None
    if reason is None:
        try:
            text = _field(line.decode("utf-8-sig"))
            reason = None if text.strip() else BLANK
        except (ValueError, RecursionError):
            reason = f"no JSON object with {FIELD!r}"
    if line.strip():
        yield Document(name, len(line), text=text, reason=reason)


def document_of_bytes(name: str, data: bytes) -> Document:
    """The text that bytes are, or the reason why they are none."""
    reason = _fault(data)
    return Document(name, len(data), text=data.decode("utf-8-sig") if reason is None else None, reason=reason)


def _field(line: str) -> str:
    """The text in a line of JSON; raises ValueError if there is none."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    text = found.get(FIELD) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"no {FIELD!r}")
    text.encode()  # JSON may hold lone surrogates, which are not text (UnicodeEncodeError is a ValueError)
    return text


def _fault(data: bytes) -> str | None:
    """The reason why bytes are not a text to survey; None if they are one."""
    try:
        return BINARY if b"\0" in data else None if data.decode().strip() else BLANK
    except UnicodeDecodeError:
        return BINARY


# --- formats ----------------------------------------------------------------------------------------------------------

COMPRESSED, PARQUET, TAR = (".zst", ".zstd", ".gz"), (".parquet",), (".tar",)
BUFFER = 2**20
ROWS = 256
"""Rows of a Parquet file that are read at a time."""


def documents(file: IO[bytes], name: str, size: int, low: int, high: int) -> Iterator[Document]:
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


def _of_format(ending: str) -> Callable[[IO[bytes], str], Iterator[Document]]:
    """The reader of a whole file, which need not be able to seek."""
    if ending in PARQUET:
        return _compressed_parquet
    return _numbered_lines if ending in LINES else _members if ending in TAR else _whole


def _whole(file: IO[bytes], name: str) -> Iterator[Document]:
    yield document_of_bytes(name, file.read())


def _lines(file: IO[bytes], name: str, low: int, high: int) -> Iterator[Document]:
    """Lines that begin in the range; they are named by the position of their first byte."""
    at = max(low - 1, 0)
    file.seek(at)
    if low > 0:
        at += len(file.readline())  # the end of the line that begins before the range
    while at < high and (line := file.readline()):
        yield from document_of_line(f"{name}@{at}", line)
        at += len(line)


def _numbered_lines(file: IO[bytes], name: str) -> Iterator[Document]:
    for at, line in enumerate(file, start=1):
        yield from document_of_line(f"{name}:{at}", line)


def _rows(file: IO[bytes], name: str, size: int, low: int, high: int) -> Iterator[Document]:
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


def _members(file: IO[bytes], name: str) -> Iterator[Document]:
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


def _compressed_parquet(file: IO[bytes], name: str) -> Iterator[Document]:
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
