"""Pages in files, in a real browser: the report, the widget of notebooks, and the tutorial's “attention by hand”.

docs/make_notebook.py opens the widget in a real JupyterLab, which is too large for the development set.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import profile_fixture as made
from qkv import masks, normalizers, reference, scores
from qkv.profiler import Profile
from qkv.report import widget
from viewer_fixture import PATIENCE, PHONE, eventually, hostile, plain, rested, share

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytest_plugins = ["viewer_fixture"]
STATIC = Path(__file__).parents[2] / "docs" / "_static"


# ---- the report -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context(browser: Browser) -> BrowserContext:
    """The pages of all tests, and an idle one that keeps their process alive, because its start takes a second."""
    made = browser.new_context()
    made.set_default_timeout(PATIENCE * 1000)
    made.new_page().goto((STATIC / "by-hand.css").as_uri())
    return made


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    page = context.new_page()
    yield page
    page.close()


def report_of(page: Page, profile: Profile, folder: Path) -> str | None:
    """Open the report of a profile; returns the state that it announces once it is at rest."""
    page.goto(profile.report(folder / "report.html").as_uri())
    rested(page)
    return page.get_attribute("html", "data-state")


@pytest.mark.parametrize(
    "make", [made.encoder_decoder, lambda: made.long(1024, 2, 2), hostile], ids=["three groups", "long", "hostile"]
)  # fmt: skip
def test_the_page_loads_without_errors(page: Page, tmp_path: Path, make: Callable[[], Profile]) -> None:
    profile = make()
    assert report_of(page, profile, tmp_path) == "ready"
    assert page.locator("[role=gridcell]").count() == len(profile.heads()) * (1 + ("weights" in profile.data))
    assert page.get_by_text("Most attended tokens").count() == 1
    assert page.locator(".curve").count() > 0
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.dataset.pwned ?? null") is None


def test_the_page_responds_to_clicks_and_keys(page: Page, tmp_path: Path) -> None:
    profile = made.gpt()
    heads = profile.heads()

    def after(act: Callable[..., Any], *arguments: Any) -> str:
        """The title of the card after an action."""
        act(*arguments)
        rested(page)
        return page.locator("#card h3").inner_text()

    def cell(layer: int, head: int, box: str = "#grid-box") -> str:
        return f'{box} [data-layer="{layer}"][data-head="{head}"]'

    assert report_of(page, profile, tmp_path) == "ready"
    assert after(page.click, cell(1, 3)) == "Layer 1, head 3"
    page.keyboard.press("ArrowDown")
    assert after(page.keyboard.press, "ArrowLeft") == "Layer 2, head 2"
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused.startswith("Layer 2, head 2: ")
    assert after(page.click, cell(0, 4, "#wall")) == page.locator("#big-map h3").inner_text() == "Layer 0, head 4"
    page.click(cell(2, 2))
    assert after(page.click, '[data-key="on"]') == "Layer 2, head 3"
    assert page.evaluate("document.activeElement.dataset.key") == "on", "the focus is kept"
    page.select_option("#statistic", "distance")
    said = f"Layer 0, head 0: Distance {heads['distance'][0]:.1f} tokens; first token 99 %"
    assert plain(page.get_attribute(cell(0, 0), "aria-label")) == said
    page.select_option("#statistic", "type")
    kind = profile.types().query("layer == 1 and head == 3").iloc[0]
    assert (page.get_attribute(cell(1, 3), "data-tip") or "").split("\n")[:2] == ["Layer 1, head 3", kind["type"]]
    page.locator('[data-key="choice-Shade by attention received from-head"]').check(force=True)
    page.click('[data-at="9"]')
    rested(page)
    assert "query “wards” (position 9) in L2 · H3" in page.inner_text("#reading .readout")
    assert page.get_attribute(".flow-token.pinned", "data-at") == "9"
    page.focus("#big-map canvas")
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    said = plain(page.inner_text(".head-map-readout"))
    query, key = map(int, re.match(r"query (\d+) “.*” → key (\d+) ", said).groups())  # type: ignore[union-attr]
    assert query - key == 3, "from the middle, two down and one to the left"
    assert share(said) == pytest.approx(float(profile.data["weights"][0, 2, 3, query, key]), abs=0.004)
    page.click('[data-key="sort-sink"]')
    best = heads.loc[heads["sink"].idxmax()]
    assert page.inner_text("#head-table tbody th >> nth=0") == f"L{best['layer']} · H{best['head']}"
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(paper)
    page.click("#theme")
    assert page.evaluate(paper) != light


# ---- the widget of notebooks ------------------------------------------------------------------------------------

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
def opened(context: BrowserContext, tmp_path: Path) -> Iterator[Callable[..., Page]]:
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
        pages.append(context.new_page())
        pages[-1].set_viewport_size({"width": width, "height": 900})
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
    page = opened(hostile(), width=390)
    page.locator('[data-key="choice-Show-text"]').check()
    page.locator(".flow-token").first.wait_for()
    assert page.evaluate("document.documentElement.dataset.pwned ?? null") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.get_attribute("html", "data-state") is None, "the page of the notebook is not the widget's"


# ---- the widget of the tutorial ---------------------------------------------------------------------------------

Matrix = list[list[float]]
Q: Matrix = [[1, 0], [0.5, 1.5], [2, -1]]
K: Matrix = [[1, 1], [0, 2], [1.5, -0.5]]
V: Matrix = [[2, 0], [0, 2], [-1, -1]]
NORMALIZERS: dict[str, Callable[[float], normalizers.Normalizer]] = {
    "softmax": normalizers.Softmax,
    "off-by-one": lambda t: normalizers.Softmax(t, sink=0.0),
    "sigmoid": lambda t: normalizers.Sigmoid().with_temperature(t),
}


@pytest.fixture
def by_hand(page: Page, tmp_path: Path) -> Iterator[Page]:
    """A page of the size of a phone with only the widget; any console message or failed request fails the test."""
    file = tmp_path / "page.html"
    file.write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>by hand</title>'
        f'<link rel="stylesheet" href="{(STATIC / "by-hand.css").as_uri()}">'
        f'<body><div id="by-hand">Here would be …</div><script src="{(STATIC / "by-hand.js").as_uri()}"></script>',
        encoding="utf-8",
    )
    said: list[str] = []

    page.set_viewport_size(PHONE)
    for event in ("console", "pageerror", "requestfailed"):
        page.on(event, lambda what: said.append(str(getattr(what, "text", what))))
    page.goto(file.as_uri())
    yield page
    assert said == []


def _shown(page: Page, name: str, columns: int, rows: int = 3) -> np.ndarray:
    """The numbers of a table or of a matrix of inputs, with one row per query; masked pairs are NaN."""
    read = "(all) => Object.fromEntries(all.map((x) => [x.dataset.at, x.value ?? x.textContent]))"
    texts = page.eval_on_selector_all(f'[data-at^="{name}-"]', read)
    numbers = {at: math.nan if text == "hidden" else float(text.replace("−", "-")) for at, text in texts.items()}
    return np.array([[numbers[f"{name}-{i}-{j}"] for j in range(columns)] for i in range(rows)])


def _expected(
    q: Any, k: Any, v: Any, normalizer: normalizers.Normalizer, *, plain: bool = False
) -> reference.Reference:
    """With a causal mask and scaled scores, unless they are plain."""
    one = [np.array(x, dtype=float)[None, None] for x in (q, k, v)]
    mask, score = (None, scores.Dot(1.0)) if plain else (masks.Causal(), None)
    return reference.attention(*one, mask=mask, score=score, normalizer=normalizer)


def _equals(page: Page, found: reference.Reference, rows: int = 3, columns: int = 3) -> None:
    """The page shows these weights and outputs."""
    np.testing.assert_allclose(_shown(page, "weights", columns, rows), found.weights[0, 0], atol=5.1e-4)
    np.testing.assert_allclose(_shown(page, "out", found.out.shape[-1], rows), found.out[0, 0], atol=5.1e-3)


def test_weights_and_outputs_by_hand_equal_the_reference(by_hand: Page) -> None:
    """Initially, after a change of numbers, temperature, mask and scale, and with scores that would overflow."""
    page = by_hand
    for name, normalizer in NORMALIZERS.items():
        page.reload()
        page.check(f'input[value="{name}"]')
        _equals(page, _expected(Q, K, V, normalizer(1.0)))
        page.fill('[data-at="K-1-0"]', "-1.5")
        page.fill('[data-at="V-2-1"]', "3")
        page.fill('input[name="temperature"]', "0.3")
        page.uncheck('input[name="causal"]')
        page.uncheck('input[name="scaled"]')
        keys, values = [K[0], [-1.5, 2], K[2]], [V[0], V[1], [-1, 3]]
        changed = _expected(Q, keys, values, normalizer(10**0.3), plain=True)
        _equals(page, changed)
        np.testing.assert_allclose(_shown(page, "weights", 4)[:, 3], changed.weights[0, 0].sum(-1), atol=5.1e-4)
        np.testing.assert_allclose(_shown(page, "scores", 3), np.array(Q) @ np.array(keys).T / 10**0.3, atol=5.1e-3)
        page.check('input[name="causal"]')
        page.check('input[name="scaled"]')
        page.fill('[data-at="Q-1-0"]', "99")
        page.fill('[data-at="K-0-0"]', "99")
        page.fill('input[name="temperature"]', "-1")
        _equals(page, _expected([Q[0], [99, 1.5], Q[2]], [[99, 1], *keys[1:]], values, normalizer(0.1)))
        assert not re.search("NaN|Infinity", page.inner_text("#by-hand"))
