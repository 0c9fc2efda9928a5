"""The widget of notebooks: its data, its answers to the page, and the page itself in a browser.

docs/make_notebook.py opens it in a real JupyterLab, which is too large for the development set.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
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
from viewer_fixture import PATIENCE, eventually, plain, share
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


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open the widget of a profile on a page with a model like anywidget's, without Python."""
    pages = []

    def opened(profile: Profile, background: str = "white", width: int = 1000) -> Page:
        shown = profile.widget()
        state = json.dumps({name: getattr(shown, name) for name in ("_page", "_packed", "_style", "selection")})
        parts = {
            "BACKGROUND": background,
            "SCRIPT": widget.script().replace("export default", "const widgetModule ="),
            "STATE": state.replace("<", "\\u003c"),
        }
        file = tmp_path / "notebook.html"
        file.write_text(re.sub("BACKGROUND|SCRIPT|STATE", lambda match: parts[match[0]], PAGE), "utf-8")
        pages.append(browser.new_page(viewport={"width": width, "height": 900}))
        pages[-1].set_default_timeout(PATIENCE * 1000)
        pages[-1].goto(file.as_uri())
        pages[-1].wait_for_selector(".qkv-widget[data-ready]")
        return pages[-1]

    yield opened
    for page in pages:
        assert page.evaluate("failed") == []
        page.close()


def test_clicks_change_the_selection_and_the_selection_changes_the_page(opened: Callable[..., Page]) -> None:
    page = opened(made.gpt())
    page.locator('.wall [data-layer="1"][data-head="3"]').click()
    page.locator(".map-title", has_text="Layer 1, head 3").wait_for()
    assert page.evaluate("[state.selection.layer, state.selection.head]") == [1, 3]
    page.evaluate("select({ layer: 2, head: 4, query: 20, key: 0 })")
    page.locator(".map-title", has_text="Layer 2, head 4").wait_for()
    page.locator(".head-map-readout", has_text="query 20 ").wait_for()
    said = plain(page.locator(".head-map-readout").inner_text())
    assert share(said) == pytest.approx(float(made.gpt().data["weights"][0, 2, 4, 20, 0]), abs=0.004)
    page.get_by_label("Zoom in (+)").click()
    eventually(page, lambda: 0 < page.evaluate("state.selection.queries[1] - state.selection.queries[0]") < 61)
    page.locator('[data-key="choice-Show-numbers"]').check()
    page.locator(".widget-numbers h3", has_text="Layer 2, head 4").first.wait_for()
    page.locator('[data-key="choice-Show-text"]').check()
    page.locator('.flow [data-at="9"]').click()
    page.locator(".reading > .readout", has_text="(position 9) in L2 · H4").wait_for()
    assert page.evaluate("state.selection.query") == 9
    page.evaluate("end()")
    assert page.evaluate("left()") == 0, "a removed widget listens to nothing"


def test_hostile_tokens_and_narrow_cells(opened: Callable[..., Page]) -> None:
    page = opened(hostile_profile(), width=390)
    page.locator('[data-key="choice-Show-text"]').check()
    page.locator(".flow-token").first.wait_for()
    assert page.evaluate("document.documentElement.dataset.pwned ?? null") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.get_attribute("html", "data-state") is None, "the page of the notebook is not the widget's"
