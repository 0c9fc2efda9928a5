"""Sinks, live, compare and alignment in a real browser: they show the numbers of the server and the profile."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import qkv
from qkv.profiler.data import tables
from qkv.report.payload import trimmed
from qkv.server.live import Live
from qkv.server.run import serve_in_thread
from qkv.server.session import Session
from qkv_lab.align.models import Aligners
from viewer_fixture import HOSTILE, LIVE_TEXT, PHONE, VISIBLE_PARTS, Served, Tab, check_pictures, overflow, texts_of

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
SHOWN = 10


@pytest.fixture(scope="module")
def live() -> Live:
    """Computes the expected answers."""
    from qkv.models.loading import load_model

    return Live(load_model("qkv-mini"))


@pytest.fixture(scope="module")
def aligners() -> Aligners:
    return Aligners()


def percent(share: float) -> str:
    """Format a share as numbers.js does."""
    value = 100 * share
    if 0 < value < 0.00095:
        return "< 0.001 %"
    if 0 < value < 0.095:
        return f"{value:.1g} %"
    return f"{value:.{1 if 0 < value < 0.95 else 0}f} %"


def nats(divergence: float) -> str:
    """Format a positive divergence as live_words.js does."""
    return "under 0.001 nats" if divergence < 0.001 else f"{divergence:#.2g}".rstrip(".") + " nats"


def plain(text: str) -> str:
    """Text with ordinary spaces."""
    return text.replace("\u00a0", " ").strip()


# ---- sinks ----------------------------------------------------------------------------------------------------


def test_sink_dots_show_the_numbers_of_the_profile(tab: Opens, served: Served) -> None:
    heads = served.profile("gpt").heads()
    one = tab().open("sinks", "gpt", layer=0, head=4)
    chart = one.page.locator('.sink-chart[aria-label^="Weight on the first token"]')
    means = [percent(x) for x in heads.groupby("layer")["sink"].mean()]
    assert all(f"{layer}: {mean}" in plain(chart.get_attribute("aria-label")) for layer, mean in enumerate(means))
    chart.focus()
    readout, seen = one.page.locator(".sink-figure output").first, set()
    for key in ("ArrowRight", "ArrowUp", "ArrowUp", "ArrowRight", "ArrowUp"):
        one.press(key).pause(25)
        said = plain(readout.inner_text())
        layer, head = map(int, re.search(r"Layer (\d+), head (\d+)", said).groups())
        assert said.endswith(percent(heads["sink"][5 * layer + head])), said
        seen.add((layer, head))
    assert len(seen) > 2
    one.press("Enter")
    one.settled()
    one.arrives(layer=layer, head=head)
    rows = one.table()
    np.testing.assert_allclose([float(row["weight_on_first"]) for row in rows], heads["sink"], rtol=1e-5)
    check_pictures(one)


def test_profile_to_compare_sinks_with_is_kept_in_the_address(tab: Opens, served: Served) -> None:
    one = tab().open("sinks", "two")
    one.page.select_option('[data-key="after"]', label="hostile")
    one.settled()
    one.arrives(after=served.ids["hostile"])
    one.eventually(lambda: "hostile has 2 layers × 3 heads instead of 2 × 4" in one.text())
    rows = one.table()
    assert [row["profile"] for row in rows] == ["two"] * 8 + ["hostile"] * 6
    other = tab().follow(one.page.url)
    other.eventually(other.text, one.text())


# ---- live -----------------------------------------------------------------------------------------------------


def bars(tab: Tab) -> list[tuple[str, str]]:
    """The listed next tokens with their probabilities as text."""
    return [
        (item.locator("code").inner_text(), plain(item.locator(".live-values").inner_text()))
        for item in tab.page.locator(".live-bars li").all()
    ]


def spaced(token: str) -> str:
    return re.sub(" +", lambda x: f"␣×{len(x[0])}" if len(x[0]) > 2 else "␣" * len(x[0]), token).replace("\n", "⏎")


def answer_of(live: Live, text: str, *edits: tuple[int, int, str, float], at: tuple[int, int] = (0, 0)) -> dict:
    changes = [SimpleNamespace(layer=a, head=b, normalizer=c, temperature=d) for a, b, c, d in edits]
    return live.answer(SimpleNamespace(text=text, edits=changes, layer=at[0], head=at[1], k=SHOWN, ids=None))


def check_bars(tab: Tab, answer: dict, *, edited: bool) -> None:
    before, after = (answer["next"][when][:SHOWN] for when in ("before", "after"))
    want = [
        (
            spaced(now["token"]),
            f"{percent(was['probability'])} → {percent(now['probability'])}" if edited else percent(now["probability"]),
        )
        for was, now in zip(before, after, strict=True)
    ]
    tab.eventually(lambda: bars(tab), want)


def test_live_page_answers_while_typing(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live")
    check_bars(one, answer_of(live, live.description()["example"]), edited=False)
    one.page.fill("#live-text", "def add(a, b):\n    return a +")
    one.page.wait_for_url(lambda url: "prompt=def" in url)
    one.settled()
    answer = answer_of(live, "def add(a, b):\n    return a +")
    check_bars(one, answer, edited=False)
    expect(one.page.locator(".live-token")).to_have_count(len(answer["tokens"]))
    sinks = [f"{100 * x:.0f}" for row in answer["sink"]["before"] for x in row]
    expect(one.page.locator(".live-cell > span")).to_have_text(sinks)


def test_another_normalizer_changes_the_next_token(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live", prompt=LIVE_TEXT)
    one.page.click('[data-key="quick-all"]')
    one.page.click('.live-setting label:has-text("off-by-one")')
    expect(one.page.locator(".live-headline")).to_contain_text("KL divergence")
    one.settled()
    layers, heads = live.description()["layers"], live.description()["heads"]
    edits = [(layer, head, "off-by-one", 1.0) for layer in range(layers) for head in range(heads)]
    answer = answer_of(live, LIVE_TEXT, *edits)
    assert answer["divergence"] > 0
    check_bars(one, answer, edited=True)
    expect(one.page.locator(".live-headline")).to_contain_text(f"KL divergence {nats(answer['divergence'])}")
    cells = [f"{100 * x:.0f}" for row in answer["sink"]["after"] for x in row]
    expect(one.page.locator(".live-cell > span")).to_have_text(cells)
    one.arrives(edits="o1-all")
    one.page.click('[data-key="reset"]')
    expect(one.page.locator(".live-headline")).to_have_text("The model is as trained.")
    one.settled()
    check_bars(one, answer_of(live, LIVE_TEXT), edited=False)


@pytest.mark.slow
def test_keys_edit_a_head(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live", prompt=LIVE_TEXT)
    one.page.focus('.live-cell[tabindex="0"]')
    one.press("ArrowRight", "ArrowDown", "Enter")
    one.page.wait_for_url(lambda url: "at=1.1" in url)
    for _ in range(8):  # over the buttons to the normalizers
        one.press("Tab")
        if one.page.evaluate("document.activeElement.type") == "radio":
            break
    one.press("ArrowRight", "ArrowRight")
    one.press("Tab")
    one.until("document.activeElement.dataset.key === 'temperature'")
    for _ in range(6):  # each step is a factor of 10 to the power of 1/20
        one.press("ArrowRight")
    one.page.wait_for_url(lambda url: "edits=s2-1.1" in url)
    one.pause(150)
    one.settled()
    answer = answer_of(live, LIVE_TEXT, (1, 1, "sigmoid", 2.0), at=(1, 1))
    check_bars(one, answer, edited=True)
    n = len(answer["tokens"])
    maps = [np.frombuffer(base64.b64decode(answer[x]), "<f4").reshape(n, n) for x in ("map_before", "map")]
    one.page.focus(".live-map >> nth=1")
    one.press("ArrowDown", "ArrowDown", "ArrowRight")
    expect(one.page.locator(".live-aside .readout")).to_contain_text(re.compile("^query 2 .* key 1 "))
    said = plain(one.page.inner_text(".live-aside .readout"))
    assert said.endswith(f"{percent(maps[0][2, 1])} → {percent(maps[1][2, 1])}")
    other = tab(mini).follow(one.page.url)
    check_bars(other, answer, edited=True)
    expect(other.page.locator("#live-text")).to_have_value(LIVE_TEXT)


@pytest.mark.slow
def test_live_page_generates_steps_undoes_and_plays(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live", prompt="import os", heat=0)
    step = one.page.get_by_role("button", name="Step")
    text, ids = "import os", None
    for at in range(3):
        step.click()
        found = live.step(
            SimpleNamespace(
                text=text, ids=ids, edits=[], layer=0, head=0, k=SHOWN, sampling_temperature=0.0, seed=0, step=at
            )
        )
        text, ids = found["text"], found.get("ids")
        expect(one.page.locator("#live-text")).to_have_value(text)
        expect(one.page.locator(".live-headline")).to_contain_text("was sampled, with probability")
        one.settled()
    expect(one.page.locator(".live-token.live-made, .live-token.live-new")).to_have_count(3)
    one.page.get_by_role("button", name="Undo").click()
    expect(one.page.locator("#live-text")).not_to_have_value(text)
    one.page.get_by_role("button", name="Play").click()
    before = len(one.page.input_value("#live-text"))
    one.until(f"document.querySelector('#live-text').value.length > {before + 4}")
    one.page.get_by_role("button", name="Stop").click()
    expect(one.page.get_by_role("button", name="Play")).to_be_visible()
    one.settled()
    length = len(one.page.input_value("#live-text"))
    one.pause(600)
    assert len(one.page.input_value("#live-text")) == length


@pytest.mark.slow
def test_live_page_handles_hostile_text_and_exports(tab: Opens, mini: Served, live: Live) -> None:
    text = " ".join(token for token in HOSTILE if len(token) < 200)
    one = tab(mini).open("live", prompt="x")
    one.page.fill("#live-text", text)
    one.pause(300)
    one.settled()
    expect(one.page.locator(".live-tokens")).to_contain_text("script")
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    assert one.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "\u202e" not in one.page.inner_text(".live-tokens")
    one.page.fill("#live-text", "import os")
    one.page.wait_for_url(lambda url: "prompt=import" in url)
    one.settled()
    answer = answer_of(live, "import os")
    rows = [row for row in one.table() if row["what"] == "probability of the next token"]
    assert [row["name"] for row in rows] == [x["token"] for x in answer["next"]["before"]]
    np.testing.assert_allclose(
        [float(row["after"]) for row in rows], [x["probability"] for x in answer["next"]["after"]], rtol=1e-6
    )
    check_pictures(one)
    one.page.fill("#live-text", "")
    expect(one.page.locator("#live-trouble")).to_have_text("Type some text for the model to read.")


def test_typing_during_a_step_keeps_the_typed_text(tab: Opens, mini: Served, live: Live) -> None:
    one, held = tab(mini), []  # the route comes first, because it is not there at once in a page that is open

    def hold(route: Route) -> None:
        held.append(route)

    one.page.route("**/api/live/step", hold)
    one.open("live", prompt="import os")
    one.page.get_by_role("button", name="Step").click()
    one.eventually(lambda: len(held) > 0)
    one.page.fill("#live-text", "import sys")
    one.page.wait_for_url(lambda url: "prompt=import+sys" in url or "prompt=import%20sys" in url)
    for route in held:
        route.continue_()
    one.pause(300)
    one.settled()
    expect(one.page.locator("#live-text")).to_have_value("import sys")
    check_bars(one, answer_of(live, "import sys"), edited=False)
    one.page.unroute("**/api/live/step")


def test_long_text_survives_leaving_the_page(tab: Opens, mini: Served) -> None:
    text = "import os\n" * 60
    one = tab(mini).open("live")
    one.page.fill("#live-text", text)
    one.page.click("#nav >> text=Overview")  # before the text is in the address
    one.settled()
    one.page.click("#nav >> text=Live")
    one.settled()
    expect(one.page.locator("#live-text")).to_have_value(text)


def test_text_with_too_many_tokens_is_reported(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live")
    one.page.fill("#live-text", "é7" * 900)
    expect(one.page.locator("#live-trouble")).to_contain_text("tokens, expected")
    expect(one.page.locator("#live-text")).to_have_attribute("aria-invalid", "true")
    one.expect("400")


# ---- compare --------------------------------------------------------------------------------------------------


def test_comparison_of_two_heads_shows_and_exports_their_numbers(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[0, :, :, :23, :23]
    one = tab().open("compare", "two", layer=0, head=1, bsource=served.ids["two"], bgroup=0, btext=0, blayer=1, bhead=2)
    a, b = weights[0, 1], weights[1, 2]
    distance = np.abs(a - b).sum(-1) / 2
    one.eventually(lambda: plain(one.page.inner_text(".compare-apart strong")), percent(distance.mean()))
    one.page.focus(".compare-map >> nth=0")
    one.press("ArrowDown", "ArrowDown", "ArrowRight")
    expect(one.page.locator(".compare-readout")).to_contain_text(re.compile("^query 2 .* key 1 "))
    said = plain(one.page.inner_text(".compare-readout"))
    found = [float(x) / 100 for x in re.findall(r"[AB] ([\d.]+) %", said)]
    assert found[:2] == [pytest.approx(a[2, 1], rel=0.06, abs=1e-4), pytest.approx(b[2, 1], rel=0.06, abs=1e-4)]
    rows = one.table()
    variation = [float(row["difference"]) for row in rows if row["what"] == "total_variation"]
    np.testing.assert_allclose(variation, distance, rtol=1e-4)
    entropy = [(float(row["a"]), float(row["b"])) for row in rows if row["what"] == "entropy" and row["position"]]
    data = served.profile("two").data["entropy"].values[0, ..., :23]
    np.testing.assert_allclose(entropy, np.stack([data[0, 1], data[1, 2]], 1), atol=2e-4)
    heads = tables.head_table(trimmed(served.profile("two").data, 0))
    whole = next(row for row in rows if row["what"] == "distance" and not row["position"])
    assert (float(whole["a"]), float(whole["b"])) == pytest.approx(
        (heads["distance"][1], heads["distance"][6]), rel=1e-5
    )
    cells = [row for row in rows if row["what"] == "weight"]
    places = [(int(row["position"]), int(row["key"])) for row in cells]
    assert places == [(query, key) for query in range(23) for key in range(23)]
    np.testing.assert_allclose(
        [(float(row["a"]), float(row["b"])) for row in cells], np.stack([a, b], -1).reshape(-1, 2), rtol=1e-5
    )
    check_pictures(one)


def test_card_names_the_heads_with_the_most_similar_maps(tab: Opens, served: Served) -> None:
    one = tab().open("overview", "two", text=1, layer=1, head=3)
    nearest = served.profile("two").similarity(1).loc[(1, 3)].drop((1, 3)).nlargest(3)
    names = [f"L{layer} · H{head}{value:.2f}" for (layer, head), value in nearest.items()]
    one.eventually(lambda: one.page.locator(".overview-similar a").all_text_contents(), names)
    one.page.click('[data-key="to-compare"]')
    one.eventually(lambda: (int(one.state.get("blayer", -1)), int(one.state.get("bhead", -1))), nearest.index[0])


def test_wall_orders_the_maps_by_their_similarity_to_the_selected_head(tab: Opens, mini: Served) -> None:
    one = tab(server=mini).open("wall", "mini", layer=2, head=1, sort="similar")
    nearest = mini.profile("mini").similarity(0).loc[(2, 1)].sort_values(ascending=False)
    names = [f"L{layer} · H{head}{value:.2f}" for (layer, head), value in nearest.items()]
    one.eventually(lambda: one.page.locator(".wall-cell span").all_text_contents()[:SHOWN], names[:SHOWN])
    one.page.click('.wall-cell[data-layer="2"][data-head="1"]')
    one.eventually(lambda: (one.page.url.split("#/")[1].split("?")[0], one.state["head"]), ("map", "1"))


def test_readout_of_a_pooled_map_names_the_blocks(tab: Opens) -> None:
    """The last block is shorter than the others."""
    profile = qkv.profile("qkv-mini", "x = 1\n" * 100, map_tokens=0, progress=False, probe=False)
    n, block = int(profile.data["n_keys"][0]), int(profile.data["bin_keys"][0])
    assert block > 1
    assert n % block
    session = Session("pooled")
    session.add_profile(profile, "pooled")
    session.prepare()
    with serve_in_thread(session) as url:
        one = tab(Served(url, session, {"pooled": 0})).open("compare", "pooled", layer=0, head=0)
        one.page.focus(".compare-map >> nth=0")
        one.press(*["ArrowDown"] * 7, "ArrowRight")
        readout, said = one.page.locator(".compare-readout"), f"query {7 * block}–{8 * block - 1} → key {block}–"
        one.eventually(lambda: plain(readout.inner_text()).startswith(f"{said}{2 * block - 1} · A "))
        one.press(*["Shift+ArrowDown"] * 13)
        first = n - n % block
        last = f"{first}–{n - 1}" if n - first > 1 else f"{first} “"
        one.eventually(lambda: plain(readout.inner_text()).startswith(f"query {last}"))
        cells = [row for row in one.table() if row["what"] == "largest_weight"]
        assert len(cells) == (n // block + 1) ** 2
        assert (cells[-1]["position"], cells[-1]["key"]) == (str(first), str(first))


def comparison(tab: Tab) -> str:
    """The text of the page once both maps are loaded."""
    tab.pause(100)
    tab.settled()
    expect(tab.page.locator("main [aria-busy]")).to_have_count(0)
    return tab.text()


@pytest.mark.slow
def test_right_side_is_chosen_and_kept_in_the_address(tab: Opens, served: Served) -> None:
    one = tab().open("compare", "two", text=1, layer=1, head=3)
    one.eventually(lambda: {"bsource", "blayer", "bhead"} <= set(one.state))  # the most similar head at first
    one.page.click('[data-key="text"].quiet')
    one.page.wait_for_url(lambda url: "btext=0" in url)
    assert (one.state["blayer"], one.state["bhead"]) == ("1", "3")
    one.page.select_option('.compare-right [data-key="right-source"]', label="cross")
    one.page.wait_for_url(lambda url: f"bsource={served.ids['cross']}" in url)
    shown, other = comparison(one), tab().follow(one.page.url)
    other.eventually(lambda: comparison(other), shown)
    one.page.click('[data-key="swap"]')
    one.page.wait_for_url(lambda url: f"&bsource={served.ids['two']}" in url)
    assert (one.state["source"], one.state["bhead"]) == (str(served.ids["cross"]), "3")
    one.page.go_back()
    one.eventually(lambda: comparison(one), shown)


def test_comparison_shows_hostile_tokens_literally(tab: Opens) -> None:
    one = tab().open("compare", "hostile", layer=0, head=0)
    one.page.focus(".compare-map >> nth=0")
    readout, said = one.page.locator(".compare-readout"), ""
    one.press("ArrowUp")  # from the first cell to itself
    for query in range(len(HOSTILE)):
        expect(readout).to_contain_text(re.compile(f"^query {query} "))
        said += readout.inner_text()
        one.press("ArrowDown")
    assert [part for part in VISIBLE_PARTS if part not in said] == []
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    check_pictures(one)


# ---- sequences and images -------------------------------------------------------------------------------------


def test_translation_shows_and_exports_its_weights(tab: Opens, mini: Served, aligners: Aligners) -> None:
    one = tab(mini).open("align", say="the black cat")
    answer = aligners.align("qkv-translation", "the black cat")
    expect(one.page.locator(".align-target")).to_have_text(answer["target"])
    weights = np.array(answer["weights"])[0, 0]
    cells = one.page.locator(".align-cell").evaluate_all("(all) => all.map((x) => x.getAttribute('aria-label'))")
    assert [plain(x) for x in cells] == [
        f"{answer['target'][t]}, {answer['source'][s]}: {percent(weights[t, s])}" for t, s in np.ndindex(weights.shape)
    ]
    one.page.hover(".align-cell >> nth=1")
    readout = one.page.locator(".align-main .readout")
    one.eventually(lambda: plain(readout.inner_text()).endswith(f"with weight {percent(weights[0, 1])}."))
    rows = one.table()
    found = np.array([[float(row[f"{s} {word}"]) for s, word in enumerate(answer["source"])] for row in rows])
    np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert set(answer["target"]) <= {text.strip() for text in texts_of(check_pictures(one))}
    one.page.fill("#align-text", "the purple zebra")
    expect(one.page.locator("#align-trouble")).not_to_be_empty()
    one.expect("400")


def test_reversal_shows_the_weights_of_the_selected_head(tab: Opens, mini: Served, aligners: Aligners) -> None:
    one = tab(mini).open("align", view="reversal")
    example = next(x for x in aligners.description()["models"] if x["kind"] == "reversal")["example"]
    answer = aligners.align("qkv-reversal", example)
    expect(one.page.locator(".align-target")).to_have_text(answer["target"])
    expect(one.page.locator(".align-head")).to_have_count(1 + answer["layers"] * answer["heads"])
    one.page.click('[data-key="head-0.1"]')
    one.settled()
    weights = np.array(answer["weights"])[0, 1]
    cell = one.page.locator('.align-cell[data-key="2.3"]')
    one.eventually(lambda: plain(cell.get_attribute("aria-label")).endswith(percent(weights[2, 3])))
    one.arrives(look="0.1")


@pytest.mark.slow
def test_caption_shows_the_weights_of_the_selected_word(tab: Opens, mini: Served, aligners: Aligners) -> None:
    one = tab(mini).open("align", view="captions", scene=2)
    answer = aligners.caption(2)
    expect(one.page.locator(".align-multiple")).to_have_count(len(answer["words"]))
    expect(one.page.locator(".align-multiple span")).to_have_text(answer["words"])
    one.page.click(".align-multiple >> nth=1")
    one.page.wait_for_url(lambda url: "word=1" in url)
    readout = one.page.locator(".align-figure .readout")
    one.eventually(lambda: percent(np.max(answer["weights"][1])) in plain(readout.inner_text()))
    rows = one.table()
    np.testing.assert_allclose(
        [float(row["weight"]) for row in rows], np.ravel(answer["weights"]), rtol=1e-6, atol=1e-12
    )
    one.page.click('[aria-label="Next scene"]')
    one.page.wait_for_url(lambda url: "scene=3" in url)
    one.settled()
    expect(one.page.locator(".align-multiple span")).to_have_text(aligners.caption(3)["words"])
    check_pictures(one)


@pytest.mark.parametrize("view", ["translation", "reversal", "captions"])
def test_alignments_do_not_overflow_on_a_phone(tab: Opens, mini: Served, view: str) -> None:
    one = tab(mini, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=1).open("align", view=view)
    one.eventually(lambda: overflow(one.page) <= 0)
