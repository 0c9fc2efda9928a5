"""Corpora: deterministic documents, held-out splits, downloads, datasets, and errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import networkx
import pytest

from conftest import refused
from qkv.profiler import corpora
from qkv.profiler.corpora import load
from qkv_lab.tokens import split, without_passages

COPY = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"  # beside the repository, if it exists


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))

    def offline(address: str) -> bytes:
        raise OSError("no network in tests")

    monkeypatch.setattr(corpora, "fetch", offline)
    return tmp_path / "cache"


def test_library_excludes_tests_and_five_percent_of_it_are_held_out() -> None:
    library = load("library")
    size = sum(map(len, library.texts))
    assert all(x.reason is None for x in library.documents)
    assert 8e6 < size < 20e6
    assert any('"""Random variable generators.' in x for x in library.texts)
    unwanted = Path(pytest.__file__).read_text(), Path(__import__("test.support").__file__).read_text()
    assert not set(unwanted) & set(library.texts)
    train, held_out = split(library.texts)
    assert sorted(train + held_out) == sorted(library.texts)
    assert not set(train) & set(held_out)
    assert 0.04 < sum(map(len, held_out)) / size <= 0.05
    assert split(load("library").texts) == (train, held_out)


def test_folder_gives_its_text_files_and_counts_the_skipped_ones(tmp_path: Path) -> None:
    for name, data in {
        "a.py": b"one\r\n", "b.md": "zwei\u00e9".encode(), "copy.py": b"one\r\n", "blank.txt": b" \n",
        "c.bin": b"\0\1text", "latin.txt": b"\xe9t\xe9", ".hidden/x.txt": b"hidden", "__pycache__/y.txt": b"cached",
        ".secret": b"dot",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = load(str(tmp_path))
    assert sorted(found.texts) == ["one\n", "zwei\u00e9"]  # one kind of line end, duplicates once
    assert [x.reason for x in found.documents[2:]] == ["no UTF-8 text"] * 2
    assert load(str(tmp_path / "a.py")).texts == ["one\n"]
    package, root = load("package:networkx"), Path(networkx.__file__).parent
    assert (root / "__init__.py").read_text() in package.texts
    assert (root / "algorithms" / "tests" / "test_core.py").read_text() not in package.texts


def test_documents_that_share_a_passage_are_left_out() -> None:
    lines = [f"    this is the long line of number {i}\n" for i in range(6)]
    book = "".join(lines)
    same = {
        "indented otherwise": "x = 1\n" + "".join("\t" + line.strip() + "\n\n" for line in lines[1:4]),
        "whole": book,
    }
    other = {
        "two lines": "".join(lines[:2]) + "and then another long line\n",
        "not in a row": "".join(f"{line}something in between them\n" for line in lines),
        "short lines": "a = 1\nb = 2\nc = 3\nd = 4\n",
    }
    assert without_passages([*same.values(), *other.values()], [book, "a = 1\nb = 2\nc = 3\n"]) == list(other.values())


def test_shakespeare_is_downloaded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 99
    if COPY.exists():
        text = COPY.read_bytes()
    else:
        monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", hashlib.sha256(text).hexdigest())
    fetched = []
    monkeypatch.setattr(corpora, "fetch", lambda address: fetched.append(address) or text)
    first, again = load("shakespeare"), load("shakespeare")
    assert first == again
    assert first.texts[0].startswith("First Citizen:\nBefore we proceed any further")
    assert fetched == ["https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"]
    assert [x.name for x in (cache / "corpora").iterdir()] == ["tinyshakespeare.txt"]


def test_wrong_or_missing_downloads_are_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("corpus", match="no network in tests"):  # by the fixture
        load("shakespeare")
    monkeypatch.setattr(corpora, "fetch", lambda address: b"<html>not found</html>")
    with refused("corpus", match="expected 86c4e6aa"):
        load("shakespeare")
    assert not cache.exists()
    (cache / "corpora").mkdir(parents=True)
    (cache / "corpora" / "tinyshakespeare.txt").write_bytes(b"First Cit")
    with refused("corpus", match="delete this file"):
        load("shakespeare")


def test_corpora_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "empty.txt").write_bytes(b"\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.bin").write_bytes(b"\0")
    for name, match in (
        ("libary", "mean 'library'"),
        (str(tmp_path / "latin.txt"), "no UTF-8 text"),
        (str(tmp_path / "empty.txt"), "has no text, expected"),
        (str(tmp_path / "folder"), "1 left out: no UTF-8 text"),
        ("package:no_such_package", "package:NAME"),
        ("package:networkx.algorithms", "package:NAME"),
        ("package:../x", "package:NAME"),
        ("package:this", "package:NAME"),
        ("hf:", "hf:NAME:COLUMN"),
        ("hf:a:b:c", "hf:NAME:COLUMN"),
    ):
        with refused("corpus", match=match):
            load(name)

    def unreadable(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", unreadable)
    with refused("corpus", match="cannot read"):
        load("library")
