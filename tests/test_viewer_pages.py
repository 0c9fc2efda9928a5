"""Sinks, live, compare, and alignment in a real browser: what they show is what the server and the profile say."""

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
from qkv.server.align import Aligners
from qkv.server.live import Live
from qkv.server.run import serve_in_thread
from qkv.server.session import Session
from viewer_fixture import HOSTILE, LIVE_TEXT, PHONE, SEEN, Served, Tab, check_pictures, overflow, texts_of

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytest_plugins = ["viewer_fixture"]
expect = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright").expect

Opens = Callable[..., Tab]
SHOWN = 10


@pytest.fixture(scope="module")
def live() -> Live:
    """What the page must agree with."""
    from qkv.profiler.capture.models import load

    return Live(load("qkv-mini"))


@pytest.fixture(scope="module")
def aligners() -> Aligners:
    return Aligners()


def percent(share: float) -> str:
    """As numbers.js writes a share."""
    value = 100 * share
    if 0 < value < 0.00095:
        return "< 0.001 %"
    if 0 < value < 0.095:
        return f"{value:.1g} %"
    return f"{value:.{1 if 0 < value < 0.95 else 0}f} %"


def plain(text: str) -> str:
    return text.replace("\u00a0", " ").strip()


# ---- sinks ----------------------------------------------------------------------------------------------------


def test_sinks_are_those_of_the_profile(tab: Opens, served: Served) -> None:
    heads = served.profile("gpt").heads()
    one = tab().open("sinks", "gpt", layer=0, head=4)
    assert (
        f"{(heads['sink'] > 0.3).sum()} of 15 heads put more than 30 % of the weight on the first token" in one.text()
    )
    chart = one.page.locator('.sink-chart[aria-label^="Weight on the first token"]')
    means = [percent(x) for x in heads.groupby("layer")["sink"].mean()]
    assert all(f"{layer}: {mean}" in plain(chart.get_attribute("aria-label")) for layer, mean in enumerate(means))
    chart.focus()
    seen = set()
    for key in ("ArrowRight", "ArrowUp", "ArrowUp", "ArrowRight", "ArrowUp"):
        one.press(key)
        said = plain(one.page.locator(".sink-figure output").first.inner_text())
        layer, head = map(int, re.search(r"Layer (\d+), head (\d+)", said).groups())
        assert said.endswith(percent(heads["sink"][5 * layer + head])), said
        seen.add((layer, head))
    assert len(seen) > 2
    one.press("Enter")
    one.settled()
    assert (int(one.state["layer"]), int(one.state["head"])) == (layer, head)
    rows = one.table()
    np.testing.assert_allclose([float(row["weight_on_first"]) for row in rows], heads["sink"], rtol=1e-5)
    check_pictures(one)


def test_another_profile_is_laid_beside(tab: Opens, served: Served) -> None:
    one = tab().open("sinks", "two")
    one.page.select_option('[data-key="after"]', label="hostile")
    one.settled()
    assert one.state["after"] == str(served.ids["hostile"])
    assert "hostile has 2 layers × 3 heads instead of 2 × 4" in one.text()
    rows = one.table()
    assert [row["profile"] for row in rows] == ["two"] * 8 + ["hostile"] * 6
    tab().follow(one.page.url).comes_to_say(one.text())


@pytest.mark.slow
def test_a_remedy_is_tried(tab: Opens, mini: Served) -> None:
    """Off-by-one in all heads, without training: sinks before and after, of a source that the server makes."""
    one = tab(mini).open("sinks", "mini")
    one.page.click('[data-key="off-by-one"]')
    expect(one.page.locator(".sinks-figures")).to_contain_text("with off-by-one")
    expect(one.page.locator('.sink-chart[aria-label^="Weight on no token"]')).to_be_visible(timeout=60_000)
    one.settled()
    remedy = mini.session.sources[int(one.state["after"])]
    assert remedy.kind == "remedy"
    before, after = (x.profile.heads()["sink"].to_numpy() for x in (mini.session.sources[0], remedy))
    rows = [row for row in one.table() if row["head"]]
    assert len(rows) == 2 * before.size
    np.testing.assert_allclose([float(row["weight_on_first"]) for row in rows], [*before, *after], rtol=1e-4)
    assert np.abs(before - after).max() > 0.01
    check_pictures(one)
    other = tab(mini).follow(one.page.url)
    other.comes_to_say(one.text())


# ---- live -----------------------------------------------------------------------------------------------------


def bars(tab: Tab) -> list[tuple[str, str]]:
    """Next tokens and what is said of their probability."""
    return [
        (item.locator("code").inner_text(), plain(item.locator(".live-values").inner_text()))
        for item in tab.page.locator(".live-bars li").all()
    ]


def spaced(token: str) -> str:
    return re.sub(" +", lambda x: f"␣×{len(x[0])}" if len(x[0]) > 2 else "␣" * len(x[0]), token).replace("\n", "⏎")


def asked(live: Live, text: str, *edits: tuple[int, int, str, float], at: tuple[int, int] = (0, 0)) -> dict:
    given = [SimpleNamespace(layer=a, head=b, normalizer=c, temperature=d) for a, b, c, d in edits]
    return live.answer(SimpleNamespace(text=text, edits=given, layer=at[0], head=at[1], k=SHOWN, ids=None))


def check_bars(tab: Tab, answer: dict, *, edited: bool) -> None:
    before, after = (answer["next"][when][:SHOWN] for when in ("before", "after"))
    want = [
        (
            spaced(now["token"]),
            f"{percent(was['probability'])} → {percent(now['probability'])}" if edited else percent(now["probability"]),
        )
        for was, now in zip(before, after, strict=True)
    ]
    assert bars(tab) == want


def test_the_model_answers_to_what_is_typed(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live")
    check_bars(one, asked(live, live.described()["example"]), edited=False)
    one.page.fill("#live-text", "def add(a, b):\n    return a +")
    one.page.wait_for_url(lambda url: "prompt=def" in url)
    one.settled()
    answer = asked(live, "def add(a, b):\n    return a +")
    check_bars(one, answer, edited=False)
    assert one.page.locator(".live-token").count() == len(answer["tokens"])
    sinks = [f"{100 * x:.0f}" for row in answer["sink"]["before"] for x in row]
    assert one.page.locator(".live-cell > span").all_inner_texts() == sinks


def test_another_normalizer_changes_the_next_token(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live", prompt=LIVE_TEXT)
    one.page.click('[data-key="quick-all"]')
    one.page.click('.live-setting label:has-text("off-by-one")')
    expect(one.page.locator(".live-headline")).to_contain_text("KL divergence")
    one.settled()
    layers, heads = live.described()["layers"], live.described()["heads"]
    edits = [(layer, head, "off-by-one", 1.0) for layer in range(layers) for head in range(heads)]
    answer = asked(live, LIVE_TEXT, *edits)
    assert answer["divergence"] > 0
    check_bars(one, answer, edited=True)
    assert f"{answer['divergence']:.2g} nats" in one.page.inner_text(".live-headline")
    cells = [f"{100 * x:.0f}" for row in answer["sink"]["after"] for x in row]
    assert one.page.locator(".live-cell > span").all_inner_texts() == cells
    assert one.state["edits"] == "o1-all"
    one.page.click('[data-key="reset"]')
    expect(one.page.locator(".live-headline")).to_have_text("As it was trained.")
    one.settled()
    check_bars(one, asked(live, LIVE_TEXT), edited=False)


@pytest.mark.slow
def test_one_head_is_edited_with_keys_alone(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live", prompt=LIVE_TEXT)
    one.page.focus('.live-cell[tabindex="0"]')
    one.press("ArrowRight", "ArrowDown", "Enter")
    one.page.wait_for_url(lambda url: "at=1.1" in url)
    for _ in range(8):  # past the buttons, to the normalizers
        one.press("Tab")
        if one.page.evaluate("document.activeElement.type") == "radio":
            break
    one.press("ArrowRight", "ArrowRight")
    one.press("Tab")
    assert one.page.evaluate("document.activeElement.dataset.key") == "temperature"
    for _ in range(6):  # a twentieth of a power of ten each
        one.press("ArrowRight")
    one.page.wait_for_url(lambda url: "edits=s2-1.1" in url)
    one.pause(150)
    one.settled()
    answer = asked(live, LIVE_TEXT, (1, 1, "sigmoid", 2.0), at=(1, 1))
    check_bars(one, answer, edited=True)
    n = len(answer["tokens"])
    maps = [np.frombuffer(base64.b64decode(answer[x]), "<f4").reshape(n, n) for x in ("map_before", "map")]
    one.page.focus(".live-map >> nth=1")
    one.press("ArrowDown", "ArrowDown", "ArrowRight")
    said = plain(one.page.inner_text(".live-aside .readout"))
    assert said.startswith("query 2 ")
    assert said.endswith(f"{percent(maps[0][2, 1])} → {percent(maps[1][2, 1])}")
    other = tab(mini).follow(one.page.url)
    check_bars(other, answer, edited=True)
    assert other.page.input_value("#live-text") == LIVE_TEXT


@pytest.mark.slow
def test_tokens_come_one_by_one(tab: Opens, mini: Served, live: Live) -> None:
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
        expect(one.page.locator(".live-headline")).to_contain_text(f"came, with {percent(found['probability'])}"[:18])
        one.settled()
    assert one.page.locator(".live-token.live-made, .live-token.live-new").count() == 3
    one.page.get_by_role("button", name="Undo").click()
    expect(one.page.locator("#live-text")).not_to_have_value(text)
    one.page.get_by_role("button", name="Play").click()
    before = len(one.page.input_value("#live-text"))
    one.page.wait_for_function("(n) => document.querySelector('#live-text').value.length > n + 4", arg=before)
    one.page.get_by_role("button", name="Stop").click()
    one.settled()
    length = len(one.page.input_value("#live-text"))
    one.pause(600)
    assert len(one.page.input_value("#live-text")) == length


@pytest.mark.slow
def test_live_is_safe_and_can_be_saved(tab: Opens, mini: Served, live: Live) -> None:
    text = " ".join(token for token in HOSTILE if len(token) < 200)
    one = tab(mini).open("live", prompt="x")
    one.page.fill("#live-text", text)
    one.pause(300)
    one.settled()
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    assert one.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "\u202e" not in one.page.inner_text(".live-tokens")
    one.page.fill("#live-text", "import os")
    one.page.wait_for_url(lambda url: "prompt=import" in url)
    one.settled()
    answer = asked(live, "import os")
    rows = [row for row in one.table() if row["what"] == "probability of the next token"]
    assert [row["name"] for row in rows] == [x["token"] for x in answer["next"]["before"]]
    np.testing.assert_allclose(
        [float(row["after"]) for row in rows], [x["probability"] for x in answer["next"]["after"]], rtol=1e-6
    )
    check_pictures(one)
    one.page.fill("#live-text", "")
    expect(one.page.locator("#live-trouble")).to_have_text("Type some text for the model to read.")


def test_what_is_typed_just_after_a_step_stays(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live", prompt="import os")
    held = []

    def hold(route: Route) -> None:
        held.append(route)

    one.page.route("**/api/live/step", hold)
    one.page.get_by_role("button", name="Step").click()
    one.pause(50)
    one.page.fill("#live-text", "import sys")
    one.page.wait_for_url(lambda url: "prompt=import+sys" in url or "prompt=import%20sys" in url)
    for route in held:
        route.continue_()
    one.pause(300)
    one.settled()
    assert one.page.input_value("#live-text") == "import sys"
    check_bars(one, asked(live, "import sys"), edited=False)
    one.page.unroute("**/api/live/step")


def test_a_text_too_long_for_the_address_is_there_again(tab: Opens, mini: Served) -> None:
    text = "import os\n" * 60
    one = tab(mini).open("live")
    one.page.fill("#live-text", text)
    one.page.click("#nav >> text=Overview")  # at once
    one.settled()
    one.page.click("#nav >> text=Live")
    one.settled()
    assert one.page.input_value("#live-text") == text


def test_a_text_that_is_too_long_is_told_in_a_sentence(tab: Opens, mini: Served, live: Live) -> None:
    one = tab(mini).open("live")
    one.page.fill("#live-text", "é7" * 900)
    expect(one.page.locator("#live-trouble")).to_contain_text("tokens, expected")
    assert one.page.get_attribute("#live-text", "aria-invalid") == "true"
    one.expect("400")


# ---- compare --------------------------------------------------------------------------------------------------


def test_two_heads_side_by_side(tab: Opens, served: Served) -> None:
    weights = served.profile("two").data["weights"].values[0, :, :, :23, :23]
    one = tab().open("compare", "two", layer=0, head=1, bsource=served.ids["two"], bgroup=0, btext=0, blayer=1, bhead=2)
    a, b = weights[0, 1], weights[1, 2]
    apart = np.abs(a - b).sum(-1) / 2
    assert plain(one.page.inner_text(".compare-apart strong")) == percent(apart.mean())
    one.page.focus(".compare-map >> nth=0")
    one.press("ArrowDown", "ArrowDown", "ArrowRight")
    said = plain(one.page.inner_text(".compare-readout"))
    found = [float(x) / 100 for x in re.findall(r"[AB] ([\d.]+) %", said)]
    assert found[:2] == [pytest.approx(a[2, 1], rel=0.06, abs=1e-4), pytest.approx(b[2, 1], rel=0.06, abs=1e-4)]
    rows = one.table()
    variation = [float(row["difference"]) for row in rows if row["what"] == "total_variation"]
    np.testing.assert_allclose(variation, apart, rtol=1e-4)
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


def test_blocks_of_a_pooled_map_are_named(tab: Opens) -> None:
    """Those of the profile, of which the last is short."""
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
        said = plain(one.page.inner_text(".compare-readout"))
        assert said.startswith(f"query {7 * block}–{8 * block - 1} → key {block}–{2 * block - 1} · A ")
        one.press(*["Shift+ArrowDown"] * 13)
        first = n - n % block
        last = f"{first}–{n - 1}" if n - first > 1 else f"{first} “"
        assert plain(one.page.inner_text(".compare-readout")).startswith(f"query {last}")
        cells = [row for row in one.table() if row["what"] == "largest_weight"]
        assert len(cells) == (n // block + 1) ** 2
        assert (cells[-1]["position"], cells[-1]["key"]) == (str(first), str(first))


def compared(tab: Tab) -> str:
    """What the page says once both maps are there."""
    tab.pause(100)
    tab.settled()
    expect(tab.page.locator("main [aria-busy]")).to_have_count(0)
    return tab.text()


@pytest.mark.slow
def test_the_other_side_is_chosen_and_kept(tab: Opens, served: Served) -> None:
    one = tab().open("compare", "two", text=1, layer=1, head=3)
    assert {"bsource", "blayer", "bhead"} <= set(one.state)  # the head that is most like it, to begin with
    one.page.click('[data-key="text"].quiet')
    one.page.wait_for_url(lambda url: "btext=0" in url)
    assert (one.state["blayer"], one.state["bhead"]) == ("1", "3")
    one.page.select_option('.compare-right [data-key="right-source"]', label="cross")
    one.page.wait_for_url(lambda url: f"bsource={served.ids['cross']}" in url)
    shown = compared(one)
    assert compared(tab().follow(one.page.url)) == shown
    one.page.click('[data-key="swap"]')
    one.page.wait_for_url(lambda url: f"&bsource={served.ids['two']}" in url)
    assert (one.state["source"], one.state["bhead"]) == (str(served.ids["cross"]), "3")
    one.page.go_back()
    assert compared(one) == shown


def test_hostile_tokens_are_compared_as_text(tab: Opens) -> None:
    one = tab().open("compare", "hostile", layer=0, head=0)
    one.page.focus(".compare-map >> nth=0")
    said = ""
    for _ in range(len(HOSTILE)):
        said += one.page.inner_text(".compare-readout")
        one.press("ArrowDown")
    said += one.page.inner_text(".compare-readout")
    assert [part for part in SEEN if part not in said] == []
    assert one.page.evaluate("document.documentElement.dataset.pwned") is None
    check_pictures(one)


# ---- sequences and images -------------------------------------------------------------------------------------


def test_a_translation_is_aligned(tab: Opens, mini: Served, aligners: Aligners) -> None:
    one = tab(mini).open("align", say="the black cat")
    answer = aligners.align(SimpleNamespace(model="qkv-translation", text="the black cat"))
    assert one.page.locator(".align-target").all_inner_texts() == answer["target"]
    weights = np.array(answer["weights"])[0, 0]
    cells = one.page.locator(".align-cell").evaluate_all("(all) => all.map((x) => x.getAttribute('aria-label'))")
    assert [plain(x) for x in cells] == [
        f"{answer['target'][t]}, {answer['source'][s]}: {percent(weights[t, s])}" for t, s in np.ndindex(weights.shape)
    ]
    one.page.hover(".align-cell >> nth=1")
    assert f"put {percent(weights[0, 1])} on" in plain(one.page.inner_text(".align-main .readout"))
    rows = one.table()
    found = np.array([[float(row[f"{s} {word}"]) for s, word in enumerate(answer["source"])] for row in rows])
    np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert set(answer["target"]) <= {text.strip() for text in texts_of(check_pictures(one))}
    one.page.fill("#align-text", "the purple zebra")
    expect(one.page.locator("#align-trouble")).not_to_be_empty()
    one.expect("400")


def test_reversal_has_many_heads(tab: Opens, mini: Served, aligners: Aligners) -> None:
    one = tab(mini).open("align", view="reversal")
    example = next(x for x in aligners.described()["models"] if x["kind"] == "reversal")["example"]
    answer = aligners.align(SimpleNamespace(model="qkv-reversal", text=example))
    assert one.page.locator(".align-target").all_inner_texts() == answer["target"]
    assert one.page.locator(".align-head").count() == 1 + answer["layers"] * answer["heads"]
    one.page.click('[data-key="head-0.1"]')
    one.settled()
    weights = np.array(answer["weights"])[0, 1]
    label = one.page.get_attribute('.align-cell[data-key="2.3"]', "aria-label")
    assert plain(label).endswith(percent(weights[2, 3]))
    assert one.state["look"] == "0.1"


@pytest.mark.slow
def test_a_caption_looks_at_the_image(tab: Opens, mini: Served, aligners: Aligners) -> None:
    one = tab(mini).open("align", view="captions", scene=2)
    answer = aligners.caption(SimpleNamespace(scene=2))
    expect(one.page.locator(".align-multiple")).to_have_count(len(answer["words"]))
    assert one.page.locator(".align-multiple span").all_inner_texts() == answer["words"]
    one.page.click(".align-multiple >> nth=1")
    one.page.wait_for_url(lambda url: "word=1" in url)
    assert percent(np.max(answer["weights"][1])) in plain(one.page.inner_text(".align-figure .readout"))
    rows = one.table()
    np.testing.assert_allclose(
        [float(row["weight"]) for row in rows], np.ravel(answer["weights"]), rtol=1e-6, atol=1e-12
    )
    one.page.click('[aria-label="Next scene"]')
    one.page.wait_for_url(lambda url: "scene=3" in url)
    one.settled()
    assert (
        one.page.locator(".align-multiple span").all_inner_texts()
        == aligners.caption(SimpleNamespace(scene=3))["words"]
    )
    check_pictures(one)


@pytest.mark.parametrize("view", ["translation", "reversal", "captions"])
def test_alignments_fit_a_phone(tab: Opens, mini: Served, view: str) -> None:
    one = tab(mini, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=1).open("align", view=view)
    assert overflow(one.page) <= 0
