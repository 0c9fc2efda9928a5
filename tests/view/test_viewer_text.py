"""The text page in a real browser: the weights of a token in both directions, and texts of any length."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from viewer_fixture import PHONE, VISIBLE_PARTS, Served, Tab, check_pictures, overflow, texts_of

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
LISTED = 8  # weights in the panel for each direction
SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def token(at: int, side: str = "query") -> str:
    return f"#text-{side}-{at}"


def listed(tab: Tab, side: str) -> list[tuple[int, float]]:
    """The weights in the panel, [(position, weight), …]; side "to" or "from"."""
    items = tab.page.locator(f".text-ties.{side} li")
    expect(items.first).to_be_visible()
    return [
        (int(item.locator("small").inner_text().replace(",", "")), share(item.locator("b").inner_text()))
        for item in items.all()
    ]


def share(words: str) -> float:
    """Parse a share of the page: "12.3 %", "4.5 · 10⁻⁶ %"."""
    number, power = re.search(r"([\d.,]+)\s(?:·\s10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)\s)?%", words).groups()
    return float(number.replace(",", "")) / 100 * 10 ** int((power or "⁰").translate(SUPERSCRIPT))


def check_listed(tab: Tab, side: str, weights: np.ndarray) -> None:
    """Wait until the panel lists the largest weights in order, and compare the shown digits."""
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] > 0][:LISTED].tolist()
    tab.eventually(lambda: [at for at, _ in listed(tab, side)], order)
    for at, shown in listed(tab, side):
        assert shown == pytest.approx(weights[at], rel=0.051, abs=1e-4)


def expect_pinned(tab: Tab, positions: list[int]) -> None:
    expect(tab.page.locator(".text-pin small")).to_have_text([str(at) for at in positions])


# ---- weights of a token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [0, 1], ids=["padded", "second text"])
def test_panel_lists_the_largest_weights(tab: Opens, served: Served, text: int) -> None:
    data = served.profile("two").data
    n = int(data["n_keys"][text])
    weights = data["weights"].values[text, 1, 2, :n, :n]
    one = tab().open("text", "two", text=text, layer=1, head=2)
    for at in (0, 7, n - 1):
        one.page.hover(token(at))
        expect(one.page.locator(".text-token p")).to_contain_text(f"token {at} of {n}")
        check_listed(one, "to", weights[at])
        check_listed(one, "from", weights[:, at])
        rest = one.page.locator(".text-ties.to .text-note").inner_text()
        assert f"the other {n - 8}" in rest
        assert share(rest.split(":")[1].strip()) == pytest.approx(np.sort(weights[at])[:-8].sum(), rel=0.051)
    received = share(re.search(r"receives (.*?%)", one.page.inner_text(".text-token p"))[1])
    assert received == pytest.approx(weights[:, n - 1].sum() / n, rel=0.051)


def test_panel_shows_the_mean_of_a_layer(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[0, 1, :, :23, :23].mean(0)
    one = tab().open("text", "two", text=0, layer=1, head=2, pins=11)
    one.page.click('.text-settings label:has-text("its layer")')
    expect(one.page.locator(".text-key")).to_contain_text("mean of 4 heads")
    one.settled()
    one.arrives(of="layer")
    check_listed(one, "to", weights[11])
    check_listed(one, "from", weights[:, 11])


def test_cross_attention_shows_both_texts(tab: Opens, served: Served) -> None:
    data = served.profile("cross").groups["cross"]
    weights = data["weights"].values[1, 0, 2, :4, :5]
    one = tab().open("text", "cross", group=2, text=1, layer=0, head=2)
    one.page.hover(token(2))
    expect(one.page.locator(".text-token p")).to_contain_text("query 2 of 4")
    check_listed(one, "to", weights[2])
    assert one.page.locator(".text-ties.from").count() == 0
    one.page.hover(token(3, "key"))
    expect(one.page.locator(".text-token p")).to_contain_text("key 3 of 5")
    check_listed(one, "from", weights[:, 3])
    one.page.click(token(3, "key"))
    one.page.wait_for_url(lambda url: "pins=k3" in url)


def test_causal_text_lists_only_visible_tokens(tab: Opens, served: Served) -> None:
    """In a causal text, the query at 3 attends to four keys."""
    weights = served.profile("gpt").data["weights"].values[0, 0, 1]
    one = tab().open("text", "gpt", layer=0, head=1, pins=3)
    check_listed(one, "to", weights[3])
    assert len(listed(one, "to")) == 4
    check_listed(one, "from", weights[:, 3])


def test_shades_follow_the_weights(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[1, 0, 1]
    one = tab().open("text", "two", text=1, layer=0, head=1, pins=20)
    listed(one, "to")
    shades = one.page.evaluate(
        """() => Array.from({ length: 37 }, (_, at) => {
            const style = getComputedStyle(document.getElementById(`text-query-${at}`));
            const [r, g, b, a = 1] = style.backgroundColor.match(/[\\d.]+/g).map(Number);
            return a ? r + g + b : 751; // the background
        })"""
    )
    order = np.argsort(-weights[20])
    assert np.argmin(shades) == order[0]
    assert np.corrcoef(shades, np.sqrt(weights[20]))[0, 1] < -0.95


def test_following_a_link_goes_one_layer_down(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[0, :, :, :23, :23]
    one = tab().open("text", "two", text=0, layer=1, head=0, pins=9)
    items = one.page.locator(".text-links li")
    expect(items).to_have_count(4)
    for head, item in enumerate(items.all()):
        assert int(item.locator("small").inner_text()) == weights[1, head, 9].argmax()
        assert share(item.locator("b").inner_text()) == pytest.approx(weights[1, head, 9].max(), rel=0.051)
    to = int(weights[1, 3, 9].argmax())
    one.page.click('[data-key="follow-3"]')
    one.page.wait_for_url(lambda url: f"pins={to}" in url)
    one.settled()
    one.arrives(layer=0, head=3, trail="1.3.9")
    check_listed(one, "to", weights[0, 3, to])
    one.page.click('[data-key="step-0"]')
    one.page.wait_for_url(lambda url: "pins=9" in url)
    one.arrives(layer=1, head=3)


# ---- pins, address, keys --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pins_are_kept_in_the_address_and_the_history(tab: Opens) -> None:
    one = tab().open("text", "two", text=1, layer=1, head=1)
    for at, pins in ((4, "4"), (30, "4,30"), (12, "4,30,12")):
        one.page.click(token(at))
        one.arrives(pins=pins)
    one.page.click('[data-key="unpin-1"]')
    one.settled()
    one.page.mouse.move(5, 5)
    expect_pinned(one, [4, 12])
    listed(one, "to")
    other = tab().follow(one.page.url)
    expect_pinned(other, [4, 12])
    other.eventually(lambda: listed(other, "to") == listed(one, "to"))
    looks = """() => Array.from(document.querySelectorAll("[data-at]"),
        (x) => [x.className, x.style.background, x.style.boxShadow])"""
    other.eventually(lambda: other.page.evaluate(looks) == one.page.evaluate(looks))
    one.page.go_back()
    one.settled()
    expect_pinned(one, [4, 30, 12])
    one.page.go_back()
    one.settled()
    expect_pinned(one, [4, 30])


def test_keys_select_pin_and_unpin(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[1, 0, 0]
    one = tab().open("text", "two", text=1, layer=0, head=0)
    one.page.focus('[aria-label^="Find in the text"]')
    for _ in range(6):
        one.press("Tab")
        if one.page.evaluate("document.activeElement.className").startswith("flow"):
            break
    one.until("document.activeElement.getAttribute('role') === 'listbox'")
    one.press("ArrowRight", "ArrowRight", "ArrowRight", "Enter")
    one.page.wait_for_url(lambda url: "pins=2" in url)
    expect(one.page.locator(token(2))).to_have_attribute("aria-selected", "true")
    expect(one.page.locator(".flow")).to_have_attribute("aria-activedescendant", token(2)[1:])
    check_listed(one, "to", weights[2])
    one.press("End")
    expect(one.page.locator(".text-token p")).to_contain_text("token 36 of 37")
    check_listed(one, "from", weights[:, 36])
    expect(one.page.locator("#live")).to_contain_text("attends to")  # announced by a screen reader
    one.press("ArrowUp")
    expect(one.page.locator(".text-token p")).not_to_contain_text("token 36")
    one.press("Escape", "Escape")
    one.page.wait_for_url(lambda url: "pins=" not in url)


def test_search_finds_words(tab: Opens) -> None:
    one = tab().open("text", "two", text=1)
    token_of = one.page.inner_text(token(25)).strip()
    one.page.fill('[aria-label^="Find in the text"]', token_of.upper())
    expect(one.page.locator(".text-found")).to_have_text("1 of 1")
    expect(one.page.locator(token(25))).to_have_class(re.compile(r"\bhit\b"))
    one.page.fill('[aria-label^="Find in the text"]', "nothing like it")
    expect(one.page.locator(".text-found")).to_have_text("not found")


def test_failed_weights_do_not_show_the_previous_head(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[1, 0, 1]
    one = tab()  # the route comes first, because it is not there at once in a page that is open
    one.page.route("**/map/0/1/0/1", lambda route: route.fulfill(status=500, json={"error": "The disk is full."}))
    one.open("text", "two", text=1, pins=4)
    listed(one, "to")
    one.press("n")
    expect(one.page.locator(".text-failed")).to_contain_text("The disk is full.")
    expect(one.page.locator("[data-at], .text-ties")).to_have_count(0)
    one.expect("500")
    one.page.unroute("**/map/0/1/0/1")
    one.page.click(".text-failed button")
    expect(one.page.locator(token(4))).to_be_visible()
    check_listed(one, "to", weights[4])


def test_pointing_keeps_the_links_of_the_pin(tab: Opens) -> None:
    one = tab().open("text", "two", text=1, layer=1, pins=4)
    expect(one.page.locator(".text-links li")).to_have_count(4)
    links = one.page.inner_text(".text-linked")
    one.page.hover(token(11))
    expect(one.page.locator(".text-token p")).to_contain_text("token 11 of 37")
    one.settled()
    assert one.page.inner_text(".text-linked") == links


# ---- long texts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_long_text_is_rendered_in_part(tab: Opens, served: Served) -> None:
    tokens = served.profile("long").data["key_token"].values[0]
    one = tab().open("text", "long")
    elements = "document.querySelectorAll('main *').length"
    assert one.page.evaluate(elements) < 6000
    expect(one.page.locator(".text-panel")).to_contain_text("The profile has no maps")
    for at in (15_000, 19_999, 37):
        one.open("text", "long", pins=at).page.reload()
        one.settled()
        expect(one.page.locator(token(at))).to_be_in_viewport()
        assert one.page.inner_text(token(at)).strip() == tokens[at].removeprefix("▁")
        assert one.page.evaluate(elements) < 6000
    one.page.focus(".flow")
    one.press("End")
    expect(one.page.locator(token(19_999))).to_be_in_viewport()
    for _ in range(5):
        one.page.mouse.move(400, 450)
        one.page.mouse.wheel(0, -3000)
        one.pause(40)
    expect(one.page.locator(token(19_999))).to_have_count(0)
    assert one.page.evaluate(elements) < 6000
    seen = one.page.evaluate(  # in one call: the wheel may still be scrolling, which removes elements
        """() => {
            const frame = document.querySelector(".flow").getBoundingClientRect();
            return Array.from(document.querySelectorAll("[data-at]")).filter((x) => {
                const { top, bottom } = x.getBoundingClientRect();
                return top >= frame.top && bottom <= frame.bottom;
            }).map((x) => [Number(x.dataset.at), x.innerText.trim()]);
        }"""
    )
    first = seen[0][0]
    assert 200 < len(seen) < 3000  # the whole view is filled with text
    assert seen == [[at, tokens[at].removeprefix("▁")] for at in range(first, first + len(seen))]


@pytest.mark.slow
def test_scrolling_shows_every_token_once(tab: Opens, served: Served) -> None:
    """No token is missing or repeated at the borders of blocks."""
    one = tab().open("text", "wide")
    seen: dict[int, str] = {}
    for _ in range(12):
        found = one.page.evaluate(
            "() => Array.from(document.querySelectorAll('[data-at]'), (x) => [Number(x.dataset.at), x.textContent])"
        )
        assert len({at for at, _ in found}) == len(found)
        seen |= dict(found)
        one.page.locator(".flow").evaluate("(x) => { x.scrollTop += 500; }")
        one.pause(40)
    tokens = served.profile("wide").data["key_token"].values[0]
    assert [seen[at].strip() for at in range(600)] == list(tokens)


# ---- hostile tokens, phones, export ---------------------------------------------------------------------------


@pytest.mark.slow
def test_panel_shows_hostile_tokens_literally(tab: Opens) -> None:
    one = tab().open("text", "hostile", pins="0,3")
    listed(one, "to")
    said = one.page.inner_text(".text-side")
    one.page.focus(".flow")
    for at in range(17):
        one.press("ArrowRight" if at else "Home")
        expect(one.page.locator(".text-token p")).to_contain_text(f"token {at} of 17")
        said += one.page.inner_text(".text-side")
    assert [part for part in VISIBLE_PARTS if part not in said] == []
    assert "\u202e" not in said
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    one.page.fill('[aria-label^="Find in the text"]', "<script>")
    expect(one.page.locator(".text-found")).to_have_text(re.compile("1 of [23]"))
    said = texts_of(check_pictures(one))
    assert any("<img src=x" in text for text in said)


def test_tap_on_a_phone_pins(tab: Opens) -> None:
    one = tab(viewport=PHONE, has_touch=True, is_mobile=True).open("text", "two", text=1)
    one.page.tap(token(6))
    one.page.wait_for_url(lambda url: "pins=6" in url)
    listed(one, "to")
    one.eventually(lambda: overflow(one.page) <= 0)


def test_text_export_holds_the_weights(tab: Opens, served: Served) -> None:
    data = served.profile("two").data
    weights = data["weights"].values[1, 0, 3]
    one = tab().open("text", "two", text=1, layer=0, head=3, pins=17)
    listed(one, "to")
    rows = one.table()
    assert [row["token"].strip() for row in rows] == list(data["key_token"].values[1])
    for column, want in (("attended_to", weights[17]), ("attends", weights[:, 17]), ("received", weights.sum(0) / 37)):
        np.testing.assert_allclose(
            [float(row[column]) for row in rows], want, rtol=2e-4
        )  # received shares have 16 bits
    said = texts_of(check_pictures(one))
    assert {row["token"].strip() for row in rows} <= {text.strip() for text in said}
