"""The HTML report: one small file, safe against hostile tokens, and interactive in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import profile_fixture as made
import qkv
from qkv.errors import InputError
from qkv.profiler import Profile
from qkv.profiler.data import tables
from qkv.profiler.data.types import MIXED, ROLES
from qkv.report import html as report
from qkv.report.payload import binned, display, payload, pooled_maps
from viewer_fixture import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest_plugins = ["viewer_fixture"]

HOSTILE = [
    "</script><script>document.documentElement.dataset.pwned='1'</script>",
    "<img src=x onerror=\"document.documentElement.dataset.pwned='1'\">",
    "<!--",
    "\u2028\u2029",
    "{{script}}",
    "&lt;b&gt;",
    "'\"`${1+1}`",
]


def hostile() -> Profile:
    """A profile in which every string is an injection attack."""
    weights = made.softmax(np.random.default_rng(0).normal(size=(2, 3, 7, 7)))
    data = made.dataset_from_weights([weights], [HOSTILE], modules=HOSTILE[:2], special=tuple(HOSTILE[:2]), name="self")
    attrs = {"model": HOSTILE[0], "text_preview": HOSTILE[1], "command": HOSTILE[0], "versions": {"x": HOSTILE[1]}}
    return Profile({"self": data}, attrs)


def page_of(html: str) -> dict:
    return json.loads(re.search(r'id="page">(.*?)</script>', html, re.S)[1])


def decoded(html: str, place: str, view: dict) -> dict[str, np.ndarray]:
    """The curves of a view, read back the way the page does."""
    text = re.search(rf'id="curves-{place}">(.*?)</script>', html, re.S)[1]
    low_bytes, high_bytes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1)
    codes = low_bytes.astype(np.int64) + 256 * high_bytes.astype(np.int64)
    arrays = {}
    for name, at in view["arrays"].items():
        part = codes[at["start"] : at["start"] + int(np.prod(at["shape"]))].reshape(at["shape"])
        number = at["low"] + (part - 1) * at["step"]
        value = np.where(part == 0, 0, np.exp(number)) if at["scale"] == "log" else number
        arrays[name] = np.where(part == 65535, np.nan, value)
    return arrays


# ---- what the file holds --------------------------------------------------------------------------------------


def test_numbers_come_back_from_the_page() -> None:
    profile = made.minilm()
    html = report.render(profile)
    view = page_of(html)["groups"][0]["texts"][0]
    heads = profile.heads()
    for name in ("entropy", "entropy_ratio", "sink", "distance", "top_key_share"):
        np.testing.assert_allclose(view["heads"][name], heads[name], rtol=1e-5)
    assert view["heads"]["goes_to"] == list(heads["goes_to"])
    arrays = decoded(html, "0-0", view)
    received = tables.received_share(profile.data)[0]
    half = {name: 0.501 * at["step"] for name, at in view["arrays"].items()}  # half a step, and rounding
    np.testing.assert_allclose(np.log(arrays["received"]), np.log(received), rtol=0, atol=half["received"])
    np.testing.assert_allclose(np.log(arrays["mean"]), np.log(received.mean((0, 1))), rtol=0, atol=half["mean"])
    np.testing.assert_allclose(arrays["entropy"], profile.data["entropy"][0], rtol=0, atol=half["entropy"])
    maps = json.loads(re.search(r'id="maps-0-0">(.*?)</script>', html, re.S)[1])
    n = view["n_keys"]
    byte = np.frombuffer(zlib.decompress(base64.b64decode(maps[17])), np.uint8).reshape(n, n)
    np.testing.assert_allclose((byte / 255) ** 2, profile.data["weights"][0, 1, 5], atol=1 / 255)
    assert byte.min() > 0, "MiniLM masks nothing"


def test_the_page_holds_every_text_of_every_group_without_padding() -> None:
    page = page_of(report.render(made.encoder_decoder()))
    sizes = {g["name"]: [(t["n_queries"], t["n_keys"]) for t in g["texts"]] for g in page["groups"]}
    assert sizes == {"encoder": [(8, 8), (5, 5)], "decoder": [(6, 6), (4, 4)], "cross": [(6, 8), (4, 5)]}
    assert page["main"] == 1
    assert page["groups"][2]["texts"][0]["queries"] == ["<pad>", " The", " house", " is", " old", "."]


def test_a_long_text_stays_small() -> None:
    html = report.render(made.long())
    assert len(html.encode()) < 5e6
    view = page_of(html)["groups"][0]["texts"][0]
    assert view["maps"] == "none"
    assert view["bins"] == {"received": 8192, "curve": 256}
    entropy = made.long().data["entropy"].values[0]
    np.testing.assert_allclose(
        decoded(html, "0-0", view)["entropy"], entropy.reshape(6, 6, 256, 32).mean(-1), atol=2e-4
    )


def test_nan_and_zero_survive_quantization() -> None:
    data = made.gpt().data.copy(deep=True)
    data["entropy"][0, 1, 2, 7] = np.nan
    data["received"][0, 0, 0, 5] = 0
    html = report.render(Profile({"self": data}))
    arrays = decoded(html, "0-0", page_of(html)["groups"][0]["texts"][0])
    assert np.argwhere(np.isnan(arrays["entropy"])).tolist() == [[1, 2, 7]]
    assert np.argwhere(arrays["received"] == 0).tolist() == [[0, 0, 5]]


def test_the_page_holds_types_and_sinks_of_heads() -> None:
    profile = qkv.profile(
        "qkv-mini", "for name in names:\n    if name not in seen:\n        seen.append(name)\n", progress=False
    )
    page, _ = payload(profile)
    json.dumps(page, allow_nan=False)
    group = page["groups"][0]
    types, sinks, tokens = profile.types(), profile.sinks(), profile.sink_tokens()
    assert group["types"]["type"] == list(types["type"])
    assert [", ".join(traits) for traits in group["types"]["traits"]] == list(types["traits"])
    np.testing.assert_allclose(group["types"]["induction"], types["induction"], rtol=1e-5)
    assert "retrieval" not in group["types"], "undefined for a short text"
    for name in ("alpha_first", "alpha_random", "value_norm_first", "key_norm_best", "best_key"):
        np.testing.assert_allclose(group["sinks"][name], sinks[name], rtol=1e-5)
    assert "learned_sink" not in group["sinks"]
    assert group["sink_tokens"]["token"] == list(tokens["token"])[:12]
    assert group["sink_tokens"]["layers"] == list(tokens["layers"])[:12]
    stream = profile.residual["blocks"]
    np.testing.assert_allclose(group["residual"]["largest"], stream["largest"][0, :, 0], rtol=1e-5)
    np.testing.assert_allclose(group["residual"]["norm_others"], stream["norm"][0, :, 1:].mean("token"), rtol=1e-5)
    position = group["residual"]["position"]
    assert position == stream["largest_token"].values[0, :, 0].tolist()
    assert group["residual"]["token"] == profile.data["query_token"].values[0, position].tolist()
    assert [role["name"] for role in page["roles"]] == [r for r in (*ROLES, MIXED) if r in set(types["type"])]
    assert all(re.fullmatch("#[0-9a-f]{6}", role[theme]) for role in page["roles"] for theme in ("light", "dark"))


def test_the_page_leaves_out_unmeasured_data() -> None:
    for group in payload(made.encoder_decoder())[0]["groups"]:
        assert not {"sinks", "sink_tokens", "residual"} & set(group)
        assert set(group["types"]) >= {"type", "traits", "self", "local"} or group["name"] == "cross"


def test_largest_activations_are_taken_over_texts() -> None:
    profile = qkv.profile("qkv-mini", ["for name in names:", "def walk(path):\n    return [path]"], progress=False)
    stream = profile.residual["blocks"]
    residual = payload(profile)[0]["groups"][0]["residual"]
    largest = stream["largest"].values[..., 0]
    np.testing.assert_allclose(residual["largest"], largest.max(0), rtol=1e-5)
    text = largest.argmax(0)
    np.testing.assert_allclose(residual["median"], stream["median"].values[text, np.arange(len(text))], rtol=1e-5)
    assert residual["token"] == [
        profile.data["query_token"].values[t, p] for t, p in zip(text, residual["position"], strict=True)
    ]


def test_bins_cover_every_position_once() -> None:
    values = np.arange(23.0)[None]
    starts = [b * 23 // 5 for b in range(6)]
    expected = [values[0, a:b].mean() for a, b in pairwise(starts)]
    np.testing.assert_allclose(binned(values, 5)[0], expected)
    values[0, 3:5] = np.nan
    assert binned(values, 5)[0, 0] == pytest.approx(1.0)
    assert binned(values, 99) is values


def test_tokens_read_as_text() -> None:
    assert "".join(display(["[CLS]", "the", "gu", "##lls", ",", "he", "."])) == " [CLS] the gulls, he."
    assert "".join(display(["Once", "Ġupon", "Ċ", "a"])) == "Once upon\na"
    assert "".join(display(["▁Das", "▁Haus", "."])) == " Das Haus."
    assert "".join(display(["Once", " upon", "\n"])) == "Once upon\n"
    assert "".join(display(["one", "two"])) == " one two"


def test_only_the_template_contributes_markup() -> None:
    html = report.render(hostile())
    assert html.count("<script") == report.asset("report.html").count("<script") + 2  # curves and maps
    assert "<img" not in html
    assert "<!--" not in html
    assert "\u2028" not in html
    assert [token.strip() for token in page_of(html)["groups"][0]["texts"][0]["keys"]] == [t.strip() for t in HOSTILE]


def test_only_the_page_own_script_and_style_may_run() -> None:
    html = report.render(made.gpt())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    loaded = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import|https?://[^"\s]*', html)
    assert {part for match in loaded for part in match if part} == {"#heads"}
    assert "innerHTML" not in html


def test_reports_are_written_atomically(tmp_path: Path) -> None:
    path = made.gpt().report(tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InputError, match=r"the folder .* does not exist"):
        made.gpt().report(tmp_path / "nowhere" / "report.html")
    with pytest.raises(InputError, match="is a folder"):
        made.gpt().report(tmp_path)


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(browser: Browser) -> Page:
    return browser.new_page()


def opened(page: Page, path: Path, until: str = "ready") -> tuple[dict[str, str], str]:
    """The data attributes of the root element once it has this one, or an error, and the document as HTML."""
    page.goto(path.as_uri())
    page.wait_for_selector(f"html[data-{until}], html[data-error]", state="attached", timeout=PATIENCE * 1000)
    page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 300))")  # it may fail later
    return page.evaluate("({ ...document.documentElement.dataset })"), page.content()


@pytest.mark.parametrize(
    "make", [made.gpt, made.encoder_decoder, made.long, lambda: made.gpt(61, True)],
    ids=["causal", "three groups", "long", "learned sink"],
)  # fmt: skip
def test_the_page_loads_without_errors(page: Page, tmp_path: Path, make: object) -> None:
    profile = make()  # type: ignore[operator]
    state, dom = opened(page, profile.report(tmp_path / "report.html"))
    assert state == {"ready": "1"}
    heads = profile.heads()
    has_maps = "weights" in profile.data
    assert dom.count('role="gridcell"') == len(heads) * (1 + has_maps)
    assert "Most attended tokens" in dom
    assert 'class="curve"' in dom


def test_only_errors_are_shown_as_errors(page: Page, tmp_path: Path) -> None:
    """A browser reports sizes that it tells a frame later through the same event as an error."""
    opened(page, made.gpt().report(tmp_path / "report.html"))
    said = "(message) => { dispatchEvent(new ErrorEvent('error', { message })); }"
    page.evaluate(said, "ResizeObserver loop completed with undelivered notifications.")
    assert page.locator("#trouble").is_hidden()
    page.evaluate(said, "x is not defined")
    assert "x is not defined" in page.locator("#trouble").inner_text()


@pytest.mark.parametrize("average", [True, False])
def test_pooled_maps_in_a_report_are_those_of_the_profile(average: bool) -> None:
    profile = qkv.profile("qkv-mini", "x = [1, 2]\n" * 60, map_tokens=0, probe=False, progress=False)
    found = pooled_maps(profile.data, average=average)
    assert found is not None
    about, packed = found
    names = ["map_max", "map_mean"][: 1 + average]
    for at, blob in enumerate(json.loads(packed)):
        codes = np.frombuffer(zlib.decompress(base64.b64decode(blob)), np.uint8)
        codes = codes.reshape(len(names), about["rows"], about["columns"]).astype(np.float64)
        got = np.where(codes, about["low"] * (about["high"] / about["low"]) ** ((codes - 1) / 254), 0)
        head = divmod(at, profile.data.sizes["head"])
        want = np.stack([profile.data[name].values[0][head] for name in names])
        large, masked = want >= about["low"], ~np.tri(about["rows"], dtype=bool)  # visible weights may be 0, too
        np.testing.assert_allclose(got[large], want[large], rtol=0.024)
        assert ((got == 0) == masked).all()
        np.testing.assert_allclose(got[~large & np.tri(about["rows"], dtype=bool)], about["low"])


def test_pooled_maps_that_are_too_large_are_pooled_further() -> None:
    profile = qkv.profile("qkv-mini", "x = [1, 2]\n" * 60, map_tokens=0, probe=False, progress=False)
    whole = pooled_maps(profile.data, average=True)
    assert whole is not None
    about, packed = pooled_maps(profile.data, average=True, limit=len(whole[1]) // 2)  # type: ignore[misc]
    assert about["coarser"]
    assert not whole[0]["coarser"]
    assert len(packed) <= len(whole[1]) // 2
    size = about["bin_queries"], about["bin_keys"]
    assert size == (2 * whole[0]["bin_queries"], 2 * whole[0]["bin_keys"])
    codes = np.frombuffer(zlib.decompress(base64.b64decode(json.loads(packed)[9])), np.uint8)
    got = about["low"] * (about["high"] / about["low"]) ** ((codes.reshape(2, -1) - 1.0) / 254)
    dense = qkv.profile("qkv-mini", "x = [1, 2]\n" * 60, map_tokens=999, probe=False, progress=False).data["weights"]
    weights = dense.values[0, 1, 3]
    for row, column in ((3, 0), (about["rows"] - 1, about["columns"] - 1)):
        part = weights[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
        at = row * about["columns"] + column
        np.testing.assert_allclose(got[:, at], [part.max(), part.mean()], rtol=0.03)


def test_hostile_tokens_are_not_executed(page: Page, tmp_path: Path) -> None:
    state, dom = opened(page, hostile().report(tmp_path / "report.html"))
    assert state == {"ready": "1"}
    assert "&lt;img src=x onerror=" in dom
    assert "<img" not in dom


DRIVER = """
;(async () => {
  const said = {}, root = document.documentElement;
  while (root.dataset.ready !== "1") await new Promise((resolve) => setTimeout(resolve, 20));
  const settle = () => new Promise((resolve) => setTimeout(resolve, 150));
  const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const title = () => document.querySelector("#card h3").textContent;
  document.querySelector('#grid-box [data-layer="1"][data-head="3"]').click(); await settle();
  said.clicked = title();
  document.querySelector('#grid-box [data-layer="1"][data-head="3"]').focus();
  press("ArrowDown"); press("ArrowLeft"); await settle();
  said.arrows = title();
  said.focused = document.activeElement.getAttribute("aria-label");
  document.querySelector('#wall [data-layer="0"][data-head="4"]').click(); await settle();
  said.wall = [document.querySelector("#big-map h3").textContent, title()];
  document.querySelector('#grid-box [data-layer="2"][data-head="2"]').click(); await settle();
  document.querySelector('[data-key="on"]').focus();
  document.querySelector('[data-key="on"]').click(); await settle();
  said.stepped = title();
  said.kept = document.activeElement.dataset.key;
  const choose = document.querySelector("#statistic");
  choose.value = "distance"; choose.dispatchEvent(new Event("change"));
  said.cell = document.querySelector('#grid-box [data-layer="0"][data-head="0"]').getAttribute("aria-label");
  choose.value = "type"; choose.dispatchEvent(new Event("change"));
  said.kind = document.querySelector('#grid-box [data-layer="1"][data-head="3"]').dataset.tip;
  document.querySelector('[data-key="choice-Shade by attention received from-head"]').click(); await settle();
  document.querySelector('[data-at="9"]').click(); await settle();
  said.asked = document.querySelector("#reading .readout").textContent;
  said.shaded = document.querySelector(".flow-token.pinned").dataset.at;
  document.querySelector("#big-map canvas").focus(); press("ArrowDown"); press("ArrowDown"); press("ArrowLeft");
  said.map = document.querySelector(".head-map-readout").textContent;
  document.querySelector('[data-key="sort-sink"]').click();
  said.sorted = document.querySelector("#head-table tbody th").textContent;
  said.order = document.querySelector('#head-table [aria-sort="descending"]').textContent;
  const light = getComputedStyle(root).backgroundColor;
  document.querySelector("#theme").click(); await settle();
  said.dark = light !== getComputedStyle(root).backgroundColor;
  root.dataset.said = JSON.stringify(said);
})();
"""


def test_the_page_responds_to_clicks_and_keys(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asset = report.asset
    monkeypatch.setattr(report, "asset", lambda name: asset(name) + (DRIVER if name == "report.js" else ""))
    profile = made.gpt()
    state, _ = opened(page, profile.report(tmp_path / "report.html"), until="said")
    assert "error" not in state
    said = json.loads(state["said"].replace("\u00a0", " "))
    heads = profile.heads()
    assert said["clicked"] == "Layer 1, head 3"
    assert said["arrows"] == "Layer 2, head 2"
    assert said["focused"].startswith("Layer 2, head 2: ")
    assert said["wall"] == ["Layer 0, head 4"] * 2
    assert said["stepped"] == "Layer 2, head 3"
    assert said["kept"] == "on"
    assert said["cell"] == f"Layer 0, head 0: Distance {heads['distance'][0]:.1f} tokens; first token 99 %"
    kind = profile.types().query("layer == 1 and head == 3").iloc[0]
    assert said["kind"].split("\n")[:2] == ["Layer 1, head 3", kind["type"]]
    assert said["asked"].startswith("Shaded: the weights of the query “wards” (position 9) in L2 · H3.")
    assert said["shaded"] == "9"
    query, key, share = re.fullmatch(r"query (\d+) “.*” → key (\d+) “.*”: ([\d.]+) %", said["map"]).groups()  # type: ignore[union-attr]
    assert int(query) - int(key) == 3, "from the middle, two down and one to the left"
    assert float(share) / 100 == pytest.approx(float(profile.data["weights"][0, 2, 3, int(query), int(key)]), abs=0.004)
    best = heads.loc[heads["sink"].idxmax()]
    assert said["sorted"] == f"L{best['layer']} · H{best['head']}"
    assert said["order"] == "First token"
    assert said["dark"] is True


def test_old_browsers_get_an_error_message(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asset = report.asset
    remove = "delete globalThis.DecompressionStream;\n"
    monkeypatch.setattr(report, "asset", lambda name: asset(name) + (remove if name == "dom.js" else ""))
    state, dom = opened(page, made.gpt().report(tmp_path / "report.html"))
    assert "DecompressionStream" in state["error"]
    assert "Please open it in a browser of 2023 or later" in dom
