"""The page about sinks in a real browser: its dots show the profile's numbers, before and after an intervention."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from viewer_fixture import Served, Tab, check_pictures, texts_of

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
TITLES = [
    "Weight on the first token",
    "α of the first token",
    "Norm of the first token’s value",
    "What the first token’s value adds",
    "Norm of the first token’s key",
    "Sink score α on three kinds of text",
    "Largest activation by depth",
]


def expect_titles(tab: Tab, titles: list[str]) -> None:
    expect(tab.page.locator(".sink-title")).to_have_text(titles)


def pointed(tab: Tab, chart: int, dot: int) -> str:
    """The readout of a chart while the pointer is on its n-th dot."""
    figure = tab.page.locator(".sink-figure").nth(chart)
    figure.scroll_into_view_if_needed()
    circle, ring = figure.locator("circle").nth(dot), figure.locator("circle[visibility]")

    def ring_is_there() -> bool:
        box = circle.bounding_box()
        if box is None:
            return False
        tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        place = [(one.get_attribute("cx"), one.get_attribute("cy")) for one in (circle, ring)]
        return place[0] == place[1] and ring.get_attribute("visibility") == "visible"

    tab.eventually(ring_is_there)
    return figure.locator("output").inner_text()


def percent(share: float) -> str:
    return f"{100 * share:.{1 if 0 < 100 * share < 0.95 else 0}f}\u00a0%"


def test_dots_show_the_numbers_of_the_profile(tab: Opens, mini: Served) -> None:
    one = tab(mini, reduced_motion="reduce").open("sinks", layer=0, head=1)  # scrolling takes no time
    profile = mini.profile("mini")
    expect_titles(one, TITLES)
    heads, sinks = profile.heads(), profile.sinks()
    said = {pointed(one, 0, dot) for dot in range(len(heads))}
    assert said == {f"Layer {row['layer']}, head {row['head']} · {percent(row['sink'])}" for _, row in heads.iterrows()}
    row = sinks.sort_values(["layer", "value_norm_first"]).iloc[0]  # dots of a layer are sorted by value
    assert pointed(one, 2, 0) == f"Layer 0, head {row['head']} · {row['value_norm_first']:.2f} ×"
    stream = profile.residual["blocks"].isel(text=0)
    depth = pointed(one, 6, 2)
    assert f"dimension {int(stream['largest_dimension'][2, 0])}" in depth
    largest = float(stream["largest"][2, 0])
    assert f"{largest:.{2 if largest < 10 else 1}f}" in depth
    over = int((sinks["alpha_first"] > 0.3).sum())
    assert f"{over} of {len(heads)}" in one.page.locator(".sink-figure").nth(5).inner_text()
    assert one.page.locator(".sink-lead").inner_text().startswith(f"{over} of {len(heads)} heads ha")
    assert f"rows of even weights have α = {sinks['alpha_even'].mean():.2g}" in one.page.inner_text(".sink-lead")
    said = {pointed(one, 3, dot) for dot in range(len(heads))}
    assert said == {f"Layer {r.layer}, head {r.head} · {percent(r.contribution_first)}" for r in sinks.itertuples()}
    rows = one.page.locator("main tbody tr")
    assert rows.count() == len(profile.sink_tokens())


def test_arrow_keys_move_between_dots_and_enter_selects(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("sinks", layer=1, head=3)
    heads = mini.profile("mini").heads().set_index(["layer", "head"])["sink"]
    chart = one.page.locator(".sink-chart").first
    chart.focus()
    readout = one.page.locator(".sink-figure output").first
    one.press("ArrowLeft")
    expect(readout).to_have_text(f"Layer 0, head 3 · {percent(heads[0, 3])}")
    order = list(heads[2].sort_values().index)
    one.press("ArrowRight", "ArrowRight")
    at = order.index(3)
    one.press("ArrowDown" if at else "ArrowUp")
    head = order[at - 1] if at else order[1]
    expect(readout).to_have_text(f"Layer 2, head {head} · {percent(heads[2, head])}")
    one.press("Enter")
    one.settled()
    one.arrives(layer=2, head=head)
    expect(chart).to_be_focused()


def test_intervention_is_overlaid_restored_and_exported(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("sinks")
    one.page.click("text=Off by one")
    expect(one.page.locator(".sink-lead p")).to_have_count(2)
    one.settled()
    intervention = int(one.state["after"])
    assert mini.session.sources[intervention].kind == "intervention"
    after = mini.session.sources[intervention].profile
    assert after is not None
    expect(one.page.locator(".sink-title", has_text="Weight on no token")).to_have_count(1)
    expect(one.page.locator("main figure table")).to_have_count(2)
    whole = one.text()
    before, later = (p.sinks()["alpha_first"].to_numpy() for p in (mini.profile("mini"), after))
    said = one.page.locator(".sink-figure").nth(6).inner_text()
    assert f"{(before > 0.3).sum()} → {(later > 0.3).sum()} of {len(before)}" in said
    both = mini.profile("mini").heads()["sink"][0], after.heads()["sink"][0]
    assert np.abs(mini.profile("mini").heads()["sink"] - after.heads()["sink"]).max() > 0.01
    wanted = f"Layer 0, head 0 · {percent(both[0])} → {percent(both[1])}"
    assert any(pointed(one, 0, dot) == wanted for dot in range(2 * len(before)))

    link = one.page.url
    fresh = tab(mini).follow(link)
    expect(fresh.page.locator(".sink-lead p")).to_have_count(2)  # the address restores the comparison
    expect(fresh.page.locator('[data-key="after"]')).to_have_value(str(intervention))
    fresh.eventually(fresh.text, whole)
    fresh.page.select_option('[data-key="after"]', "")
    fresh.settled()
    fresh.eventually(lambda: "after" not in fresh.state)
    expect(fresh.page.locator(".sink-lead p")).to_have_count(1)
    fresh.page.go_back()
    fresh.settled()
    expect(fresh.page.locator(".sink-lead p")).to_have_count(2)

    drawing = check_pictures(one)
    assert {*TITLES, "Weight on no token"} <= set(texts_of(drawing))
    table = one.table()
    rows, depths = table[: 2 * len(before)], table[2 * len(before) :]
    weights = [float(row["weight_on_first"]) for row in rows]
    expected = [*mini.profile("mini").heads()["sink"], *after.heads()["sink"]]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose([float(row["alpha_first"]) for row in rows], [*before, *later], rtol=1e-5)
    assert all(row["learned_sink"] == "" for row in rows[: len(before)])
    assert float(rows[len(before)]["learned_sink"]) > 0
    streams = [next(iter(profile.residual.values())) for profile in (mini.profile("mini"), after)]
    largest = [x for stream in streams for x in stream["largest"].values[0, :, 0]]
    layers = len(mini.profile("mini").data["layer"])
    assert [row["depth"] for row in depths] == [*map(str, range(layers + 1))] * 2
    np.testing.assert_allclose([float(row["largest_activation"]) for row in depths], largest, rtol=1e-5)


def test_weights_of_rows_that_do_not_sum_to_one_are_also_shown_undivided(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("sinks")
    expect(one.page.locator(".sink-title", has_text="Undivided weight")).to_have_count(0)
    one.page.click("text=Sigmoid")
    expect(one.page.locator(".sink-lead p")).to_have_count(2)
    one.settled()
    expect(one.page.locator(".sink-title", has_text="Undivided weight on the first token")).to_have_count(1)


def test_profile_of_another_size_is_shown_below(tab: Opens, served: Served) -> None:
    one = tab().open("sinks", "gpt", after=served.ids["two"])
    expect(one.page.locator(".sinks-note")).to_contain_text("two has 2 layers × 4 heads instead of 3 × 5")
    expect_titles(one, ["Weight on the first token"] * 2)
    assert len(one.table()) == 15 + 8
    said = one.page.inner_text(".sinks-controls")
    assert "open the model itself" in said, "a saved profile cannot run"


@pytest.mark.parametrize("source", ["gpt", "two", "cross", "long"])
def test_missing_measurements_have_no_chart(tab: Opens, served: Served, source: str) -> None:
    one = tab().open("sinks", source)
    expect_titles(one, ["Weight on the first token"])
    first = pointed(one, 0, 0)
    assert re.fullmatch(r"Layer 0, head \d+ · [\d.]+\u00a0%", first)


def test_unknown_profile_to_compare_is_reported(tab: Opens) -> None:
    one = tab().open("sinks", "gpt", after=99)
    expect(one.page.locator(".sinks-note")).to_have_text("There is no profile 99.")
