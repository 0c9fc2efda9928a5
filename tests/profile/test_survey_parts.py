"""Whoever computes the shards of a survey, and wherever they are, they merge to the bytes of one process."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from matplotlib.figure import Figure

import survey_process
from conftest import Command, refused
from forked import Forked
from qkv._survey_settings import Settings
from qkv.models import checkpoint
from qkv.plot import survey as survey_plots
from qkv.profiler.surveys.corpus import of_addresses
from qkv.profiler.surveys.data import Survey
from qkv.profiler.surveys.folder import Folder, Incomplete, check_complete, merge_folders
from survey_process import TEXTS, own, own_survey

RESULT = "survey.qkv.zip"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a survey by one process."""
    out = tmp_path_factory.mktemp("whole")
    own_survey(out)
    return out


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two machines, with the shards 0 and 2, and 1."""
    folders = [tmp_path_factory.mktemp("machine") for _ in range(2)]
    for i, folder in enumerate(folders):
        own_survey(folder, only_shards=f"{i}/2")
    return folders


@pytest.fixture
def memory() -> Iterator[Any]:
    """The store memory://, empty."""
    files = fsspec.filesystem("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(files), "store", {})
        patch.setattr(type(files), "pseudo_dirs", [""])
        yield files


def test_every_shard_is_in_exactly_one_part() -> None:
    for of in range(1, 8):
        numbers = [number for i in range(of) for number in Settings(shards=7, only_shards=f"{i}/{of}").numbers]
        assert sorted(numbers) == list(range(7))


def test_folders_of_several_machines_merge_to_the_bytes_of_one_process(
    parts: list[Path], whole: Path, tmp_path: Path, memory: Any
) -> None:
    want = (whole / RESULT).read_bytes()
    assert [sorted(Folder(p).finished()) for p in parts] == [[0, 2], [1]]
    assert merge_folders(parts[::-1], tmp_path / "all").packed() == want
    assert (tmp_path / "all" / RESULT).read_bytes() == want
    assert not any((p / RESULT).exists() for p in parts), "merging wrote to a folder that it only reads"
    own_survey("memory://a", only_shards="0/2")
    assert merge_folders(["memory://a", parts[1]], "memory://b").packed() == want
    memory.get("/a", str(tmp_path / "copy"), recursive=True)  # as `aws s3 sync` would
    assert merge_folders([tmp_path / "copy", parts[1]], tmp_path / "c").packed() == want


def test_parts_in_one_folder_merge_and_only_lost_shards_are_computed_again(whole: Path, tmp_path: Path) -> None:
    def survey(part: str) -> tuple[int, Survey]:
        batches = list[int]()
        found = own_survey(
            f"file://{tmp_path}/x", only_shards=part, on_batch=lambda documents, size, tokens: batches.append(tokens)
        )
        return sum(batches), found

    tokens, first = survey("1/3")
    assert tokens == first.record["tokens"] > 0
    assert survey("1/3")[0] == 0
    (tmp_path / "x" / "shards" / "0001.qkv.zip").unlink()
    assert survey("1/3")[0] == tokens
    assert survey("1/3")[1].packed() == first.packed()
    survey("2/3"), survey("0/2")
    assert merge_folders([tmp_path / "x"]).packed() == (whole / RESULT).read_bytes()
    assert (tmp_path / "x" / RESULT).read_bytes() == (whole / RESULT).read_bytes()


@pytest.mark.parametrize("where", ["disk", "store"])
def test_survey_continues_after_a_write_that_failed(
    where: str, whole: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, which has half a file then, and in a store."""
    out = tmp_path / "a" if where == "disk" else "memory://a"
    owner, name = (Path, "write_bytes") if where == "disk" else (memory, "mv")
    write = getattr(owner, name)

    def fails(path: Any, data: Any) -> Any:
        if "0001.qkv.zip" in f"{path} {data!r}"[:200]:
            if where == "disk":
                write(path, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with refused("out", "No space left.*; 1 shards are finished"):
            own_survey(out)
    assert Folder(out).finished() == {0}
    assert own_survey(out).packed() == (whole / RESULT).read_bytes()


@pytest.mark.slow
def test_killed_survey_resumes_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    process = Forked(survey_process.main, tmp_path / "a", 1, folder=tmp_path)
    assert process.wait() == -signal.SIGKILL, process.errors
    assert len(list((tmp_path / "a" / "shards").iterdir())) == 2
    (tmp_path / "a" / "shards" / ".0002.qkv.zip.x.tmp").write_bytes(b"half a file")  # as of one killed while writing
    own_survey(tmp_path / "a")
    files = [{p.relative_to(x): p.read_bytes() for p in x.rglob("*") if p.is_file()} for x in (tmp_path / "a", whole)]
    assert files[0] == files[1]


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    for argument, call in (("out", Folder), ("corpus", lambda address: of_addresses([address]))):
        with refused(argument, r"pip install 'qkv\[cloud\]'"):
            call("s3://bucket/x")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a bucket of an S3 server in this process, which the environment names."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    running = server.ThreadedMotoServer(port=0, verbose=False)
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
def test_survey_on_s3_continues_on_another_machine(bucket: str, tmp_path: Path, whole: Path) -> None:
    """Which has no file of the one that began but what is in the bucket."""
    own_survey(f"{bucket}/begun", only_shards="1/2")
    assert Folder(f"{bucket}/begun").finished() == {1}
    assert own_survey(f"{bucket}/begun").packed() == (whole / RESULT).read_bytes()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2]).encode()
    (tmp_path / "x.jsonl").write_bytes(lines)
    fsspec.filesystem("s3").pipe_file(f"{bucket}/corpus/x.jsonl", lines)
    found = own_survey(f"{bucket}/a", of_addresses([f"{bucket}/corpus"]), shards=1)
    assert found.heads().equals(own_survey(tmp_path / "a", of_addresses([tmp_path / "x.jsonl"]), shards=1).heads())
    assert Survey.load(f"{bucket}/a/{RESULT}").packed() == found.packed()
    with refused("out"):
        own_survey("s3://no-such-bucket/a")


def test_missing_shards_are_named(parts: list[Path]) -> None:
    with pytest.raises(Incomplete, match=r"1 of 3 shards are missing \(1\).*--only-shards 1/3"):
        merge_folders(parts[:1])
    with pytest.raises(Incomplete, match=r"\(0, 2, 3, 4, 5, 6, 7, 8 and 3 more\)"):
        check_complete([1], 12, "in x")
    check_complete([1], 3, "in x", numbers=[1])


DIFFERENT: dict[str, dict[str, Any]] = {
    "batch_tokens": {"batch_tokens": 91}, "shards": {"shards": 4}, "definition.local_window": {"local_window": 7},
    "definition.overlap": {"overlap": 3}, "corpus": {"texts": TEXTS[1:]},
    "definition.weights": {},
}  # fmt: skip


@pytest.mark.parametrize("setting", DIFFERENT)
def test_surveys_that_differ_are_neither_merged_nor_continued(
    setting: str, parts: list[Path], whole: Path, tmp_path: Path
) -> None:
    changes = dict(DIFFERENT[setting])
    if setting == "definition.weights":
        changes["model"] = own()
        next(changes["model"].parameters()).data.mul_(2)
    own_survey(tmp_path, only_shards="1/3", **changes)
    with refused("folders", f"differ: {setting} is"):
        merge_folders([parts[0], tmp_path])
    with refused("out", "of another corpus" if setting == "corpus" else f"other settings: {setting} was"):
        own_survey(whole, **changes)


def test_folders_that_do_not_fit_together_are_rejected(parts: list[Path], tmp_path: Path, memory: Any) -> None:
    for name, of in (("copy", parts[1]), ("mixed", parts[1]), ("broken", parts[1])):
        shutil.copytree(of, tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "survey.json").write_text("[")
    (tmp_path / "mixed" / "shards" / "0001.qkv.zip").write_bytes((parts[0] / "shards" / "0002.qkv.zip").read_bytes())
    own_survey("memory://b")
    memory.pipe_file("/b/shards/0001.qkv.zip", memory.cat_file("/b/shards/0001.qkv.zip")[:-1])
    rows: list[tuple[str, str, list[Any]]] = [
        ("path", "shards/0001.qkv.zip", ["memory://b"]),
        ("folders", "shard 1 twice", [*parts, tmp_path / "copy"]),
        ("out", "another survey", [parts[0], tmp_path / "mixed"]),
        ("folders", "no survey", [*parts, tmp_path / "empty"]),
        ("folders", "empty", []),
        ("folders", "cannot use", [tmp_path / "broken"]),
    ]
    for argument, match, folders in rows:
        with refused(argument, match):
            merge_folders(folders)


def test_commands_survey_parts_and_merge_them(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey_plots, "FIGURES", dict.fromkeys(survey_plots.FIGURES, lambda *_, **__: Figure()))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "texts" / "b.py").write_text("import os\n")
    (tmp_path / "texts" / "c.bin").write_bytes(b"\0")
    one, many = tmp_path / "one", tmp_path / "many"
    model = checkpoint.save(own(), tmp_path / "model")
    words = ["survey", model, tmp_path / "texts", "--shards", 2, "--threads", 1, "--out"]
    said = command.succeeds(*words, one)
    assert "2 texts" in said
    assert "Skipped 1 texts: 1 × no UTF-8 text" in said
    assert {p.name for p in one.glob("*.png")} >= {"heads.png", "sinks.png", "texts.png", "distribution.png"}
    assert f"qkv survey merge {many}" in command.succeeds(*words, many, "--only-shards", "1/2")
    assert not (many / "heads.csv").exists()
    with pytest.raises(SystemExit) as ended:
        command("survey", "merge", many)
    assert ended.value.code == 1
    command.succeeds(*words, many, "--only-shards", "0/2")
    command.succeeds("survey", "merge", many)
    for name in (RESULT, "heads.csv"):
        assert (one / name).read_bytes() == (many / name).read_bytes(), name
    assert command.refuses("survey", "merge", many, many).startswith("qkv: DIR")
