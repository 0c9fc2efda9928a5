"""The widget of notebooks: its data and its answers to the page, which test_viewer.py opens in a browser."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

pytest.importorskip("anywidget", reason="the widget needs anywidget")

import profile_fixture as made
import qkv
from conftest import refused
from qkv.report import widget

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
    tile = {"what": "tile", "row": 10, "zoom": 1}
    content, (data,) = answered(shown, monkeypatch, **tile, i=1, j=0, pool="max")
    assert content == {"rows": n - 256, "columns": 256}
    np.testing.assert_allclose(
        np.frombuffer(data, np.float32).reshape(n - 256, 256), weights[1, 4, 256:, :256], atol=3e-6
    )
    assert answered(shown, monkeypatch, **tile, i=0, j=1, pool="mean") == ({"rows": 0, "columns": 0}, [b""])
    content, _ = answered(shown, monkeypatch, what="pair", row=2, query=70, key=3)
    assert content["weight"] == pytest.approx(float(weights[0, 2, 70, 3]), abs=1e-6)


def test_other_inputs_than_those_of_the_profile_are_an_error_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = qkv.profile("qkv-mini", CODE, map_tokens=0, progress=False, probe=False)
    content, _ = answered(profile.widget("qkv-mini", "x = 1"), monkeypatch, what="shape")
    assert content["error"].startswith("inputs have ")
    with refused("inputs"):
        profile.widget("qkv-mini")


def test_a_notebook_shows_the_widget_and_keeps_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = made.gpt()
    assert profile._repr_mimebundle_() == {}, "this is no notebook"
    assert profile._repr_png_().startswith(b"\x89PNG")
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert (
        profile._repr_mimebundle_()["application/vnd.jupyter.widget-view+json"]["model_id"] == profile.widget().model_id
    )
    assert "image/png" not in profile._repr_mimebundle_(), "IPython adds it from _repr_png_"
    assert profile._display_() is profile.widget()
    monkeypatch.setattr("qkv.runs.profiles.find_spec", lambda name: None)
    assert profile._repr_mimebundle_() == {}
    monkeypatch.undo()
    monkeypatch.setattr("qkv.runs.profiles.find_spec", lambda name: None)
    assert isinstance(profile._display_(), Figure)
