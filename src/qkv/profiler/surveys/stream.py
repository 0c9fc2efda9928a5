"""A corpus that is read as a stream: each shard reads its own part, and no process lists or holds all texts.

`Stream` reads files and folders (plain text, JSON lines, Parquet, WebDataset tar, each also compressed); `Dataset`
reads a dataset of the Hugging Face hub by the package ``datasets``.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qkv._files import checked_datasets, dataset_and_column, filesystem, reason
from qkv.errors import InputError
from qkv.profiler.surveys.corpus import BUFFER, Document, Part, Source, checked_shards, documents, of_value

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


@dataclass(frozen=True)
class Stream(Source):
    """Files and folders at paths and addresses, in a reproducible order.

    The files are laid end to end, and shard i of N has the texts that begin in the i-th N-th of all bytes. So no
    process has to know where the texts of other shards begin. Only the names of the files are read in advance.
    """

    name: str
    addresses: tuple[str, ...]
    fingerprint: str
    """SHA-256 of the names, sizes and contents of all files; of the contents perhaps as far as `SAMPLE` says."""
    stamp: str
    """SHA-256 of names, sizes and stamps of all files."""
    extent: int
    """The position after the last file."""

    def shards(self, number: int) -> Sequence[Part]:
        """`number` parts of equal size. Texts that can only be read from the start of a file are in the same one.

        Compressed files hold more text than their bytes say.
        """
        checked_shards(number)
        borders = [self.extent * i // number for i in range(number + 1)]
        return [Part(high - low, partial(_chunks, partial(self._texts, low, high)))
                for low, high in itertools.pairwise(borders)]  # fmt: skip

    def _texts(self, low: int, high: int) -> Iterator[Document]:
        """The texts that begin in a range of positions."""
        state, own = hashlib.sha256(), list[File]()
        for file in _files(self.addresses):
            _add(state, file, file.stamp)
            if file.at < high and low <= file.at + file.size:
                own.append(file)
        if state.hexdigest() != self.stamp:
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


def of_addresses(addresses: Sequence[str | os.PathLike[str]], *, whole: bool = False) -> Stream:
    """A corpus at paths and addresses, which is read as a stream.

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
    return Stream(", ".join(texts), texts, content.hexdigest(), stamps.hexdigest(), extent)


def _add(state: hashlib._Hash, file: File, about: str) -> None:
    state.update(f"{file.name}\0{file.size}\0{about}\0".encode(errors="surrogateescape"))


def _files(addresses: Sequence[str]) -> Iterator[File]:
    """All files in order. Only the names in one folder are held at a time."""
    at = 0
    for address in addresses:
        files, root = filesystem(os.path.expanduser(address), "corpus")
        files.invalidate_cache()  # so that a file that has changed is noticed
        try:
            about = _target(files, files.info(root))
            for name, info in _walk(files, root, "") if about["type"] == "directory" else [(_last(root), about)]:
                size = int(info.get("size") or 0)
                hashes = [f"{key} {info[key]}" for key in _HASHES if info.get(key)]
                times = [f"{key} {info[key]}" for key in _TIMES if info.get(key)]
                left_out = {"file": None, "directory": "a link to a folder"}.get(info["type"], "no file")
                stamp, content = " ".join(hashes or times), hashes[0] if hashes else None
                yield File(name, address, info["name"], size, at, stamp, content, left_out)
                at += size + 1
        except FileNotFoundError as error:
            raise InputError(f"corpus has the path {address!r}, expected a file or folder that exists") from error
        except InputError:
            raise
        except Exception as error:  # each backend has its own types of errors
            raise InputError(f"corpus: cannot list {address} ({reason(error)})") from error


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
    try:
        with _opened(file) as opened:
            yield from documents(opened, file.name, file.size, low, high)
    except PermissionError as error:
        if low <= 0 < high:
            yield Document(file.name, file.size, reason=_unreadable(error))
    except InputError:
        raise
    except Exception as error:  # of the storage, each with types of its own, or of a damaged file
        raise InputError(
            f"corpus: cannot read {file.path} ({reason(error)}); if it is damaged, remove it from the corpus"
        ) from error


def _unreadable(error: PermissionError) -> str:
    return f"unreadable: {error.strerror}"


def _opened(file: File) -> io.BufferedReader:
    files, _ = filesystem(os.path.expanduser(file.address), "corpus")
    return io.BufferedReader(files.open(file.path, "rb"), BUFFER)


def _hash(file: File, *, whole: bool) -> str:
    """The SHA-256 of a file, or of its start and its end."""
    if file.reason is not None:
        return file.reason
    try:
        with _opened(file) as opened:
            if whole:
                return hashlib.file_digest(opened, "sha256").hexdigest()
            start = opened.read(SAMPLE)
            opened.seek(max(file.size - SAMPLE, 0))
            return hashlib.sha256(start + opened.read(SAMPLE)).hexdigest()
    except PermissionError as error:
        return _unreadable(error)
    except OSError as error:
        raise InputError(f"corpus: cannot read {file.path} ({reason(error)})") from error


@dataclass(frozen=True)
class Dataset(Source):
    """The train split of a dataset, which is downloaded while it is read."""

    name: str
    dataset: str
    column: str
    fingerprint: str
    """SHA-256 of the names of dataset and column, and of the versions of its files."""

    def shards(self, number: int) -> Sequence[Part]:
        """`number` shares: files of the dataset if `number` divides their number, else every n-th row."""
        checked_shards(number)
        return [Part(0, partial(_chunks, partial(self._texts, i, number))) for i in range(number)]

    def _texts(self, share: int, of: int) -> Iterator[Document]:
        """The rows of one of `of` shares."""
        from datasets.distributed import split_dataset_by_node

        try:
            for at, row in enumerate(split_dataset_by_node(_streamed(self.dataset, self.column), share, of)):
                yield of_value(f"{self.name} share {share} row {at}", row[self.column], self.column)
        except InputError:
            raise
        except Exception as error:  # the network libraries underneath raise their own types of errors
            raise InputError(f"corpus: cannot read the dataset {self.dataset!r} ({reason(error)})") from error


def of_dataset(name: str) -> Dataset:
    """The dataset of a name ``"hf:NAME"`` or ``"hf:NAME:COLUMN"``. Only its description is downloaded now."""
    dataset, column = dataset_and_column(name)
    checked_datasets(name)
    import datasets

    try:
        builder = datasets.load_dataset_builder(dataset)
        origins = [getattr(files, "origin_metadata", None) for files in (builder.config.data_files or {}).values()]
        columns = list(builder.info.features or _streamed(dataset, None).features or {})
    except Exception as error:  # the network libraries underneath raise their own types of errors
        raise InputError(f"corpus: cannot load the dataset {dataset!r} ({reason(error)})") from error
    if column not in columns:
        raise InputError(
            f"corpus is {name!r}, but {dataset} has no column {column!r}, expected 'hf:{dataset}:COLUMN' with one of "
            f"{', '.join(columns)}"
        )
    version = f"{dataset}\0{column}\0{builder.hash}\0{origins}\0batched by {CHUNK} bytes"
    return Dataset(name, dataset, column, hashlib.sha256(version.encode()).hexdigest())


def _streamed(dataset: str, column: str | None) -> Any:
    import datasets

    rows = datasets.load_dataset(dataset, split="train", streaming=True)
    return rows.select_columns([column]) if column else rows
