"""Texts by name: bundled passages, the standard library, files, and corpora."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
import urllib.request
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from qkv._files import write_atomically
from qkv.errors import InputError, nearest, refusing
from qkv.profiler.surveys.corpus import (
    BLANK,
    Corpus,
    Document,
    document_of_bytes,
    of_addresses,
    of_texts,
    of_value,
    opened_dataset,
)

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


def load(name: str) -> Corpus:
    """Load the corpus of a name.

    Args:
        name: ``"library"`` (Python's standard library without its tests: about 11 MB, slightly different in each
            version of Python), ``"package:NAME"`` (the Python files of an installed package, without its tests),
            ``"shakespeare"`` (Tiny Shakespeare, 1.1 MB, downloaded once),
            ``"hf:NAME"`` or ``"hf:NAME:COLUMN"`` (the train split of a Hugging Face dataset), or the path of a file or
            a folder, as in `qkv.profiler.surveys.corpus.of_addresses`.

    Returns:
        The texts without duplicates and empty ones, in a shuffled order that is always the same.

    Raises:
        InputError: if there is no such corpus, if it has no text, or if a package that it needs is missing.

    >>> len(load("library").texts) > 400
    True
    """
    if name == "library":
        return _python_files(name, Path(sysconfig.get_path("stdlib")))
    if name.startswith("package:"):
        package = name.removeprefix("package:")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise InputError(f"corpus is {name!r}, expected 'package:NAME' with the name of an installed package")
        return _python_files(name, Path(next(iter(spec.submodule_search_locations))))
    if name == "shakespeare":
        return _shuffled(name, [document_of_bytes("", _shakespeare())])
    if name.startswith("hf:"):
        _, column, rows = opened_dataset(name, _rows)
        return _shuffled(name, [of_value(f"{at:012}", text, column) for at, text in enumerate(rows[column])])
    if not Path(name).expanduser().exists():
        expected = f"{', '.join(map(repr, NAMES))}, 'package:NAME', 'hf:NAME', or the path of a text file or a folder"
        raise InputError(f"corpus: no file or folder {name!r}, expected {expected}{nearest(name, NAMES)}")
    return _shuffled(name, of_addresses([name]))


def cache_folder() -> Path:
    """The folder for downloaded texts and token files: ``$QKV_CACHE``, or ``~/.cache/qkv``."""
    return Path(os.environ.get("QKV_CACHE") or "~/.cache/qkv").expanduser()


def write_cached(path: Path, data: bytes | memoryview) -> None:
    """Write a file of the cache atomically; several processes may do so at once."""
    with refusing(f"QKV_CACHE: cannot write {path} ({{}}); set QKV_CACHE to another folder", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)


def _shuffled(name: str, documents: Iterable[Document]) -> Corpus:
    """A corpus in the order of a hash of the names, without duplicates and blank texts."""
    found = sorted(documents, key=lambda one: hashlib.sha256(one.name.encode(errors="surrogateescape")).digest())
    texts = dict.fromkeys(one.text for one in found if one.reason is None and one.text is not None)
    return of_texts(texts, name, left_out=[one for one in found if one.reason not in (None, BLANK)])


def _python_files(name: str, root: Path) -> Corpus:
    """The Python files in a folder and its subfolders."""
    found = list[Document]()
    for folder, inner, names in os.walk(root):
        inner[:] = [x for x in inner if x not in EXCLUDED_FOLDERS and not x.startswith(".")]
        for path in (Path(folder) / x for x in names if x.endswith(".py") and not x.startswith(".")):
            if path.is_file():
                found.append(document_of_bytes(path.relative_to(root).as_posix(), _bytes(path)))
    return _shuffled(name, found)


def _rows(dataset: str) -> tuple[Any, list[str]]:
    import datasets

    rows = datasets.load_dataset(dataset, split="train")
    return rows, rows.column_names


def _bytes(path: Path) -> bytes:
    with refusing(f"corpus: cannot read {path} ({{}})", OSError):
        return path.read_bytes()


def _shakespeare() -> bytes:
    """The text, from the cache or downloaded."""
    file = cache_folder() / "corpora" / "tinyshakespeare.txt"
    cached = file.exists()
    way_out = "without a network, give the path of a copy of that file"
    with refusing(f"corpus: cannot download {SHAKESPEARE} ({{}}); {way_out}", OSError):
        data = _bytes(file) if cached else fetch(SHAKESPEARE)
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
