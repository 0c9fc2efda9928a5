"""Files from strangers: their declared sizes are checked first, and every loader refuses in one sentence."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qkv
from conftest import refused
from fuzz.files import isolate
from fuzz.files.damage import with_bomb
from fuzz.files.formats import FORMATS, GOLDEN, Format, write
from qkv import InputError, _untrusted, lab
from qkv._untrusted import in_bytes, parse_array, parse_json, read_zip
from qkv.cli import main
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler import Survey
from qkv.profiler.data.variables import check_hierarchy, frame_size
from qkv_lab.tasks import Reversal

CASES = 300


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    write(folder)
    return folder


@pytest.mark.slow
def test_damaged_and_hostile_files_of_every_format_are_refused_or_loaded(valid: Path) -> None:
    for form in FORMATS.values():
        form.open(valid)
    reports = isolate.run(0, range(CASES), valid)
    failed = [x for x in reports if x.failed and x.outcome != "slow"]  # `make fuzz-files` judges the time
    commands = [f"python -m fuzz.files --seed 0 --case {x.case.number}  {x}" for x in failed]
    assert not failed, "\n".join(commands)


# --- the fuzzer notices ----------------------------------------------------------------------------------------------


def _write(folder: Path) -> None:
    Path("planted").write_text("x")


def _endless(folder: Path) -> None:
    while True:
        pass


PLANTED: dict[str, Callable[[Path], Any]] = {
    "escaped": lambda folder: 1 / 0,
    "warned": lambda folder: warnings.warn("from a library", stacklevel=1),
    "printed": lambda folder: os.write(2, b"a traceback"),
    "too much memory": lambda folder: len(b"x" * (isolate.MEMORY + 2**25)),
    "files were written": _write,
    "crashes": lambda folder: os.abort(),
    "hangs": lambda folder: time.sleep(60),
}


@pytest.mark.parametrize("outcome", PLANTED)
def test_the_fuzzer_notices_a_loader_that_misbehaves(
    outcome: str, valid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolate, "FORMATS", {"vocabulary": Format(("vocabulary.json",), PLANTED[outcome])})
    monkeypatch.setattr(isolate, "HANG", 2.0 if outcome == "hangs" else 300.0)
    reports = list(isolate.run(0, [3, 4], valid))
    assert [(report.case.number, report.outcome) for report in reports] == [(3, outcome), (4, outcome)]


def test_the_fuzzer_notices_a_loader_that_never_ends(valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "FORMATS", {"vocabulary": Format(("vocabulary.json",), _endless)})
    monkeypatch.setattr(isolate, "ENDLESS", 1)
    assert [report.outcome for report in isolate.run(0, [3], valid)] == ["crashes"]


def test_a_case_depends_on_its_seed_and_number_alone(valid: Path, tmp_path: Path) -> None:
    cases = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        cases.append(isolate.prepare(7, 11, valid, tmp_path / name))
    assert cases[0] == cases[1]
    first, second = (contents(tmp_path / name) for name in ("a", "b"))
    assert first == second != contents(valid)


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a folder; links to devices are left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder): path.read_bytes() for path in files}


# --- profiles and surveys --------------------------------------------------------------------------------------------


def rezipped(path: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A copy of a zip file with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return target


ARRAY = "groups/self/entropy/zarr.json"


@pytest.mark.parametrize(("entry", "value"), [("shape", [1, 1, 2, 2**40]), ("shape", [2**62] * 4), ("shape", [-1])])
def test_a_profile_that_declares_too_much_is_refused(entry: str, value: Any, tmp_path: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        members[ARRAY] = json.dumps(json.loads(members[ARRAY]) | {entry: value}).encode()

    path = rezipped(GOLDEN / "profile.qkv.zip", tmp_path / "x.zip", change)
    with refused("path"):
        qkv.Profile.load(path)


def test_a_chunk_that_inflates_beyond_its_array_is_refused(tmp_path: Path) -> None:
    from numcodecs.zstd import compress

    def change(members: dict[str, bytes]) -> None:
        members["groups/self/entropy/c/0/0/0/0"] = compress(bytes(2**20))

    path = rezipped(GOLDEN / "profile.qkv.zip", tmp_path / "x.zip", change)
    with refused("path", match="has 1048576 bytes, expected 64"):
        qkv.Profile.load(path)


def test_a_chunk_of_other_strings_than_declared_is_refused(tmp_path: Path) -> None:
    """The number of strings, at the beginning of a chunk, is a number of pointers that zarr would allocate."""
    from numcodecs.zstd import compress

    def change(members: dict[str, bytes]) -> None:
        members["groups/self/query_token/c/0/0"] = compress(b"\xff\xff\xff\x7f")

    path = rezipped(GOLDEN / "profile.qkv.zip", tmp_path / "x.zip", change)
    with refused("path", match="does not have 8 strings"):
        qkv.Profile.load(path)


def test_a_variable_may_have_the_name_of_the_folder_of_chunks() -> None:
    members, budget = read_zip(GOLDEN / "profile.qkv.zip")
    check_hierarchy({name.replace("self/entropy/", "self/c/"): data for name, data in members.items()}, budget)


@pytest.mark.parametrize("load", [qkv.Profile.load, Survey.load])
def test_a_bomb_is_refused(load: Callable[[Path], Any], tmp_path: Path) -> None:
    """2.6 MB that inflate to 2.5 GiB, with a true and with a false declared size."""
    name = "zarr.json" if load == qkv.Profile.load else "survey.json"
    for size in (2560 * 2**20, 10):
        (tmp_path / "bomb.zip").write_bytes(with_bomb({}, name, size, 2560))
        with refused("path", match="declares contents of 2.5 GiB" if size > 10 else None):
            load(tmp_path / "bomb.zip")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65_791, 65_792, 2**20])
def test_the_declared_size_of_a_chunk_is_read(size: int) -> None:
    from numcodecs.zstd import compress

    assert frame_size(compress(bytes(size))) == size


def test_arrays_of_other_sizes_than_declared_are_refused() -> None:
    import numpy as np

    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(6.0).reshape(2, 3))
    assert parse_array(file.getvalue()).tolist() == [[0, 1, 2], [3, 4, 5]]
    for data in (file.getvalue()[:-1], file.getvalue() + b"x", file.getvalue().replace(b"(2, 3)", b"(2,63)")):
        with pytest.raises(ValueError, match="declares"):
            parse_array(data)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return qkv.models.save(DecoderLM(DecoderConfig(d_model=8, layers=1, heads=2, context=8)), tmp_path / "model")


def changed(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["config"] |= entries
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_of_a_wrong_dtype_are_refused(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    save_file({name: x.to(torch.int32) for name, x in weights.items()}, model / "model.safetensors")
    with refused("checkpoint", match="wrong dtype"):
        qkv.models.load(model)


@pytest.mark.parametrize(
    "entries", [{"layers": 2**40}, {"vocab_size": 2**40}, {"context": 2**62}, {"d_model": 2**40}, {"heads": 2**70}]
)
def test_a_configuration_that_asks_for_too_much_is_refused(entries: dict[str, int], model: Path) -> None:
    changed(model, **entries)
    with pytest.raises(InputError):
        qkv.models.load(model)


def test_a_configuration_of_100_000_brackets_is_refused(model: Path) -> None:
    (model / "config.json").write_text("[" * 100_000)
    with refused("config.json", match="levels deep"):
        qkv.models.load(model)


def test_training_a_model_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    for config in (DecoderConfig(d_model=2**40, heads=2), DecoderConfig(layers=2**40, d_model=8, heads=2)):
        with refused("model", match="too large"):
            lab.train(Reversal(model=config), lab.Training(steps=1), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


# --- the limit -------------------------------------------------------------------------------------------------------


def test_max_size_sets_the_limit_and_restores_it() -> None:
    path = GOLDEN / "profile.qkv.zip"
    with qkv.max_size("10 KB"), refused("path", match="max-size or qkv.max_size"):
        qkv.Profile.load(path)
    qkv.Profile.load(path)


def test_free_memory_is_a_limit_that_max_size_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_untrusted, "free_memory", lambda: 10_000)
    path = GOLDEN / "profile.qkv.zip"
    with refused("path", match="the limit of 9.8 KiB"):
        qkv.Profile.load(path)
    with qkv.max_size(10**8):
        qkv.Profile.load(path)


def test_free_memory_is_known_on_this_machine() -> None:
    assert 2**20 < _untrusted.free_memory() < 2**50


def test_the_command_line_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    path = str(GOLDEN / "profile.qkv.zip")
    assert main(["view", path, "--no-browser", "--max-size", "10KB"]) == 2
    assert "the limit of 9.8 KiB" in capsys.readouterr().err
    assert main(["view", path, "--no-browser", "--max-size", "large"]) == 2
    assert capsys.readouterr().err.startswith("qkv: --max-size is 'large'")
    qkv.Profile.load(path)  # the option held for its command alone


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("500 MB", 5 * 10**8), ("2GiB", 2**31), ("1.5k", 1500), (" 8 tb ", 8 * 10**12)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1 XB", "1e3", "inf", True, 10**30])
def test_wrong_sizes_are_refused(text: Any) -> None:
    with refused("size"):
        in_bytes(text)


# --- JSON and messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["[" * 102 + "]" * 102, "[" * 10**5, '"\\ud800"', '{"\\ud800": 1}', "9" * 5000, b"\xff", "[[],[" * 10**6, ""],
    ids=["102 deep", "open", "surrogate", "key", "digits", "bytes", "lists", "empty"],
)
def test_hostile_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # also those of json and of codecs
        parse_json(text)


def test_json_of_100_levels_is_read() -> None:
    assert parse_json("[" * 100 + "]" * 100)


def test_messages_have_a_length_that_can_be_read() -> None:
    message = str(InputError(f"text is {'x' * 10**6}, expected less"))
    assert len(message) < 2000
    assert message.endswith("expected less")


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('task = "reversal"\n["\\u001b[2J"]\n')
    assert main(["train", "--config", str(tmp_path / "run.toml")]) == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert "\\x1b[2J" in printed
