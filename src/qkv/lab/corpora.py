"""Texts to train on, by name: Python's standard library, files and folders, Tiny Shakespeare, Hugging Face datasets."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv._files import write_whole
from qkv.errors import InputError
from qkv.models.config import nearest

NAMES = ("library", "shakespeare")
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NO_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data",
}  # fmt: skip
"""Folders that lie with the standard library: what others wrote, tests, a copy of Python's grammar, and tables."""
HELD_OUT = 0.05
"""Share of a corpus that no model is trained on."""
LEAST = 0.5
"""Of that share must be reached by whole documents, or the end of every document is held out instead."""


@dataclass(frozen=True)
class Corpus:
    """Documents, in an order that mixes them and is always the same."""

    name: str
    documents: tuple[str, ...]
    """No two are equal, none is empty."""
    skipped: int = 0
    """Files that are no UTF-8 text."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all documents: the same for the same text, wherever it came from."""
        state = hashlib.sha256()
        for document in self.documents:
            text = document.encode()
            state.update(len(text).to_bytes(8, "little"))
            state.update(text)
        return state.hexdigest()

    def split(self) -> tuple[list[str], list[str]]:
        """Documents to train on, and those held out, which are about 5 % of the text.

        Whole documents are held out where there are enough small ones; else, as of one book, the end of each.

        >>> train, held_out = Corpus("a book", ("0123456789" * 10,)).split()
        >>> held_out
        ['56789']
        """
        room = HELD_OUT * sum(map(len, self.documents))
        train, held_out, length = list[str](), list[str](), 0
        for document in self.documents:
            fits = length + len(document) <= room
            length += len(document) if fits else 0
            (held_out if fits else train).append(document)
        if length >= LEAST * room:
            return train, held_out
        cuts = [len(document) - round(HELD_OUT * len(document)) for document in self.documents]
        parts = [(document[:cut], document[cut:]) for document, cut in zip(self.documents, cuts, strict=True)]
        return [start for start, _ in parts if start], [end for _, end in parts if end]


def load(name: str) -> Corpus:
    """The corpus of a name.

    Args:
        name: ``"library"`` (Python's standard library without its tests: about 11 MB, on every machine, and a little
            different in each version of Python), ``"shakespeare"`` (Tiny Shakespeare, 1.1 MB, fetched once),
            ``"hf:NAME"`` or ``"hf:NAME:COLUMN"`` (the train split of a Hugging Face dataset), or the path of a text
            file or a folder of them (all files that are UTF-8 text, subfolders too; hidden ones are left out).

    Raises:
        InputError: if there is no such corpus, it is empty or no UTF-8, or what it needs is missing.

    >>> len(load("library").documents) > 400
    True
    """
    if name == "library":
        return _of_folder(name, Path(sysconfig.get_path("stdlib")), lambda path: path.endswith(".py"), NO_LIBRARY)
    if name == "shakespeare":
        return _corpus(name, [("", _shakespeare().decode())])
    if name.startswith("hf:"):
        return _of_hugging_face(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_folder(name, path, lambda path: True, set())
    if not path.exists():
        expected = f"{', '.join(map(repr, NAMES))}, 'hf:NAME', or the path of a text file or a folder"
        raise InputError(f"corpus: no file or folder {name!r}, expected {expected}{nearest(name, NAMES)}")
    text = _text(_bytes(path))
    if text is None:
        raise InputError(f"corpus: {name} is no UTF-8 text, expected a text file or a folder of them")
    return _corpus(name, [("", text)])


def cache_folder() -> Path:
    """Where fetched texts and token files are kept: ``$QKV_CACHE``, or ``~/.cache/qkv``."""
    return Path(os.environ.get("QKV_CACHE") or "~/.cache/qkv").expanduser()


def keep(path: Path, data: bytes | memoryview) -> None:
    """Write a file of the cache, whole or not at all, even if several processes write it at once.

    Raises:
        InputError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}); QKV_CACHE names another folder to keep it"
        ) from error


def _corpus(name: str, named: Sequence[tuple[str, str]], skipped: int = 0) -> Corpus:
    """Documents in the order of a hash of their names, which mixes them; copies and blank ones are left out."""
    mixed = sorted(named, key=lambda item: hashlib.sha256(item[0].encode(errors="surrogateescape")).digest())
    documents = tuple(dict.fromkeys(text for _, text in mixed if text.strip()))
    if not documents:
        beside = f" (files that are no UTF-8 text: {skipped:,})" if skipped else ""
        raise InputError(f"corpus: {name} is empty{beside}, expected some text")
    return Corpus(name, documents, skipped)


def _text(data: bytes) -> str | None:
    """What bytes say, with their line ends as they are; None if they are no text."""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"corpus: cannot read {path} ({error.strerror})") from error


# --- files ------------------------------------------------------------------------------------------------------------


def _of_folder(name: str, root: Path, wanted: Callable[[str], bool], without: set[str]) -> Corpus:
    """All texts in a folder, by their paths in it."""
    found, skipped = list[tuple[str, str]](), 0
    for folder, inner, files in os.walk(root):
        inner[:] = [x for x in inner if x not in without and x != "__pycache__" and not x.startswith(".")]
        for path in (Path(folder) / x for x in files if wanted(x) and not x.startswith(".")):
            text = _text(_bytes(path)) if path.is_file() else None
            if text is None:
                skipped += 1
            else:
                found.append((path.relative_to(root).as_posix(), text))
    return _corpus(name, sorted(found), skipped)


# --- Tiny Shakespeare -------------------------------------------------------------------------------------------------


def _shakespeare() -> bytes:
    """The text, from the cache or its public address."""
    file = cache_folder() / "corpora" / "tinyshakespeare.txt"
    if file.exists():
        data = _bytes(file)
        _check_shakespeare(data, f"{file}: delete it, and it is fetched again")
        return data
    try:
        data = fetch(SHAKESPEARE)
    except OSError as error:  # no network, no such name, a refusal, a time-out
        raise InputError(
            f"corpus: cannot fetch {SHAKESPEARE} ({error}); expected a network, or the path of a copy of that file"
        ) from error
    _check_shakespeare(data, SHAKESPEARE)
    keep(file, data)
    return data


def _check_shakespeare(data: bytes, where: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise InputError(f"corpus: the SHA-256 is {found}, expected {SHAKESPEARE_SHA256}, of {where}")


def fetch(address: str) -> bytes:
    """What a public address answers."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        data: bytes = answer.read()
    return data


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _of_hugging_face(name: str) -> Corpus:
    """The train split of a dataset, a row a document."""
    _, dataset, *rest = name.split(":")
    if not dataset or len(rest) > 1:
        raise InputError(f"corpus is {name!r}, expected 'hf:NAME' or 'hf:NAME:COLUMN'")
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"corpus {name!r} needs datasets: pip install 'datasets>=4'")
    import datasets

    if int(datasets.__version__.split(".")[0]) < 4:
        raise InputError(
            f"corpus {name!r} needs datasets 4 or newer, which runs no code of a dataset, and this is "
            f"{datasets.__version__}: pip install 'datasets>=4'"
        )
    try:
        rows = datasets.load_dataset(dataset, split="train")
    except Exception as error:  # the transport underneath has errors of its own kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"corpus: cannot load the dataset {dataset!r} ({reason})") from error
    column = rest[0] if rest else "text"
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise InputError(
            f"corpus: {dataset} has no column {column!r}, expected 'hf:{dataset}:COLUMN' with one of {columns}"
        )
    return _corpus(name, [(f"{at:012}", _row(text, name)) for at, text in enumerate(rows[column])])


def _row(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"corpus: {name} holds {type(text).__name__}, expected a column of texts")
    return text
