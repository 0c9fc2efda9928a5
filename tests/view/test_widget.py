"""The widget of notebooks: its data, its answers to the page, and the page itself in a browser and in JupyterLab."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("anywidget", reason="the widget needs anywidget")

import profile_fixture as made
import qkv
from conftest import refused
from qkv.profiler import Profile
from qkv.report import notebook, widget
from viewer_fixture import PATIENCE
from viewer_fixture import hostile as hostile_profile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest_plugins = ["viewer_fixture"]

CODE = "def mean(values):\n    return sum(values) / len(values)\n" * 20


def answered(shown: widget.ProfileWidget, monkeypatch: pytest.MonkeyPatch, **of: Any) -> tuple[dict[str, Any], Any]:
    """What the widget answers to a question of its page."""
    sent: list[tuple[dict[str, Any], Any]] = []
    monkeypatch.setattr(type(shown), "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    shown._answer(None, {"id": "7", "of": {"group": "self", "text": 0} | of}, [])
    (content, buffers), *others = sent
    assert not others
    assert content.pop("id") == "7"
    return content, buffers


# ---- data --------------------------------------------------------------------------------------------------------


def test_the_script_is_one_small_offline_module() -> None:
    script = widget.script()
    assert len(script.encode()) < 300_000
    assert re.findall(r"^(?:import|export) .*", script, re.MULTILINE) == ["export default { render: renderWidget };"]
    assert set(re.findall(r"https?://[^\s\"'`)]*", script)) == {"http://www.w3.org/2000/svg"}
    assert ":root" not in widget.style(), "the style sheet would not apply in a shadow tree"


def test_the_selection_is_that_of_python_and_is_checked() -> None:
    shown = made.encoder_decoder().widget()
    assert shown is made.encoder_decoder().widget(), "one object for each profile"
    assert shown.selection["group"] == "decoder"
    shown.select(group="cross", text=1, layer=1, head=2)
    place = {"group": "cross", "text": 1, "layer": 1, "head": 2}
    assert shown.selection == place | {"query": None, "key": None, "queries": [0, 4], "keys": [0, 5]}
    shown.select(query=3, key=4)
    assert (shown.selection["query"], shown.selection["key"]) == (3, 4)
    for name, value in (("text", 2), ("layer", 2), ("head", -1), ("query", 4), ("key", 5)):
        with refused(name):
            shown.select(**{name: value})  # type: ignore[arg-type]
    with refused("group"):
        shown.select(group="other")
    with refused("selection"):
        shown.selection = {"layer": 0}
    assert shown.selection["query"] == 3, "a rejected value changes nothing"


def test_tiles_and_weights_from_python_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"progress": False, "probe": False, "layers": [1, 3]}
    profile = qkv.profile("qkv-mini", CODE, map_tokens=0, **settings)
    weights = qkv.profile("qkv-mini", CODE, map_tokens=999, **settings).data["weights"].values[0]
    n = weights.shape[-1]
    shown = profile.widget()
    assert answered(shown, monkeypatch, what="shape") == ({"shape": None}, []), "there is no model yet"
    profile.widget("qkv-mini", CODE)
    content, _ = answered(shown, monkeypatch, what="shape")
    assert content == {"shape": {"n_queries": n, "n_keys": n, "deepest": 1}}
    tile = {"what": "tile", "layer": 1, "head": 4, "zoom": 1}
    content, (data,) = answered(shown, monkeypatch, **tile, i=1, j=0, pool="max")
    assert content == {"rows": n - 256, "columns": 256}
    np.testing.assert_allclose(
        np.frombuffer(data, np.float32).reshape(n - 256, 256), weights[1, 4, 256:, :256], atol=3e-6
    )
    assert answered(shown, monkeypatch, **tile, i=0, j=1, pool="mean") == ({"rows": 0, "columns": 0}, [b""])
    content, _ = answered(shown, monkeypatch, what="pair", layer=0, head=2, query=70, key=3)
    assert content["weight"] == pytest.approx(float(weights[0, 2, 70, 3]), abs=1e-6)


def test_other_inputs_than_those_of_the_profile_are_an_error_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = qkv.profile("qkv-mini", CODE, map_tokens=0, progress=False, probe=False)
    content, _ = answered(profile.widget("qkv-mini", "x = 1"), monkeypatch, what="shape")
    assert content["error"].startswith("inputs have ")
    with refused("inputs"):
        profile.widget("qkv-mini")


def test_a_notebook_shows_the_widget_and_keeps_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = made.gpt()
    assert profile._repr_mimebundle_() == {}, "this is no notebook"
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert (
        profile._repr_mimebundle_()["application/vnd.jupyter.widget-view+json"]["model_id"] == profile.widget().model_id
    )
    assert "text/html" not in profile._repr_mimebundle_(), "IPython adds it from _repr_html_"
    assert profile._display_() is profile.widget()
    monkeypatch.setattr(notebook, "has_anywidget", lambda: False)
    assert profile._repr_mimebundle_() == {}
    assert profile._display_()._repr_html_() == profile._repr_html_()


# ---- in a browser -----------------------------------------------------------------------------------------------

PAGE = """<!doctype html><meta charset="utf-8"><body style="background: BACKGROUND"><div id="cell"></div>
<script>
window.failed = [];
addEventListener("error", (event) => failed.push(event.message));
addEventListener("unhandledrejection", (event) => failed.push(String(event.reason)));
</script>
<script type="module">
SCRIPT
window.state = STATE;
const listeners = {}, tell = (name, ...what) => (listeners[name] || []).forEach((one) => one(...what));
window.model = {
  get: (name) => state[name], set: (name, value) => { state[name] = value; }, save_changes() {},
  on: (name, one) => { (listeners[name] ||= []).push(one); },
  off: (name, one) => { listeners[name] = listeners[name].filter((other) => other !== one); },
  send: (message) => setTimeout(() => tell("msg:custom", { id: message.id, shape: null }, [])),
};
window.select = (changes) => {
  state.selection = { ...state.selection, ...changes };
  tell("change:selection");
};
window.left = () => Object.values(listeners).flat().length;
window.end = widgetModule.render({ model, el: document.getElementById("cell") });
</script>"""


def opened(browser: Browser, profile: Profile, folder: Path, background: str = "white", width: int = 1000) -> Page:
    """The widget of a profile on a page with a model like anywidget's, without Python."""
    shown = profile.widget()
    state = json.dumps({name: getattr(shown, name) for name in ("_page", "_packed", "_style", "selection")})
    parts = {
        "BACKGROUND": background,
        "SCRIPT": widget.script().replace("export default", "const widgetModule ="),
        "STATE": state.replace("<", "\\u003c"),
    }
    file = folder / "notebook.html"
    file.write_text(re.sub("BACKGROUND|SCRIPT|STATE", lambda match: parts[match[0]], PAGE), "utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(file.as_uri())
    page.wait_for_selector(".qkv-widget[data-ready]", timeout=PATIENCE * 1000)
    return page


def test_clicks_change_the_selection_and_the_selection_changes_the_page(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, made.gpt(), tmp_path)
    page.locator('.wall [data-layer="1"][data-head="3"]').click()
    page.locator(".map-title", has_text="Layer 1, head 3").wait_for()
    assert page.evaluate("[state.selection.layer, state.selection.head]") == [1, 3]
    page.evaluate("select({ layer: 2, head: 4, query: 20, key: 0 })")
    page.locator(".map-title", has_text="Layer 2, head 4").wait_for()
    page.locator(".head-map-readout", has_text="query 20 ").wait_for()
    weight = 100 * float(made.gpt().data["weights"][0, 2, 4, 20, 0])
    share = re.search(r": ([\d.]+)", page.locator(".head-map-readout").inner_text().replace("\u00a0", " "))
    assert float(share[1]) == pytest.approx(weight, abs=0.4)  # type: ignore[index]
    page.get_by_label("Zoom in (+)").click()
    page.wait_for_timeout(700)
    queries = page.evaluate("state.selection.queries")
    assert 0 < queries[1] - queries[0] < 61
    page.locator('[data-key="choice-Show-numbers"]').check()
    assert page.locator(".card, .widget-numbers h3").first.inner_text() == "Layer 2, head 4"
    page.locator('[data-key="choice-Show-text"]').check()
    page.locator('.flow [data-at="9"]').click()
    page.locator(".reading > .readout", has_text="(position 9) in L2 · H4").wait_for()
    assert page.evaluate("state.selection.query") == 9
    assert page.evaluate("failed") == []
    page.evaluate("end()")
    assert page.evaluate("left()") == 0, "a removed widget listens to nothing"
    page.close()


def test_the_theme_is_that_of_the_page_behind(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, made.gpt(), tmp_path, background="oklch(0.98 0 0)")
    host = page.locator(".qkv-widget")
    assert host.get_attribute("data-theme") == "light"
    page.evaluate("document.body.style.background = 'rgb(20, 20, 20)'")
    page.wait_for_selector(".qkv-widget[data-theme=dark]")
    assert page.evaluate("failed") == []
    page.close()


def test_hostile_tokens_and_narrow_cells(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, hostile_profile(), tmp_path, width=390)
    page.locator('[data-key="choice-Show-text"]').check()
    page.locator(".flow-token").first.wait_for()
    assert page.evaluate("document.documentElement.dataset.pwned") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("failed") == []
    page.close()


# ---- in JupyterLab ----------------------------------------------------------------------------------------------

CELLS = [
    "import qkv\ntext = 'def mean(values):\\n    return sum(values) / len(values)\\n' * 20\n"
    "profile = qkv.profile('qkv-mini', text, map_tokens=0, progress=False, probe=False)\n"
    "profile.widget('qkv-mini', text)\nprofile",
    "print(profile.widget().selection['layer'], profile.widget().selection['head'])",
]


@pytest.mark.slow
def test_a_cell_of_jupyterlab_shows_a_profile(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jupyterlab", reason="jupyterlab is too large for the development set: pip install jupyterlab")
    cells = [
        {"cell_type": "code", "execution_count": None, "id": f"c{n}", "metadata": {}, "outputs": [], "source": source}
        for n, source in enumerate(CELLS)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    (tmp_path / "notebook.ipynb").write_text(
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
    )
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--IdentityProvider.token=",
        f"--notebook-dir={tmp_path}",
    ]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyter", "lab", *options], stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(PATIENCE * 4):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=1).close()
                break
            except OSError:
                time.sleep(0.25)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE * 1000)
        page.goto(f"{address}/lab/tree/notebook.ipynb")
        for _ in range(PATIENCE // 2):  # a cell that is run before the kernel has started is not run later
            page.locator(".jp-CodeCell .cm-content").first.click()
            page.keyboard.press("Shift+Enter")
            page.wait_for_timeout(2000)
            if page.locator(".jp-InputPrompt").first.inner_text().strip() != "[ ]:":
                break
        page.locator(".qkv-widget[data-exact]").wait_for()  # tiles from Python
        page.locator('.qkv-widget [data-layer="1"][data-head="2"]').click()
        page.locator(".qkv-widget .map-title", has_text="Layer 1, head 2").wait_for()
        assert page.locator(".qkv-widget .widget-problem").is_hidden()
        page.locator(".jp-CodeCell .cm-content").nth(1).click()
        page.keyboard.press("Shift+Enter")
        page.locator(".jp-OutputArea-output", has_text="1 2").wait_for()
        page.close()
    finally:
        server.terminate()
        server.wait(PATIENCE)
