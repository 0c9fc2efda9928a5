"""`qkv view`: the address that it prints and opens, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import Command
from forked import Forked, view_without_end
from fuzz.files.formats import GOLDEN as FORMATS

pytest.importorskip("transformers", reason="loading models needs transformers")
GOLDEN = FORMATS / "profile.qkv.zip"


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
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    monkeypatch.setattr("webbrowser.open", lambda url: opened.set())

    def serve(session: Any, *, on_start: Any, **options: Any) -> bool:
        on_start("http://[fe80::1]:8765/?token=x")
        return True

    monkeypatch.setattr("qkv.server.run.serve", serve)
    out = command.succeeds("view", GOLDEN, "--no-browser", "--host", "::")
    assert out.count("http://[fe80::1]:8765/?token=x\n") == 2
    assert not opened.is_set()
    command.succeeds("view", GOLDEN)
    assert opened.wait(60)
