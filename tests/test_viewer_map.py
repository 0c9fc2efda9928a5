"""The map in a real browser: the weights it shows are those of the profile, and it asks for the tiles it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from viewer_fixture import HOSTILE, SEEN, Served, Tab, check_pictures, hostile, texts_of

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
TILE = 256
SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
LEFT, TOP, RIGHT, BOTTOM = 104, 84, 74, 66  # of the picture, for axes and edges: map_scene.js


@dataclass
class View:
    """Where tokens lie on the stage: `scale` pixels each, the first at `left`, `top`; and what of them is in view."""

    n: int
    scale: float
    left: float
    top: float
    rows: tuple[int, int]
    columns: tuple[int, int]

    def place(self, query: int, key: int) -> tuple[float, float]:
        """The middle of a cell."""
        return self.left + (key + 0.5) * self.scale, self.top + (query + 0.5) * self.scale

    @property
    def deepest(self) -> int:
        return max(0, math.ceil(math.log2(self.n / TILE)))

    @property
    def zoom(self) -> int:
        """The zoom that has at least one pixel for each of the screen."""
        return min(max(math.floor(self.deepest + math.log2(min(self.scale, 1)) + 0.02), 0), self.deepest)

    def tiles(self, pool: str = "max") -> set[str]:
        """What has to be asked for: the whole map in small, and the tiles in view."""
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
    """The view that the address tells of; how much room the axes take is the page's own affair."""

    def layout(view: dict[str, float] | None) -> dict:
        return tab.page.evaluate(LAYOUT, {"queries": queries, "keys": keys, "view": view})

    found = layout(None)
    if "z" in tab.state:
        asked = {name: float(tab.state[name]) for name in "xyz"}
        area, scale = layout(asked)["area"], 2 ** asked["z"]
        for name, tokens, room in (("x", keys, area["w"]), ("y", queries, area["h"])):  # no view beyond the map
            half = min(room / scale, tokens) / 2
            asked[name] = min(max(asked[name], half), tokens - half)
        found = layout(asked)
    at = found["origin"]
    return View(max(queries, keys), found["scale"], at["x"], at["y"], tuple(found["rows"]), tuple(found["columns"]))


def rested(tab: Tab) -> Tab:
    """The page waits for a view to last before it asks for tiles."""
    tab.pause(150)
    return tab.settled()


def point(tab: Tab, view: View, query: int, key: int) -> None:
    box = tab.page.locator(".map-canvas").bounding_box()
    x, y = view.place(query, key)
    tab.page.mouse.move(box["x"] + x, box["y"] + y)


def weight_of(words: str) -> float:
    """A weight as the page writes it: "12.3 %", "4.5 · 10⁻⁶ %"."""
    found = re.match(r"([\d.,]+)\s(?:·\s10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)\s)?%", words)
    assert found, words
    return float(found[1].replace(",", "")) / 100 * 10 ** int((found[2] or "⁰").translate(SUPERSCRIPT))


def shown(tab: Tab) -> tuple[int, int, float]:
    """Query, key and weight of the readout, once the weight is there."""
    strong = tab.page.locator(".map-weight strong")
    expect(strong).not_to_have_text("…")
    at = [
        int(re.search(r"([\d,]+) “", text)[1].replace(",", ""))
        for text in tab.page.locator(".map-pair").all_inner_texts()
    ]
    return at[0], at[1], weight_of(strong.inner_text())


def same(words: float, weight: float) -> bool:
    """Whether a weight was written to its digits: three, or two of what is next to nothing."""
    return math.isclose(words, weight, rel_tol=5.1e-3 if weight >= 1e-5 else 5.1e-2)


# ---- the numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "group", "text", "layer", "head"),
    [("two", 0, 0, 1, 2), ("two", 0, 1, 0, 3), ("cross", 2, 1, 1, 1), ("cross", 2, 0, 0, 2), ("gpt", 0, 0, 2, 1)],
    ids=["padded", "second text", "cross attention, padded", "cross attention", "causal"],
)
def test_hover_shows_the_weight_of_the_data_set(
    tab: Opens, served: Served, source: str, group: int, text: int, layer: int, head: int
) -> None:
    data = list(served.profile(source).groups.values())[group]
    n, m = int(data["n_queries"][text]), int(data["n_keys"][text])
    weights = data["weights"].values[text, layer, head, :n, :m]
    one = tab().open("map", source, group=group, text=text, layer=layer, head=head)
    view = view_of(one, n, m)
    rng = np.random.default_rng(3)
    cells = [(0, 0), (n - 1, m - 1), (n - 1, 0), *zip(rng.integers(0, n, 5), rng.integers(0, m, 5), strict=True)]
    if not data.attrs["causal"]:
        cells.append((0, m - 1))
    for query, key in cells:
        point(one, view, query, key)
        tokens = f"“{data['query_token'].values[text, query]}”", f"“{data['key_token'].values[text, key]}”"
        expect(one.page.locator(".map-pair").nth(0)).to_contain_text(str(query))
        expect(one.page.locator(".map-pair").nth(1)).to_contain_text(str(key))
        assert shown(one)[:2] == (query, key)
        assert same(shown(one)[2], weights[query, key]), (shown(one), weights[query, key])
        said = one.page.inner_text(".map-readout").replace(" ", "").replace("▁", "").replace("Ġ", "")
        assert all(token.replace("▁", "").replace("Ġ", "") in said for token in tokens)
        received = re.search(r"receives (.*?%) of", one.page.inner_text(".map-readout"))[1]
        assert same(weight_of(received), data["received"].values[text, layer, head, key] / n)
        entropy = re.search(r"entropy (?:is )?([\d.]+) nats", one.page.inner_text(".map-readout"))[1]
        assert float(entropy) == pytest.approx(data["entropy"].values[text, layer, head, query], abs=0.0051)


def test_exact_weights_of_a_model(tab: Opens, mini: Served) -> None:
    data = mini.profile("mini").data
    n = data.sizes["query"]
    weights = data["weights"].values[0, 2, 3]
    one = tab(mini).open("map", "mini", layer=2, head=3)
    view = view_of(one, n, n)
    for query, key in ((n - 1, 0), (n - 1, n - 1), (n // 2, n // 3), (3, 1)):
        point(one, view, query, key)
        expect(one.page.locator(".map-pair").nth(0)).to_contain_text(f"{query} ")
        expect(one.page.locator(".map-pair").nth(1)).to_contain_text(f"{key} ")
        assert shown(one)[:2] == (query, key)
        assert same(shown(one)[2], weights[query, key])


def test_from_afar_the_exact_weight_and_what_its_pixel_pools(tab: Opens, served: Served) -> None:
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


def test_what_the_mask_hides_is_nothing(tab: Opens) -> None:
    one = tab().open("map", "gpt", layer=0, head=4)
    point(one, view_of(one, 61, 61), 10, 40)
    expect(one.page.locator(".map-weight")).to_contain_text("hidden by the mask")
    assert shown(one) == (10, 40, 0)


# ---- tiles ----------------------------------------------------------------------------------------------------


def test_tiles_of_the_whole_map(tab: Opens) -> None:
    one = rested(tab().open("map", "wide", head=1))
    assert set(one.tiles()) == {f"0/0/0/1/{tile}" for tile in view_of(one, 600, 600).tiles()}
    assert len(set(one.tiles())) == 5  # four, and the one that shows all


@pytest.mark.parametrize(("x", "y", "z"), [(300, 300, 1), (40, 560, 3.5), (590, 10, 0.2), (258, 300, 5)])
def test_tiles_of_a_part(tab: Opens, x: float, y: float, z: float) -> None:
    one = rested(tab().open("map", "wide", x=x, y=y, z=z))
    view = view_of(one, 600, 600)
    assert view.zoom == 2
    assert set(one.tiles()) == {f"0/0/0/0/{tile}" for tile in view.tiles()}
    first, last, left, right = *view.rows, *view.columns
    if (last - first) * (right - left) < 2000:  # near enough for every token to have its label
        said = texts_of(check_pictures(one))
        keys = [f"{at}" for at in range(left + 1, right)]
        assert [key for key in keys if not any(text.endswith(key) for text in said)] == []


@pytest.mark.slow
def test_zooming_asks_for_what_comes_into_view_and_for_nothing_twice(tab: Opens) -> None:
    one = rested(tab().open("map", "wide"))
    box = one.page.locator(".map-canvas").bounding_box()
    far = view_of(one, 600, 600)
    x, y = far.place(450, 150)
    before = one.page.url
    one.page.mouse.move(box["x"] + x, box["y"] + y)
    held = []
    for _ in range(5):  # what is smaller than the stage is kept in its middle; then the pointer holds the map
        one.page.mouse.wheel(0, -240)
        one.pause(300)
        held.append(shown(one)[:2])
    assert np.ptp(held[2:], axis=0).max() <= 2, held
    one.page.wait_for_url(lambda url: "z=" in url)
    one.pause(450)
    rested(one)
    near = view_of(one, 600, 600)
    assert near.scale > 8 * far.scale
    assert {f"0/0/0/0/{tile}" for tile in near.tiles()} <= set(one.tiles())
    one.page.focus(".map-canvas")
    since = len(one.requests)
    one.press("0")
    one.page.wait_for_url(lambda url: "z=" not in url)
    rested(one)
    # The readout of a bin asks for its mean, too; what was shown before is kept.
    assert [tile for tile in one.tiles(since) if "/max/" in tile] == []
    one.page.go_back()
    one.page.wait_for_url(lambda url: "z=" in url)
    one.page.go_back()
    one.page.wait_for_url(before)


def test_panning_with_the_mouse_moves_the_view(tab: Opens) -> None:
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
    assert {f"0/0/0/0/{tile}" for tile in view_of(one, 600, 600).tiles()} <= set(one.tiles())


def test_means_are_other_tiles(tab: Opens, served: Served) -> None:
    one = rested(tab().open("map", "wide"))
    since = len(one.requests)
    one.page.click('.map-settings label:has-text("mean")')
    rested(one)
    assert one.state["pool"] == "mean"
    assert set(one.tiles(since)) == {f"0/0/0/0/{x}" for x in view_of(one, 600, 600).tiles("mean")} - {
        "0/0/0/0/max/0/0/0"
    }
    weights = served.profile("wide").data["weights"].values[0, 0, 0]
    rows = one.table()
    want = weights.reshape(300, 2, 300, 2).mean((1, 3))
    found = np.array([float(row["mean_weight"]) for row in rows]).reshape(300, 300)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-9)
    assert [int(rows[301][name]) for name in ("first_query", "last_query", "first_key", "last_key")] == [2, 3, 2, 3]


def test_a_profile_without_maps_says_why(tab: Opens) -> None:
    one = tab().open("map", "long")
    assert "The profile keeps no maps" in one.page.inner_text(".map-why")
    assert one.tiles() == []
    one.page.click("#export")
    one.page.click("#export-menu [data-kind=csv]")
    expect(one.page.locator("#troubles")).to_contain_text("no map to save")


# ---- address, keys, looks -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_address_brings_back_the_view(tab: Opens) -> None:
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
    assert shown(other) == shown(one)
    assert shown(other)[:2] == (512, 77)
    other.comes_to_say(one.text())
    box = one.page.locator(".map-canvas").bounding_box()
    for part in (0.3, 0.45, 0.6):  # the same token under the same place
        for tab_ in (one, other):
            tab_.page.mouse.move(box["x"] + part * box["width"], box["y"] + part * box["height"])
        expect(other.page.locator(".map-pair").nth(1)).to_have_text(one.page.locator(".map-pair").nth(1).inner_text())
        assert shown(other) == shown(one)


def test_the_crosshair_is_moved_with_keys(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[1, 0, 0]
    one = tab().open("map", "two", text=1, layer=0, head=0)
    one.page.focus('[aria-label="Whole map (0)"]')
    one.press("Shift+Tab", "Shift+Tab", "Shift+Tab")
    assert one.page.evaluate("document.activeElement.className").startswith("map-canvas")
    start = shown(one)
    one.press("ArrowUp", "ArrowUp", "ArrowRight")
    expect(one.page.locator(".map-pair").nth(0)).to_contain_text(f"{start[0] - 2} ")
    assert shown(one)[:2] == (start[0] - 2, start[1] + 1)
    assert same(shown(one)[2], weights[start[0] - 2, start[1] + 1])
    one.press("Enter")
    one.page.wait_for_url(lambda url: f"cq={start[0] - 2}" in url)
    assert one.state["ck"] == str(start[1] + 1)
    one.press("+")
    one.page.wait_for_url(lambda url: "z=" in url)
    one.press("0")
    one.page.wait_for_url(lambda url: "z=" not in url)
    expect(one.page.locator("#live")).to_contain_text("exact weight")  # said by a screen reader
    one.press("Escape")
    one.page.wait_for_url(lambda url: "cq=" not in url)
    one.press("n")  # the next head
    one.settled()
    assert one.state["head"] == "1"


def test_a_pin_leads_to_the_text(tab: Opens) -> None:
    one = tab().open("map", "two", layer=1, head=1, cq=5, ck=9)
    assert shown(one)[:2] == (5, 9)
    one.page.click('.map-pinned [data-key="text"]')
    one.settled()
    assert one.at == "text"
    assert one.state["pins"] == "5"


def test_another_text_is_seen_whole(tab: Opens) -> None:
    one = tab().open("map", "two", text=1, layer=1, head=1, x=30, y=30, z=5, cq=30, ck=36)
    one.page.select_option('#context [data-key="text"]', index=0)
    one.settled()
    assert one.state == {"source": one.state["source"], "group": "0", "text": "0", "layer": "1", "head": "1"}
    assert set(one.tiles()[-1:]) == {"0/0/1/1/max/0/0/0"}
    assert one.page.inner_text(".map-readout").startswith("Point at the map")


def test_a_pin_belongs_to_its_text(tab: Opens) -> None:
    one = tab().open("map", "two", text=1, layer=1, head=1, cq=5, ck=9)
    assert shown(one)[:2] == (5, 9)
    one.page.select_option('#context [data-key="text"]', index=0)
    one.settled()
    assert "cq" not in one.state
    assert one.page.locator(".map-pinned button").count() == 0


def test_the_view_is_kept_from_head_to_head(tab: Opens) -> None:
    one = rested(tab().open("map", "wide", x=300, y=300, z=2))
    box = one.page.locator(".map-canvas").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    one.page.mouse.move(*middle)
    one.page.mouse.down()
    one.page.mouse.move(middle[0] + 80, middle[1], steps=4)
    one.page.mouse.up()
    one.press("n")  # before the address follows
    one.page.wait_for_url(lambda url: "head=1" in url and "x=280" in url)
    one.pause(500)
    assert one.state["x"] == "280"


def test_an_address_without_a_view_shows_all(tab: Opens, served: Served) -> None:
    weights = served.profile("wide").data["weights"].values[0, 0, 1]
    one = rested(tab().open("map", "wide", x=100, y=500, z=3))
    one = rested(one.open("map", "wide", head=1))
    assert "z" not in one.state
    point(one, view_of(one, 600, 600), 433, 120)
    query, key, weight = shown(one)
    assert abs(query - 433) + abs(key - 120) <= 2
    assert same(weight, weights[query, key])


def test_a_head_that_cannot_be_had_leaves_no_other_under_its_name(tab: Opens) -> None:
    one = rested(tab().open("map", "wide"))
    one.page.route("**/map/0/0/0/1", lambda route: route.fulfill(status=500, json={"error": "The disk is full."}))
    one.press("n")
    expect(one.page.locator(".map-why")).to_contain_text("The disk is full.")
    point(one, view_of(one, 600, 600), 433, 120)
    assert one.page.locator(".map-weight").count() == 0
    one.expect("500")
    one.page.unroute("**/map/0/0/0/1")
    one.page.click(".map-why button")
    expect(one.page.locator(".map-why")).to_be_hidden()
    expect(one.page.locator(".map-canvas")).to_have_attribute("aria-label", re.compile("[Hh]ead 1"))
    point(one, view_of(one, 600, 600), 400, 120)
    expect(one.page.locator(".map-weight")).to_be_visible()


def test_a_tile_that_fails_does_not_hold_up_others(tab: Opens) -> None:
    one = tab()
    # The failed one would be asked for again after three seconds: here that time never comes.
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


def test_the_map_fills_the_window_and_no_more(tab: Opens) -> None:
    one = tab().open("map", "wide")
    assert one.page.evaluate("document.documentElement.scrollHeight - innerHeight") <= 0
    canvas = one.page.locator(".map-canvas").bounding_box()
    assert canvas["width"] * canvas["height"] > 0.5 * 1280 * 720
    assert canvas["y"] + canvas["height"] <= 720


def test_the_map_is_painted_in_the_theme(tab: Opens) -> None:
    """Where the weight is, the picture is darkest in the light, and lightest in the dark."""
    one = tab().open("map", "gpt", layer=1, head=1, scale="linear")  # each attends to the token before
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
    paper, strong, weak = one.page.evaluate(brightness, [corner, peak, rest])
    assert strong + 200 < weak <= paper + 30
    one.press("t")
    one.pause(100)
    paper, strong, weak = one.page.evaluate(brightness, [corner, peak, rest])
    assert paper < 150
    assert strong > weak + 200


# ---- hostile tokens, export -----------------------------------------------------------------------------------


def test_hostile_tokens_are_named_as_text(tab: Opens) -> None:
    one = tab().open("map", "hostile", layer=0, head=0, cq=0, ck=0)
    n, said = len(HOSTILE), ""
    view = view_of(one, n, n)
    for at in range(n):
        point(one, view, at, n - 1 - at)
        expect(one.page.locator(".map-pair").nth(0)).to_contain_text(f"query {at} ")
        said += one.page.inner_text(".map-readout")
    assert [part for part in SEEN if part not in said] == []
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
def test_what_is_in_view_is_exported(tab: Opens, served: Served) -> None:
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
