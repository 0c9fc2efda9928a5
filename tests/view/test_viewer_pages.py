"""Sinks, live, compare, all maps and alignment in a real browser: they show the numbers of server and profile."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from qkv.models.loading import load_model
from qkv.server.live import Live
from qkv_lab.align.models import Aligners
from viewer_fixture import HOSTILE, Served, Tab, check_pictures, floats, percent, plain, texts_of

if TYPE_CHECKING:
    pass

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
SHOWN = 10  # next tokens that the live page lists


@pytest.fixture(scope="module")
def live() -> Live:
    """Computes the expected answers."""
    return Live(load_model("qkv-mini"))


@pytest.fixture(scope="module")
def aligners() -> Aligners:
    return Aligners()


# ---- sinks ----------------------------------------------------------------------------------------------------

WEIGHT = "Weight on the first token"
TITLES = [
    WEIGHT,
    "α of the first token",
    "Norm of the first token’s value",
    "What the first token’s value adds",
    "Norm of the first token’s key",
    "Sink score α on three kinds of text",
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
    every = list(range(len(heads)))
    weights = {f"Layer {row['layer']}, head {row['head']} · {percent(row['sink'])}" for _, row in heads.iterrows()}
    assert set(pointed(one, 0, every)) == weights
    added = {f"Layer {r.layer}, head {r.head} · {percent(r.contribution_first)}" for r in sinks.itertuples()}
    assert set(pointed(one, 3, every)) == added
    row = sinks.sort_values(["layer", "value_norm_first"]).iloc[0]  # dots of a layer are sorted by value
    assert pointed(one, 2, [0]) == [f"Layer 0, head {row['head']} · {row['value_norm_first']:.2f} ×"]
    stream = profile.residual["blocks"].isel(text=0)
    largest, dimension = (float(stream[name][2, 0]) for name in ("largest", "largest_dimension"))
    (depth,) = pointed(one, 6, [2])
    assert f"dimension {int(dimension)}" in depth
    assert f"{largest:.{2 if largest < 10 else 1}f}" in depth
    over = int((sinks["alpha_first"] > 0.3).sum())
    assert f"{over} of {len(heads)}" in one.page.locator(".sink-figure").nth(5).inner_text()
    lead = one.page.inner_text(".sink-lead")
    assert lead.startswith(f"{over} of {len(heads)} heads ha")
    assert f"rows of even weights have α = {sinks['alpha_even'].mean():.2g}" in lead
    assert one.page.locator("main tbody tr").count() == len(profile.sink_tokens())


def test_intervention_is_overlaid_restored_and_exported(view: Opens, tab: Opens, mini: Served) -> None:
    one = view(mini).open("sinks")
    one.page.click("text=Off by one")
    expect(one.page.locator(".sink-lead p")).to_have_count(2)
    intervention = mini.session.sources[int(one.settled().state["after"])]
    assert intervention.kind == "intervention"
    assert intervention.profile is not None
    expect(one.page.locator("main figure table")).to_have_count(2)
    profiles = mini.profile("mini"), intervention.profile
    before, later = (p.sinks()["alpha_first"].to_numpy() for p in profiles)
    said = one.page.locator(".sink-figure").nth(6).inner_text()
    assert f"{(before > 0.3).sum()} → {(later > 0.3).sum()} of {len(before)}" in said
    sinks = [p.heads()["sink"] for p in profiles]
    assert np.abs(sinks[0] - sinks[1]).max() > 0.01
    wanted = f"Layer 0, head 0 · {percent(sinks[0][0])} → {percent(sinks[1][0])}"
    assert wanted in pointed(one, 0, list(range(2 * len(before))))
    one.page.mouse.move(0, 0)

    fresh = tab(mini).follow(one.page.url)  # the address restores the comparison
    expect(fresh.page.locator('[data-key="after"]')).to_have_value(str(intervention.id))
    assert fresh.text() == one.settled().text()
    fresh.page.select_option('[data-key="after"]', "")
    expect(fresh.page.locator(".sink-lead p")).to_have_count(1)
    assert "after" not in fresh.settled().state
    expect(fresh.back().page.locator(".sink-lead p")).to_have_count(2)

    assert {*TITLES, "Weight on no token"} <= set(texts_of(check_pictures(one)))
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
    before, after = (answer["next"][when][:SHOWN] for when in ("before", "after"))
    want = [
        (spaced(b["token"]), (f"{percent(a['probability'])} → " if edited else "") + percent(b["probability"]))
        for a, b in zip(before, after, strict=True)
    ]
    bars = tab.settled().page.locator(".live-bars li")
    values = map(plain, bars.locator(".live-values").all_inner_texts())
    assert list(zip(bars.locator("code").all_inner_texts(), values, strict=True)) == want


def check_sinks(tab: Tab, answer: dict[str, Any], when: str) -> None:
    sinks = [f"{100 * x:.0f}" for row in answer["sink"][when] for x in row]
    expect(tab.page.locator(".live-cell > span")).to_have_text(sinks)


def test_live_page_answers_while_typing_and_keeps_a_long_text(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live")
    check_bars(one, live.answer(asked(live.description()["example"])), edited=False)
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
    assert [row["name"] for row in rows] == [x["token"] for x in answer["next"]["before"]]
    np.testing.assert_allclose(floats(rows, "after"), [x["probability"] for x in answer["next"]["after"]], rtol=1e-6)
    check_pictures(one)
    one.page.fill("#live-text", "")
    expect(one.page.locator("#live-trouble")).to_contain_text("Type some text")


# ---- sequences and images -------------------------------------------------------------------------------------


def test_translation_shows_and_exports_its_weights(view: Opens, mini: Served, aligners: Aligners) -> None:
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
    assert set(target) <= {text.strip() for text in texts_of(check_pictures(one))}
    one.page.fill("#align-text", "the purple zebra")
    expect(one.page.locator("#align-trouble")).not_to_be_empty()
    one.expect("400")
