"""The viewer in a real browser: properties of all pages, navigation, and the overview."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from qkv.models.loading import load_model
from qkv.profiler import Profile
from qkv.profiler.data import frames, tables
from qkv.report.payload import trimmed
from qkv.report.stored import StoredMaps
from qkv.server.run import serve_in_thread
from qkv.server.session import Session
from viewer_fixture import (
    DESKTOP,
    HOSTILE,
    PAGES,
    PHONE,
    PROFILE_PAGES,
    VISIBLE_PARTS,
    Served,
    Tab,
    check_pictures,
    faint,
    nameless,
    overflow,
    spilt,
    texts_of,
)

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
CELL = ".overview-grid [data-layer]"


def expect_head(tab: Tab, layer: int | str, head: int | str) -> None:
    """Wait until this head is marked in the grid and selected in the address."""
    marked = f'.overview-grid [aria-selected="true"][data-layer="{layer}"][data-head="{head}"]'
    expect(tab.page.locator(marked)).to_have_count(1)
    tab.arrives(layer=layer, head=head)


def heads_of(profile: Profile, text: int) -> pd.DataFrame:
    """The table of heads of one text."""
    return tables.head_table(trimmed(profile.data, text))


# ---- every page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_with_names_and_contrast_in_both_themes(tab: Opens, mini: Served, page: str) -> None:
    one = tab(mini).open(page)
    one.arrives(page)
    expect(one.page.locator("#nav [aria-current]")).to_have_attribute("data-key", page)
    assert one.page.locator("#troubles").inner_text() == ""
    one.eventually(lambda: len(one.text()) > 100)
    one.eventually(lambda: nameless(one.page), [])
    one.eventually(lambda: faint(one.page), [])
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = one.page.evaluate(paper)
    one.page.emulate_media(color_scheme="dark")
    one.settled()
    one.eventually(lambda: one.page.evaluate(paper) != light)
    one.eventually(lambda: faint(one.page), [])


def test_no_page_overflows_on_a_phone(tab: Opens, mini: Served) -> None:
    one = tab(mini, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=1)
    for page in PAGES:
        one.open(page).arrives(page)
        one.eventually(lambda: (one.at, overflow(one.page) <= 0), (page, True))
        one.eventually(lambda: (one.at, spilt(one.page)), (page, []))
    for page in PAGES:  # a phone that becomes a desktop
        one.page.set_viewport_size(PHONE)
        one.open(page).page.set_viewport_size(DESKTOP)
        one.settled()
        one.eventually(lambda: (one.at, overflow(one.page) <= 0), (page, True))


@pytest.mark.parametrize("page", PROFILE_PAGES)
def test_hostile_tokens_are_never_parsed_as_markup(tab: Opens, page: str) -> None:
    one = tab().open(page, "hostile")
    assert one.page.locator("#troubles").inner_text() == ""
    for element in one.page.locator("main [data-tip]:visible").all()[:8]:
        element.scroll_into_view_if_needed()
        one.settled()  # scrolling hides the tip
        element.hover()
        expect(one.page.locator("#tip")).to_be_visible()
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    assert one.page.evaluate("document.querySelectorAll('main img, main script, main iframe').length") == 0
    one.eventually(lambda: overflow(one.page) <= 0)
    one.eventually(lambda: spilt(one.page), [])


def test_hostile_tokens_are_shown_literally(tab: Opens) -> None:
    one = tab().open("text", "hostile")
    said = one.text()
    # In running text a mark is a separate box without quotation marks.
    assert [part for part in VISIBLE_PARTS if part.replace("‹", "").replace("›", "") not in said] == []
    assert "\u202e" not in said
    assert "x" * 500 in said or "xxx…" in said
    # The bar shows the name of the model, too.
    assert HOSTILE[0] in one.page.inner_text("#context")


@pytest.mark.slow
def test_reduced_motion_disables_animations(tab: Opens, mini: Served) -> None:
    one = tab(mini, reduced_motion="reduce")
    for page in PAGES:
        one.open(page)
        moving = one.page.evaluate(
            """Array.from(document.querySelectorAll("*")).filter((x) => {
                const { animationName, transitionDuration } = getComputedStyle(x);
                return animationName !== "none" || transitionDuration.split(", ").some((time) => parseFloat(time) > 0);
            }).map((x) => x.outerHTML.slice(0, 100))"""
        )
        assert moving == [], page


def test_unknown_page_and_layer_are_replaced_with_a_message(tab: Opens) -> None:
    one = tab().open("nowhere", "gpt", layer=99, head=1)
    one.arrives("overview", layer=2)
    expect(one.page.locator("#troubles")).to_contain_text("There is no page “nowhere”")
    expect(one.page.locator("#troubles")).to_contain_text("There is no layer 99 among 3 layers")
    one.page.click("#troubles button >> nth=0")
    one.press("Escape")
    expect(one.page.locator("#troubles p")).to_have_count(0)


def test_lost_server_is_reported_and_the_page_recovers(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.context.set_offline(True)
    one.page.select_option('#context [data-key="source"]', label="two")
    one.page.wait_for_selector("#troubles p")
    assert one.page.inner_text("#troubles p") == "The server does not answer: is qkv view still running?"
    one.expect("does not answer|ERR_INTERNET_DISCONNECTED")
    one.context.set_offline(False)
    one.page.select_option('#context [data-key="source"]', label="cross")  # it recovers
    one.settled()
    one.page.wait_for_selector('#context [data-key="group"]')


@pytest.mark.slow
def test_page_waits_for_a_profile_and_reports_a_failure(tab: Opens) -> None:
    loaded, go_on = load_model("qkv-mini"), threading.Event()
    next(loaded.model.children()).register_forward_pre_hook(lambda *_: go_on.wait(30) and None)
    session = Session("test")
    session.add_model(loaded, "import os\n")
    session.add_model(loaded, "")  # an empty text cannot be profiled
    with serve_in_thread(session) as url:
        one = tab(Served(url, session, {}))
        one.page.goto(f"{url}#/text?layer=1&head=2")
        try:
            expect(one.page.locator("main")).to_contain_text("Profiling qkv-mini")
            expect(one.page.locator("#busy")).to_contain_text("Running qkv-mini")
        finally:
            go_on.set()
        expect(one.page.locator(".text-page")).to_be_visible(timeout=30_000)
        one.arrives("text", layer=1, head=2)  # as in the address at first
        one.open("overview", layer=0, head=0)
        one.page.goto(f"{url}#/overview?source=1")
        expect(one.page.locator("main")).to_contain_text("This profile could not be computed")
        expect(one.page.locator(".waiting p").first).to_contain_text("the text is empty")


def test_leaving_the_map_cancels_its_tiles(tab: Opens, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, made = threading.Event(), StoredMaps.tile
    monkeypatch.setattr(StoredMaps, "tile", lambda *args, **more: go_on.wait(20) and made(*args, **more))
    one, aborted = tab(), []
    one.page.on("requestfailed", lambda request: aborted.append(request.url))
    try:
        one.page.goto(f"{served.url}#/map?source={served.ids['wide']}")
        expect(one.page.locator("#busy")).to_contain_text("Computing the map")
        one.press("1")
        expect(one.page.locator(".overview-grid")).to_be_visible()
        expect(one.page.locator("#busy")).to_be_hidden()
        one.settled()
        assert one.tiles()
        one.eventually(lambda: len([url for url in aborted if "/tiles/" in url]) == len(one.tiles()))
    finally:
        go_on.set()
    one.press("3")
    expect(one.page.locator(".map-canvas")).to_be_visible()
    one.settled()


def test_security_policy_blocks_other_hosts(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    outcome = one.page.evaluate("fetch('http://example.com/').then(() => 'answered', () => 'blocked')")
    assert outcome == "blocked"
    one.expect("connect-src")
    one.page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://example.com/x.png' }))")
    one.expect("img-src")
    provoked = re.compile("a request left the host|.*Content Security Policy", re.DOTALL)
    one.problems = [problem for problem in one.problems if not provoked.match(problem)]


def test_checks_of_contrast_names_and_overflow_can_fail(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.page.evaluate(
        """() => {
            const add = (tag, text, style) => {
                const x = document.createElement(tag);
                x.textContent = text;
                for (const [name, value] of Object.entries(style)) x.style.setProperty(name, value);
                document.querySelector("main").append(x);
            };
            add("p", "too pale", { color: "#999999" });
            add("button", "", { width: "30px" });
            add("div", "wide", { width: "3000px" });
            add("p", "a".repeat(90), { width: "100px" });
        }"""
    )
    assert [x for x in faint(one.page) if "too pale" in x]
    assert len(nameless(one.page)) == 1
    assert overflow(one.page) > 1000
    assert spilt(one.page) == ["a" * 40]


# ---- address, history, keys -----------------------------------------------------------------------------------


def test_address_restores_the_overview(tab: Opens) -> None:
    one = tab().open("overview", "cross")
    one.page.select_option('#context [data-key="group"]', label="cross")
    one.page.select_option('#context [data-key="text"]', index=1)
    one.page.click(f"{CELL} >> nth=4")
    one.page.select_option('[data-key="statistic"]', "spread")
    one.page.click('.choice label:has-text("Value")')
    one.settled()
    one.arrives(statistic="spread", sort="value", group=2, text=1)
    other = tab().follow(one.page.url)
    assert other.page.url == one.page.url
    other.eventually(other.text, one.text())
    other.eventually(other.page.title, one.page.title())
    other.eventually(lambda: other.page.inner_text("#context"), one.page.inner_text("#context"))
    for tab_ in (one, other):
        expect_head(tab_, one.state["layer"], one.state["head"])


def test_back_button_undoes_each_selection(tab: Opens) -> None:
    one = tab().open("overview", "gpt", layer=0, head=0)
    steps = [one.page.url]
    one.page.click(f"{CELL} >> nth=7")
    steps.append(one.arrives(layer=1, head=2).page.url)
    one.page.select_option('[data-key="statistic"]', "entropy")
    steps.append(one.arrives(statistic="entropy").page.url)
    one.page.click('#nav [data-key="map"]')
    one.settled()
    one.arrives("map", layer=1, head=2)
    for url in reversed(steps):
        one.page.go_back()
        one.page.wait_for_url(url)
        one.settled()
        one.arrives("overview")
        expect(one.page.locator('[data-key="statistic"]')).to_have_value(one.state.get("statistic", "sink"))
        expect_head(one, one.state["layer"], one.state["head"])
    one.page.go_forward()
    one.page.wait_for_url(steps[1])
    expect_head(one, 1, 2)


@pytest.mark.slow
def test_single_keys_navigate(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("overview", layer=0, head=0)
    for number, page in enumerate(PAGES, 1):
        one.press(str(number)).settled()
        one.arrives(page)
    one.press("1").settled()
    heads = len(mini.profile("mini").data["head"])
    one.press("n")
    expect_head(one, 0, 1)
    one.press("p", "p")
    expect_head(one, len(mini.profile("mini").data["layer"]) - 1, heads - 1)
    one.press("Shift+N")
    expect_head(one, 0, heads - 1)
    one.press("?").until("document.activeElement.closest('#help-dialog[open]')")
    one.press("Escape").until("!document.activeElement.closest('#help-dialog')")
    assert one.page.get_attribute("html", "data-theme") != "dark"
    one.press("t").until("document.documentElement.dataset.theme === 'dark'")
    one.page.reload()
    one.settled()
    expect(one.page.locator("html")).to_have_attribute("data-theme", "dark")  # it is stored


def test_single_keys_can_be_disabled(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.press("?")
    one.page.click("#single-keys")
    one.press("Escape", "2").pause(100)
    assert one.at == "overview"
    one.page.focus('[data-key="statistic"]')
    one.press("?").pause(100)
    assert not one.page.locator("#help-dialog").is_visible()


def test_skip_link_moves_the_focus_to_the_page(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.press("Tab")
    one.until("document.activeElement.id === 'skip'")
    one.eventually(lambda: one.page.locator("#skip").bounding_box()["x"] >= 0)
    one.press("Enter")
    one.until("document.activeElement.id === 'main'")


# Name and visibility of the focused element; a radio button is represented by its label.
FOCUSED = """() => {
    const x = document.activeElement, shown = x.matches("[type=radio]") ? x.nextElementSibling : x;
    const { top, bottom, width } = shown.getBoundingClientRect(), style = getComputedStyle(shown);
    const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
    const visible = outlined && width > 0 && bottom > 0 && top < innerHeight;
    return [x === document.body ? null : x.outerHTML.slice(0, 120), visible];
}"""


def test_every_element_in_tab_order_has_a_visible_focus(tab: Opens, mini: Served) -> None:
    one = tab(mini)
    for page in PAGES:
        one.open(page).arrives(page)
        one.page.focus("#main")
        seen = []
        for _ in range(60):
            one.press("Tab")
            seen.append(one.page.evaluate(FOCUSED))
            if seen[-1][0] is None:  # past the end of the page
                break
        assert len(seen) > 3, page
        assert [name for name, visible in seen if name and not visible] == [], page


def test_arrow_keys_move_in_the_grid_of_heads(tab: Opens) -> None:
    one = tab().open("overview", "gpt", layer=0, head=0)
    one.page.focus(f'{CELL}[tabindex="0"]')
    keys = ("ArrowRight", "ArrowDown", "End", "ArrowRight", "ArrowUp", "Home")
    for key, (layer, head) in zip(keys, [(0, 1), (1, 1), (1, 4), (1, 4), (0, 4), (0, 0)], strict=True):
        one.press(key)
        expect_head(one, layer, head)
        one.until(f"document.activeElement.dataset.head === '{head}'")
    one.press("ArrowDown", "Enter")
    one.settled()
    one.arrives("map", layer=1, head=0)


def test_enter_opens_the_selected_head(tab: Opens) -> None:
    one = tab().open("overview", "gpt", layer=0, head=0)
    one.page.click(f"{CELL} >> nth=1")
    one.press("n", "Shift+n")
    expect_head(one, 1, 2)
    one.press("ArrowRight")
    expect_head(one, 1, 3)
    one.page.select_option('[data-key="head"]', "0")
    expect_head(one, 1, 0)
    one.page.focus(f'{CELL}[tabindex="0"]')
    one.press("Enter")
    one.settled()
    one.arrives("map", layer=1, head=0)


def test_anchor_in_the_address_does_not_change_the_page(tab: Opens) -> None:
    one = tab()
    one.page.goto(f"{one.served.url}#main")
    one.settled().arrives("overview")
    one.open("sinks", "gpt")
    one.page.evaluate("location.hash = '#main'")
    one.pause(200)
    assert one.page.locator(".page-sinks").count() == 1


# ---- the overview ---------------------------------------------------------------------------------------------


def test_grid_shows_the_statistics_of_the_profile(tab: Opens, served: Served) -> None:
    one = tab().open("overview", "two", text=1)
    heads = heads_of(served.profile("two"), 1)
    sink = [f"{100 * x:.0f}" for x in heads["sink"]]
    expect(one.page.locator(CELL)).to_have_text(sink)
    one.page.select_option('[data-key="statistic"]', "entropy")
    expect(one.page.locator(CELL)).to_have_text([f"{x:.1f}" for x in heads["entropy"]])
    shade = one.page.locator(CELL).evaluate_all(
        "cells => cells.map((x) => getComputedStyle(x).backgroundColor.match(/\\d+/g).reduce((sum, n) => sum + +n, 0))"
    )
    assert np.argmin(shade) == np.argmax(heads["entropy"])  # the largest value has the darkest cell
    one.page.hover(f"{CELL} >> nth=5")
    expect(one.page.locator("#tip")).to_contain_text("Layer 1, head 1")
    tip = one.page.inner_text("#tip")
    assert f"{heads['entropy'][5]:.2f} nats" in tip
    assert heads["goes_to"][5] in tip
    one.page.click(f"{CELL} >> nth=5")
    expect(one.page.locator(".overview-card")).to_contain_text("Layer 1, head 1")
    card = one.page.inner_text(".overview-card")
    assert f"{heads['distance'][5]:.1f} tokens" in card or f"{heads['distance'][5]:.2f} tokens" in card


def test_grid_orders_heads_by_value_and_by_type(tab: Opens, served: Served) -> None:
    one = tab().open("overview", "gpt", statistic="distance", sort="value")
    heads = served.profile("gpt").heads()
    shown = one.page.locator(CELL).evaluate_all("cells => cells.map((x) => [+x.dataset.layer, +x.dataset.head])")
    order = np.argsort(-heads["distance"].to_numpy(), kind="stable")
    assert shown == [[int(at) // 5, int(at) % 5] for at in order]
    one.open("overview", "gpt", statistic="type", sort="type")
    kinds = served.profile("gpt").types()["type"]
    assert sorted(one.page.locator(".overview-grid h4").all_inner_texts()) == sorted(
        f"{kind} · {count}" for kind, count in kinds.value_counts().items()
    )


def test_overview_export_holds_the_statistics(tab: Opens, served: Served) -> None:
    one = tab().open("overview", "two", text=1, statistic="distance")
    heads = heads_of(served.profile("two"), 1)
    rows = one.table()
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == list(
        zip(heads["layer"], heads["head"], strict=True)
    )
    for name in ("entropy", "sink", "distance", "top_key_share"):
        np.testing.assert_allclose([float(row[name]) for row in rows], heads[name], rtol=1e-5)
    said = texts_of(check_pictures(one))
    assert any(frames.STATISTICS["distance"].label in text for text in said)
    shown = {f"{x:.1f}" if x < 9.95 else f"{x:.0f}" for x in heads["distance"]}
    assert shown <= set(said)


@pytest.mark.slow
def test_overview_exports_hostile_tokens(tab: Opens) -> None:
    one = tab().open("overview", "hostile")
    check_pictures(one)
    assert {row["top_key_token"].strip() for row in one.table()} <= {token.strip() for token in HOSTILE}
