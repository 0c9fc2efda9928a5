"""The text page in a real browser: the weights of a token in both directions, and texts of any length."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from viewer_fixture import HOSTILE, Served, Tab, check_pictures, floats, share, texts_of, unseen

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
LISTED = 8  # weights in the panel for each direction
FIND = '[aria-label^="Find in the text"]'


def token(at: int, side: str = "query") -> str:
    return f"#text-{side}-{at}"


def listed(tab: Tab, side: str) -> list[tuple[int, float]]:
    """The weights in the panel, [(position, weight), …]; side "to" or "from"."""
    items = tab.page.locator(f".text-ties.{side} li")
    expect(items.first).to_be_visible()
    places = [int(place.replace(",", "")) for place in items.locator("small").all_inner_texts()]
    return list(zip(places, map(share, items.locator("b").all_inner_texts()), strict=True))


def check_listed(tab: Tab, side: str, weights: np.ndarray) -> None:
    """The panel lists the largest weights in order."""
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] > 0][:LISTED].tolist()
    found = listed(tab.settled(), side)
    assert [at for at, _ in found] == order
    assert [shown for _, shown in found] == [pytest.approx(weights[at], rel=0.051, abs=1e-4) for at in order]


def pointed(tab: Tab, at: int, side: str = "query") -> Tab:
    tab.page.hover(token(at, side))
    return tab.settled()


# ---- weights of a token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [0, 1], ids=["padded", "second text"])
def test_panel_lists_the_largest_weights(view: Opens, served: Served, text: int) -> None:
    data = served.profile("two").data
    n = int(data["n_keys"][text])
    weights = data["weights"].values[text, 1, 2, :n, :n]
    one = view().open("text", "two", text=text, layer=1, head=2)
    for at in (0, n - 1):
        pointed(one, at)
        check_listed(one, "to", weights[at])
        check_listed(one, "from", weights[:, at])
        rest = one.page.locator(".text-ties.to .text-note").inner_text()
        assert f"the other {n - 8}" in rest
        assert share(rest.split(":")[1].strip()) == pytest.approx(np.sort(weights[at])[:-8].sum(), rel=0.051)
    about = one.page.inner_text(".text-token p")
    assert f"token {n - 1} of {n}" in about
    received = share(re.search(r"receives (.*?%)", about)[1])
    assert received == pytest.approx(weights[:, n - 1].sum() / n, rel=0.051)


# ---- long texts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_long_text_is_rendered_in_part(view: Opens, served: Served) -> None:
    tokens = [token.removeprefix("▁") for token in served.profile("long").data["key_token"].values[0]]
    one = view().open("text", "long")
    expect(one.page.locator(".text-panel")).to_contain_text("no maps")
    for at in (19_999, 15_000, 37):
        one.open("text", "long", pins=at)
        expect(one.page.locator(token(at))).to_be_in_viewport()
        assert one.page.inner_text(token(at)).strip() == tokens[at]
        assert one.page.evaluate("document.querySelectorAll('main *').length") < 6000
    one.page.focus(".flow")
    one.press("End").settled()
    expect(one.page.locator(token(19_999))).to_be_in_viewport()
    one.page.locator(".flow").evaluate("(x) => { x.scrollTop -= 12000; }")
    seen = one.settled().js("tokensInView")
    expect(one.page.locator(token(19_999))).to_have_count(0)
    first = seen[0][0]
    assert 200 < len(seen) < 3000  # the whole view is filled with text
    assert seen == [[at, tokens[at]] for at in range(first, first + len(seen))]


# ---- hostile tokens, phones, export ---------------------------------------------------------------------------


@pytest.mark.slow
def test_hostile_tokens_are_shown_literally(view: Opens) -> None:
    one = view().open("text", "hostile", pins="0,3")
    said = one.text()
    # In running text a mark is a separate box without quotation marks.
    assert unseen(said.replace("U+202E", "‹U+202E›").replace("U+200B", "‹U+200B›")) == []
    assert "x" * 500 in said or "xxx…" in said
    assert HOSTILE[0] in one.page.inner_text("#context"), "the bar shows the name of the model"
    said = one.page.inner_text(".text-side")
    one.page.focus(".flow")
    for at in range(17):
        one.press("ArrowRight" if at else "Home").settled()
        expect(one.page.locator(".text-token p")).to_contain_text(f"token {at} of 17")
        said += one.page.inner_text(".text-side")
    assert unseen(said) == []
    assert one.is_safe()
    one.page.fill(FIND, "<script>")
    expect(one.page.locator(".text-found")).to_have_text(re.compile("1 of [23]"))
    assert any("<img src=x" in text for text in texts_of(check_pictures(one)))


def test_text_export_holds_the_weights(view: Opens, served: Served) -> None:
    data = served.profile("two").data
    weights = data["weights"].values[1, 0, 3]
    one = view().open("text", "two", text=1, layer=0, head=3, pins=17)
    rows = one.table()
    names = [row["token"].strip() for row in rows]
    assert names == list(data["key_token"].values[1])
    for column, want in (("attended_to", weights[17]), ("attends", weights[:, 17]), ("received", weights.sum(0) / 37)):
        np.testing.assert_allclose(floats(rows, column), want, rtol=2e-4)  # received shares have 16 bits
    assert set(names) <= {text.strip() for text in texts_of(check_pictures(one))}
