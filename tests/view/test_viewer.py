"""The viewer in a real browser: properties of all pages, navigation, and the overview."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import numpy as np
import pytest

from qkv.models.loading import load_model
from qkv.profiler.data import tables
from qkv.report.payload import trimmed
from qkv.server.run import serve_in_thread
from qkv.server.session import Session
from viewer_fixture import DESKTOP, PAGES, PHONE, PROFILE_PAGES, Served, Tab, check_pictures, overflow  # fmt: skip

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
CELL = ".overview-grid [data-layer]"


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


def test_security_policy_blocks_other_hosts(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    assert one.page.evaluate("fetch('http://example.com/').then(() => 'answered', () => 'blocked')") == "blocked"
    one.expect("connect-src")
    one.page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://example.com/x.png' }))")
    one.expect("img-src")
    provoked = re.compile("a request left the host|.*Content Security Policy", re.DOTALL)
    one.problems = [problem for problem in one.problems if not provoked.match(problem)]


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
