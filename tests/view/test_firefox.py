"""The report in Firefox, where it is installed: playwright drives only a Firefox of its own, which no registry has."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import profile_fixture as made

FIREFOX = shutil.which("firefox") or shutil.which("firefox-esr")
PATIENCE = 60.0  # seconds


@pytest.fixture
def firefox(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A Firefox without a window: `send(command, **parameters)` of its protocol, Marionette: JSON after its length."""
    if FIREFOX is None:
        pytest.skip("Firefox is not installed")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    preferences = {"marionette.port": port, "services.settings.server": "data:,"}  # it asks nobody for updates
    lines = (f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in preferences.items())
    (tmp_path / "user.js").write_text("\n".join(lines))
    command = [FIREFOX, "--headless", "--marionette", "--profile", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end, connection = time.monotonic() + PATIENCE, None
        while connection is None:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            except OSError:
                assert time.monotonic() < end, "Firefox does not listen"
                time.sleep(0.2)
        with connection, connection.makefile("rwb") as stream:

            def receive() -> Any:
                return json.loads(stream.read(int(b"".join(iter(lambda: stream.read(1), b":")))))

            def send(command: str, **parameters: Any) -> Any:
                message = json.dumps([0, 0, command, parameters]).encode()
                stream.write(b"%d:%s" % (len(message), message))
                stream.flush()
                _, _, error, result = receive()
                assert error is None, error
                return result

            receive()  # the greeting
            send("WebDriver:NewSession")
            yield send
    finally:
        process.kill()
        process.wait()


def test_the_report_draws_its_maps_and_follows_a_click(firefox: Callable[..., Any], tmp_path: Path) -> None:
    def read(script: str) -> Any:
        return firefox("WebDriver:ExecuteScript", script=f"return {script}", args=[])["value"]

    def rests() -> None:
        end = time.monotonic() + PATIENCE
        while (state := read("document.documentElement.dataset.state")) != "ready":
            assert state in ("loading", "busy"), f"the page is {state}: {read('document.body.innerText')}"
            assert time.monotonic() < end
            time.sleep(0.1)

    profile = made.gpt()
    firefox("WebDriver:Navigate", url=profile.report(tmp_path / "report.html").as_uri())
    rests()
    assert read("document.querySelectorAll('.wall-cell').length") == len(profile.heads())
    pixels = "document.querySelector('.wall-cell canvas').getContext('2d').getImageData(0, 0, 61, 61).data"
    assert len(set(read(f"Array.from({pixels})"))) > 5, "the first map has several colours"
    read('document.querySelector(\'.wall [data-layer="1"][data-head="3"]\').click()')
    rests()
    assert read("[location.hash, document.querySelector('#card h3').innerText]") == ["#L1H3", "Layer 1, head 3"]
