"""Pages in a real browser: the viewer, the report, the widget of notebooks, and the tutorial's “attention by hand”.

Properties of all pages, navigation, and each page shows the numbers of its profile. One module, because the tests of a
module share a browser and its tabs. docs/make_notebook.py opens the widget in a real JupyterLab, which is too large for
the development set.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import profile_fixture as made
from qkv import Profile, masks, normalizers, reference, scores
from qkv.models import ByteTokenizer, DecoderConfig, DecoderLM
from qkv.models.loading import Loaded, load_model
from qkv.profiler.data import tables
from qkv.report import widget
from qkv.report.payload import trimmed
from qkv.runs.run import profile
from qkv.server.live import Live
from qkv.server.run import serve_in_thread
from qkv.server.session import Session
from qkv_lab.align import models as aligners
from viewer_fixture import (
    HOSTILE,
    PAGES,
    PHONE,
    PROFILE_PAGES,
    Served,
    Tab,
    check_picture,
    check_pictures,
    eventually,
    floats,
    hostile,
    inaccessible,
    new_context,
    overflow,
    percent,
    plain,
    rested,
    share,
    texts_of,
    unseen,
)  # fmt: skip

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

STATIC = Path(__file__).parents[2] / "docs" / "_static"
Opens = Callable[..., Tab]
CELL = ".overview-grid [data-layer]"


# ---- every page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_names_contrast_focus_and_no_motion_if_reduced(view: Opens, mini: Served, page: str) -> None:
    one = view(mini)
    one.page.emulate_media(reduced_motion="reduce")
    one.open(page).arrives(page)
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
    for scheme in ("light", "dark"):
        one.page.emulate_media(color_scheme=scheme)
        assert inaccessible(one.settled().page) == []


def test_no_page_overflows_on_a_phone(tab: Opens, mini: Served, served: Served) -> None:
    one = tab(mini, phone=True)
    assert inaccessible(tab(served, phone=True).open().page) == []
    views = [{"page": page} for page in PAGES] + [{"page": "align", "view": view} for view in ("reversal", "captions")]
    for view in views:
        one.open(**view).arrives(view["page"])
        assert (view, overflow(one.page) <= 0, one.js("spilt")) == (view, True, [])


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
    if page == "overview":  # the exports of others are tested with their numbers
        check_pictures(one)
    if page == "text":
        one.page.fill('[aria-label^="Find in the text"]', "<script>")
        expect(one.page.locator(".text-found")).to_have_text(re.compile("1 of [23]"))
        assert any("<img src=x" in text for text in texts_of(check_picture(one)))


# ---- troubles -------------------------------------------------------------------------------------------------


def test_lost_server_is_reported_and_the_page_recovers(view: Opens) -> None:
    one = view().open("overview", "gpt")
    one.context.set_offline(True)
    one.page.select_option('#context [data-key="source"]', label="two")
    expect(one.page.locator("#troubles p")).to_contain_text("is qkv view still running?")
    one.expect("does not answer|ERR_INTERNET_DISCONNECTED")
    one.context.set_offline(False)
    one.page.select_option('#context [data-key="source"]', label="cross")
    expect(one.page.locator('#context [data-key="group"]')).to_be_visible()


@pytest.mark.slow
def test_page_waits_for_a_profile_and_reports_a_failure(tab: Opens) -> None:
    model = DecoderLM(DecoderConfig(d_model=16, layers=2, heads=4)).eval()
    loaded, go_on = Loaded("tiny", model, ByteTokenizer()), threading.Event()
    next(loaded.model.children()).register_forward_pre_hook(lambda *_: go_on.wait(60) and None)
    session = Session("test")
    session.add_model(loaded, "import os\n")
    session.add_model(loaded, "")  # an empty text cannot be profiled
    with serve_in_thread(session) as url:
        one = tab(Served(url, session, {}))
        one.page.goto(f"{url}#/text?layer=1&head=2")
        try:
            expect(one.page.locator("main")).to_contain_text("Profiling tiny")
            expect(one.page.locator("#busy")).to_contain_text("Running tiny")
            assert one.page.get_attribute("html", "data-state") == "loading"
        finally:
            go_on.set()
        expect(one.page.locator(".text-page")).to_be_visible()
        one.arrives("text", layer=1, head=2)  # as in the address at first
        one.follow(f"{url}#/overview?source=1")
        expect(one.page.locator(".waiting p").first).to_contain_text("the text is empty")
        one.page.close()  # it asks how far the session is, also after the server has stopped


def test_security_policy_blocks_other_hosts(view: Opens) -> None:
    one = view().open("overview", "gpt")
    assert one.page.evaluate("fetch('http://example.com/').then(() => 'answered', () => 'blocked')") == "blocked"
    one.expect("connect-src")
    one.page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://example.com/x.png' }))")
    one.expect("img-src")
    provoked = re.compile("a request left the host|.*Content Security Policy", re.DOTALL)
    one.problems = [problem for problem in one.problems if not provoked.match(problem)]


def test_pages_begin_with_the_most_telling_head_and_compare_with_one_of_another_type(view: Opens, mini: Served) -> None:
    data = mini.profile("mini").data
    (layer, head), (other_layer, other_head), *_ = tables.telling_heads(data)
    view(mini).open("map").arrives("map", layer=layer, head=head)
    view(mini).open("compare").arrives("compare", layer=layer, head=head, blayer=other_layer, bhead=other_head)
    types = tables.type_table(data)["type"].to_numpy().reshape(-1, data.sizes["head"])
    assert types[layer, head] != types[other_layer, other_head]


# ---- the overview -------------------------------------------------------------------------------------------


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


def point_at_cell(tab: Tab, size: tuple[int, int], query: int, key: int) -> None:
    """Move the mouse to a pair on the stage of a map of this size, which is shown as a whole."""
    layout = tab.js("layout", size)
    box, at, scale = tab.page.locator(".map-canvas").bounding_box(), layout["origin"], layout["scale"]
    tab.page.mouse.move(box["x"] + at["x"] + (key + 0.5) * scale, box["y"] + at["y"] + (query + 0.5) * scale)
    tab.settled()


def readout(tab: Tab) -> tuple[int, int, float]:
    """Query, key and weight of the readout."""
    pair = tab.page.locator(".map-pair").all_inner_texts()
    query, key = (int(re.search(r"([\d,]+) “", text)[1].replace(",", "")) for text in pair)
    return query, key, share(tab.page.inner_text(".map-weight strong"))


def same(words: float, weight: float) -> bool:
    """Whether a weight agrees to the shown digits: three, or two for tiny ones."""
    return math.isclose(words, weight, rel_tol=5.1e-3 if weight >= 1e-5 else 5.1e-2)


# ---- the map: numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "group", "text", "layer", "head"),
    [("cross", 2, 1, 1, 1), ("mini", 0, 0, 2, 3)],
    ids=["cross attention, padded", "exact and causal, of a model"],
)
def test_readout_shows_the_weight_of_the_data_set(
    view: Opens, served: Served, mini: Served, source: str, group: int, text: int, layer: int, head: int
) -> None:
    server = mini if source == "mini" else served
    data = list(server.profile(source).groups.values())[group]
    n, m = int(data["n_queries"][text]), int(data["n_keys"][text])
    weights = data["weights"].values[text, layer, head, :n, :m]
    one = view(server).open("map", source, group=group, text=text, layer=layer, head=head)
    for query, key in ((n - 1, m - 1), (n - 1, 0), (n // 2, m // 3), (0, m - 1)):
        point_at_cell(one, (n, m), query, key)
        if data.attrs["causal"] and key > query:
            expect(one.page.locator(".map-weight")).to_contain_text("masked")
            assert readout(one) == (query, key, 0)
            continue
        assert readout(one)[:2] == (query, key)
        assert same(readout(one)[2], weights[query, key]), (readout(one), weights[query, key])
        said = one.page.inner_text(".map-readout")
        for token in (data["query_token"].values[text, query], data["key_token"].values[text, key]):
            assert re.sub("[ ▁Ġ\n]", "", token) in re.sub("[ ▁Ġ]", "", said)
        received = data["received"].values[text, layer, head, key] / n
        assert same(share(re.search(r"receives (.*?%) of", said)[1]), received)
        entropy = re.search(r"entropy of the query ([\d.]+) nats", said)[1]
        assert float(entropy) == pytest.approx(data["entropy"].values[text, layer, head, query], abs=0.0051)


def test_zoomed_out_readout_shows_the_exact_weight_and_its_bin(view: Opens, served: Served) -> None:
    """Also after a zoomed view of another head, since the address has no view."""
    weights = served.profile("wide").data["weights"].values[0, 0, 1]
    one = view().open("map", "wide", x=100, y=500, z=3).open("map", "wide", head=1)
    assert "z" not in one.state
    point_at_cell(one, (600, 600), 433, 120)
    query, key, weight = readout(one)
    assert max(abs(query - 433), abs(key - 120)) <= 1
    assert same(weight, weights[query, key])
    pooled = weights[query // 2 * 2 :][:2, key // 2 * 2 :][:, :2]
    said = one.page.locator(".map-bin").first.inner_text()
    assert f"queries {query // 2 * 2}–{query // 2 * 2 + 1} × keys {key // 2 * 2}–{key // 2 * 2 + 1}" in said
    assert same(share(re.search(r"largest (.*?%)", said)[1]), pooled.max())
    assert same(share(re.search(r"mean (.*?%)", said)[1]), pooled.mean())


# ---- the map: hostile tokens, export ------------------------------------------------------------------------


def test_readout_and_export_hold_hostile_tokens_literally(view: Opens) -> None:
    one = view().open("map", "hostile", layer=0, head=0, cq=0, ck=0)
    n, said = len(HOSTILE), ""
    for at in range(n):
        point_at_cell(one, (n, n), at, n - 1 - at)
        expect(one.page.locator(".map-pair").nth(0)).to_contain_text(f"query {at} ")
        said += one.page.inner_text(".map-readout")
    assert unseen(said) == []
    assert one.is_safe()
    rows = one.table()
    tokens = {row["key_token"].strip(" ") for row in rows}
    assert {token for token in HOSTILE if token.isprintable()} <= tokens
    weights = hostile().data["weights"].values[0, 0, 0]
    found = {(int(row["query"]), int(row["key"])): float(row["weight"]) for row in rows}
    assert found == {at: pytest.approx(weights[at], rel=1e-6) for at in np.ndindex(n, n)}
    check_picture(one)


LISTED = 8  # weights in the panel for each direction


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


def at_token(tab: Tab, at: int, side: str = "query") -> Tab:
    tab.page.hover(token(at, side))
    return tab.settled()


# ---- the text: weights of a token ---------------------------------------------------------------------------


def test_panel_lists_the_largest_weights(view: Opens, served: Served) -> None:
    data = served.profile("two").data  # its first text is padded
    n = int(data["n_keys"][0])
    weights = data["weights"].values[0, 1, 2, :n, :n]
    one = view().open("text", "two", layer=1, head=2)
    for at in (0, n - 1):
        at_token(one, at)
        check_listed(one, "to", weights[at])
        check_listed(one, "from", weights[:, at])
        rest = one.page.locator(".text-ties.to .text-note").inner_text()
        assert f"the other {n - 8}" in rest
        assert share(rest.split(":")[1].strip()) == pytest.approx(np.sort(weights[at])[:-8].sum(), rel=0.051)
    about = one.page.inner_text(".text-token p")
    assert f"token {n - 1} of {n}" in about
    received = share(re.search(r"receives (.*?%)", about)[1])
    assert received == pytest.approx(weights[:, n - 1].sum() / n, rel=0.051)


# ---- the text: long texts -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_long_text_is_rendered_in_part(view: Opens, served: Served) -> None:
    tokens = [token.removeprefix("▁") for token in served.profile("long").data["key_token"].values[0]]
    one = view().open("text", "long")
    expect(one.page.locator(".text-panel")).to_contain_text("no maps")
    for at in (7_999, 5_000, 37):
        one.open("text", "long", pins=at)
        expect(one.page.locator(token(at))).to_be_in_viewport()
        assert one.page.inner_text(token(at)).strip() == tokens[at]
        assert one.page.evaluate("document.querySelectorAll('main *').length") < 6000
    one.page.focus(".flow")
    one.press("End").settled()
    expect(one.page.locator(token(7_999))).to_be_in_viewport()
    one.page.locator(".flow").evaluate("(x) => { x.scrollTop -= 12000; }")
    seen = one.settled().js("tokensInView")
    expect(one.page.locator(token(7_999))).to_have_count(0)
    first = seen[0][0]
    assert 200 < len(seen) < 3000  # the whole view is filled with text
    assert seen == [[at, tokens[at]] for at in range(first, first + len(seen))]


def test_a_token_is_pinned_from_the_start_and_the_first_one_is_left_out_where_it_is_a_sink(
    view: Opens, mini: Served
) -> None:
    one = view(mini).open("text", layer=4, head=2)
    n = mini.profile("mini").data.sizes["key"]
    expect(one.page.locator(".text-token p")).to_contain_text(f"token {n - 1} of {n}")
    expect(one.page.locator(token(0))).not_to_have_attribute("style", re.compile("background"))
    weights = mini.profile("mini").data["weights"].values[0, 4, 2]
    many = ((weights >= 0.05) & ~np.eye(n, dtype=bool)).sum(0)
    expect(one.page.locator(".arcs path")).to_have_count(int(many[1:].sum()))
    one.page.uncheck(".leave input")
    expect(one.settled().page.locator(".arcs path")).to_have_count(int(many.sum()))
    assert one.state["leave"] == "0"
    one.page.focus(".flow")
    one.press("Escape", "Escape").settled()
    assert re.search("pins=(&|$)", one.page.url), "no token is pinned any more"


# ---- the text: export ---------------------------------------------------------------------------------------


def test_text_export_holds_the_weights(view: Opens, served: Served) -> None:
    data = served.profile("two").data
    weights = data["weights"].values[1, 0, 3]
    one = view().open("text", "two", text=1, layer=0, head=3, pins=17)
    rows = one.table()
    names = [row["token"].strip() for row in rows]
    assert names == list(data["key_token"].values[1])
    for column, want in (("attended_to", weights[17]), ("attends", weights[:, 17]), ("received", weights.sum(0) / 37)):
        np.testing.assert_allclose(floats(rows, column), want, rtol=2e-4)  # received shares have 16 bits
    assert set(names) <= {text.strip() for text in texts_of(check_picture(one))}


SHOWN = 10  # next tokens that the live page lists


@pytest.fixture(scope="module")
def live() -> Live:
    """Computes the expected answers."""
    return Live(load_model("qkv-mini"))


# ---- sinks ----------------------------------------------------------------------------------------------------

WEIGHT = "Weight on the first token"
TITLES = [
    WEIGHT,
    "The value that a sink adds",
    "Contribution of the first token",
    "Norm of the first token’s key",
    "First token, on three kinds of text",
    "Largest activation by depth",
]


def expect_titles(tab: Tab, titles: list[str]) -> None:
    expect(tab.page.locator(".sink-title")).to_have_text(titles)


def pointed(tab: Tab, chart: int, dots: list[int]) -> list[str]:
    """The readouts of a chart while the pointer is on each of these dots."""
    figure = tab.page.locator(".sink-figure").nth(chart)
    figure.scroll_into_view_if_needed()
    boxes = figure.locator("circle:not([visibility])").evaluate_all(
        "(all) => all.map((x) => x.getBoundingClientRect()).map((box) => [box.x, box.y, box.width])"
    )
    said = []
    for x, y, width in (boxes[dot] for dot in dots):
        tab.page.mouse.move(x + width / 2, y + width / 2)
        said.append(plain(figure.locator("output").inner_text()))
    return said


def test_dots_show_the_numbers_of_the_profile(view: Opens, mini: Served) -> None:
    one = view(mini).open("sinks", layer=0, head=1)
    profile = mini.profile("mini")
    expect_titles(one, TITLES)
    heads, sinks = profile.heads(), profile.sinks()
    some = list(range(0, len(heads), 5))
    weights = {f"Layer {row['layer']}, head {row['head']} · {percent(row['sink'])}" for _, row in heads.iterrows()}
    assert weights >= (shown := set(pointed(one, 0, some)))
    added = {f"Layer {r.layer}, head {r.head} · {percent(r.contribution_first)}" for r in sinks.itertuples()}
    assert added >= (also := set(pointed(one, 2, some)))
    assert len(shown) == len(also) == len(some)
    row = sinks[sinks["alpha_first"] <= 0.3].sort_values("value_norm_first").iloc[0]  # sinks follow, in orange
    name = f"Layer {row['layer']}, head {row['head']} · {percent(row['alpha_first'])}"
    assert pointed(one, 1, [0]) == [f"{name} · {row['value_norm_first']:.2f} ×"]
    stream = profile.residual["blocks"].isel(text=0)
    largest, dimension = (float(stream[name][2, 0]) for name in ("largest", "largest_dimension"))
    (depth,) = pointed(one, 5, [2])
    assert f"dimension {int(dimension)}" in depth
    assert f"{largest:.{2 if largest < 10 else 1}f}" in depth
    over = int((sinks["alpha_first"] > 0.3).sum())
    assert f"{over} of {len(heads)}" in one.page.locator(".sink-figure").nth(4).inner_text()
    lead = plain(one.page.inner_text(".sink-lead"))
    assert lead.startswith(f"{over} of {len(heads)} heads ha")
    assert f"even attention would give {percent(sinks['alpha_even'].mean())}" in lead
    assert one.page.locator("main tbody tr").count() == len(profile.sink_tokens())


def test_intervention_is_overlaid_restored_and_exported(view: Opens, mini: Served) -> None:
    one = view(mini).open("sinks")
    one.page.click("text=Off by one")
    expect(one.page.locator(".sink-lead p")).to_have_count(2)
    intervention = mini.session.sources[int(one.settled().state["after"])]
    assert intervention.kind == "intervention"
    assert intervention.profile is not None
    expect(one.page.locator("main figure table")).to_have_count(2)
    profiles = mini.profile("mini"), intervention.profile
    before, later = (p.sinks()["alpha_first"].to_numpy() for p in profiles)
    said = one.page.locator(".sink-figure").nth(5).inner_text()
    assert f"{(before > 0.3).sum()} → {(later > 0.3).sum()} of {len(before)}" in said
    sinks = [p.heads()["sink"] for p in profiles]
    assert np.abs(sinks[0] - sinks[1]).max() > 0.01
    wanted = f"Layer 0, head 0 · {percent(sinks[0][0])} → {percent(sinks[1][0])}"
    assert wanted in pointed(one, 0, list(range(12)))  # the dots of the first layer
    one.page.mouse.move(0, 0)

    assert {*TITLES, "Weight on no token"} <= set(texts_of(check_picture(one)))
    table = one.table()
    rows, depths = table[: 2 * len(before)], table[2 * len(before) :]
    np.testing.assert_allclose(floats(rows, "weight_on_first"), np.concatenate(sinks), rtol=1e-5)
    np.testing.assert_allclose(floats(rows, "alpha_first"), [*before, *later], rtol=1e-5)
    assert all(row["learned_sink"] == "" for row in rows[: len(before)])
    assert float(rows[len(before)]["learned_sink"]) > 0
    streams = [next(iter(profile.residual.values())) for profile in profiles]
    largest = [x for stream in streams for x in stream["largest"].values[0, :, 0]]
    assert [int(row["depth"]) for row in depths] == [*range(len(largest) // 2)] * 2
    np.testing.assert_allclose(floats(depths, "largest_activation"), largest, rtol=1e-5)

    said, address = one.settled().text(), one.page.url
    one.open("overview").follow(address)  # the address restores the comparison
    expect(one.page.locator('[data-key="after"]')).to_have_value(str(intervention.id))
    assert one.text() == said
    one.page.select_option('[data-key="after"]', "")
    expect(one.page.locator(".sink-lead p")).to_have_count(1)
    assert "after" not in one.settled().state
    expect(one.back().page.locator(".sink-lead p")).to_have_count(2)


# ---- live -----------------------------------------------------------------------------------------------------


def nats(divergence: float) -> str:
    """Format a positive divergence as live_words.js does."""
    return "under 0.001 nats" if divergence < 0.001 else f"{divergence:#.2g}".rstrip(".") + " nats"


def spaced(token: str) -> str:
    return re.sub(" +", lambda x: f"␣×{len(x[0])}" if len(x[0]) > 2 else "␣" * len(x[0]), token).replace("\n", "⏎")


def asked(text: str, *edits: tuple[int, int, str, float], at: tuple[int, int] = (0, 0), **more: Any) -> SimpleNamespace:
    changes = [SimpleNamespace(layer=a, head=b, normalizer=c, temperature=d) for a, b, c, d in edits]
    return SimpleNamespace(text=text, edits=changes, layer=at[0], head=at[1], k=SHOWN, **{"ids": None, **more})


def check_bars(tab: Tab, answer: dict[str, Any], *, edited: bool) -> None:
    """The bars show the next tokens of the answer, with their probabilities."""
    before, after = (answer[when]["next"][:SHOWN] for when in ("before", "after"))
    want = [
        (spaced(b["token"]), (f"{percent(a['probability'])} → " if edited else "") + percent(b["probability"]))
        for a, b in zip(before, after, strict=True)
    ]
    bars = tab.settled().page.locator(".live-bars li")
    values = map(plain, bars.locator(".live-values").all_inner_texts())
    assert list(zip(bars.locator("code").all_inner_texts(), values, strict=True)) == want


def check_sinks(tab: Tab, answer: dict[str, Any], when: str) -> None:
    sinks = [f"{100 * x:.0f}" for row in answer[when]["sink"] for x in row]
    expect(tab.page.locator(".live-cell > span")).to_have_text(sinks)


def test_live_page_answers_while_typing_and_keeps_a_long_text(view: Opens, mini: Served, live: Live) -> None:
    one = view(mini).open("live")
    check_bars(one, live.answer(asked(live.description.example)), edited=False)
    text = "def add(a, b):\n    return a +"
    one.page.fill("#live-text", text)
    answer = live.answer(asked(text))
    check_bars(one, answer, edited=False)
    assert one.state["prompt"] == text
    expect(one.page.locator(".live-token")).to_have_count(len(answer["tokens"]))
    check_sinks(one, answer, "before")
    one.page.fill("#live-text", "import os\n" * 60)
    one.page.click("#nav >> text=Overview")  # before the text is in the address
    one.arrives("overview")
    one.page.click("#nav >> text=Live")
    expect(one.arrives("live").page.locator("#live-text")).to_have_value("import os\n" * 60)
    one.page.fill("#live-text", "é7" * 900)
    expect(one.page.locator("#live-trouble")).to_contain_text("tokens, expected")
    expect(one.page.locator("#live-text")).to_have_attribute("aria-invalid", "true")
    one.expect("400")


def test_beside_the_text_of_the_edited_model_stands_that_of_the_model_as_trained(
    view: Opens, mini: Served, live: Live
) -> None:
    about, text, said = live.description, "import os\n\nclass", []
    edits = [(layer, head, "off-by-one", 1.0) for layer in range(about.layers) for head in range(about.heads)]
    one = view(mini).open("live", prompt=text, edits="o1-all", heat=0)
    for changes in (edits, []):
        first = live.step(asked(text, *changes, sampling_temperature=0.0, seed=0, step=0))
        ids = {"ids": first["ids"], "sampling_temperature": 0.0, "seed": 0, "step": 1}
        said.append([first["token"], live.step(asked(first["text"], *changes, **ids))["token"]])
    for _ in range(2):
        one.page.click("text=Step")
        one.settled()
    expect(one.page.locator(".live-both dd")).to_have_text(["".join(tokens) for tokens in said])
    one.page.click("text=Undo")
    expect(one.settled().page.locator(".live-both dd")).to_have_text([tokens[0] for tokens in said])
    one.page.fill("#live-text", text)
    expect(one.settled().page.locator(".live-both dd")).to_have_count(0)


@pytest.mark.slow
def test_live_page_handles_hostile_text_and_exports(view: Opens, mini: Served, live: Live) -> None:
    one = view(mini).open("live", prompt="x")
    one.page.fill("#live-text", " ".join(token for token in HOSTILE if len(token) < 200))
    expect(one.settled().page.locator(".live-tokens")).to_contain_text("script")
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    assert one.page.locator("main img, main script").count() == 0
    assert "\u202e" not in one.page.inner_text(".live-tokens")
    one.page.fill("#live-text", "import os")
    one.settled()
    answer = live.answer(asked("import os"))
    rows = [row for row in one.table() if row["what"] == "probability of the next token"]
    assert [row["name"] for row in rows] == [x["token"] for x in answer["before"]["next"]]
    np.testing.assert_allclose(floats(rows, "after"), [x["probability"] for x in answer["after"]["next"]], rtol=1e-6)
    check_picture(one)
    one.page.fill("#live-text", "")
    expect(one.page.locator("#live-trouble")).to_contain_text("Type some text")


# ---- sequences and images -------------------------------------------------------------------------------------


def test_translation_shows_and_exports_its_weights(view: Opens, mini: Served) -> None:
    one = view(mini).open("align", say="the black cat")
    answer = aligners.align("qkv-translation", "the black cat")
    source, target, weights = answer["source"], answer["target"], np.array(answer["weights"])[0, 0]
    expect(one.page.locator(".align-target")).to_have_text(target)
    cells = one.page.locator(".align-cell").evaluate_all("(all) => all.map((x) => x.getAttribute('aria-label'))")
    assert [plain(x) for x in cells] == [
        f"{target[t]}, {source[s]}: {percent(weights[t, s])}" for t, s in np.ndindex(weights.shape)
    ]
    one.page.hover(".align-cell >> nth=1")
    expect(one.page.locator(".align-main .readout")).to_contain_text(f"with weight {percent(weights[0, 1])}.")
    rows = one.table()
    found = [floats(rows, f"{s} {word}") for s, word in enumerate(source)]
    np.testing.assert_allclose(np.transpose(found), weights, rtol=1e-6)
    assert set(target) <= {text.strip() for text in texts_of(check_picture(one))}
    one.page.fill("#align-text", "the purple zebra")
    expect(one.page.locator("#align-trouble")).not_to_be_empty()
    one.expect("400")


# ---- the report -------------------------------------------------------------------------------------------------


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
    "make",
    [
        made.encoder_decoder, lambda: made.long(1024, 26, 2), hostile,
        lambda: profile("qkv-translation", torch.tensor([[3, 4, 5, 6]]), progress=False),
    ],
    ids=["three groups", "long", "hostile", "one head"],
)  # fmt: skip
def test_the_page_loads_without_errors(page: Page, tmp_path: Path, make: Callable[[], Profile]) -> None:
    found = make()
    assert report_of(page, found, tmp_path) == "ready"
    assert page.locator("[role=gridcell]").count() == len(found.heads()) * (1 + ("weights" in found.data))
    assert page.get_by_text("Most attended tokens").count() == 1
    assert page.locator(".curve .reference").first.get_attribute("d"), "uniform attention is drawn beside the entropy"
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.dataset.pwned ?? null") is None
    assert inaccessible(page) == []
    page.emulate_media(color_scheme="dark")
    assert inaccessible(page) == []


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
    assert after(page.click, cell(0, 4, ".wall")) == page.locator("#big-map h3").inner_text() == "Layer 0, head 4"
    page.click(cell(2, 2))
    assert after(page.click, '[data-key="on"]') == "Layer 2, head 3"
    assert page.evaluate("document.activeElement.dataset.key") == "on", "the focus is kept"
    page.select_option('[data-key="statistic"]', "distance")
    said = f"Layer 0, head 0: Distance {heads['distance'][0]:.1f} tokens; first token 99 %"
    assert plain(page.get_attribute(cell(0, 0), "aria-label")) == said
    page.select_option('[data-key="statistic"]', "type")
    kind = profile.types().query("layer == 1 and head == 3").iloc[0]
    assert (page.get_attribute(cell(1, 3), "data-tip") or "").split("\n")[:2] == ["Layer 1, head 3", kind["type"]]
    page.locator('[data-key="choice-Shade by attention received from-head"]').check(force=True)
    page.click('[data-at="9"]')
    rested(page)
    assert "query “wards” (position 9) in L2 · H3" in page.inner_text("#reading .readout")
    assert page.get_attribute(".flow-token.pinned", "data-at") == "9"
    page.focus("#big-map .map-canvas")
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    said = plain(page.inner_text(".map-readout"))
    query, key = map(int, re.match(r"query (\d+) “.*” → key (\d+) ", said).groups())  # type: ignore[union-attr]
    assert query - key == 3, "from the middle, two down and one to the left"
    assert share(said) == pytest.approx(float(profile.data["weights"][0, 2, 3, query, key]), abs=0.004)
    assert page.url.endswith("#L2H3"), "the selection is in the address"
    page.evaluate("location.hash = '#L0H1'")
    rested(page)
    assert page.locator("#card h3").inner_text() == "Layer 0, head 1"
    first = next(one for one in profile.findings() if one.heads)
    page.click(f'.value:has-text("{first.value}") >> nth=0')
    rested(page)
    shown = page.locator(".wall-cell:not(.faded)").evaluate_all(
        "(all) => all.map((x) => [x.dataset.layer, x.dataset.head])"
    )
    assert [int(layer) * len(profile.data["head"]) + int(head) for layer, head in shown] == list(first.heads)
    with page.expect_download() as download:
        page.click('#maps [data-kind="svg"]')
    assert ElementTree.fromstring(Path(download.value.path()).read_bytes()).tag.endswith("svg")
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
    page.locator(".map-readout", has_text="query 20 ").wait_for()
    said = plain(page.locator(".map-readout").inner_text())
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


SITE = """# A page

```{toctree}
:caption: Learn

other
```

| | wide |
|---|---|
| one | two |

```python
"a line of code that is much wider than the window of a phone, so that it must be scrolled, by keyboard, too"
```

```{py:function} attend(queries, keys, values, mask=None, bias=None, score=None, normalizer=None, kernel=None, out=None)
Each parameter of this signature has a line.
```

## A part

$$\\sum_{abcdefghijklmnopqrstuvwxyz} abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz$$
"""


def test_a_page_of_the_site_satisfies_axe(browser: Browser, tmp_path: Path) -> None:
    """Settings of docs/conf.py, on a page with captions, code, a formula and an empty header."""
    pytest.importorskip("furo", reason="the site needs the docs extra")
    (tmp_path / "index.md").write_text(SITE)
    (tmp_path / "other.md").write_text("# Other")
    docs = Path(__file__).parents[2] / "docs"
    extensions = ["-D", "extensions=myst_nb,sphinx_copybutton,mathml,accessible"]
    command = [sys.executable, "-m", "sphinx", "-q", "-c", docs, *extensions, tmp_path, tmp_path / "site"]
    subprocess.run(command, check=True)
    page = new_context(browser, viewport=PHONE).new_page()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto((tmp_path / "site" / "index.html").as_uri())
        assert page.locator("link[rel='shortcut icon']").count() == 1
        assert page.locator("pre[tabindex='0']").count() == 1
        assert page.locator(".sig-params > span").count() == 9
        assert inaccessible(page) == []
