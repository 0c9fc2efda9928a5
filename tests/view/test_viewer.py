"""The viewer in a real browser: properties of all pages, navigation, and the overview."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import numpy as np
import pytest

from qkv.models.loading import load_model
from qkv.profiler.data import frames, tables
from qkv.report.payload import trimmed
from qkv.report.stored import StoredMaps
from qkv.server.run import serve_in_thread
from qkv.server.session import Session
from viewer_fixture import (
    DESKTOP,
    PAGES,
    PHONE,
    PROFILE_PAGES,
    Served,
    Tab,
    check_pictures,
    floats,
    overflow,
    texts_of,
)  # fmt: skip

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
CELL = ".overview-grid [data-layer]"


def expect_head(tab: Tab, layer: int | str, head: int | str) -> None:
    """Wait until this head is marked in the grid and selected in the address."""
    marked = f'.overview-grid [aria-selected="true"][data-layer="{layer}"][data-head="{head}"]'
    expect(tab.page.locator(marked)).to_have_count(1)
    tab.arrives(layer=layer, head=head)


# ---- every page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_names_contrast_focus_and_no_motion_if_reduced(tab: Opens, mini: Served, page: str) -> None:
    one = tab(mini, reduced_motion="reduce").open(page).arrives(page)
    expect(one.page.locator("#nav [aria-current]")).to_have_attribute("data-key", page)
    assert one.page.get_attribute("html", "data-state") == "ready"
    assert len(one.text()) > 100
    assert one.js("nameless") == []
    assert one.js("moving") == []
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = one.page.evaluate(paper)
    assert one.js("faint") == []
    one.page.emulate_media(color_scheme="dark")
    one.settled()
    assert one.page.evaluate(paper) != light
    assert one.js("faint") == []
    one.page.focus("#main")
    seen = []
    for _ in range(60):
        one.press("Tab")
        seen.append(one.js("focused"))
        if seen[-1][0] is None:  # past the end of the page
            break
    assert len(seen) > 3
    assert [name for name, visible in seen if name and not visible] == []


def test_no_page_overflows_on_a_phone_or_when_it_becomes_a_desktop(tab: Opens, mini: Served) -> None:
    one = tab(mini, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=1)
    views = [{"page": page} for page in PAGES] + [{"page": "align", "view": view} for view in ("reversal", "captions")]
    for view in views:
        one.open(**view).arrives(view["page"])
        assert (view, overflow(one.page) <= 0, one.js("spilt")) == (view, True, [])
        one.page.set_viewport_size(DESKTOP)
        one.settled()
        one.eventually(lambda view=view: (view, overflow(one.page) <= 0), (view, True))
        one.page.set_viewport_size(PHONE)


@pytest.mark.parametrize("page", PROFILE_PAGES)
def test_hostile_tokens_are_never_parsed_as_markup(view: Opens, page: str) -> None:
    one = view().open(page, "hostile")
    assert one.page.get_attribute("html", "data-state") == "ready"
    for element in one.page.locator("main [data-tip]:visible").all()[:4]:
        element.scroll_into_view_if_needed()
        one.settled()  # scrolling hides the tip
        element.hover()
        expect(one.page.locator("#tip")).to_be_visible()
    assert one.is_safe()
    assert overflow(one.page) <= 0
    assert one.js("spilt") == []
    if page in ("overview", "sinks"):  # the exports of the others are tested with their numbers
        check_pictures(one)


# ---- troubles -------------------------------------------------------------------------------------------------


def test_unknown_page_and_layer_are_replaced_with_a_message(view: Opens) -> None:
    one = view().open("nowhere", "gpt", layer=99, head=1)
    one.arrives("overview", layer=2)
    assert one.page.get_attribute("html", "data-state") == "error"
    expect(one.page.locator("#troubles")).to_contain_text("“nowhere”")
    expect(one.page.locator("#troubles")).to_contain_text("no layer 99 among 3")
    one.page.click("#troubles button >> nth=0")
    one.press("Escape")
    expect(one.page.locator("#troubles p")).to_have_count(0)
    assert one.settled().page.get_attribute("html", "data-state") == "ready"


def test_lost_server_is_reported_and_the_page_recovers(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.context.set_offline(True)
    one.page.select_option('#context [data-key="source"]', label="two")
    expect(one.page.locator("#troubles p")).to_contain_text("is qkv view still running?")
    one.expect("does not answer|ERR_INTERNET_DISCONNECTED")
    one.context.set_offline(False)
    one.page.select_option('#context [data-key="source"]', label="cross")
    expect(one.page.locator('#context [data-key="group"]')).to_be_visible()


@pytest.mark.slow
def test_page_waits_for_a_profile_and_reports_a_failure(tab: Opens) -> None:
    loaded, go_on = load_model("qkv-mini"), threading.Event()
    next(loaded.model.children()).register_forward_pre_hook(lambda *_: go_on.wait(60) and None)
    session = Session("test")
    session.add_model(loaded, "import os\n")
    session.add_model(loaded, "")  # an empty text cannot be profiled
    with serve_in_thread(session) as url:
        one = tab(Served(url, session, {}))
        one.page.goto(f"{url}#/text?layer=1&head=2")
        try:
            expect(one.page.locator("main")).to_contain_text("Profiling qkv-mini")
            expect(one.page.locator("#busy")).to_contain_text("Running qkv-mini")
            assert one.page.get_attribute("html", "data-state") == "loading"
        finally:
            go_on.set()
        expect(one.page.locator(".text-page")).to_be_visible()
        one.arrives("text", layer=1, head=2)  # as in the address at first
        one.follow(f"{url}#/overview?source=1")
        expect(one.page.locator(".waiting p").first).to_contain_text("the text is empty")


def test_leaving_the_map_cancels_its_tiles(tab: Opens, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, made = threading.Event(), StoredMaps.tile
    monkeypatch.setattr(StoredMaps, "tile", lambda *args, **more: go_on.wait(60) and made(*args, **more))
    one, aborted = tab(), list[str]()
    one.page.on("requestfailed", lambda request: aborted.append(request.url))
    try:
        one.page.goto(f"{served.url}#/map?source={served.ids['wide']}")
        expect(one.page.locator("#busy")).to_contain_text("Computing the map")
        one.press("1")
        expect(one.page.locator(".overview-grid")).to_be_visible()
        one.eventually(lambda: len([url for url in aborted if "/tiles/" in url]) == len(one.tiles()) > 0)
    finally:
        go_on.set()
    expect(one.arrives("overview").page.locator("#busy")).to_be_hidden()
    one.press("3").arrives("map")
    expect(one.page.locator(".map-canvas")).to_be_visible()


def test_security_policy_blocks_other_hosts(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    assert one.page.evaluate("fetch('http://example.com/').then(() => 'answered', () => 'blocked')") == "blocked"
    one.expect("connect-src")
    one.page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://example.com/x.png' }))")
    one.expect("img-src")
    provoked = re.compile("a request left the host|.*Content Security Policy", re.DOTALL)
    one.problems = [problem for problem in one.problems if not provoked.match(problem)]


# ---- address, history, keys -----------------------------------------------------------------------------------


def test_back_button_undoes_each_selection(view: Opens) -> None:
    one = view().open("overview", "gpt", layer=0, head=0)
    steps = [one.page.url]
    one.page.click(f"{CELL} >> nth=7")
    steps.append(one.arrives(layer=1, head=2).page.url)
    one.page.select_option('[data-key="statistic"]', "entropy")
    steps.append(one.arrives(statistic="entropy").page.url)
    one.page.click('#nav [data-key="map"]')
    one.arrives("map", layer=1, head=2)
    for url in reversed(steps):
        assert one.back().page.url == url
        expect(one.page.locator('[data-key="statistic"]')).to_have_value(one.state.get("statistic", "sink"))
        expect_head(one, one.state["layer"], one.state["head"])
    one.page.go_forward()
    expect_head(one, 1, 2)


@pytest.mark.slow
def test_single_keys_navigate_until_they_are_disabled(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("overview", layer=0, head=0)
    for number, page in enumerate(PAGES, 1):
        one.press(str(number)).arrives(page)
    one.press("1").arrives("overview")
    layers, heads = (mini.profile("mini").data.sizes[name] for name in ("layer", "head"))
    last = (layers - 1, heads - 1)
    for keys, at in (("n", (0, 1)), ("p p", last), ("Shift+N", (0, heads - 1)), ("Shift+P", last)):
        one.press(*keys.split())
        expect_head(one, *at)
    one.press("?").until("document.activeElement.closest('#help-dialog[open]')")
    one.press("Escape").until("!document.activeElement.closest('#help-dialog')")
    assert one.page.get_attribute("html", "data-theme") != "dark"
    one.press("t").until("document.documentElement.dataset.theme === 'dark'")
    one.page.reload()
    expect(one.settled().page.locator("html")).to_have_attribute("data-theme", "dark")  # it is stored
    one.press("?")
    one.page.click("#single-keys")
    assert one.press("Escape", "2").settled().at == "overview"
    one.page.focus('[data-key="statistic"]')
    one.press("?").settled()
    assert not one.page.locator("#help-dialog").is_visible()


def test_arrow_keys_move_in_the_grid_of_heads_and_enter_opens_one(view: Opens) -> None:
    one = view().open("overview", "gpt", layer=0, head=0)
    one.page.focus(f'{CELL}[tabindex="0"]')
    keys = ("ArrowRight", "ArrowDown", "End", "ArrowRight", "ArrowUp", "Home")
    for key, (layer, head) in zip(keys, [(0, 1), (1, 1), (1, 4), (1, 4), (0, 4), (0, 0)], strict=True):
        one.press(key)
        expect_head(one, layer, head)
        one.until(f"document.activeElement.dataset.head === '{head}'")
    one.page.select_option('[data-key="head"]', "3")  # of the bar
    expect_head(one, 0, 3)
    one.page.focus(f'{CELL}[tabindex="0"]')
    one.press("ArrowDown", "Enter").arrives("map", layer=1, head=3)


# ---- the overview ---------------------------------------------------------------------------------------------


def test_grid_shows_the_statistics_of_the_profile(view: Opens, served: Served) -> None:
    one = view().open("overview", "two", text=1)
    heads = tables.head_table(trimmed(served.profile("two").data, 1))
    expect(one.page.locator(CELL)).to_have_text([f"{100 * x:.0f}" for x in heads["sink"]])
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
    expect(one.page.locator(".overview-card")).to_contain_text(re.compile(f"{heads['distance'][5]:.1f}\\d? tokens"))


def test_overview_export_holds_the_statistics(view: Opens, served: Served) -> None:
    one = view().open("overview", "two", text=1, statistic="distance")
    heads = tables.head_table(trimmed(served.profile("two").data, 1))
    rows = one.table()
    for name in ("layer", "head", "entropy", "sink", "distance", "top_key_share"):
        np.testing.assert_allclose(floats(rows, name), heads[name], rtol=1e-5)
    said = texts_of(check_pictures(one))
    assert any(frames.STATISTICS["distance"].label in text for text in said)
    assert {f"{x:.1f}" if x < 9.95 else f"{x:.0f}" for x in heads["distance"]} <= set(said)
