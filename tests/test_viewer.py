"""The viewer in a real browser: what all its pages have in common, and the overview."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from qkv.figures import style
from qkv.profiler import Profile
from qkv.profiler.capture.models import load
from qkv.profiler.data import tables
from qkv.report.payload import trimmed
from qkv.server.run import serve_in_thread
from qkv.server.session import Session
from qkv.server.stored import Stored
from viewer_fixture import (
    HOSTILE,
    OF_PROFILES,
    PAGES,
    PHONE,
    SEEN,
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


def chosen(tab: Tab) -> tuple[int, int]:
    """Layer and head of the cell that is marked, which must be those of the address."""
    cell = tab.page.locator('.overview-grid [aria-selected="true"]')
    found = tuple(int(cell.get_attribute(f"data-{name}")) for name in ("layer", "head"))
    assert found == (int(tab.state["layer"]), int(tab.state["head"]))
    return found


def heads_of(profile: Profile, text: int) -> pd.DataFrame:
    """The table of heads of one text."""
    return tables.head_table(trimmed(profile.data, text))


# ---- every page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_view_opens_and_can_be_read_by_everybody(tab: Opens, mini: Served, page: str) -> None:
    one = tab(mini).open(page)
    assert one.at == page
    assert one.page.get_attribute("#nav [aria-current]", "data-key") == page
    assert one.page.locator("#troubles").inner_text() == ""
    assert len(one.text()) > 100
    assert nameless(one.page) == []
    assert faint(one.page) == []
    light = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    one.page.emulate_media(color_scheme="dark")
    one.settled()
    assert one.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != light
    assert faint(one.page) == []


@pytest.mark.parametrize("page", PAGES)
def test_on_a_phone_nothing_is_wider_than_the_window(tab: Opens, mini: Served, page: str) -> None:
    one = tab(mini, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=1).open(page)
    assert one.at == page
    assert overflow(one.page) <= 0
    assert spilt(one.page) == []
    one.page.set_viewport_size({"width": 1280, "height": 720})
    one.settled()
    assert overflow(one.page) <= 0


@pytest.mark.parametrize("page", OF_PROFILES)
def test_hostile_tokens_are_text(tab: Opens, page: str) -> None:
    one = tab().open(page, "hostile")
    assert one.page.locator("#troubles").inner_text() == ""
    for element in one.page.locator("main [data-tip]:visible").all()[:8]:
        element.hover()
        assert one.page.locator("#tip").is_visible()
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    assert one.page.evaluate("document.querySelectorAll('main img, main script, main iframe').length") == 0
    assert overflow(one.page) <= 0
    assert spilt(one.page) == []


def test_hostile_tokens_read_as_they_are(tab: Opens) -> None:
    one = tab().open("text", "hostile")
    said = one.text()
    # In running text a mark stands in a box of its own, without quotes.
    assert [part for part in SEEN if part.replace("‹", "").replace("›", "") not in said] == []
    assert "\u202e" not in said
    assert "x" * 500 in said or "xxx…" in said
    # The name of the model and the text are in the bar and the title, too.
    assert HOSTILE[0] in one.page.inner_text("#context")


@pytest.mark.slow
def test_animations_stop_for_those_who_ask(tab: Opens, mini: Served) -> None:
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


def test_a_page_that_is_not_there_is_mended_with_a_sentence(tab: Opens) -> None:
    one = tab().open("nowhere", "gpt", layer=99, head=1)
    assert one.at == "overview"
    assert one.state["layer"] == "2"
    said = one.page.inner_text("#troubles")
    assert "There is no page “nowhere”" in said
    assert "There is no layer 99 among 3 layers" in said
    one.page.click("#troubles button >> nth=0")
    one.press("Escape")
    assert one.page.inner_text("#troubles") == ""


def test_a_server_that_has_gone_is_told(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.context.set_offline(True)
    one.page.select_option('#context [data-key="source"]', label="two")
    one.page.wait_for_selector("#troubles p")
    assert one.page.inner_text("#troubles p") == "The server does not answer: is qkv view still running?"
    one.expect("does not answer|ERR_INTERNET_DISCONNECTED")
    one.context.set_offline(False)
    one.page.select_option('#context [data-key="source"]', label="cross")  # and it goes on
    one.settled()
    one.page.wait_for_selector('#context [data-key="group"]')


@pytest.mark.slow
def test_a_profile_in_the_making_is_told_and_then_shown(tab: Opens) -> None:
    loaded, go_on = load("qkv-mini"), threading.Event()
    next(loaded.model.children()).register_forward_pre_hook(lambda *_: go_on.wait(30) and None)
    session = Session("test")
    session.add_model(loaded, "import os\n")
    session.add_model(loaded, "")  # of which nothing can be told
    with serve_in_thread(session) as url:
        one = tab(Served(url, session, {}))
        one.page.goto(f"{url}#/text?layer=1&head=2")
        try:
            expect(one.page.locator("main")).to_contain_text("Measuring where qkv-mini attends")
            expect(one.page.locator("#busy")).to_contain_text("Running qkv-mini")
        finally:
            go_on.set()
        expect(one.page.locator(".text-page")).to_be_visible(timeout=30_000)
        assert (one.at, one.state["layer"], one.state["head"]) == ("text", "1", "2")  # as was asked
        one.open("overview", layer=0, head=0)
        one.page.goto(f"{url}#/overview?source=1")
        expect(one.page.locator("main")).to_contain_text("This profile could not be made")
        assert "the text is empty" in one.page.inner_text(".waiting p")


def test_tiles_that_nobody_waits_for_are_dropped(tab: Opens, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, made = threading.Event(), Stored.tile
    monkeypatch.setattr(Stored, "tile", lambda *args, **more: go_on.wait(20) and made(*args, **more))
    one, aborted = tab(), []
    one.page.on("requestfailed", lambda request: aborted.append(request.url))
    try:
        one.page.goto(f"{served.url}#/map?source={served.ids['wide']}")
        expect(one.page.locator("#busy")).to_contain_text("Computing the map")
        one.press("1")
        expect(one.page.locator(".overview-grid")).to_be_visible()
        expect(one.page.locator("#busy")).to_be_hidden()
        one.settled()  # what the browser has dropped, it tells a little later
        assert one.tiles()
        assert len([url for url in aborted if "/tiles/" in url]) == len(one.tiles())
    finally:
        go_on.set()
    one.press("2")
    expect(one.page.locator(".map-canvas")).to_be_visible()
    one.settled()


def test_a_page_cannot_ask_another_host(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    asked = one.page.evaluate("fetch('http://example.com/').then(() => 'answered', () => 'refused')")
    assert asked == "refused"
    one.expect("Content Security Policy")
    one.page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://example.com/x.png' }))")
    one.page.evaluate("eval ? new Promise((done) => setTimeout(done, 50)) : null")
    one.expect("Content Security Policy")
    one.problems = [problem for problem in one.problems if not problem.startswith("a request left the host")]


def test_what_these_tests_look_for_they_find(tab: Opens) -> None:
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


def test_an_address_brings_back_what_was_shown(tab: Opens) -> None:
    one = tab().open("overview", "cross")
    one.page.select_option('#context [data-key="group"]', label="cross")
    one.page.select_option('#context [data-key="text"]', index=1)
    one.page.click(f"{CELL} >> nth=4")
    one.page.select_option('[data-key="statistic"]', "spread")
    one.page.click('.choice label:has-text("Value")')
    one.settled()
    assert one.state | {"statistic": "spread", "sort": "value", "group": "2", "text": "1"} == one.state
    other = tab().follow(one.page.url)
    assert other.page.url == one.page.url
    other.comes_to_say(one.text())
    assert other.page.title() == one.page.title()
    assert other.page.inner_text("#context") == one.page.inner_text("#context")
    assert chosen(other) == chosen(one)


def test_the_back_button_steps_through_what_was_done(tab: Opens) -> None:
    one = tab().open("overview", "gpt", layer=0, head=0)
    steps = [one.page.url]
    one.page.click(f"{CELL} >> nth=7")
    steps.append(one.page.url)
    one.page.select_option('[data-key="statistic"]', "entropy")
    steps.append(one.page.url)
    one.page.click('#nav [data-key="map"]')
    one.settled()
    assert one.at == "map"
    assert (one.state["layer"], one.state["head"]) == ("1", "2")
    for url in reversed(steps):
        one.page.go_back()
        one.page.wait_for_url(url)
        one.settled()
        assert one.at == "overview"
        assert one.page.locator('[data-key="statistic"]').input_value() == one.state.get("statistic", "sink")
        chosen(one)
    one.page.go_forward()
    one.page.wait_for_url(steps[1])
    assert chosen(one) == (1, 2)


@pytest.mark.slow
def test_keys_go_everywhere(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("overview", layer=0, head=0)
    for number, page in enumerate(PAGES, 1):
        one.press(str(number)).settled()
        assert one.at == page
    one.press("1").settled()
    heads = len(mini.profile("mini").data["head"])
    one.press("n")
    assert chosen(one) == (0, 1)
    one.press("p", "p")
    assert chosen(one) == (len(mini.profile("mini").data["layer"]) - 1, heads - 1)
    one.press("Shift+N")
    assert chosen(one) == (0, heads - 1)
    one.press("?").until("document.activeElement.closest('#help-dialog[open]')")
    one.press("Escape").until("!document.activeElement.closest('#help-dialog')")
    assert one.page.get_attribute("html", "data-theme") != "dark"
    one.press("t").until("document.documentElement.dataset.theme === 'dark'")
    one.page.reload()  # which is remembered
    one.settled()
    assert one.page.get_attribute("html", "data-theme") == "dark"


def test_single_keys_can_be_switched_off(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.press("?")
    one.page.click("#single-keys")
    one.press("Escape", "2")
    assert one.at == "overview"
    one.page.focus('[data-key="statistic"]')
    one.press("?")
    assert not one.page.locator("#help-dialog").is_visible()


def test_the_bar_can_be_skipped(tab: Opens) -> None:
    one = tab().open("overview", "gpt")
    one.press("Tab")
    assert one.page.evaluate("document.activeElement.id") == "skip"
    assert one.page.locator("#skip").bounding_box()["x"] >= 0
    one.press("Enter")
    assert one.page.evaluate("document.activeElement.id") == "main"


# Name and visibility of what has the focus; of a radio button its label is what one sees.
FOCUSED = """() => {
    const x = document.activeElement, shown = x.matches("[type=radio]") ? x.nextElementSibling : x;
    const { top, bottom, width } = shown.getBoundingClientRect(), style = getComputedStyle(shown);
    const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
    const visible = outlined && width > 0 && bottom > 0 && top < innerHeight;
    return [x === document.body ? null : x.outerHTML.slice(0, 120), visible];
}"""


@pytest.mark.parametrize("page", PAGES)
def test_everything_can_be_reached_with_tab_and_seen_to_be(tab: Opens, mini: Served, page: str) -> None:
    one = tab(mini).open(page)
    one.page.focus("#main")
    seen = []
    for _ in range(60):
        one.press("Tab")
        seen.append(one.page.evaluate(FOCUSED))
        if seen[-1][0] is None:  # past the end of the page
            break
    assert len(seen) > 3
    assert [name for name, visible in seen if name and not visible] == []


def test_the_grid_is_walked_with_arrows(tab: Opens) -> None:
    one = tab().open("overview", "gpt", layer=0, head=0)
    one.page.focus(f'{CELL}[tabindex="0"]')
    walked = []
    for key in ("ArrowRight", "ArrowDown", "End", "ArrowRight", "ArrowUp", "Home"):
        one.press(key)
        walked.append(chosen(one))
        assert one.page.evaluate("document.activeElement.dataset.head") == str(walked[-1][1])
    assert walked == [(0, 1), (1, 1), (1, 4), (1, 4), (0, 4), (0, 0)]
    one.press("ArrowDown", "Enter")
    one.settled()
    assert one.at == "map"
    assert (one.state["layer"], one.state["head"]) == ("1", "0")


def test_enter_opens_the_head_that_is_chosen_however_it_was_chosen(tab: Opens) -> None:
    one = tab().open("overview", "gpt", layer=0, head=0)
    one.page.click(f"{CELL} >> nth=1")
    one.press("n", "Shift+n")
    assert chosen(one) == (1, 2)
    one.press("ArrowRight")
    assert chosen(one) == (1, 3)
    one.page.select_option('[data-key="head"]', "0")
    one.page.focus(f'{CELL}[tabindex="0"]')
    one.press("Enter")
    one.settled()
    assert (one.at, one.state["layer"], one.state["head"]) == ("map", "1", "0")


def test_an_address_of_a_place_in_the_page_opens_the_first_view(tab: Opens) -> None:
    one = tab()
    one.page.goto(f"{one.served.url}#main")
    assert one.settled().at == "overview"
    one.open("sinks", "gpt")
    one.page.evaluate("location.hash = '#main'")
    one.pause(200)
    assert one.page.locator(".page-sinks").count() == 1


# ---- the overview ---------------------------------------------------------------------------------------------


def test_the_grid_shows_the_numbers_of_the_profile(tab: Opens, served: Served) -> None:
    one = tab().open("overview", "two", text=1)
    heads = heads_of(served.profile("two"), 1)
    sink = [f"{100 * x:.0f}" for x in heads["sink"]]
    assert one.page.locator(CELL).all_inner_texts() == sink
    one.page.select_option('[data-key="statistic"]', "entropy")
    assert one.page.locator(CELL).all_inner_texts() == [f"{x:.1f}" for x in heads["entropy"]]
    shade = one.page.locator(CELL).evaluate_all(
        "cells => cells.map((x) => getComputedStyle(x).backgroundColor.match(/\\d+/g).reduce((sum, n) => sum + +n, 0))"
    )
    assert np.argmin(shade) == np.argmax(heads["entropy"])  # the most is the darkest
    one.page.hover(f"{CELL} >> nth=5")
    tip = one.page.inner_text("#tip")
    assert "Layer 1, head 1" in tip
    assert f"{heads['entropy'][5]:.2f} nats" in tip
    assert heads["goes_to"][5] in tip
    one.page.click(f"{CELL} >> nth=5")
    card = one.page.inner_text(".overview-card")
    assert "Layer 1, head 1" in card
    assert f"{heads['distance'][5]:.1f} tokens" in card or f"{heads['distance'][5]:.2f} tokens" in card


def test_heads_are_sorted(tab: Opens, served: Served) -> None:
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


def test_the_overview_is_exported(tab: Opens, served: Served) -> None:
    one = tab().open("overview", "two", text=1, statistic="distance")
    heads = heads_of(served.profile("two"), 1)
    rows = one.table()
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == list(
        zip(heads["layer"], heads["head"], strict=True)
    )
    for name in ("entropy", "sink", "distance", "top_key_share"):
        np.testing.assert_allclose([float(row[name]) for row in rows], heads[name], rtol=1e-5)
    said = texts_of(check_pictures(one))
    assert any(style.STATISTICS["distance"].label in text for text in said)
    shown = {f"{x:.1f}" if x < 9.95 else f"{x:.0f}" for x in heads["distance"]}
    assert shown <= set(said)


@pytest.mark.slow
def test_hostile_tokens_can_be_exported(tab: Opens) -> None:
    one = tab().open("overview", "hostile")
    check_pictures(one)
    assert {row["top_key_token"].strip() for row in one.table()} <= {token.strip() for token in HOSTILE}
