"""The viewer's page about sinks, in a real browser: dots tell the numbers of the profile, before and after a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from viewer_fixture import Served, Tab, check_pictures, texts_of

pytest_plugins = ["viewer_fixture"]

Opens = Callable[..., Tab]
TITLES = [
    "Weight on the first token",
    "Length of the first token’s value",
    "Length of the first token’s key",
    "Sink score α on three kinds of text",
    "Largest activation by depth",
]


def titles(tab: Tab) -> list[str]:
    return tab.page.locator(".sink-title").all_inner_texts()


def pointed(tab: Tab, chart: int, dot: int) -> str:
    """What a chart says of its n-th dot while the pointer is on it."""
    figure = tab.page.locator(".sink-figure").nth(chart)
    figure.scroll_into_view_if_needed()
    box = figure.locator("circle").nth(dot).bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return figure.locator("output").inner_text()


def percent(share: float) -> str:
    return f"{100 * share:.{1 if 0 < 100 * share < 0.95 else 0}f}\u00a0%"


def test_dots_tell_the_numbers_of_the_profile(tab: Opens, mini: Served) -> None:
    one = tab(mini, reduced_motion="reduce").open("sinks", layer=0, head=1)  # scrolling takes no time
    profile = mini.profile("mini")
    assert titles(one) == TITLES
    heads, sinks = profile.heads(), profile.sinks()
    said = {pointed(one, 0, dot) for dot in range(24)}
    assert said == {f"Layer {row['layer']}, head {row['head']} · {percent(row['sink'])}" for _, row in heads.iterrows()}
    row = sinks.sort_values(["layer", "value_norm_first"]).iloc[0]  # dots of a layer stand in order of their value
    assert pointed(one, 1, 0) == f"Layer 0, head {row['head']} · {row['value_norm_first']:.2f} ×"
    stream = profile.residual["blocks"].isel(text=0)
    depth = pointed(one, 4, 2)
    assert f"dimension {int(stream['largest_dimension'][2, 0])}" in depth
    assert f"{float(stream['largest'][2, 0]):.2f}" in depth
    over = int((sinks["alpha_first"] > 0.3).sum())
    assert f"{over} of 24" in one.page.locator(".sink-figure").nth(3).inner_text()
    assert one.page.locator(".sink-lead").inner_text().startswith(f"{over} of 24 heads ha")
    rows = one.page.locator("main tbody tr")
    assert rows.count() == len(profile.sink_tokens())


def test_the_keyboard_walks_from_head_to_head_and_selects(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("sinks", layer=1, head=3)
    heads = mini.profile("mini").heads().set_index(["layer", "head"])["sink"]
    chart = one.page.locator(".sink-chart").first
    chart.focus()
    readout = one.page.locator(".sink-figure output").first
    one.press("ArrowLeft")
    assert readout.inner_text() == f"Layer 0, head 3 · {percent(heads[0, 3])}"
    order = list(heads[2].sort_values().index)
    one.press("ArrowRight", "ArrowRight")
    at = order.index(3)
    one.press("ArrowDown" if at else "ArrowUp")
    head = order[at - 1] if at else order[1]
    assert readout.inner_text() == f"Layer 2, head {head} · {percent(heads[2, head])}"
    one.press("Enter")
    one.settled()
    assert (one.state["layer"], one.state["head"]) == ("2", str(head))
    assert chart.evaluate("x => x === document.activeElement"), "the focus stays where it was"


def test_a_remedy_is_laid_beside(tab: Opens, mini: Served) -> None:
    one = tab(mini).open("sinks")
    one.page.click("text=Off by one")
    one.page.wait_for_function("() => document.querySelectorAll('.sink-lead p').length === 2")
    one.settled()
    remedy = int(one.state["after"])
    after = mini.session.sources[remedy].profile
    assert after is not None
    assert "Weight on no token" in titles(one)
    assert one.page.locator("main figure table").count() == 2
    before, later = (p.sinks()["alpha_first"].to_numpy() for p in (mini.profile("mini"), after))
    said = one.page.locator(".sink-figure").nth(4).inner_text()
    assert f"{(before > 0.3).sum()} → {(later > 0.3).sum()} of 24" in said
    both = mini.profile("mini").heads()["sink"][0], after.heads()["sink"][0]
    dots = [pointed(one, 0, dot) for dot in range(48)]
    assert f"Layer 0, head 0 · {percent(both[0])} → {percent(both[1])}" in dots

    link = one.page.url
    fresh = tab(mini).follow(link)
    assert fresh.page.locator(".sink-lead p").count() == 2, "the address restores the comparison"
    assert fresh.page.input_value('[data-key="after"]') == str(remedy)
    fresh.page.select_option('[data-key="after"]', "")
    fresh.settled()
    assert "after" not in fresh.state
    assert fresh.page.locator(".sink-lead p").count() == 1
    fresh.page.go_back()
    fresh.settled()
    assert fresh.page.locator(".sink-lead p").count() == 2

    drawing = check_pictures(one)
    assert {*TITLES, "Weight on no token"} <= set(texts_of(drawing))
    table = one.table()
    rows, depths = table[:48], table[48:]
    weights = [float(row["weight_on_first"]) for row in rows]
    expected = [*mini.profile("mini").heads()["sink"], *after.heads()["sink"]]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose([float(row["alpha_first"]) for row in rows], [*before, *later], rtol=1e-5)
    assert all(row["learned_sink"] == "" for row in rows[:24])
    assert float(rows[24]["learned_sink"]) > 0
    streams = [next(iter(profile.residual.values())) for profile in (mini.profile("mini"), after)]
    largest = [x for stream in streams for x in stream["largest"].values[0, :, 0]]
    assert [row["depth"] for row in depths] == [*"01234"] * 2
    np.testing.assert_allclose([float(row["largest_activation"]) for row in depths], largest, rtol=1e-5)


def test_profiles_of_other_shapes_stand_below(tab: Opens, served: Served) -> None:
    one = tab().open("sinks", "gpt", after=served.ids["two"])
    assert "two has 2 layers × 4 heads instead of 3 × 5" in one.page.inner_text(".sinks-said")
    assert titles(one) == ["Weight on the first token"] * 2
    assert len(one.table()) == 15 + 8
    said = one.page.inner_text(".sinks-controls")
    assert "open the model itself" in said, "a saved profile cannot run"


@pytest.mark.parametrize("source", ["gpt", "two", "cross", "long"])
def test_what_was_not_measured_is_not_drawn(tab: Opens, served: Served, source: str) -> None:
    one = tab().open("sinks", source)
    assert titles(one) == ["Weight on the first token"]
    heads = served.profile(source).heads()
    count = int((heads["sink"] > 0.3).sum())
    assert one.page.inner_text(".sink-lead").startswith(f"{count} of {len(heads)} heads put")
    first = pointed(one, 0, 0)
    assert re.fullmatch(r"Layer 0, head \d+ · [\d.]+\u00a0%", first)


def test_a_profile_that_is_not_there_is_said(tab: Opens) -> None:
    one = tab().open("sinks", "gpt", after=99)
    assert one.page.inner_text(".sinks-said") == "There is no profile 99."
