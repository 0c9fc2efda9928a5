"""A corpus of any size: list its texts without loading them, sort out unreadable ones, and split it into shards."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from qkv.errors import InputError

LINES = (".jsonl", ".ndjson")
FIELD = "text"
BINARY, BLANK = "no UTF-8 text", "empty"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, as a range of bytes in a file or as a string; or the reason why it cannot be surveyed."""

    name: str
    size: int
    """Bytes."""
    path: str | None = None
    start: int = 0
    """Offset in the file, if it is a line of one."""
    text: str | None = None
    reason: str | None = None
    """The reason why it is left out; None if it is a text."""
    stamp: tuple[int, int] | None = None
    """Size and modification time of its file when the corpus was listed."""

    def read(self) -> str:
        """Read the text."""
        if self.text is not None:
            return self.text
        assert self.path is not None
        try:
            with Path(self.path).open("rb") as file:
                if _stamp(file.fileno()) != self.stamp:
                    raise ValueError("its size or modification time differs")
                file.seek(self.start)
                data = file.read(self.size)
            text = data.decode("utf-8-sig")
            return _field(text) if self.path.lower().endswith(LINES) else text
        except (OSError, ValueError) as error:
            raise InputError(f"corpus has a file that changed since the survey began: {self.name} ({error})") from error


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
    """Documents in a reproducible order; documents that cannot be read are included, with the reason."""

    name: str
    documents: tuple[Document, ...]
    fingerprint: str
    """SHA-256 of the texts in their order; it does not depend on the location of the files."""

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
    return _checked(Corpus(name, tuple(found), state.hexdigest()))


def of_files(paths: Sequence[str | os.PathLike[str]]) -> Corpus:
    """A corpus of the texts in files and folders.

    Args:
        paths: text files, with one text each; ``.jsonl`` files, with one text a line in the field "text"; folders, of
            which all files are read, sorted by name, with subfolders but without hidden files and ``__pycache__``.
    """
    found: list[Document] = []
    state = hashlib.sha256()
    for name in paths:
        path = Path(name).expanduser()
        if not path.exists():
            raise InputError(f"corpus has the path {str(name)!r}, expected a file or folder that exists")
        for inner, file in _files(path) if path.is_dir() else [(path.name, path)]:
            found += _documents(inner, file, state)
    return _checked(Corpus(", ".join(map(str, paths)), tuple(found), state.hexdigest()))


def _stamp(file: int | Path) -> tuple[int, int]:
    known = os.stat(file)
    return known.st_size, known.st_mtime_ns


def _files(root: Path) -> Iterator[tuple[str, Path | str]]:
    """Files of a folder with their relative names; for a folder that cannot be listed, the reason instead of a file."""
    failed: list[OSError] = []
    for folder, inner, files in os.walk(root, onerror=failed.append):
        for linked in sorted(x for x in inner if (Path(folder) / x).is_symlink()):
            yield (Path(folder) / linked).relative_to(root).as_posix(), "a link to a folder"
        inner[:] = sorted(x for x in inner if x != "__pycache__" and not x.startswith("."))
        for file in (Path(folder) / x for x in sorted(files) if not x.startswith(".")):
            yield file.relative_to(root).as_posix(), file
    for error in failed:
        yield str(error.filename), str(error.strerror)


def _documents(name: str, file: Path | str, state: hashlib._Hash) -> Iterator[Document]:
    """The texts of one file; its bytes are added to the fingerprint."""
    state.update(name.encode(errors="surrogateescape") + b"\0")
    if isinstance(file, str):
        yield Document(name, 0, reason=f"unreadable: {file}")
        return
    if not file.is_file():
        yield Document(name, 0, reason="no file")
        return
    try:
        if file.name.lower().endswith(LINES):
            yield from _lines(name, file, state)
            return
        data = file.read_bytes()
    except OSError as error:
        yield Document(name, 0, reason=f"unreadable: {error.strerror}")
        return
    state.update(hashlib.sha256(data).digest())
    yield Document(name, len(data), str(file), reason=_fault(data), stamp=_stamp(file))


def _lines(name: str, file: Path, state: hashlib._Hash) -> Iterator[Document]:
    start, stamp = 0, _stamp(file)
    with file.open("rb") as lines:
        for at, line in enumerate(lines, start=1):
            state.update(hashlib.sha256(line).digest())
            for document in document_of_line(f"{name}:{at}", line):
                yield replace(document, text=None, path=str(file), start=start, stamp=stamp)
            start += len(line)


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


def _checked(corpus: Corpus) -> Corpus:
    """The corpus; raises `InputError` if it has no text."""
    if all(d.reason is not None for d in corpus.documents):
        reasons = ", ".join(sorted({d.reason for d in corpus.documents if d.reason}))
        skipped = f"; {len(corpus.documents):,} left out: {reasons}" if reasons else ""
        raise InputError(f"corpus has no text, expected at least one in {corpus.name or 'it'}{skipped}")
    return corpus
