"""Files from strangers: their declared sizes are checked first, and every loader refuses in one sentence."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import numpy as arrays
from safetensors.torch import load_file, save_file

import qkv
from conftest import Command, refused
from fuzz.files import isolate
from fuzz.files.damage import with_bomb
from fuzz.files.formats import FORMATS, GOLDEN, Format, write
from qkv import InputError, _untrusted, lab
from qkv._untrusted import in_bytes, parse_array, parse_json, read_zip
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler import Survey
from qkv_lab.tasks import Reversal

CASES = range(15, 50)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    write(folder)
    return folder


@pytest.mark.slow
def test_damaged_and_hostile_files_of_every_format_are_refused_or_loaded(valid: Path) -> None:
    for form in FORMATS.values():
        form.open(valid)
    reports = isolate.run(0, CASES, valid)
    failed = [x for x in reports if x.failed and x.outcome != "slow"]  # `make fuzz-files` judges the time
    commands = [f"python -m fuzz.files --seed 0 --case {x.case.number}  {x}" for x in failed]
    assert not failed, "\n".join(commands)


@pytest.mark.slow
def test_links_to_a_file_without_an_end_are_refused_or_not_read(valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [(name, file) for name, form in FORMATS.items() for file in form.files]

    class Links:
        def __init__(self, seed: str) -> None:
            self.chosen = [*files[int(seed.split()[1])], "a link to /dev/zero"]

        def choice(self, options: object) -> str:
            return self.chosen.pop(0)

    for form in FORMATS.values():
        form.open(valid)
    monkeypatch.setattr(isolate, "Random", Links)
    reports = [*isolate.run(0, range(len(files)), valid)]
    assert not [str(x) for x in reports if x.failed and x.outcome != "slow"]
    assert {x.case.what for x in reports} == {"a link to /dev/zero"}


# --- the fuzzer notices ----------------------------------------------------------------------------------------------


def _endless(folder: Path) -> None:
    while True:
        pass


PLANTED: dict[str, tuple[Callable[[Path], Any], str]] = {  # a loader, and what the fuzzer says of it
    "raises": (lambda folder: 1 / 0, "escaped"),
    "warns": (lambda folder: warnings.warn("from a library", stacklevel=1), "warned"),
    "prints": (lambda folder: os.write(2, b"a traceback"), "printed"),
    "allocates": (lambda folder: len(b"x" * (isolate.MEMORY + 2**25)), "too much memory"),
    "writes": (lambda folder: Path("planted").write_text("x"), "files were written"),
    "aborts": (lambda folder: os.abort(), "crashes"),
    "sleeps": (lambda folder: time.sleep(60), "hangs"),
    "never ends": (_endless, "crashes"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_the_fuzzer_notices_a_loader_that_misbehaves(what: str, valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, outcome = PLANTED[what]
    monkeypatch.setattr(isolate, "FORMATS", {"vocabulary": Format(("vocabulary.json",), load)})
    monkeypatch.setattr(isolate, "HANG", 0.2 if outcome == "hangs" else 300.0)
    monkeypatch.setattr(isolate, "ENDLESS", 1 if what == "never ends" else 20)
    numbers = [3, 4] if what in ("raises", "aborts") else [3]  # the next case runs, also after a crash
    reports = list(isolate.run(0, numbers, valid))
    assert [(report.case.number, report.outcome) for report in reports] == [(number, outcome) for number in numbers]


# --- profiles and surveys --------------------------------------------------------------------------------------------


def described(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    """Another description of an array in the header."""

    def change(members: dict[str, bytes]) -> None:
        header = json.loads(members["profile.json"])
        header["groups"]["self"]["variables"]["entropy"] |= changes
        members["profile.json"] = json.dumps(header).encode()

    return change


def stream(plain: bytes, more: bytes = b"") -> Callable[[dict[str, bytes]], None]:
    """Other bytes of an array."""

    def change(members: dict[str, bytes]) -> None:
        made = np.frombuffer(zlib.compress(plain) + more, np.uint8)
        tensors = arrays.load(members["arrays.safetensors"]) | {"groups/self/entropy": made}
        members["arrays.safetensors"] = arrays.save(tensors)

    return change


def other_tensor(members: dict[str, bytes]) -> None:
    members["arrays.safetensors"] = arrays.save({"x": np.zeros(3, np.float32)})


SIZE = 3 * 8  # bytes of the entropy of 8 queries, which is the same in both heads
HOSTILE: dict[str, tuple[Callable[[dict[str, bytes]], Any], str]] = {
    "large": (described(shape=[1, 1, 2, 2**40], repeats=[1, 1, 1, 2**40]), "more than the limit"),
    "huge": (described(shape=[2**62] * 4, repeats=[1] * 4), "declares contents"),
    "negative": (described(shape=[1, 1, 2, -8]), "the shape"),
    "dimensions": (described(dims=["text", "text", "head", "query"]), "the dimensions"),
    "other dimensions": (described(dims=["text"]), "the dimensions"),
    "repeats": (described(repeats=[1, 1, 3, 1]), "repeats"),
    "no repeat": (described(repeats=[1]), "a repeat for each"),
    "shift": (described(shift=32), "shift 32"),
    "bytes": (described(bytes=5), "bytes 5"),
    "dtype": (described(dtype="object"), "data type 'object'"),
    "order": (described(ordered_by="visible_queries"), "ordered_by"),
    "a bomb": (stream(bytes(2**28)), f"has not the {SIZE} bytes"),
    "short": (stream(bytes(SIZE - 1)), f"has not the {SIZE} bytes"),
    "more": (stream(bytes(SIZE), b"x"), f"has not the {SIZE} bytes"),
    "another tensor": (other_tensor, "not a list of bytes"),
    "another member": (lambda members: members.update({"../x": b""}), "expected profile.json and"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_profile_of_other_sizes_than_declared_is_refused(name: str, tmp_path: Path) -> None:
    change, match = HOSTILE[name]
    members, _ = read_zip(GOLDEN / "profile.qkv.zip", "profile.json")
    change(members)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    with refused("path", match=match):
        qkv.Profile.load(tmp_path / "x.zip")


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    """2.6 MB that inflate to 2.5 GiB, with a true and with a false declared size."""
    path = tmp_path / "bomb.zip"
    for load, name in ((qkv.Profile.load, "profile.json"), (Survey.load, "survey.json")):
        for size, match in ((2560 * 2**20, "contents of 2.5 GiB"), (10, None)):
            path.write_bytes(with_bomb({}, name, size, 2560))
            with refused("path", match=match):
                load(path)


def test_declared_sizes_of_arrays_are_read() -> None:
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


@pytest.mark.slow
def test_weights_and_configurations_that_do_not_fit_are_refused(model: Path) -> None:
    text = (model / "config.json").read_text()
    for entry in ({"layers": 2**40}, {"vocab_size": 2**40}, {"context": 2**62}, {"d_model": 2**40}, {"heads": 2**70}):
        made = json.loads(text)
        made["config"] |= entry
        (model / "config.json").write_text(json.dumps(made))
        with pytest.raises(InputError):
            qkv.models.load(model)
    (model / "config.json").write_text("[" * 100_000)
    with refused("config.json", match="levels deep"):
        qkv.models.load(model)
    (model / "config.json").write_text(text)
    weights = load_file(model / "model.safetensors")
    save_file({name: x.to(torch.int32) for name, x in weights.items()}, model / "model.safetensors")
    with refused("checkpoint", match="wrong dtype"):
        qkv.models.load(model)


@pytest.mark.slow
def test_training_a_model_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    for config in (DecoderConfig(d_model=2**40, heads=2), DecoderConfig(layers=2**40, d_model=8, heads=2)):
        with refused("model", match="too large"):
            lab.train(Reversal(model=config), lab.Training(steps=1), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


# --- the limit -------------------------------------------------------------------------------------------------------


def test_max_size_and_free_memory_are_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < _untrusted.free_memory() < 2**50
    path = GOLDEN / "profile.qkv.zip"
    with qkv.max_size("10 KB"), refused("path", match="9.8 KiB"):
        qkv.Profile.load(path)
    qkv.Profile.load(path)
    monkeypatch.setattr(_untrusted, "free_memory", lambda: 10_000)
    with refused("path", match="9.8 KiB"):
        qkv.Profile.load(path)
    with qkv.max_size(10**8):
        qkv.Profile.load(path)


def test_sizes_are_read_or_refused() -> None:
    sizes = {"1": 1, "500 MB": 5 * 10**8, "2GiB": 2**31, "1.5k": 1500, " 8 tb ": 8 * 10**12}
    assert {text: in_bytes(text) for text in sizes} == sizes
    for wrong in ("", "x", "-1", "0", "1 XB", "1e3", "inf", True, 10**30):
        with refused("size"):
            in_bytes(wrong)  # type: ignore[arg-type]


# --- JSON and messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["[" * 102 + "]" * 102, "[" * 10**5, '"\\ud800"', '{"\\ud800": 1}', "9" * 5000, b"\xff", "[[],[" * 10**6, ""],
    ids=["102 deep", "open", "surrogate", "key", "digits", "bytes", "lists", "empty"],
)
def test_hostile_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # also those of json and of codecs
        parse_json(text)
    assert parse_json("[" * 100 + "]" * 100)


def test_messages_have_a_length_that_can_be_read_and_no_control_characters(tmp_path: Path, command: Command) -> None:
    message = str(InputError(f"text is {'x' * 10**6}, expected less"))
    assert len(message) < 2000
    assert message.endswith("expected less")
    (tmp_path / "run.toml").write_text('task = "reversal"\n["\\u001b[2J"]\n')
    printed = command.refuses("train", "--config", tmp_path / "run.toml")
    assert "\x1b" not in printed
    assert "\\x1b[2J" in printed
