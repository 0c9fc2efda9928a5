"""Surveys in parts: processes that do not know each other compute shards, which merge to the bytes of one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import refused
from qkv._survey_settings import Settings
from qkv.cli import main
from qkv.models.tokenizers import ByteTokenizer
from qkv.profiler.surveys.folder import Folder
from qkv.profiler.surveys.merging import Incomplete, merge_folders
from qkv.profiler.surveys.survey import survey
from survey_process import TEXTS, own, own_survey

SHARDS = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a survey by one process."""
    out = tmp_path_factory.mktemp("whole")
    own_survey(out, shards=SHARDS)
    return (out / "survey.qkv.zip").read_bytes()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of three machines, with the shards 0 and 3, 1 and 4, and 2."""
    folders = [tmp_path_factory.mktemp("machine") for _ in range(3)]
    for i, folder in enumerate(folders):
        own_survey(folder, shards=SHARDS, only_shards=f"{i}/3")
    return folders


@pytest.mark.parametrize("of", range(1, 8))
def test_every_shard_is_in_exactly_one_part(of: int) -> None:
    numbers = [number for i in range(of) for number in Settings(shards=7, only_shards=f"{i}/{of}").numbers]
    assert sorted(numbers) == list(range(7))


def test_folders_of_several_machines_merge_to_the_bytes_of_one_process(
    parts: list[Path], whole: bytes, tmp_path: Path
) -> None:
    assert [sorted(Folder(p).finished()) for p in parts] == [[0, 3], [1, 4], [2]]
    merged = merge_folders(parts[::-1], tmp_path / "all")
    assert merged.packed() == whole
    assert (tmp_path / "all" / "survey.qkv.zip").read_bytes() == whole
    assert not any((p / "survey.qkv.zip").exists() for p in parts), "merging wrote to a folder that it only reads"


def test_parts_in_one_folder_merge_to_the_bytes_of_one_process(whole: bytes, tmp_path: Path) -> None:
    for part in ("3/4", "1/4", "0/4", "0/2", "2/4"):  # 0/2 repeats shards that exist
        own_survey(tmp_path, shards=SHARDS, only_shards=part)
    assert merge_folders([tmp_path]).packed() == whole
    assert (tmp_path / "survey.qkv.zip").read_bytes() == whole


def test_a_finished_part_is_not_computed_again_and_a_lost_shard_is(tmp_path: Path) -> None:
    def count(documents: int, size: int, tokens: int) -> None:
        batches.append(tokens)

    batches: list[int] = []
    first = own_survey(tmp_path, only_shards="1/2", on_batch=count)
    assert sum(batches) == first.record["tokens"] > 0
    batches.clear()
    assert own_survey(tmp_path, only_shards="1/2", on_batch=count).packed() == first.packed()
    assert not batches
    (tmp_path / "shards" / "0001.qkv.zip").unlink()
    assert own_survey(tmp_path, only_shards="1/2", on_batch=count).packed() == first.packed()
    assert sum(batches) == first.record["tokens"]


@pytest.mark.parametrize("only", ["", "3", "1/", "/2", "-1/2", "1/2/3", "a/b", "1.0/2", "2/2", "0/0", "0/6", "1/4 "])
def test_malformed_parts_are_rejected(only: str, tmp_path: Path) -> None:
    with refused("only_shards", repr(only)):
        own_survey(tmp_path / "x", shards=SHARDS, only_shards=only)
    assert not (tmp_path / "x").exists()


# --- what does not merge ----------------------------------------------------------------------------------------------


def test_missing_shards_are_named(parts: list[Path]) -> None:
    with pytest.raises(Incomplete, match=r"2 of 5 shards are missing \(1, 4\).*--only-shards 1/5"):
        merge_folders([parts[0], parts[2]])


def test_a_shard_in_two_folders_is_rejected(parts: list[Path], tmp_path: Path) -> None:
    shutil.copytree(parts[0], tmp_path / "copy")
    with refused("folders", "shard 0 twice"):
        merge_folders([*parts, tmp_path / "copy"])
    with refused("folders", "name each folder once"):
        merge_folders([parts[0], *parts])


def _other_model() -> Any:
    model = own()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    return model


@pytest.mark.parametrize(
    ("difference", "changes"),
    [
        ("batch_tokens is 90", {"batch_tokens": 91}),
        ("shards is 5", {"shards": 6}),
        ("definition.local_window is 8", {"local_window": 7}),
        ("definition.weights", {"model": _other_model()}),
        ("corpus is", {"texts": TEXTS[1:]}),
    ],
)
def test_surveys_that_differ_are_rejected(
    difference: str, changes: dict[str, Any], parts: list[Path], tmp_path: Path
) -> None:
    arguments = {"model": own(), "texts": TEXTS, "shards": SHARDS, "batch_tokens": 90} | changes
    survey(tokenizer=ByteTokenizer(), out=tmp_path, only_shards="1/3", **arguments)
    with refused("folders", difference):
        merge_folders([parts[0], tmp_path, parts[2]])


def test_a_shard_of_another_survey_is_rejected(parts: list[Path], tmp_path: Path) -> None:
    shutil.copytree(parts[2], tmp_path / "a")
    shard = parts[1] / "shards" / "0001.qkv.zip"
    shutil.copy(shard, tmp_path / "a" / "shards" / "0002.qkv.zip")
    with refused("out", "belongs to another survey"):
        merge_folders([parts[0], parts[1], tmp_path / "a"])


def test_folders_without_a_survey_are_rejected(parts: list[Path], tmp_path: Path) -> None:
    with refused("folders", "no survey"):
        merge_folders([*parts, tmp_path])
    with refused("folders", "empty"):
        merge_folders([])
    (tmp_path / "survey.json").write_text("[")
    with refused("folders", "cannot use"):
        merge_folders([tmp_path])


# --- the commands -----------------------------------------------------------------------------------------------------


def test_commands_survey_parts_and_merge_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "b.py").write_text("import os\n")
    texts = [str(tmp_path / "a.py"), str(tmp_path / "b.py")]
    one, many = tmp_path / "one", tmp_path / "many"
    command = ["survey", "qkv-mini", *texts, "--shards", "2"]
    assert main([*command, "--out", str(one)]) == 0
    assert main([*command, "--out", str(many), "--only-shards", "1/2"]) == 0
    assert f"qkv survey merge {many}" in capsys.readouterr().out
    assert not (many / "heads.csv").exists()
    with pytest.raises(SystemExit) as ended:
        main(["survey", "merge", str(many)])
    assert ended.value.code == 1
    assert "1 of 2 shards are missing (0)" in capsys.readouterr().err
    assert main([*command, "--out", str(many), "--only-shards", "0/2"]) == 0
    assert main(["survey", "merge", str(many)]) == 0
    for name in ("survey.qkv.zip", "heads.csv", "heads.png"):
        assert (one / name).read_bytes() == (many / name).read_bytes(), name
    assert main(["survey", "merge", str(many), str(many)]) == 2
    assert main(["survey", "merge"]) == 2
    assert main([*command, "--out", str(many), "--only-shards", "2/2"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert [line.split()[1] for line in said] == ["DIR", "DIR", "--only-shards"]
