"""Corpora that can be split into shards: strings (`of_texts`), files (`of_addresses`), datasets (`of_dataset`).

The last two are read as a stream: each shard reads its own part, and no process lists or holds all texts. Files are
plain text, JSON lines, Parquet or WebDataset tar, each also compressed; texts that cannot be read are sorted out.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import importlib.util
import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import IO, Any, TypeVar

from qkv._files import decoded, filesystem
from qkv.errors import InputError, refusing

LINES = (".jsonl", ".ndjson")
FIELD = "text"
BINARY, BLANK = "no UTF-8 text", "empty"
T = TypeVar("T")


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


@dataclass(frozen=True)
class Corpus:
    """Texts that can be split into shards; documents that cannot be surveyed are included, with the reason."""

    name: str
    fingerprint: str
    """Tells whether two corpora have the same texts."""
    split: Callable[[int], Sequence[Part]] = field(compare=False, repr=False)
    """Splits the texts into so many shards, the same in every process."""

    def shards(self, number: int) -> Sequence[Part]:
        """Split the texts into `number` shards; `InputError` for a number that is out of range."""
        if not 1 <= number <= 9999:
            raise InputError(f"shards is {number}, expected 1 to 9999")
        return self.split(number)

    def __iter__(self) -> Iterator[Document]:
        return (document for part in self.shards(1) for chunk in part.chunks() for document in chunk)

    @property
    def documents(self) -> tuple[Document, ...]:
        return tuple(self)

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self if document.text is not None]


def of_texts(texts: Iterable[str], name: str = "texts", *, left_out: Iterable[Document] = ()) -> Corpus:
    """A corpus of strings, and of documents that are none, each with its reason.

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
    for one in left_out:
        state.update(hashlib.sha256().digest())
        found.append(Document(one.name, 0, reason=one.reason))
    if all(d.reason is not None for d in found):
        reasons = ", ".join(sorted({d.reason for d in found if d.reason}))
        skipped = f"; {len(found):,} left out: {reasons}" if reasons else ""
        raise InputError(f"corpus has no text, expected at least one in {name or 'it'}{skipped}")
    return Corpus(name, state.hexdigest(), partial(_even, found))


def _even(documents: Sequence[Document], number: int) -> list[Part]:
    """Shards of about the same size: each document is added to the smallest. All of a shard are batched together."""
    parts: list[list[Document]] = [[] for _ in range(number)]
    filled = [(0, i) for i in range(number)]
    for document in documents:
        size, least = heapq.heappop(filled)
        parts[least].append(document)
        heapq.heappush(filled, (size + document.size, least))
    return [Part(sum(d.size for d in part), partial(iter, (tuple(part),))) for part in parts]


def document_of_line(name: str, line: bytes) -> Iterator[Document]:
    """The text in a line of JSON, or the reason why there is none; nothing for a blank line."""
    text, missing = decoded(line), BINARY
    if text is not None:
        found, missing = None, f"no JSON object with {FIELD!r}"
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
        text = found.get(FIELD) if isinstance(found, dict) else None
    if line.strip():
        yield _document(name, len(line), text, missing)


def document_of_bytes(name: str, data: bytes) -> Document:
    """The text that bytes are, or the reason why they are none."""
    return _document(name, len(data), decoded(data), BINARY)


def of_value(name: str, text: Any, column: str = FIELD) -> Document:
    """The text that is the value of a row in this column, or the reason why it is none."""
    size = len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0
    return _document(name, size, text, f"no text in {column!r}")


def _document(name: str, size: int, text: Any, missing: str) -> Document:
    """A text, or the reason why there is none to survey: that it is blank, or what is `missing`."""
    with suppress(UnicodeEncodeError):  # JSON may hold lone surrogates, which are not text
        if isinstance(text, str):
            text.encode()
            return Document(name, size, text=text, reason=None if text.strip() else BLANK)
    return Document(name, size, reason=missing)


# --- formats ----------------------------------------------------------------------------------------------------------

COMPRESSED, PARQUET, TAR = (".zst", ".zstd", ".gz"), (".parquet",), (".tar",)
BUFFER = 2**20
ROWS = 256
"""Rows of a Parquet file that are read at a time."""


def documents(file: IO[bytes], name: str, size: int, low: int, high: int) -> Iterator[Document]:
    """The texts of a file that begin at a position from `low` to before `high`, which may be outside the file.

    Every text has a position from 0 to `size`, so ranges that cover these share a file among several readers. Lines
    begin at their first byte. The groups of rows of a Parquet file are spread over it evenly. Everything else begins
    at 0, because it can only be read from the start. The ending of the name tells the format.

    >>> [d.text for d in documents(io.BytesIO(b'{"text": "a"}\\n{"text": "b"}\\n'), "x.jsonl", 28, 1, 28)]
    ['b']
    """
    path = PurePosixPath(name.lower())
    compressed = path.suffix in COMPRESSED
    ending = PurePosixPath(path.stem).suffix if compressed else path.suffix
    if ending in LINES and not compressed:
        yield from _lines(file, name, low, high)
    elif ending in PARQUET and not compressed:
        yield from _rows(file, name, size, low, high)
    elif low <= 0 < high:
        if ending in PARQUET:
            raise InputError(f"corpus has {name}, expected Parquet files as they are: they are compressed inside")
        whole = _decompressed(file, path.suffix, name) if compressed else file  # it need not be able to seek
        yield from (_numbered_lines if ending in LINES else _members if ending in TAR else _whole)(whole, name)


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


def _decompressed(file: IO[bytes], ending: str, name: str) -> IO[bytes]:
    if ending == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    arrow = _arrow("", name)
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd"), BUFFER)


def _arrow(module: str, name: str) -> Any:
    with refusing(f"corpus has {name}, which needs the package pyarrow: pip install 'qkv[cloud]'", ImportError):
        return importlib.import_module(f"pyarrow.{module}".rstrip("."))


# --- streams ----------------------------------------------------------------------------------------------------------

CHUNK = 2**22
"""Bytes of text that are batched together, and the most that is held of a shard."""
SAMPLE = 2**16
"""Bytes at the start and at the end of a file by which it is known, if its storage keeps no hash of the content."""
_HASHES = ("ETag", "etag", "md5Hash", "crc32c", "blob_id")  # of S3 and others, Google Cloud Storage, Hugging Face
_TIMES = ("mtime", "created", "LastModified", "last_modified")


@dataclass(frozen=True, slots=True)
class File:
    """A file of the corpus."""

    name: str
    """Relative to the folder that was given."""
    address: str
    """The folder or file that was given."""
    path: str
    """In its file system."""
    size: int
    at: int
    """Position in the corpus: the sum of the sizes of the files before, each counted as one byte more."""
    stamp: str
    """Changes when the content does."""
    content: str | None
    """A hash of the content, if the storage keeps one."""
    reason: str | None = None
    """The reason why it is left out."""


def _by_bytes(addresses: Sequence[str], stamp: str, extent: int, number: int) -> list[Part]:
    """Shards of the files at these addresses, which are laid end to end: shard i has the texts that begin in its bytes.

    So no process has to know where the texts of other shards begin. Texts that can only be read from the start of a
    file are in one shard. Compressed files hold more text than their bytes say.
    """
    borders = [extent * i // number for i in range(number + 1)]
    return [Part(high - low, partial(_chunks, partial(_texts, addresses, stamp, low, high)))
            for low, high in itertools.pairwise(borders)]  # fmt: skip


def _texts(addresses: Sequence[str], stamp: str, low: int, high: int) -> Iterator[Document]:
    """The texts that begin in a range of positions; `stamp` is the SHA-256 of names, sizes and stamps of all files."""
    state, own = hashlib.sha256(), list[File]()
    for file in _files(addresses):
        _add(state, file, file.stamp)
        if file.at < high and low <= file.at + file.size:
            own.append(file)
    if state.hexdigest() != stamp:
        raise InputError("corpus has files that changed since the survey began; run the same command again")
    for file in own:
        yield from _read(file, low - file.at, high - file.at)


def _chunks(texts: Callable[[], Iterable[Document]]) -> Iterator[Sequence[Document]]:
    """The texts in lists of about `CHUNK` bytes."""
    found, size = list[Document](), 0
    for document in texts():
        found.append(document)
        size += document.size
        if size >= CHUNK:
            yield found
            found, size = [], 0
    yield found


def of_addresses(addresses: Sequence[str | os.PathLike[str]], *, whole: bool = False) -> Corpus:
    """A corpus at paths and addresses, which is read as a stream. Only the names of the files are read in advance.

    Args:
        addresses: files and folders, on this machine or for example at ``s3://``, ``gs://`` or ``hf://``. Folders are
            read with their subfolders, but without hidden files and ``__pycache__``. The ending of a file tells its
            format: ``.jsonl`` and ``.parquet`` with the texts in "text"; ``.tar`` with members ``.txt`` and ``.json``
            (WebDataset); any other file is one text. All but Parquet may be compressed: ``.zst``, ``.gz``.
        whole: where the storage keeps no hash of the content, read every file to its end for the fingerprint.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a.txt", "b.txt"):
    ...         _ = (Path(folder) / name).write_text(f"the text of {name}")
    ...     parts = of_addresses([folder]).shards(2)
    ...     [[d.name for chunk in part.chunks() for d in chunk] for part in parts]
    [['a.txt'], ['b.txt']]
    """
    texts = tuple(os.fspath(address) for address in addresses)
    content, stamps = hashlib.sha256(f"stream, batched by {CHUNK} bytes".encode()), hashlib.sha256()
    extent = 0
    for file in _files(texts):
        _add(content, file, file.content or _hash(file, whole=whole))
        _add(stamps, file, file.stamp)
        extent = file.at + file.size + 1
    if not extent:
        raise InputError(f"corpus has no file, expected at least one in {', '.join(texts) or 'it'}")
    return Corpus(", ".join(texts), content.hexdigest(), partial(_by_bytes, texts, stamps.hexdigest(), extent))


def _add(state: hashlib._Hash, file: File, about: str) -> None:
    state.update(f"{file.name}\0{file.size}\0{about}\0".encode(errors="surrogateescape"))


def _files(addresses: Sequence[str]) -> Iterator[File]:
    """All files in order. Only the names in one folder are held at a time."""
    at = 0
    for address in addresses:
        files, root = filesystem(os.path.expanduser(address), "corpus")
        files.invalidate_cache()  # so that a file that has changed is noticed
        absent = refusing(f"corpus has the path {address!r}, expected a file or folder that exists", FileNotFoundError)
        with refusing(f"corpus: cannot list {address} ({{}})"), absent:
            about = _target(files, files.info(root))
            for name, info in _walk(files, root, "") if about["type"] == "directory" else [(_last(root), about)]:
                size = int(info.get("size") or 0)
                hashes = [f"{key} {info[key]}" for key in _HASHES if info.get(key)]
                times = [f"{key} {info[key]}" for key in _TIMES if info.get(key)]
                left_out = {"file": None, "directory": "a link to a folder"}.get(info["type"], "no file")
                stamp, content = " ".join(hashes or times), hashes[0] if hashes else None
                yield File(name, address, info["name"], size, at, stamp, content, left_out)
                at += size + 1


def _walk(files: Any, folder: str, inside: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in sorted(files.ls(folder, detail=True), key=lambda entry: _last(entry["name"])):
        info, last = _target(files, entry), _last(entry["name"])
        if last.startswith(".") or last == "__pycache__" or info["name"].strip("/") == folder.strip("/"):
            continue
        if info["type"] == "directory" and not info.get("islink"):
            yield from _walk(files, info["name"], f"{inside}{last}/")
        else:
            yield inside + last, info


def _target(files: Any, info: dict[str, Any]) -> dict[str, Any]:
    """What is known about a file, or about the target of a link to one, on a disk."""
    if not info.get("islink"):
        return info
    target = os.path.realpath(info["name"])
    known = files.info(target) if os.path.exists(target) else {"type": "other"}
    return {**known, "name": info["name"], "islink": True}


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _read(file: File, low: int, high: int) -> Iterator[Document]:
    if file.reason is not None:
        if low <= 0 < high:
            yield Document(file.name, file.size, reason=file.reason)
        return
    # Storages have types of errors of their own, and a file may be damaged.
    with refusing(f"corpus: cannot read {file.path} ({{}}); if it is damaged, remove it from the corpus"):
        try:
            with _opened(file) as opened:
                yield from documents(opened, file.name, file.size, low, high)
        except PermissionError as error:
            if low <= 0 < high:
                yield Document(file.name, file.size, reason=_unreadable(error))


def _unreadable(error: PermissionError) -> str:
    return f"unreadable: {error.strerror}"


def _opened(file: File) -> io.BufferedReader:
    files, _ = filesystem(os.path.expanduser(file.address), "corpus")
    return io.BufferedReader(files.open(file.path, "rb"), BUFFER)


def _hash(file: File, *, whole: bool) -> str:
    """The SHA-256 of a file, or of its start and its end."""
    if file.reason is not None:
        return file.reason
    with refusing(f"corpus: cannot read {file.path} ({{}})", OSError):
        try:
            with _opened(file) as opened:
                if whole:
                    return hashlib.file_digest(opened, "sha256").hexdigest()
                start = opened.read(SAMPLE)
                opened.seek(max(file.size - SAMPLE, 0))
                return hashlib.sha256(start + opened.read(SAMPLE)).hexdigest()
        except PermissionError as error:
            return _unreadable(error)


def of_dataset(name: str) -> Corpus:
    """The train split of a dataset ``"hf:NAME"`` or ``"hf:NAME:COLUMN"``, which is downloaded while it is read.

    Only its description is downloaded now. Shards are files of the dataset if their number divides that of the files,
    else every n-th row.
    """

    def described(dataset: str) -> tuple[str, list[str]]:
        import datasets

        builder = datasets.load_dataset_builder(dataset)
        origins = [getattr(files, "origin_metadata", None) for files in (builder.config.data_files or {}).values()]
        columns = list(builder.info.features or _streamed(dataset, None).features or {})
        return f"{builder.hash}\0{origins}", columns

    dataset, column, version = opened_dataset(name, described)
    version = f"{dataset}\0{column}\0{version}\0batched by {CHUNK} bytes"
    rows = partial(_rows_of_dataset, name, dataset, column)
    return Corpus(name, hashlib.sha256(version.encode()).hexdigest(), partial(_by_rows, rows))


def _by_rows(rows: Callable[[int, int], Iterator[Document]], number: int) -> list[Part]:
    return [Part(0, partial(_chunks, partial(rows, i, number))) for i in range(number)]


def _rows_of_dataset(name: str, dataset: str, column: str, share: int, of: int) -> Iterator[Document]:
    """The rows of one of `of` shares."""
    from datasets.distributed import split_dataset_by_node

    with refusing(f"corpus: cannot read the dataset {dataset!r} ({{}})"):
        for at, row in enumerate(split_dataset_by_node(_streamed(dataset, column), share, of)):
            yield of_value(f"{name} share {share} row {at}", row[column], column)


def opened_dataset(name: str, load: Callable[[str], tuple[T, list[str]]]) -> tuple[str, str, T]:
    """The names of a dataset and its column, and what `load` gives for the dataset beside the names of its columns."""
    _, dataset, *rest = name.split(":")
    if not dataset or len(rest) > 1:
        raise InputError(f"corpus is {name!r}, expected 'hf:NAME' or 'hf:NAME:COLUMN'")
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"corpus: {name!r} needs the package datasets: pip install 'datasets>=4'")
    import datasets

    if int(datasets.__version__.split(".")[0]) < 4:
        raise InputError(
            f"corpus: {name!r} needs datasets 4 or newer, which does not run code from datasets; installed is "
            f"{datasets.__version__}: pip install 'datasets>=4'"
        )
    with refusing(f"corpus: cannot load the dataset {dataset!r} ({{}})"):  # libraries of networks have own errors
        found, columns = load(dataset)
    column = rest[0] if rest else FIELD
    if column not in columns:
        raise InputError(
            f"corpus is {name!r}, but {dataset} has no column {column!r}, expected 'hf:{dataset}:COLUMN' with one of "
            f"{', '.join(columns)}"
        )
    return dataset, column, found


def _streamed(dataset: str, column: str | None) -> Any:
    import datasets

    rows = datasets.load_dataset(dataset, split="train", streaming=True)
    return rows.select_columns([column]) if column else rows
