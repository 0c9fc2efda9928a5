"""The map in a real browser: it shows the weights of the profile and requests exactly the tiles that it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from viewer_fixture import HOSTILE, Served, Tab, check_pictures, hostile, share, unseen

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
TILE = 256


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


def view_of(tab: Tab, queries: int, keys: int) -> View:
    """The view in the address, with the margins that the page computes."""

    def layout(view: dict[str, float] | None) -> dict:
        return tab.js("layout", {"queries": queries, "keys": keys, "view": view})

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


def point(tab: Tab, view: View, query: int, key: int) -> None:
    box = tab.page.locator(".map-canvas").bounding_box()
    x, y = view.place(query, key)
    tab.page.mouse.move(box["x"] + x, box["y"] + y)
    tab.settled()


def shown(tab: Tab) -> tuple[int, int, float]:
    """Query, key and weight of the readout."""
    pair = tab.page.locator(".map-pair").all_inner_texts()
    query, key = (int(re.search(r"([\d,]+) “", text)[1].replace(",", "")) for text in pair)
    return query, key, share(tab.page.inner_text(".map-weight strong"))


def same(words: float, weight: float) -> bool:
    """Whether a weight agrees to the shown digits: three, or two for tiny ones."""
    return math.isclose(words, weight, rel_tol=5.1e-3 if weight >= 1e-5 else 5.1e-2)


# ---- the numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "group", "text", "layer", "head"),
    [("two", 0, 0, 1, 2), ("cross", 2, 1, 1, 1), ("gpt", 0, 0, 2, 1), ("mini", 0, 0, 2, 3)],
    ids=["padded", "cross attention, padded", "causal", "exact, of a model"],
)
def test_readout_shows_the_weight_of_the_data_set(
    view: Opens, served: Served, mini: Served, source: str, group: int, text: int, layer: int, head: int
) -> None:
    server = mini if source == "mini" else served
    data = list(server.profile(source).groups.values())[group]
    n, m = int(data["n_queries"][text]), int(data["n_keys"][text])
    weights = data["weights"].values[text, layer, head, :n, :m]
    one = view(server).open("map", source, group=group, text=text, layer=layer, head=head)
    stage = view_of(one, n, m)
    for query, key in ((n - 1, m - 1), (n - 1, 0), (n // 2, m // 3), (0, m - 1)):
        point(one, stage, query, key)
        if data.attrs["causal"] and key > query:
            expect(one.page.locator(".map-weight")).to_contain_text("masked")
            assert shown(one) == (query, key, 0)
            continue
        assert shown(one)[:2] == (query, key)
        assert same(shown(one)[2], weights[query, key]), (shown(one), weights[query, key])
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
    stage = view_of(one, 600, 600)
    assert stage.zoom == 1
    point(one, stage, 433, 120)
    query, key, weight = shown(one)
    assert max(abs(query - 433), abs(key - 120)) <= 1
    assert same(weight, weights[query, key])
    pooled = weights[query // 2 * 2 :][:2, key // 2 * 2 :][:, :2]
    said = one.page.locator(".map-bin").first.inner_text()
    assert f"queries {query // 2 * 2}–{query // 2 * 2 + 1} × keys {key // 2 * 2}–{key // 2 * 2 + 1}" in said
    assert same(share(re.search(r"largest (.*?%)", said)[1]), pooled.max())
    assert same(share(re.search(r"mean (.*?%)", said)[1]), pooled.mean())


# ---- hostile tokens, export -----------------------------------------------------------------------------------


def test_readout_and_export_hold_hostile_tokens_literally(view: Opens) -> None:
    one = view().open("map", "hostile", layer=0, head=0, cq=0, ck=0)
    n, said = len(HOSTILE), ""
    stage = view_of(one, n, n)
    for at in range(n):
        point(one, stage, at, n - 1 - at)
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
    check_pictures(one)
