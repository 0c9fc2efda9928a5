"""`qkv view`: which sources it opens, what it refuses, and how it ends."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import qkv
from conftest import Command
from forked import Forked, view_without_end

pytest.importorskip("transformers", reason="loading models needs transformers")
TEXT = "def one():\n    return 1\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `qkv profile --out found` leaves, as far as the viewer needs it."""
    path = tmp_path_factory.mktemp("view")
    (path / "found").mkdir()
    qkv.profile("qkv-mini", TEXT, probe=False, progress=False).save(path / "found" / "profile.qkv.zip")
    (path / "text.py").write_text(TEXT)
    return path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in the folder with the profile."""
    monkeypatch.chdir(folder)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Sessions, and how they would be served."""
    found: list[Any] = []
    monkeypatch.setattr("qkv.server.run.serve", lambda session, **options: not found.append((session, options)))
    return found


@pytest.mark.slow
def test_interrupt_before_the_model_is_ready_ends_a_public_server_quietly(tmp_path: Path) -> None:
    words = ("qkv-mini", "--host", "0.0.0.0", "--port", 0, "--no-browser")
    process = Forked(view_without_end, *words, folder=tmp_path, HF_HUB_OFFLINE="1")
    process.has_said("\n")
    assert process.out.startswith("Viewer"), process.out
    url = httpx.URL(process.out.split()[1])
    assert url.params["token"]
    assert httpx.get(url.copy_with(query=None)).status_code == 401
    assert httpx.get(url).status_code == 303
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 0
    assert "Traceback" not in process.errors


def test_the_address_is_printed_whole_and_opened_in_a_browser_unless_told_not_to(
    here: None, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    monkeypatch.setattr("webbrowser.open", lambda url: opened.set())

    def serve(session: Any, *, on_start: Any, **options: Any) -> bool:
        on_start("http://[fe80::1]:8765/?token=x")
        return True

    monkeypatch.setattr("qkv.server.run.serve", serve)
    out = command.succeeds("view", "found", "--no-browser", "--host", "::")
    assert out.count("http://[fe80::1]:8765/?token=x\n") == 2
    assert not opened.is_set()
    command.succeeds("view", "found")
    assert opened.wait(60)


REFUSALS = [
    ("missing.qkv.zip", "no file missing.qkv"), ("qkv-mini --against missing.zip", "--against: there is"),
    ("text.py", "not a profile"), ("found --tokens 5", "already has its text"), ("./nowhere", "no folder"),
    ("found --against found/profile.qkv.zip 'some text'", "already has its text"),
    ("found --against found --target x", "already has its text"), ("'The cat sat.'", "expected a folder"),
    (f"qkv-mini --against {'x' * 5000}", "expected a folder"), ("qkv-mini ''", "text is empty"),
    ("qkv-mini abc --target x", "no decoder"), ("found 'a b' --against qkv-translation", "no tokenizer"),
    ("qkv-mini --port 70000", "--port is 70000"), ("qkv-mini --port -1", "--port is -1"),
    ("found --host 203.0.113.7", "cannot listen"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "fragment"), REFUSALS, ids=range(len(REFUSALS)))
def test_bad_input_is_one_sentence_and_code_2(words: str, fragment: str, here: None, command: Command) -> None:
    assert fragment in command.refuses("view", *shlex.split(words), "--no-browser")
