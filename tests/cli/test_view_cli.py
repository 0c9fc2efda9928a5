"""`qkv view` as a user types it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import qkv
from qkv.cli import main
from qkv.profiler.corpora import default_text

pytest.importorskip("transformers", reason="loading models needs transformers")
TEXT = "def one():\n    return 1\n"


@contextmanager
def viewer(*arguments: str, cwd: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that `qkv view` prints, and its process, interrupted at the end as by Ctrl+C."""
    command = [sys.executable, "-m", "qkv.cli", "view", *arguments, "--port", "0", "--no-browser"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=cwd, env=env, **pipes) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("Viewer"), line + (process.stderr.read() if process.stderr else "")
            yield line.split()[1], process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.stderr is not None
        assert "Traceback" not in (said := process.stderr.read()), said


def sources(url: str) -> list[dict[str, Any]]:
    """As the page sees them, once none is running any more."""
    import time

    while True:
        found: list[dict[str, Any]] = httpx.get(f"{url}api/session").json()["sources"]
        if all(x["state"] != "running" for x in found):
            return found
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `qkv profile --out found` leaves, as far as the viewer needs it."""
    path = tmp_path_factory.mktemp("view")
    (path / "found").mkdir()
    qkv.profile("qkv-mini", TEXT, probe=False, progress=False).save(path / "found" / "profile.qkv.zip")
    (path / "text.py").write_text(TEXT)
    return path


@pytest.mark.slow
def test_model_on_a_file_against_a_saved_profile(folder: Path) -> None:
    with viewer("qkv-mini", "--file", "text.py", "--against", "found", cwd=folder) as (url, process):
        found = sources(url)
        assert [(x["kind"], x["state"], x["name"]) for x in found] == [
            ("model", "ready", "qkv-mini"), ("profile", "ready", "qkv-mini (found)"),
        ]  # fmt: skip
        row, saved = (httpx.get(f"{url}api/sources/{s}/row/0/0/0/0?query=3").json() for s in (0, 1))
        assert [x["token"] for x in row["top"]] == [x["token"] for x in saved["top"]]
        assert httpx.get(url).text.startswith("<!doctype html>")
    assert process.returncode == 0


@pytest.mark.slow
def test_interrupt_before_the_model_is_ready_on_another_address(folder: Path) -> None:
    arguments = ("random-gpt2", "--tokens", "4096", "--host", "0.0.0.0")
    with viewer(*arguments, cwd=folder) as (url, process):
        assert httpx.URL(url).params["token"]
        assert httpx.get(httpx.URL(url).copy_with(query=None)).status_code == 401
        assert httpx.get(url).status_code == 303
    assert process.returncode == 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Sessions, and how they would be served."""
    found: list[Any] = []
    monkeypatch.setattr("qkv.server.run.serve", lambda session, **options: not found.append((session, options)))
    return found


def test_profile_opens_from_its_folder_or_file(
    folder: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in ("found", "found/profile.qkv.zip"):
        assert main(["view", name, "--port", "0"]) == 0
        session, options = served.pop()
        assert [(x.kind, x.name) for x in session.sources] == [("profile", f"qkv-mini ({name})")]
        assert (options["host"], options["port"]) == ("127.0.0.1", 0)


def read_by(session: Any) -> list[Any]:
    return [inputs for _, inputs, _ in session._models.values()]


def test_two_models_read_the_same_text(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Typed:
        buffer = io.BytesIO(TEXT.encode())

    monkeypatch.setattr(sys, "stdin", Typed)
    assert main(["view", "qkv-mini", "--file", "-", "--against", "random-gpt2"]) == 0
    assert read_by(served.pop()[0]) == [TEXT, TEXT]
    for first, second in (("qkv-mini", "random-gpt2"), ("random-gpt2", "qkv-mini")):
        assert main(["view", first, "--against", second]) == 0
        assert read_by(served.pop()[0]) == [default_text(first)] * 2


def test_text_goes_to_the_model_and_not_to_the_profile(
    folder: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["view", "found", TEXT, "--against", "qkv-mini"]) == 0
    session = served.pop()[0]
    assert [x.kind for x in session.sources] == ["profile", "model"]
    assert read_by(session) == [TEXT]


def test_address_is_printed_without_wrapping(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(session: Any, *, on_start: Any, **options: Any) -> bool:
        on_start("http://[fe80::1]:8765/?token=x")
        return True

    monkeypatch.setattr("qkv.server.run.serve", serve)
    monkeypatch.chdir(folder)
    assert main(["view", "found", "--no-browser", "--host", "::"]) == 0
    assert capsys.readouterr().out.count("http://[fe80::1]:8765/?token=x\n") == 2


def test_browser_opens_unless_no_browser(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    opened = threading.Event()
    monkeypatch.setattr("webbrowser.open", lambda url: opened.set())

    def serve(session: Any, *, on_start: Any, **options: Any) -> bool:
        on_start("http://127.0.0.1/")
        return True

    monkeypatch.setattr("qkv.server.run.serve", serve)
    monkeypatch.chdir(folder)
    assert main(["view", "found", "--no-browser"]) == 0
    assert not opened.is_set()
    assert main(["view", "found"]) == 0
    assert opened.wait(10)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["missing.qkv.zip"], "there is no file missing.qkv.zip"),
        (["qkv-mini", "--against", "missing.zip"], "--against: there is no file"),
        (["text.py"], "not a profile"),
        (["found", "some text"], "already has its text"),
        (["found", "--tokens", "5"], "already has its text"),
        (["found", "--against", "found/profile.qkv.zip", "some text"], "already has its text"),
        (["found", "--against", "found", "--target", "x"], "already has its text"),
        (["./nowhere"], "no folder"),
        (["The cat sat on the mat."], "model is 'The cat sat on the mat.', expected a folder or a model's name"),
        (["x" * 5000], "a text comes after the model"),
        (["def one():\n" * 500], "a text comes after the model"),
        (["qkv-mini", "--against", "x" * 300], "model is 'xxx"),
        (["qkv-mini", ""], "the text is empty"),
        (["qkv-mini", "abc", "--target", "x"], "no decoder that could read it"),
        (["qkv-translation", "hi"], "there is no tokenizer"),
        (["found", TEXT, "--against", "qkv-translation"], "there is no tokenizer"),
        (["qkv-mini", TEXT, "--file", "text.py"], "expected one of them"),
        (["qkv-mini", "--file", "missing.txt"], "missing.txt"),
        (["qkv-mini", "--tokens", "0"], "--tokens is 0"),
        (["qkv-mini", "--port", "70000"], "--port is 70000"),
        (["qkv-mini", "--port", "-1"], "--port is -1"),
        (["found", "--host", "203.0.113.7"], "cannot listen at 203.0.113.7"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], word: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["view", *arguments, "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("qkv: ")
    assert len(said.splitlines()) == 1
    assert word in said


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["view", "--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    for word in ("--against", "--no-browser", "--host", "PROFILE|MODEL"):
        assert word in said


def test_missing_fastapi_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "fastapi" else find(name, *more)
    )
    assert main(["view"]) == 2
    assert "pip install 'qkv[view]'" in capsys.readouterr().err
