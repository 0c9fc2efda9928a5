"""Texts by name: bundled passages, the standard library, files, and corpora."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from qkv._files import checked_datasets, dataset_and_column, write_atomically
from qkv.errors import InputError, nearest

SENTENCES = {
    "fox": "The quick brown fox jumps over the lazy dog.",
    "car": "The red car was parked next to a blue truck.",
    "cat": "The cat sat on the mat.",
    "pronoun": "The animal didn't cross the street because it was too tired.",
}
"""Short texts by name, which courses use."""
PASSAGES = {"lighthouse": "default_text.txt", "logbook": "default_code.txt"}
"""Files of longer texts by name: a passage of about 200 tokens with names, pronouns, repetition and a question; a
short program."""
PRESETS = (*SENTENCES, *PASSAGES)


def preset(name: str) -> str:
    """The bundled text with a name.

    >>> preset("fox")
    'The quick brown fox jumps over the lazy dog.'
    >>> preset("lighthouse").split()[:4]
    ['The', 'lighthouse', 'keeper', 'kept']
    """
    if name in SENTENCES:
        return SENTENCES[name]
    if name not in PASSAGES:
        raise InputError(f"preset is {name!r}, expected one of {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    return (files("qkv.profiler") / PASSAGES[name]).read_text(encoding="utf-8").strip()


def default_text(model: str = "") -> str:
    """The bundled text for a model: a program for ``"qkv-mini"``, which was trained on code only, else a passage.

    >>> default_text("qkv-mini").splitlines()[0]
    'class LogBook:'
    """
    return preset("logbook" if model == "qkv-mini" else "lighthouse")


def library_text(characters: int) -> str:
    """The first `characters` of the source code of Python's standard library, its modules sorted by name."""
    found: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if length >= characters:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        found.append(text)
        length += len(text)
    return "".join(found)[:characters]


NAMES = ("library", "shakespeare")
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "_vendor",
}  # fmt: skip
"""Folders to leave out of the standard library and of packages: installed packages, tests, a Python grammar, tables."""


@dataclass(frozen=True)
class Corpus:
    """The documents of a corpus, in a shuffled order that is always the same."""

    name: str
    documents: tuple[str, ...]
    """Without duplicates and empty documents."""
    skipped: int = 0
    """The number of files that are not UTF-8 text."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all documents. It depends on the text alone, not on where it was loaded from."""
        state = hashlib.sha256()
        for document in self.documents:
            text = document.encode()
            state.update(len(text).to_bytes(8, "little"))
            state.update(text)
        return state.hexdigest()


def load(name: str) -> Corpus:
    """Load the corpus of a name.

    Args:
        name: ``"library"`` (Python's standard library without its tests: about 11 MB, slightly different in each
            version of Python), ``"package:NAME"`` (the Python files of an installed package, without its tests),
            ``"shakespeare"`` (Tiny Shakespeare, 1.1 MB, downloaded once),
            ``"hf:NAME"`` or ``"hf:NAME:COLUMN"`` (the train split of a Hugging Face dataset), or the path of a text
            file or a folder (all UTF-8 files in it and its subfolders, except hidden ones).

    Raises:
        InputError: if there is no such corpus, if it is empty or not UTF-8, or if a package that it needs is missing.

    >>> len(load("library").documents) > 400
    True
    """
    if name == "library":
        return _folder_corpus(
            name, Path(sysconfig.get_path("stdlib")), lambda path: path.endswith(".py"), EXCLUDED_FOLDERS
        )
    if name.startswith("package:"):
        return _package_corpus(name)
    if name == "shakespeare":
        return _corpus(name, [("", _shakespeare().decode())])
    if name.startswith("hf:"):
        return _dataset_corpus(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder_corpus(name, path, lambda path: True, set())
    if not path.exists():
        expected = f"{', '.join(map(repr, NAMES))}, 'package:NAME', 'hf:NAME', or the path of a text file or a folder"
        raise InputError(f"corpus: no file or folder {name!r}, expected {expected}{nearest(name, NAMES)}")
    text = _text(_bytes(path))
    if text is None:
        raise InputError(f"corpus is {name!r}, which is not UTF-8 text, expected a text file or a folder of them")
    return _corpus(name, [("", text)])


def cache_folder() -> Path:
    """The folder for downloaded texts and token files: ``$QKV_CACHE``, or ``~/.cache/qkv``."""
    return Path(os.environ.get("QKV_CACHE") or "~/.cache/qkv").expanduser()


def write_cached(path: Path, data: bytes | memoryview) -> None:
    """Write a file of the cache atomically; several processes may do so at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise InputError(
            f"QKV_CACHE: cannot write {path} ({error.strerror}); set QKV_CACHE to another folder"
        ) from error


def _corpus(name: str, named: Sequence[tuple[str, str]], skipped: int = 0) -> Corpus:
    """A corpus of texts by name, shuffled by a hash of the names, without duplicates and blank texts."""
    shuffled = sorted(named, key=lambda item: hashlib.sha256(item[0].encode(errors="surrogateescape")).digest())
    documents = tuple(dict.fromkeys(text for _, text in shuffled if text.strip()))
    if not documents:
        also = f" (files that are not UTF-8 text: {skipped:,})" if skipped else ""
        raise InputError(f"corpus is {name!r}, which is empty{also}, expected some text")
    return Corpus(name, documents, skipped)


def _text(data: bytes) -> str | None:
    """Decode UTF-8, without changing line ends; None if the data is not text."""
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


def _folder_corpus(name: str, root: Path, include: Callable[[str], bool], excluded: set[str]) -> Corpus:
    """The text files in a folder and its subfolders whose names `include` accepts."""
    found, skipped = list[tuple[str, str]](), 0
    for folder, inner, names in os.walk(root):
        inner[:] = [x for x in inner if x not in excluded and x != "__pycache__" and not x.startswith(".")]
        for path in (Path(folder) / x for x in names if include(x) and not x.startswith(".")):
            text = _text(_bytes(path)) if path.is_file() else None
            if text is None:
                skipped += 1
            else:
                found.append((path.relative_to(root).as_posix(), text))
    return _corpus(name, sorted(found), skipped)


def _package_corpus(name: str) -> Corpus:
    """The Python files of an installed package."""
    _, package = name.split(":", 1)
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise InputError(f"corpus is {name!r}, expected 'package:NAME' with the name of an installed package")
    root = Path(next(iter(found.submodule_search_locations)))
    return _folder_corpus(name, root, lambda path: path.endswith(".py"), EXCLUDED_FOLDERS)


# --- Tiny Shakespeare -------------------------------------------------------------------------------------------------


def _shakespeare() -> bytes:
    """The text, from the cache or downloaded."""
    file = cache_folder() / "corpora" / "tinyshakespeare.txt"
    cached = file.exists()
    try:
        data = _bytes(file) if cached else fetch(SHAKESPEARE)
    except OSError as error:  # no network, unknown host, HTTP error, time-out
        raise InputError(
            f"corpus: cannot download {SHAKESPEARE} ({error}); without a network, give the path of a copy of that file"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != SHAKESPEARE_SHA256:
        where = f"{file}; delete this file to download it again" if cached else SHAKESPEARE
        raise InputError(f"corpus: the SHA-256 is {found}, expected {SHAKESPEARE_SHA256}, for {where}")
    if not cached:
        write_cached(file, data)
    return data


def fetch(address: str) -> bytes:
    """Download a file."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        data: bytes = answer.read()
    return data


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _dataset_corpus(name: str) -> Corpus:
    """The train split of a Hugging Face dataset; each row is a document."""
    dataset, column = dataset_and_column(name)
    checked_datasets(name)
    import datasets

    try:
        rows = datasets.load_dataset(dataset, split="train")
    except Exception as error:  # the network libraries underneath raise their own types of errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"corpus: cannot load the dataset {dataset!r} ({reason})") from error
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise InputError(
            f"corpus is {name!r}, but {dataset} has no column {column!r}, expected 'hf:{dataset}:COLUMN' with "
            f"one of {columns}"
        )
    return _corpus(name, [(f"{at:012}", _row(text, name)) for at, text in enumerate(rows[column])])


def _row(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"corpus is {name!r}, whose rows are {type(text).__name__}, expected a column of texts")
    return text
