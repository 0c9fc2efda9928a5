"""The map in a real browser: it shows the weights of the profile and requests exactly the tiles that it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from viewer_fixture import HOSTILE, VISIBLE_PARTS, Served, Tab, check_pictures, hostile, texts_of

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
TILE = 256
SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


@dataclass
class View:
    """The layout of the stage: `scale` pixels per token, the first at `left`, `top`; visible rows and columns."""

    n: int
    scale: float
    left: float
    top: float
    rows: tuple[int, int]
    columns: tuple[int, int]

    def place(self, query: int, key: int) -> tuple[float, float]:
        """The centre of a cell."""
        return self.left + (key + 0.5) * self.scale, self.top + (query + 0.5) * self.scale

    @property
    def deepest(self) -> int:
        return max(0, math.ceil(math.log2(self.n / TILE)))

    @property
    def zoom(self) -> int:
        """The smallest zoom with at least one pixel per screen pixel."""
        return min(max(math.floor(self.deepest + math.log2(min(self.scale, 1)) + 0.02), 0), self.deepest)

    def tiles(self, pool: str = "max") -> set[str]:
        """The tiles to request: the overview and the visible ones."""
        side = TILE * 2 ** (self.deepest - self.zoom)
        inner = {
            f"{pool}/{self.zoom}/{i}/{j}"
            for i in range(self.rows[0] // side, self.rows[1] // side + 1)
            for j in range(self.columns[0] // side, self.columns[1] // side + 1)
        }
        return inner | {f"{pool}/0/0/0", "max/0/0/0"}


LAYOUT = """async ({ queries, keys, view }) => {
    const { layoutOf, fitted } = await import("/static/map_scene.js");
    const { clientWidth: width, clientHeight: height } = document.querySelector(".map-canvas").parentElement;
    const size = { width, height, queries, keys };
    return layoutOf({ ...size, view: view ?? fitted(size) });
}"""


def view_of(tab: Tab, queries: int, keys: int) -> View:
    """The view in the address, with the margins that the page computes."""

    def layout(view: dict[str, float] | None) -> dict:
        return tab.page.evaluate(LAYOUT, {"queries": queries, "keys": keys, "view": view})

    found = layout(None)
    if "z" in tab.state:
        wanted = {name: float(tab.state[name]) for name in "xyz"}
        area, scale = layout(wanted)["area"], 2 ** wanted["z"]
        for name, tokens, room in (("x", keys, area["w"]), ("y", queries, area["h"])):  # no view extends beyond the map
            half = min(room / scale, tokens) / 2
            wanted[name] = min(max(wanted[name], half), tokens - half)
        found = layout(wanted)
    at = found["origin"]
    return View(max(queries, keys), found["scale"], at["x"], at["y"], tuple(found["rows"]), tuple(found["columns"]))


def rested(tab: Tab) -> Tab:
    """Wait until the page has loaded the tiles of a view, which it requests once the zoom is stable."""
    tab.pause(150)
    return tab.settled()


def point(tab: Tab, view: View, query: int, key: int) -> None:
    box = tab.page.locator(".map-canvas").bounding_box()
    x, y = view.place(query, key)
    tab.page.mouse.move(box["x"] + x, box["y"] + y)


def weight_of(words: str) -> float:
    """Parse a weight of the page: "12.3 %", "4.5 · 10⁻⁶ %"."""
    found = re.match(r"([\d.,]+)\s(?:·\s10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)\s)?%", words)
    assert found, words
    return float(found[1].replace(",", "")) / 100 * 10 ** int((found[2] or "⁰").translate(SUPERSCRIPT))


def shown(tab: Tab) -> tuple[int, int, float]:
    """Query, key and weight of the readout, once the weight is known."""
    strong = tab.page.locator(".map-weight strong")
    expect(strong).to_be_visible()
    expect(strong).not_to_have_text("…")
    at = [
        int(re.search(r"([\d,]+) “", text)[1].replace(",", ""))
        for text in tab.page.locator(".map-pair").all_inner_texts()
    ]
    return at[0], at[1], weight_of(strong.inner_text())


def same(words: float, weight: float) -> bool:
    """Whether a weight agrees to the shown digits: three, or two for tiny ones."""
    return math.isclose(words, weight, rel_tol=5.1e-3 if weight >= 1e-5 else 5.1e-2)


# ---- the numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "group", "text", "layer", "head"),
    [("two", 0, 0, 1, 2), ("two", 0, 1, 0, 3), ("cross", 2, 1, 1, 1), ("cross", 2, 0, 0, 2), ("gpt", 0, 0, 2, 1)],
    ids=["padded", "second text", "cross attention, padded", "cross attention", "causal"],
)
def test_readout_shows_the_weight_of_the_data_set(
    tab: Opens, served: Served, source: str, group: int, text: int, layer: int, head: int
) -> None:
    data = list(served.profile(source).groups.values())[group]
    n, m = int(data["n_queries"][text]), int(data["n_keys"][text])
    weights = data["weights"].values[text, layer, head, :n, :m]
    one = tab().open("map", source, group=group, text=text, layer=layer, head=head)
    view = view_of(one, n, m)
    rng = np.random.default_rng(3)
    cells = [(0, 0), (n - 1, m - 1), (n - 1, 0), *zip(rng.integers(0, n, 2), rng.integers(0, m, 2), strict=True)]
    if not data.attrs["causal"]:
        cells.append((0, m - 1))
    for query, key in cells:
        point(one, view, query, key)
        tokens = f"“{data['query_token'].values[text, query]}”", f"“{data['key_token'].values[text, key]}”"
        one.eventually(lambda query=query, key=key: shown(one)[:2] == (query, key))
        expect(one.page.locator(".map-readout")).to_contain_text("the key receives")
        assert same(shown(one)[2], weights[query, key]), (shown(one), weights[query, key])
        said = one.page.inner_text(".map-readout").replace(" ", "").replace("▁", "").replace("Ġ", "")
        assert all(token.replace("▁", "").replace("Ġ", "") in said for token in tokens)
        received = re.search(r"receives (.*?%) of", one.page.inner_text(".map-readout"))[1]
        assert same(weight_of(received), data["received"].values[text, layer, head, key] / n)
        entropy = re.search(r"entropy of the query ([\d.]+) nats", one.page.inner_text(".map-readout"))[1]
        assert float(entropy) == pytest.approx(data["entropy"].values[text, layer, head, query], abs=0.0051)


def test_readout_shows_exact_weights_of_a_model(tab: Opens, mini: Served) -> None:
    data = mini.profile("mini").data
    n = data.sizes["query"]
    weights = data["weights"].values[0, 2, 3]
    one = tab(mini).open("map", "mini", layer=2, head=3)
    view = view_of(one, n, n)
    for query, key in ((n - 1, 0), (n - 1, n - 1), (n // 2, n // 3), (3, 1)):
        point(one, view, query, key)
        one.eventually(lambda query=query, key=key: shown(one)[:2] == (query, key))
        assert same(shown(one)[2], weights[query, key])


def test_zoomed_out_readout_shows_the_exact_weight_and_its_bin(tab: Opens, served: Served) -> None:
    weights = served.profile("wide").data["weights"].values[0, 0, 1]
    one = tab().open("map", "wide", head=1)
    view = view_of(one, 600, 600)
    assert view.zoom == 1
    point(one, view, 433, 120)
    query, key, weight = shown(one)
    assert abs(query - 433) <= 1
    assert abs(key - 120) <= 1
    assert same(weight, weights[query, key])
    pooled = weights[query // 2 * 2 :][:2, key // 2 * 2 :][:, :2]
    expect(one.page.locator(".map-bin").first).not_to_contain_text("…")
    said = one.page.locator(".map-bin").first.inner_text()
    assert f"queries {query // 2 * 2}–{query // 2 * 2 + 1} × keys {key // 2 * 2}–{key // 2 * 2 + 1}" in said
    assert same(weight_of(re.search(r"largest (.*?%)", said)[1]), pooled.max())
    assert same(weight_of(re.search(r"mean (.*?%)", said)[1]), pooled.mean())


def test_masked_pair_is_named_as_masked(tab: Opens) -> None:
    one = tab().open("map", "gpt", layer=0, head=4)
    point(one, view_of(one, 61, 61), 10, 40)
    expect(one.page.locator(".map-weight")).to_contain_text("masked")
    assert shown(one) == (10, 40, 0)


# ---- tiles ----------------------------------------------------------------------------------------------------


def test_whole_map_requests_its_tiles(tab: Opens) -> None:
    one = rested(tab().open("map", "wide", head=1))
    one.eventually(lambda: set(one.tiles()), {f"0/0/0/1/{tile}" for tile in view_of(one, 600, 600).tiles()})
    assert len(set(one.tiles())) == 5  # four and the overview


@pytest.mark.parametrize(("x", "y", "z"), [(300, 300, 1), (40, 560, 3.5), (590, 10, 0.2), (258, 300, 5)])
def test_part_of_a_map_requests_the_visible_tiles(tab: Opens, x: float, y: float, z: float) -> None:
    one = rested(tab().open("map", "wide", x=x, y=y, z=z))
    view = view_of(one, 600, 600)
    assert view.zoom == 2
    one.eventually(lambda: set(one.tiles()), {f"0/0/0/0/{tile}" for tile in view.tiles()})
    first, last, left, right = *view.rows, *view.columns
    if (last - first) * (right - left) < 2000:  # every token has a label
        said = texts_of(check_pictures(one))
        keys = [f"{at}" for at in range(left + 1, right)]
        assert [key for key in keys if not any(text.endswith(key) for text in said)] == []


@pytest.mark.slow
def test_zooming_requests_each_tile_once(tab: Opens) -> None:
    one = rested(tab().open("map", "wide"))
    box = one.page.locator(".map-canvas").bounding_box()
    far = view_of(one, 600, 600)
    x, y = far.place(450, 150)
    before = one.page.url
    one.page.mouse.move(box["x"] + x, box["y"] + y)
    held = []
    for _ in range(5):  # a map smaller than the stage stays centred; afterwards the token under the pointer stays
        one.page.mouse.wheel(0, -240)
        one.pause(300)
        held.append(shown(one)[:2])
    assert np.ptp(held[2:], axis=0).max() <= 2, held
    one.page.wait_for_url(lambda url: "z=" in url)
    one.pause(450)
    rested(one)
    near = view_of(one, 600, 600)
    assert near.scale > 8 * far.scale
    one.eventually(lambda: {f"0/0/0/0/{tile}" for tile in near.tiles()} <= set(one.tiles()))
    one.page.focus(".map-canvas")
    since = len(one.requests)
    one.press("0")
    one.page.wait_for_url(lambda url: "z=" not in url)
    rested(one)
    # The readout of a bin requests its mean, too; tiles that were shown before are cached.
    assert [tile for tile in one.tiles(since) if "/max/" in tile] == []
    one.page.go_back()
    one.page.wait_for_url(lambda url: "z=" in url)
    for _ in range(5):  # one entry of the history, or more if a busy machine paused between the steps of the wheel
        if one.page.url != before:
            one.page.go_back()
            one.settled()
    one.eventually(lambda: one.page.url, before)


def test_dragging_moves_the_view_without_pinning(tab: Opens) -> None:
    one = tab().open("map", "wide", x=300, y=300, z=2)
    box = one.page.locator(".map-canvas").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    one.page.mouse.move(*middle)
    one.page.mouse.down()
    one.page.mouse.move(middle[0] + 80, middle[1] - 40, steps=4)
    one.page.mouse.up()
    one.page.wait_for_url(lambda url: "x=300" not in url)
    assert float(one.state["x"]) == pytest.approx(280, abs=0.6)
    assert float(one.state["y"]) == pytest.approx(310, abs=0.6)
    assert "cq" not in one.state  # a drag is no click
    rested(one)
    one.eventually(lambda: {f"0/0/0/0/{tile}" for tile in view_of(one, 600, 600).tiles()} <= set(one.tiles()))


def test_mean_pooling_requests_and_exports_mean_tiles(tab: Opens, served: Served) -> None:
    one = rested(tab().open("map", "wide"))
    since = len(one.requests)
    one.page.click('.map-settings label:has-text("mean")')
    rested(one)
    one.arrives(pool="mean")
    wanted = {f"0/0/0/0/{x}" for x in view_of(one, 600, 600).tiles("mean")} - {"0/0/0/0/max/0/0/0"}
    one.eventually(lambda: set(one.tiles(since)), wanted)
    weights = served.profile("wide").data["weights"].values[0, 0, 0]
    rows = one.table()
    want = weights.reshape(300, 2, 300, 2).mean((1, 3))
    found = np.array([float(row["mean_weight"]) for row in rows]).reshape(300, 300)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-9)
    assert [int(rows[301][name]) for name in ("first_query", "last_query", "first_key", "last_key")] == [2, 3, 2, 3]


def test_profile_without_maps_explains_why(tab: Opens) -> None:
    one = tab().open("map", "long")
    expect(one.page.locator(".map-why")).to_contain_text("The profile has no maps")
    assert one.tiles() == []
    one.page.click("#export")
    one.page.click("#export-menu [data-kind=csv]")
    expect(one.page.locator("#troubles")).to_contain_text("no map to save")


# ---- address, keys, theme -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_address_restores_the_view(tab: Opens) -> None:
    one = tab().open("map", "wide", head=1)
    one.page.click('.map-settings label:has-text("mean")')
    one.page.click('.map-settings label:has-text("linear")')
    one.page.fill('[aria-label="Query position"]', "512")
    one.page.fill('[aria-label="Key position"]', "77")
    one.press("Enter")
    one.page.wait_for_url(lambda url: "cq=512" in url and "ck=77" in url and "z=" in url)
    one.pause(450)
    rested(one)
    one.page.mouse.move(0, 0)
    other = tab().follow(one.page.url)
    assert other.page.url == one.page.url
    for tab_ in (one, other):
        tab_.eventually(lambda tab_=tab_: shown(tab_)[:2], (512, 77))
    assert shown(other) == shown(one)
    other.eventually(other.text, one.text())
    box = one.page.locator(".map-canvas").bounding_box()
    for part in (0.3, 0.45, 0.6):  # the same token at the same place
        for tab_ in (one, other):
            tab_.page.mouse.move(box["x"] + part * box["width"], box["y"] + part * box["height"])
        other.eventually(lambda: shown(other) == shown(one))


def test_keys_move_the_crosshair_and_zoom(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[1, 0, 0]
    one = tab().open("map", "two", text=1, layer=0, head=0)
    one.page.focus('[aria-label="Whole map (0)"]')
    one.press("Shift+Tab", "Shift+Tab", "Shift+Tab")
    one.until("document.activeElement.classList.contains('map-canvas')")
    start = shown(one)
    one.press("ArrowUp", "ArrowUp", "ArrowRight")
    one.eventually(lambda: shown(one)[:2], (start[0] - 2, start[1] + 1))
    assert same(shown(one)[2], weights[start[0] - 2, start[1] + 1])
    one.press("Enter")
    one.page.wait_for_url(lambda url: f"cq={start[0] - 2}" in url)
    assert one.state["ck"] == str(start[1] + 1)
    one.press("+")
    one.page.wait_for_url(lambda url: "z=" in url)
    one.press("0")
    one.page.wait_for_url(lambda url: "z=" not in url)
    expect(one.page.locator("#live")).to_contain_text("exact weight")  # announced by a screen reader
    one.press("Escape")
    one.page.wait_for_url(lambda url: "cq=" not in url)
    one.press("n")  # the next head
    one.settled()
    one.arrives(head=1)


def test_pin_can_be_shown_in_the_text(tab: Opens) -> None:
    one = tab().open("map", "two", layer=1, head=1, cq=5, ck=9)
    one.eventually(lambda: shown(one)[:2], (5, 9))
    one.page.click('.map-pinned [data-key="text"]')
    one.settled()
    one.arrives("text", pins=5)


def test_another_text_resets_the_view(tab: Opens) -> None:
    one = tab().open("map", "two", text=1, layer=1, head=1, x=30, y=30, z=5, cq=30, ck=36)
    one.page.select_option('#context [data-key="text"]', index=0)
    one.settled()
    source = one.state["source"]
    one.eventually(lambda: one.state, {"source": source, "group": "0", "text": "0", "layer": "1", "head": "1"})
    one.eventually(lambda: one.tiles()[-1:], ["0/0/1/1/max/0/0/0"])
    expect(one.page.locator(".map-readout")).to_contain_text("Point at the map")


def test_another_text_removes_the_pin(tab: Opens) -> None:
    one = tab().open("map", "two", text=1, layer=1, head=1, cq=5, ck=9)
    one.eventually(lambda: shown(one)[:2], (5, 9))
    one.page.select_option('#context [data-key="text"]', index=0)
    one.settled()
    one.eventually(lambda: "cq" not in one.state)
    expect(one.page.locator(".map-pinned button")).to_have_count(0)


def test_another_head_keeps_the_view(tab: Opens) -> None:
    one = rested(tab().open("map", "wide", x=300, y=300, z=2))
    box = one.page.locator(".map-canvas").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    one.page.mouse.move(*middle)
    one.page.mouse.down()
    one.page.mouse.move(middle[0] + 80, middle[1], steps=4)
    one.page.mouse.up()
    one.press("n")  # before the view is written into the address
    one.page.wait_for_url(lambda url: "head=1" in url and "x=280" in url)
    one.pause(500)
    assert one.state["x"] == "280"


def test_address_without_a_view_shows_the_whole_map(tab: Opens, served: Served) -> None:
    weights = served.profile("wide").data["weights"].values[0, 0, 1]
    one = rested(tab().open("map", "wide", x=100, y=500, z=3))
    one = rested(one.open("map", "wide", head=1))
    assert "z" not in one.state
    point(one, view_of(one, 600, 600), 433, 120)
    query, key, weight = shown(one)
    assert abs(query - 433) + abs(key - 120) <= 2
    assert same(weight, weights[query, key])


def test_failed_map_does_not_show_the_previous_head(tab: Opens) -> None:
    one = tab()  # the route comes first, because it is not there at once in a page that is open
    one.page.route("**/map/0/0/0/1", lambda route: route.fulfill(status=500, json={"error": "The disk is full."}))
    rested(one.open("map", "wide")).press("n")
    expect(one.page.locator(".map-why")).to_contain_text("The disk is full.")
    point(one, view_of(one, 600, 600), 433, 120)
    one.pause(100)
    assert one.page.locator(".map-weight").count() == 0
    one.expect("500")
    one.page.unroute("**/map/0/0/0/1")
    one.page.click(".map-why button")
    expect(one.page.locator(".map-why")).to_be_hidden()
    expect(one.page.locator(".map-canvas")).to_have_attribute("aria-label", re.compile("[Hh]ead 1"))
    point(one, view_of(one, 600, 600), 400, 120)
    expect(one.page.locator(".map-weight")).to_be_visible()


def test_failed_tile_does_not_delay_other_tiles(tab: Opens) -> None:
    one = tab()
    # A failed tile is requested again after three seconds: this script disables that timer.
    one.page.add_init_script("{ const s = setTimeout; window.setTimeout = (f, ms) => (ms > 1500 ? 0 : s(f, ms)); }")
    one.page.route("**/max/2/0/0", lambda route: route.fulfill(status=500, json={"error": "The disk is full."}))
    one.open("map", "wide", x=80, y=80, z=2)
    expect(one.page.locator("#troubles")).to_contain_text("The disk is full.")
    one.page.fill('[aria-label="Query position"]', "590")
    one.page.fill('[aria-label="Key position"]', "580")
    with one.page.expect_request("**/max/2/2/2"):
        one.press("Enter")
    one.page.unroute("**/max/2/0/0")
    one.expect("500|The disk is full")


def test_map_fills_the_window_without_scrolling(tab: Opens) -> None:
    one = tab().open("map", "wide")
    one.until("document.documentElement.scrollHeight - innerHeight <= 0")
    canvas = one.page.locator(".map-canvas").bounding_box()
    assert canvas["width"] * canvas["height"] > 0.5 * 1280 * 720
    assert canvas["y"] + canvas["height"] <= 720


def test_map_colours_follow_the_theme(tab: Opens) -> None:
    """Large weights are dark in the light theme and light in the dark theme."""
    one = tab().open("map", "gpt", layer=1, head=1, scale="linear")  # each query attends to the previous token
    view = view_of(one, 61, 61)
    corner, peak, rest = (2, 2), view.place(40, 39), view.place(40, 20)
    brightness = """(places) => {
        const copy = document.createElement("canvas"), shown = document.querySelector(".map-canvas");
        Object.assign(copy, { width: shown.width, height: shown.height });
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(shown, 0, 0);
        const colour = ([x, y]) => Array.from(context.getImageData(x, y, 1, 1).data.slice(0, 3));
        return places.map((place) => colour(place).reduce((a, b) => a + b));
    }"""

    def light() -> bool:
        paper, strong, weak = one.page.evaluate(brightness, [corner, peak, rest])
        return strong + 200 < weak <= paper + 30

    def dark() -> bool:
        paper, strong, weak = one.page.evaluate(brightness, [corner, peak, rest])
        return paper < 150 and strong > weak + 200

    one.eventually(light)
    one.press("t")
    one.eventually(dark)


# ---- hostile tokens, export -----------------------------------------------------------------------------------


def test_readout_shows_hostile_tokens_literally(tab: Opens) -> None:
    one = tab().open("map", "hostile", layer=0, head=0, cq=0, ck=0)
    n, said = len(HOSTILE), ""
    view = view_of(one, n, n)
    for at in range(n):
        point(one, view, at, n - 1 - at)
        expect(one.page.locator(".map-pair").nth(0)).to_contain_text(f"query {at} ")
        said += one.page.inner_text(".map-readout")
    assert [part for part in VISIBLE_PARTS if part not in said] == []
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    assert one.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    rows = one.table()
    tokens = {row["key_token"].strip(" ") for row in rows}
    assert {token for token in HOSTILE if token.isprintable()} <= tokens
    weights = hostile().data["weights"].values[0, 0, 0]
    found = {(int(row["query"]), int(row["key"])): float(row["weight"]) for row in rows}
    assert found == {at: pytest.approx(weights[at], rel=1e-6) for at in np.ndindex(n, n)}
    check_pictures(one)


@pytest.mark.slow
def test_export_holds_the_visible_part(tab: Opens, served: Served) -> None:
    weights = served.profile("wide").data["weights"].values[0, 0, 0]
    one = tab().open("map", "wide", x=300, y=300, z=4)
    view = view_of(one, 600, 600)
    first, last, left, right = *view.rows, *view.columns
    rows = one.table()
    assert len(rows) == (last - first + 1) * (right - left + 1)
    for row in rows:
        assert float(row["weight"]) == pytest.approx(weights[int(row["query"]), int(row["key"])], rel=1e-6)
    assert {int(row["query"]) for row in rows} == set(range(first, last + 1))
    assert {int(row["key"]) for row in rows} == set(range(left, right + 1))
    image = next(x for x in check_pictures(one).iter() if x.tag.endswith("}image"))
    assert next(value for name, value in image.attrib.items() if name.endswith("href")).startswith(
        "data:image/png;base64,"
    )
