"""Streamed corpora: every text is in exactly one shard, whatever the format, and no process holds all texts."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import tarfile
import tracemalloc
from collections.abc import Sequence
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
from qkv.cli import main
from qkv.models.tokenizers import ByteTokenizer
from qkv.profiler.surveys import formats, stream
from qkv.profiler.surveys.corpus import Document
from qkv.profiler.surveys.merging import merge_folders
from qkv.profiler.surveys.stream import Stream, of_addresses
from qkv.profiler.surveys.survey import survey
from survey_process import TEXTS, own

MANY = [f"text {i}: " + "é" * (i % 7) + "\n" * (i % 3) + "word " * (i % 11) for i in range(40)]


def lines(texts: Sequence[Any]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def table(texts: Sequence[Any], rows: int = 6) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), file, row_group_size=rows)
    return file.getvalue()


def tar(texts: Sequence[str]) -> bytes:
    """Every second text is a member .txt, the others are members .json with a field "text"."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for at, text in enumerate(texts):
            name, data = (f"{at:04}.txt", text.encode()) if at % 2 else (f"{at:04}.json", lines([text]))
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


FILES = {
    "x.jsonl": lines(MANY), "x.ndjson": lines(MANY), "x.parquet": table(MANY), "x.tar": tar(MANY),
    "x.jsonl.zst": zstd(lines(MANY)), "x.jsonl.gz": gzip.compress(lines(MANY)), "x.tar.zst": zstd(tar(MANY)),
    "x.tar.gz": gzip.compress(tar(MANY)),
}  # fmt: skip


def texts_of(corpus: Stream, shards: int) -> list[list[str | None]]:
    return [[d.text for chunk in part.chunks() for d in chunk if d.reason is None] for part in corpus.shards(shards)]


def in_order(shards: list[list[str | None]]) -> list[str | None]:
    return [text for shard in shards for text in shard]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 60])
@pytest.mark.parametrize("name", FILES)
def test_every_text_of_every_format_is_in_exactly_one_shard(name: str, shards: int, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    found = texts_of(of_addresses([tmp_path / name]), shards)
    assert in_order(found) == MANY
    splits = name in ("x.jsonl", "x.ndjson", "x.parquet")
    assert sum(map(bool, found)) > 1 or shards == 1 or not splits, "a file that can be split was not"


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
            for d in formats.documents(io.BytesIO(data), "a.jsonl", len(data), start, stop)
        ]
        assert cut == texts


@pytest.mark.parametrize("shards", [1, 2, 5, 30])
def test_folders_are_divided_and_what_is_no_text_is_counted(shards: int, tmp_path: Path) -> None:
    (tmp_path / "in" / ".git").mkdir(parents=True)
    (tmp_path / "in" / ".git" / "x").write_text("hidden")
    (tmp_path / "a.txt").write_text("\ufeffone")
    (tmp_path / "b.jsonl").write_bytes(lines(["two", 3, "three"]) + b"no JSON\n\n" + b"[" * 100_000)
    (tmp_path / "binary").write_bytes(b"\0")
    (tmp_path / "blank").write_bytes(b"")
    (tmp_path / "in" / "c.tar").write_bytes(FILES["x.tar"])
    (tmp_path / "in" / "d.parquet").write_bytes(table(["four", None, " "]))
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "y.jsonl").symlink_to(tmp_path / "in" / "five")
    (tmp_path / "in" / "five").write_bytes(lines(["five"]))
    (tmp_path / "z").write_bytes(b"")
    parts = of_addresses([tmp_path]).shards(shards)
    found = [d for part in parts for chunk in part.chunks() for d in chunk]
    assert [d.text for d in found if d.reason is None] == [
        "one",
        "two",
        "three",
        *MANY,
        "four",
        '{"text": "five"}\n',
        "five",
    ]
    reasons = sorted((d.name.partition("@")[0], d.reason) for d in found if d.reason is not None)
    assert reasons == [
        ("b.jsonl", "no JSON object with 'text'"), ("b.jsonl", "no JSON object with 'text'"),
        ("b.jsonl", "no JSON object with 'text'"), ("binary", "no UTF-8 text"), ("blank", "empty"),
        ("in/d.parquet:2", "no text in 'text'"), ("in/d.parquet:3", "empty"), ("link", "a link to a folder"),
        ("nowhere", "no file"),
        ("z", "empty"),
    ]  # fmt: skip


def test_members_of_other_kinds_are_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, data in (("1.cls", b"7"), ("1.txt", b"a text"), ("2.json", b""), ("folder", None)):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            member.size = len(data or b"")
            archive.addfile(member, io.BytesIO(data or b""))
    (part,) = of_addresses([tmp_path / "x.tar"]).shards(1)
    assert [(d.name, d.text, d.reason) for chunk in part.chunks() for d in chunk] == [
        ("x.tar/1.cls", None, "member of a tar that is neither .txt nor .json"), ("x.tar/1.txt", "a text", None),
        ("x.tar/2.json", None, "no JSON object with 'text'"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.tar", "x.jsonl.zst"])
def test_memory_does_not_grow_with_the_corpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 2**16)
    texts = [f"{i} " + "abcdefgh" * 1000 for i in range(1500)]  # 12 MB
    made = {
        "x.jsonl": lines,
        "x.parquet": lambda t: table(t, 50),
        "x.tar": tar,
        "x.jsonl.zst": lambda t: zstd(lines(t)),
    }
    (tmp_path / name).write_bytes(made[name](texts))
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


# --- surveys of streams -----------------------------------------------------------------------------------------------


def test_survey_of_a_stream_has_the_sums_of_a_survey_of_its_texts(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    run: dict[str, Any] = {"tokenizer": ByteTokenizer(), "batch_tokens": 90}
    model = own().double()
    streamed = survey(model, of_addresses([tmp_path / "x.jsonl"]), out=tmp_path / "a", shards=3, **run)
    listed = survey(model, TEXTS, out=tmp_path / "b", shards=2, **run)
    for name in ("documents", "sequences", "tokens"):
        assert streamed.record[name] == listed.record[name]
    for name in ("entropy", "sink", "distance"):
        np.testing.assert_allclose(streamed.heads()[name], listed.heads()[name], rtol=1e-9)


def test_texts_of_a_shard_in_several_chunks_have_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    run: dict[str, Any] = {"tokenizer": ByteTokenizer(), "batch_tokens": 90, "shards": 1}
    model = own().double()
    whole = survey(model, of_addresses([tmp_path / "x.jsonl"]), out=tmp_path / "a", **run)
    monkeypatch.setattr(stream, "CHUNK", 50)
    cut = survey(model, of_addresses([tmp_path / "x.jsonl"]), out=tmp_path / "b", **run)
    assert {**whole.record, "shards": []} == {**cut.record, "shards": []}
    for name in whole.heads().columns[3:]:
        np.testing.assert_allclose(whole.heads()[name], cut.heads()[name], rtol=1e-9, atol=1e-9, err_msg=name)
    assert whole.record["shards"] != cut.record["shards"], "other batches round differently, so this is another corpus"


def test_parts_of_a_stream_merge_to_the_bytes_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "y.txt").write_text("another text")
    run: dict[str, Any] = {"tokenizer": ByteTokenizer(), "batch_tokens": 90, "shards": 9}
    one = survey(own(), of_addresses([tmp_path / "x.jsonl", tmp_path / "y.txt"]), out=tmp_path / "one", **run)
    for i in (1, 0):
        found = of_addresses([tmp_path / "x.jsonl", tmp_path / "y.txt"])
        survey(own(), found, out=tmp_path / f"{i}", only_shards=f"{i}/2", **run)
    assert merge_folders([tmp_path / "0", tmp_path / "1"]).packed() == one.packed()


def test_changed_files_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(MANY))
    before = of_addresses([file])
    file.write_bytes(lines(MANY[::-1]))
    with refused("corpus", "changed since the survey began"):
        list(before.shards(3)[2].chunks())
    assert of_addresses([file]).fingerprint != before.fingerprint


def test_fingerprint_depends_on_names_and_contents_and_not_on_the_place(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "in").mkdir(parents=True)
        (tmp_path / folder / "in" / "x.jsonl").write_bytes(lines(MANY))
    fsspec.filesystem("memory").pipe_file("/place/in/x.jsonl", lines(MANY))
    places = [tmp_path / "a", f"file://{tmp_path}/b", "memory://place"]
    assert len({of_addresses([place]).fingerprint for place in places}) == 1
    (tmp_path / "b" / "in" / "x.jsonl").rename(tmp_path / "b" / "in" / "y.jsonl")
    assert of_addresses(places[:1]).fingerprint != of_addresses(places[1:2]).fingerprint


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.jsonl.gz", "x.tar", "x.parquet", "x.tar.zst"])
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name][: len(FILES[name]) // 2])
    (part,) = of_addresses([tmp_path / name]).shards(1)
    with refused("corpus", name):
        list(part.chunks())


def test_unsuitable_files_are_rejected(tmp_path: Path) -> None:
    with refused("corpus", "that exists"):
        of_addresses([tmp_path / "nowhere"])
    with refused("corpus", "no file"):
        of_addresses([tmp_path])
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "x.parquet")
    (part,) = of_addresses([tmp_path / "x.parquet"]).shards(1)
    with refused("corpus", "without a column 'text'.*it has content"):
        list(part.chunks())
    (tmp_path / "x.parquet").rename(tmp_path / "x.parquet.gz")
    (part,) = of_addresses([tmp_path / "x.parquet.gz"]).shards(1)
    with refused("corpus"):
        list(part.chunks())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(FILES["x.jsonl.zst"])
    (part,) = of_addresses([tmp_path / "x.jsonl.zst"]).shards(1)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with refused("corpus", r"pip install 'qkv\[cloud\]'"):
        list(part.chunks())


def test_command_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(zstd(lines(TEXTS[:3])))
    (tmp_path / "y.txt").write_text("another text")
    texts = [str(tmp_path / "x.jsonl.zst"), str(tmp_path / "y.txt")]
    assert main(["survey", "qkv-mini", *texts, "--shards", "2", "--out", str(tmp_path / "out")]) == 0
    assert "4 texts" in capsys.readouterr().out
    assert main(["survey", "qkv-mini", "library", "--stream", "--out", str(tmp_path / "no")]) == 2
    assert "cannot be streamed" in capsys.readouterr().err


# --- datasets of the Hugging Face hub ---------------------------------------------------------------------------------


def test_dataset_is_read_row_by_row(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    (tmp_path / "hub").mkdir()
    for at in range(2):
        pq.write_table(pa.table({"body": MANY[20 * at : 20 * at + 20]}), tmp_path / "hub" / f"train-{at}.parquet")
    name = f"hf:{tmp_path / 'hub'}:body"
    found = stream.of_dataset(name)
    for shards in (1, 2, 3):
        rows = [d for part in found.shards(shards) for chunk in part.chunks() for d in chunk]
        assert sorted(str(d.text) for d in rows if d.reason is None) == sorted(MANY)
        assert all(isinstance(d, Document) for d in rows)
    assert stream.of_dataset(name).fingerprint == found.fingerprint
    with refused("corpus", "no column 'text'.*one of body"):
        stream.of_dataset(name.removesuffix(":body"))
