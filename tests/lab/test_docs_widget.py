"""The tutorial's widget “attention by hand” in a browser: it shows the weights of the reference, explained."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from qkv import masks, normalizers, reference, scores

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
STATIC = Path(__file__).parents[2] / "docs" / "_static"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
Matrix = list[list[float]]
Q: Matrix = [[1, 0], [0.5, 1.5], [2, -1]]
K: Matrix = [[1, 1], [0, 2], [1.5, -0.5]]
V: Matrix = [[2, 0], [0, 2], [-1, -1]]
NORMALIZERS: dict[str, Callable[[float], normalizers.Normalizer]] = {
    "softmax": normalizers.Softmax,
    "off-by-one": lambda t: normalizers.Softmax(t, sink=0.0),
    "sigmoid": lambda t: normalizers.Sigmoid().with_temperature(t),
}


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """A tab of the size of a phone."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    api = pytest.importorskip("playwright.sync_api", reason="the test drives a browser with playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 390, "height": 844})
        browser.close()


@pytest.fixture
def page(tab: Page, tmp_path: Path) -> Iterator[Page]:
    """A page with only the widget, opened as a file; any console message or failed request fails the test."""
    file = tmp_path / "page.html"
    file.write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>by hand</title>'
        f'<link rel="stylesheet" href="{(STATIC / "by-hand.css").as_uri()}">'
        f'<body><div id="by-hand">Here would be …</div><script src="{(STATIC / "by-hand.js").as_uri()}"></script>',
        encoding="utf-8",
    )
    said: list[str] = []

    def hear(what: object) -> None:
        said.append(str(getattr(what, "text", what)))

    for event in ("console", "pageerror", "requestfailed"):
        tab.on(event, hear)
    tab.goto(file.as_uri())
    yield tab
    for event in ("console", "pageerror", "requestfailed"):
        tab.remove_listener(event, hear)
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


@pytest.mark.parametrize("name", NORMALIZERS)
def test_weights_and_outputs_equal_the_reference(page: Page, name: str) -> None:
    """Initially, after a change of numbers, temperature, mask and scale, and with scores that would overflow."""
    page.check(f'input[value="{name}"]')
    _equals(page, _expected(Q, K, V, NORMALIZERS[name](1.0)))
    page.fill('[data-at="K-1-0"]', "-1.5")
    page.fill('[data-at="V-2-1"]', "3")
    page.fill('input[name="temperature"]', "0.3")
    page.uncheck('input[name="causal"]')
    page.uncheck('input[name="scaled"]')
    keys, values = [K[0], [-1.5, 2], K[2]], [V[0], V[1], [-1, 3]]
    changed = _expected(Q, keys, values, NORMALIZERS[name](10**0.3), plain=True)
    _equals(page, changed)
    np.testing.assert_allclose(_shown(page, "weights", 4)[:, 3], changed.weights[0, 0].sum(-1), atol=5.1e-4)
    np.testing.assert_allclose(_shown(page, "scores", 3), np.array(Q) @ np.array(keys).T / 10**0.3, atol=5.1e-3)
    page.check('input[name="causal"]')
    page.check('input[name="scaled"]')
    page.fill('[data-at="Q-1-0"]', "99")
    page.fill('[data-at="K-0-0"]', "99")
    page.fill('input[name="temperature"]', "-1")
    _equals(page, _expected([Q[0], [99, 1.5], Q[2]], [[99, 1], *keys[1:]], values, NORMALIZERS[name](0.1)))
    assert not re.search("NaN|Infinity", page.inner_text("#by-hand"))
