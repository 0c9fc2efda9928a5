"""Corpora: every text is in exactly one shard, whatever the format, and no process holds all texts of a stream."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import refused
from qkv.profiler.surveys import corpus
from qkv.profiler.surveys.corpus import Corpus, Document, of_addresses
from survey_process import TEXTS, own, own_survey

MANY = [f"text {i}: " + "é" * (i % 7) + "\n" * (i % 3) + "word " * (i % 11) for i in range(40)]


def lines(texts: Sequence[Any]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def table(texts: Sequence[Any], rows: int = 6) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), file, row_group_size=rows)
    return file.getvalue()


def archive(members: Sequence[tuple[str, bytes | None]]) -> bytes:
    """A tar; a member without data is a folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            member.size = len(data or b"")
            made.addfile(member, io.BytesIO(data or b""))
    return file.getvalue()


def tar(texts: Sequence[str]) -> bytes:
    """Every second text is a member .txt, the others are members .json with a field "text"."""
    return archive([(f"{i}.txt", x.encode()) if i % 2 else (f"{i}.json", lines([x])) for i, x in enumerate(texts)])


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


FORMATS: dict[str, Callable[[Sequence[Any]], bytes]] = {
    "x.jsonl": lines, "x.ndjson": lines, "x.parquet": table, "x.tar": tar,
    "x.jsonl.zst": lambda texts: zstd(lines(texts)), "x.jsonl.gz": lambda texts: gzip.compress(lines(texts)),
    "x.tar.zst": lambda texts: zstd(tar(texts)), "x.tar.gz": lambda texts: gzip.compress(tar(texts)),
}  # fmt: skip


def texts_of(found: Corpus, shards: int) -> list[list[str | None]]:
    return [[d.text for chunk in part.chunks() for d in chunk if d.reason is None] for part in found.shards(shards)]


def in_order(shards: list[list[str | None]]) -> list[str | None]:
    return [text for shard in shards for text in shard]


@pytest.mark.parametrize("name", FORMATS)
def test_every_text_of_every_format_is_in_exactly_one_shard(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(FORMATS[name](MANY))
    for shards in (1, 2, 7, 60):
        found = texts_of(of_addresses([file]), shards)
        assert in_order(found) == MANY
        splits = name in ("x.jsonl", "x.ndjson", "x.parquet")
        assert sum(map(bool, found)) > 1 or shards == 1 or not splits, "a file that can be split was not"
    if name not in ("x.jsonl", "x.ndjson"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with refused("corpus", name):
            texts_of(of_addresses([file]), 1)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 9), st.booleans())
def test_lines_are_divided_wherever_the_borders_fall(lengths: list[int], shards: int, ends: bool) -> None:
    texts = [str(at) + "x" * n for at, n in enumerate(lengths)]
    data = lines(texts) if ends else lines(texts)[:-1]
    fsspec.filesystem("memory").pipe_file("/divided/a.jsonl", data)
    assert in_order(texts_of(of_addresses(["memory://divided/a.jsonl"]), shards)) == texts
    for low in range(0, len(data), 7):
        borders = (-5, low, low + 3, len(data) + 1)
        cut = [
            d.text
            for start, stop in itertools.pairwise(borders)
            for d in corpus.documents(io.BytesIO(data), "a.jsonl", len(data), start, stop)
        ]
        assert cut == texts


NO_JSON = "no JSON object with 'text'"
BAD_LINES = [
    b'\xef\xbb\xbf{"text": "two"}', b'{"text": 3}', b'{"text": "three"}', b"no JSON", b"", b'{"text": " "}',
    b'{"text": "bad \\ud800"}', b"[" * 100_000,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of texts, of what is none, and of links."""
    root = tmp_path / "corpus"
    files = {
        "a.txt": "\ufeffone".encode(), "b.jsonl": b"\n".join(BAD_LINES), "binary": b"\0", "blank": b" \n",
        "in/.git/x": b"hidden", "in/five": lines(["five"]), "in/latin": "é".encode("latin-1"),
    }  # fmt: skip
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "link").symlink_to(root / "in")
    (root / "y.jsonl").symlink_to(root / "in" / "five")
    return root


@pytest.mark.parametrize("shards", [1, 5, 30])
def test_folders_are_divided_and_what_is_no_text_is_counted(
    shards: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [("1.cls", b"7"), ("1.txt", b"a text"), ("2.json", b""), ("folder", None)]
    (folder / "in" / "c.tar").write_bytes(archive(members))
    (folder / "in" / "d.parquet").write_bytes(table(["four", None, " "]))
    (folder / "nowhere").symlink_to(folder / "missing")
    (folder / "locked").write_text("secret")
    os.mkfifo(folder / "pipe")
    opened = corpus._opened

    def refuse(file: corpus.File) -> io.BufferedReader:
        if file.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(file)

    monkeypatch.setattr(corpus, "_opened", refuse)  # who runs as root may read everything
    (folder / "z").write_bytes(b"")
    found = [d for part in of_addresses([folder]).shards(shards) for chunk in part.chunks() for d in chunk]
    assert [d.text for d in found if d.reason is None] == [
        "one", "two", "three", "a text", "four", '{"text": "five"}\n', "five",
    ]  # fmt: skip
    assert [(d.name.partition("@")[0], d.reason) for d in found if d.reason is not None] == [
        ("b.jsonl", NO_JSON), ("b.jsonl", NO_JSON), ("b.jsonl", "empty"), ("b.jsonl", NO_JSON), ("b.jsonl", NO_JSON),
        ("binary", "no UTF-8 text"), ("blank", "empty"),
        ("in/c.tar/1.cls", "member of a tar that is neither .txt nor .json"), ("in/c.tar/2.json", NO_JSON),
        ("in/d.parquet:2", "no text in 'text'"), ("in/d.parquet:3", "empty"), ("in/latin", "no UTF-8 text"),
        ("link", "a link to a folder"), ("locked", "unreadable: Permission denied"), ("nowhere", "no file"),
        ("pipe", "no file"), ("z", "empty"),
    ]  # fmt: skip
    survey = own_survey(tmp_path / "out", of_addresses([folder, folder / "a.txt"]))
    assert survey.record["documents"] == 8, "a.txt was named twice"
    assert survey.record["skipped"] == Counter(d.reason for d in found if d.reason is not None)
    assert any(e.startswith("binary: ") for e in survey.record["examples"])


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.tar.zst"])
def test_memory_does_not_grow_with_the_corpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK", 2**16)
    texts = [f"{i} " + "abcdefgh" * 1000 for i in range(1500)]  # 12 MB
    (tmp_path / name).write_bytes(table(texts, 50) if name == "x.parquet" else FORMATS[name](texts))
    (part,) = of_addresses([tmp_path / name]).shards(1)
    size = 0
    next(part.chunks())  # imports
    tracemalloc.start()
    for chunk in part.chunks():
        size += sum(d.size for d in chunk)
        assert sum(d.size for d in chunk) < 2**16 + 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 10e6
    assert peak < 5e6


def test_survey_of_a_stream_has_the_sums_of_a_survey_of_its_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is one shard, several, or a shard in several chunks; only the batches round differently."""
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    model = own().double()
    surveys = [own_survey(tmp_path / "listed", TEXTS, model, shards=2)]
    for name, shards, chunk in (("one", 1, corpus.CHUNK), ("three", 3, corpus.CHUNK), ("chunks", 1, 50)):
        monkeypatch.setattr(corpus, "CHUNK", chunk)
        surveys.append(own_survey(tmp_path / name, of_addresses([tmp_path / "x.jsonl"]), model, shards=shards))
    want, *tables = (found.heads().iloc[:, 3:] for found in surveys)
    for found, table in zip(surveys[1:], tables, strict=True):
        for name in ("documents", "sequences", "tokens"):
            assert found.record[name] == surveys[0].record[name]
        np.testing.assert_allclose(table, want, rtol=1e-9, atol=1e-9)
    assert surveys[1].record["shards"] != surveys[3].record["shards"], "other batches are another corpus"


def test_fingerprint_depends_on_names_and_contents_and_not_on_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "SAMPLE", 8)
    (tmp_path / "x").write_bytes(lines(MANY))
    whole = of_addresses([tmp_path / "x"], whole=True).fingerprint
    (tmp_path / "x").write_bytes(lines(MANY).replace(b"text 20", b"text zz"))
    assert of_addresses([tmp_path / "x"], whole=True).fingerprint != whole
    for folder in ("a", "b"):
        (tmp_path / folder / "in").mkdir(parents=True)
        (tmp_path / folder / "in" / "x.jsonl").write_bytes(lines(MANY))
    fsspec.filesystem("memory").pipe_file("/place/in/x.jsonl", lines(MANY))
    places = [tmp_path / "a", f"file://{tmp_path}/b", "memory://place"]
    (fingerprint,) = {of_addresses([place]).fingerprint for place in places}
    before = of_addresses(places[:1])
    (tmp_path / "a" / "in" / "x.jsonl").write_bytes(lines(MANY)[:-4] + b"?" + lines(MANY)[-3:])  # near the end
    with refused("corpus", "changed since the survey"):
        list(before.shards(3)[2].chunks())
    (tmp_path / "b" / "in" / "x.jsonl").rename(tmp_path / "b" / "in" / "y.jsonl")
    for place in places[:2]:
        assert of_addresses([place]).fingerprint != fingerprint


def chunks(file: Path) -> list[Any]:
    return list(of_addresses([file]).shards(1)[0].chunks())


def test_unsuitable_corpora_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "x.parquet")
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "x.parquet.gz")
    rows: list[tuple[str, Callable[[], object]]] = [
        ("no text", lambda: corpus.of_texts([])),
        ("1 left out: empty", lambda: corpus.of_texts([" "])),
        ("holds int", lambda: corpus.of_texts([3])),  # type: ignore[list-item]
        ("that exists", lambda: of_addresses([tmp_path / "nowhere"])),
        ("no file", lambda: of_addresses([tmp_path / "folder"])),
        ("it has content", lambda: chunks(tmp_path / "x.parquet")),
        ("compressed inside", lambda: chunks(tmp_path / "x.parquet.gz")),
    ]
    for match, call in rows:
        with refused("corpus", match):
            call()
    assert len(corpus.of_texts("one text").documents) == 1


def test_dataset_of_the_hugging_face_hub_is_read_row_by_row(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    (tmp_path / "hub").mkdir()
    for at in range(2):
        pq.write_table(pa.table({"body": MANY[20 * at : 20 * at + 20]}), tmp_path / "hub" / f"train-{at}.parquet")
    name = f"hf:{tmp_path / 'hub'}:body"
    found = corpus.of_dataset(name)
    for shards in (1, 2, 3):
        rows = [d for part in found.shards(shards) for chunk in part.chunks() for d in chunk]
        assert sorted(str(d.text) for d in rows if d.reason is None) == sorted(MANY)
        assert all(isinstance(d, Document) for d in rows)
    assert corpus.of_dataset(name).fingerprint == found.fingerprint
    with refused("corpus", "no column 'text'"):
        corpus.of_dataset(name.removesuffix(":body"))
