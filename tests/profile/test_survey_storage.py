"""Surveys at addresses: an object counts once its marker is there, and a survey continues on any machine."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import survey_process
from conftest import refused
from forked import Forked, free_port
from qkv import _files
from qkv.cli import main
from qkv.models.tokenizers import ByteTokenizer
from qkv.profiler.surveys.data import Survey
from qkv.profiler.surveys.folder import COMPLETE, Folder, Objects
from qkv.profiler.surveys.merging import merge_folders
from qkv.profiler.surveys.stream import of_addresses
from qkv.profiler.surveys.survey import survey
from survey_process import TEXTS, own, own_survey


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a survey on this machine."""
    out = tmp_path_factory.mktemp("whole")
    own_survey(out)
    return (out / "survey.qkv.zip").read_bytes()


@pytest.fixture
def memory() -> Iterator[Any]:
    """The store memory://, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "scheme"),
    [
        ("s3://bucket/x", "s3"), ("S3://bucket/x", "s3"), ("s3:/bucket/x", "s3"), ("hf://datasets/a/b", "hf"),
        ("file:///x", None), ("folder/s3", None), ("hf:NAME:COLUMN", None), ("C:/x", None), ("/x:/y", None), ("", None),
    ],
)  # fmt: skip
def test_addresses_are_told_from_paths(address: str, scheme: str | None) -> None:
    assert _files.scheme_of(address) == scheme


def test_unknown_schemes_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qkv.models.loading.load_model", loaded)
    (tmp_path / "x.txt").write_text("a text")
    for arguments in (["x.txt", "--out", "nosuch://a/b"], ["nosuch://a/b"], ["x.txt", "--out", "s3:/bucket/x"]):
        assert main(["survey", "qkv-mini", *arguments]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert arguments[-1] in said
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"], "a folder named like an address was written"


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    for argument, call in (("out", Folder), ("corpus", lambda address: of_addresses([address]))):
        with refused(argument, r"Install s3fs.*pip install 'qkv\[cloud\]'"):
            call("s3://bucket/x")


def test_other_commands_refuse_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "qkv-mini", "--out", "s3://bucket/x"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_file_address_is_a_path(tmp_path: Path, whole: bytes) -> None:
    assert own_survey(f"file://{tmp_path}/x").packed() == whole
    assert (tmp_path / "x" / "survey.qkv.zip").read_bytes() == whole


# --- markers ----------------------------------------------------------------------------------------------------------


def test_an_object_without_its_marker_does_not_exist(memory: Any) -> None:
    store = Objects("memory://a")
    store.write("in/x", b"data")
    assert (store.names("in"), store.read("in/x")) == (["x"], b"data")
    memory.rm(f"/a/in/x{COMPLETE}")
    assert (store.names("in"), store.read("in/x")) == ([], None)
    assert (store.names("elsewhere"), store.read("y")) == ([], None)


def test_an_object_that_differs_from_its_marker_is_refused(memory: Any) -> None:
    own_survey("memory://a")
    data = memory.cat_file("/a/shards/0001.qkv.zip")
    memory.pipe_file("/a/shards/0001.qkv.zip", data[:-1])
    with refused("out", "shards/0001.qkv.zip.*differs from"):
        merge_folders(["memory://a"])


def test_survey_continues_after_a_write_that_failed_between_object_and_marker(
    memory: Any, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: str, data: bytes, **options: Any) -> None:
        if path.endswith(f"0001.qkv.zip{COMPLETE}"):
            raise OSError("the connection was lost")
        write(path, data, **options)

    write = memory.pipe_file
    with monkeypatch.context() as patch:
        patch.setattr(memory, "pipe_file", fails)
        with refused("out", "connection was lost.*1 shards are finished"):
            own_survey("memory://a")
    assert memory.exists("/a/shards/0001.qkv.zip")
    assert Folder("memory://a").finished() == {0}
    assert own_survey("memory://a").packed() == whole
    assert Survey.load("memory://a/survey.qkv.zip").packed() == whole


def test_a_folder_with_other_settings_is_refused(memory: Any) -> None:
    own_survey("memory://a")
    with refused("out", "batch_tokens was 90 and is 91"):
        own_survey("memory://a", batch_tokens=91)


def test_folders_of_different_storage_merge(memory: Any, whole: bytes, tmp_path: Path) -> None:
    own_survey("memory://a", only_shards="0/2")
    own_survey(tmp_path, only_shards="1/2")
    assert merge_folders(["memory://a", tmp_path], "memory://b").packed() == whole
    memory.get("/a", str(tmp_path / "copy"), recursive=True)  # as `aws s3 sync` would
    assert merge_folders([tmp_path / "copy", tmp_path], tmp_path / "c").packed() == whole


def test_command_writes_tables_and_figures_to_a_store(
    memory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory.pipe_file("/corpus/a.jsonl", b'{"text": "import os"}\n{"text": "x = 1"}\n')
    command = ["survey", "qkv-mini", "memory://corpus", "--shards", "2", "--out"]
    assert main([*command, "memory://out"]) == 0
    assert "memory://out/survey.qkv.zip" in capsys.readouterr().out
    assert main([*command, str(tmp_path)]) == 0
    for name in ("survey.qkv.zip", "heads.csv", "heads.png"):
        assert memory.cat_file(f"/out/{name}") == (tmp_path / name).read_bytes(), name


# --- a real S3 server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a bucket of an S3 server in this process, which the environment names."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    running = server.ThreadedMotoServer(port=free_port(), verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        files = fsspec.filesystem("s3")
        files.mkdir("bucket")
        yield "s3://bucket"
        type(files).clear_instance_cache()
    running.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of aiobotocore and moto
def test_survey_reads_from_and_writes_to_s3(bucket: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "x.jsonl").write_text(lines)
    fsspec.filesystem("s3").pipe_file(f"{bucket}/corpus/x.jsonl", lines.encode())
    run: dict[str, Any] = {"tokenizer": ByteTokenizer(), "shards": 3, "batch_tokens": 90}
    found = survey(own(), of_addresses([f"{bucket}/corpus"]), out=f"{bucket}/a", **run)
    local = survey(own(), of_addresses([tmp_path / "x.jsonl"]), out=tmp_path / "a", **run)
    assert found.heads().equals(local.heads())
    assert Survey.load(f"{bucket}/a/survey.qkv.zip").packed() == found.packed()
    with refused("out"):
        own_survey("s3://no-such-bucket/a")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of aiobotocore and moto
def test_survey_of_a_killed_process_continues_on_another_machine(bucket: str, tmp_path: Path, whole: bytes) -> None:
    """The process that continues has no file of the one that was killed but what is in the bucket."""
    process = Forked(survey_process.main, f"{bucket}/killed", 3, 1, folder=tmp_path)
    assert process.wait() == -signal.SIGKILL, process.errors
    assert Folder(f"{bucket}/killed").finished() == {0, 1}
    assert own_survey(f"{bucket}/killed").packed() == whole
    assert main(["survey", "merge", f"{bucket}/killed"]) == 0
