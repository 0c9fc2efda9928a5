"""The HTML report: small, safe against hostile tokens; test_viewer.py opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import profile_fixture as made
import qkv
from qkv import Profile
from qkv.errors import InputError
from qkv.profiler.data import tables
from qkv.profiler.data.tables import MIXED, ROLES
from qkv.report import html as report
from qkv.report.payload import display, payload, pooled_maps, turns
from viewer_fixture import HOSTILE, hostile


def page_of(html: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="page">(.*?)</script>', html, re.S)[1])


def unpacked(blob: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(blob)), np.uint8)


def numbers(about: dict[str, Any], codes: np.ndarray) -> np.ndarray:
    """What codes stand for, by their description in the page."""
    number = about["low"] + (codes.astype(np.float64) - 1) * about["step"]
    return np.where(codes == 0, 0, {"linear": number, "log": np.exp(number), "root": number**2}[about["scale"]])


def decoded(html: str, view: dict[str, Any]) -> dict[str, np.ndarray]:
    """The curves of the first text, read back the way the page does."""
    low_bytes, high_bytes = unpacked(re.search(r'id="curves-0-0">(.*?)</script>', html, re.S)[1]).reshape(2, -1)
    codes = low_bytes.astype(np.int64) + 256 * high_bytes.astype(np.int64)
    arrays = {}
    for name, at in view["arrays"].items():
        part = codes[at["start"] : at["start"] + int(np.prod(at["shape"]))].reshape(at["shape"])
        arrays[name] = np.where(part == 65535, np.nan, numbers(at, part))
    return arrays


# ---- what the file holds --------------------------------------------------------------------------------------


def test_numbers_come_back_from_the_page() -> None:
    profile = made.gpt()
    html = report.render(profile)
    view = page_of(html)["groups"][0]["texts"][0]
    heads = profile.heads()
    for name in ("entropy", "entropy_ratio", "sink", "distance", "top_key_share"):
        np.testing.assert_allclose(view["heads"][name], heads[name], rtol=1e-5)
    assert view["heads"]["goes_to"] == list(heads["goes_to"])
    arrays, received = decoded(html, view), tables.received_share(profile.data)[0]
    half = {name: 0.501 * at["step"] for name, at in view["arrays"].items()}  # half a step, and rounding
    np.testing.assert_allclose(np.log(arrays["received"]), np.log(received), rtol=0, atol=half["received"])
    np.testing.assert_allclose(np.log(arrays["mean"]), np.log(received.mean((0, 1))), rtol=0, atol=half["mean"])
    np.testing.assert_allclose(arrays["entropy"], profile.data["entropy"][0], rtol=0, atol=half["entropy"])
    maps = json.loads(re.search(r'id="weights-0-0">(.*?)</script>', html, re.S)[1])
    byte = unpacked(maps[8]).reshape(view["n_keys"], view["n_keys"])
    weights = np.nan_to_num(profile.data["weights"][0, 1, 3])
    np.testing.assert_allclose(numbers(view["maps"][0], byte), weights, atol=1 / 255)
    assert ((byte > 0) == np.tri(view["n_keys"], dtype=bool)).all(), "0 stands for masked pairs and nothing else"


def test_the_page_holds_every_text_of_every_group_without_padding_and_what_was_measured() -> None:
    page = page_of(report.render(made.encoder_decoder()))
    sizes = {g["name"]: [(t["n_queries"], t["n_keys"]) for t in g["texts"]] for g in page["groups"]}
    assert sizes == {"encoder": [(8, 8), (5, 5)], "decoder": [(6, 6), (4, 4)], "cross": [(6, 8), (4, 5)]}
    assert page["main"] == 1
    assert page["groups"][2]["texts"][0]["queries"] == ["<pad>", " The", " house", " is", " old", "."]
    for group in page["groups"]:
        assert not {"sinks", "sink_tokens", "residual"} & set(group)
        assert set(group["types"]) >= {"type", "traits", "self", "local"} or group["name"] == "cross"


def test_nan_and_zero_survive_quantization() -> None:
    data = made.gpt().data.copy(deep=True)
    data["entropy"][0, 1, 2, 7] = np.nan
    data["received"][0, 0, 0, 5] = 0
    html = report.render(Profile({"self": data}))
    arrays = decoded(html, page_of(html)["groups"][0]["texts"][0])
    assert np.argwhere(np.isnan(arrays["entropy"])).tolist() == [[1, 2, 7]]
    assert np.argwhere(arrays["received"] == 0).tolist() == [[0, 0, 5]]


def test_the_page_holds_types_sinks_and_the_largest_activations_over_texts() -> None:
    code = "for name in names:\n    if name not in seen:\n        seen.append(name)\n"
    profile = qkv.profile("qkv-mini", [code, "def walk(path):\n    return [path]"], progress=False)
    page, _ = payload(profile)
    json.dumps(page, allow_nan=False)
    (group,) = page["groups"]
    types, sinks, tokens = profile.types(), profile.sinks(), profile.sink_tokens()
    assert group["types"]["type"] == list(types["type"])
    assert [", ".join(traits) for traits in group["types"]["traits"]] == list(types["traits"])
    np.testing.assert_allclose(group["types"]["induction"], types["induction"], rtol=1e-5)
    assert "retrieval" not in group["types"], "undefined for a short text"
    for name in ("alpha_first", "alpha_random", "value_norm_first", "key_norm_best", "best_key"):
        np.testing.assert_allclose(group["sinks"][name], sinks[name], rtol=1e-5)
    assert "learned_sink" not in group["sinks"]
    for name in ("token", "layers"):
        assert group["sink_tokens"][name] == list(tokens[name])[:12]
    assert [role["name"] for role in page["roles"]] == [r for r in (*ROLES, MIXED) if r in set(types["type"])]
    assert all(re.fullmatch("#[0-9a-f]{6}", role[theme]) for role in page["roles"] for theme in ("light", "dark"))
    stream, residual = profile.residual["blocks"], group["residual"]
    largest = stream["largest"].values[..., 0]
    np.testing.assert_allclose(residual["largest"], largest.max(0), rtol=1e-5)
    at = largest.argmax(0), np.arange(largest.shape[1])  # the text with the largest activation at each depth
    np.testing.assert_allclose(residual["median"], stream["median"].values[at], rtol=1e-5)
    assert residual["position"] == stream["largest_token"].values[..., 0][at].tolist()
    names = profile.data["query_token"].values
    assert residual["token"] == [names[t, p] for t, p in zip(at[0], residual["position"], strict=True)]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["[CLS]", "the", "gu", "##lls", ",", "he", "."], " [CLS] the gulls, he."),
        (["Once", "Ġupon", "Ċ", "a"], "Once upon\na"),
        (["▁Das", "▁Haus", "."], " Das Haus."),
        (["Once", " upon", "\n"], "Once upon\n"),
        (["one", "two"], " one two"),
    ],
)
def test_tokens_read_as_text(tokens: list[str], said: str) -> None:
    assert "".join(display(tokens)) == said


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("<|begin_of_text|> <|start_header_id|> user <|end_header_id|> \n\n Hi <|eot_id|> "
         "<|start_header_id|> assistant <|end_header_id|> \n\n", [(1, 5, 6, "user"), (7, 11, 11, "assistant")]),
        ("<bos> <start_of_turn> user \n Hi <end_of_turn> \n <start_of_turn> model \n",
         [(1, 4, 5, "user"), (7, 10, 10, "model")]),
        ("<|user|> \n Hi <|end|> \n <|assistant|> \n", [(0, 2, 3, "user"), (5, 7, 7, "assistant")]),
        ("a page <b> user </b> with <|im_end|> in it", []),
    ],
)  # fmt: skip
def test_turns_of_chats(text: str, roles: list[tuple[int, int, int, str]]) -> None:
    assert turns(text.split(" ")) == roles


def test_only_the_template_contributes_markup_and_only_its_script_and_style_may_run() -> None:
    html = report.render(hostile())
    assert html.count("<script") == report.asset("report.html").count("<script") + 2  # curves and maps
    for part in ("<img", "<!--", "\u2028", "innerHTML"):
        assert part not in html
    assert [token.strip() for token in page_of(html)["groups"][0]["texts"][0]["keys"]] == [t.strip() for t in HOSTILE]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    loaded = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import|https?://[^"\s]*', report.render(made.gpt()))
    assert {part for match in loaded for part in match if part} == {"#one"}


def test_reports_are_written_atomically(tmp_path: Path) -> None:
    path = made.gpt().report(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == [path]
    for target in (tmp_path / "nowhere" / "report.html", tmp_path):
        with pytest.raises(InputError, match="folder"):
            made.gpt().report(target)


@pytest.fixture(scope="module")
def pooled() -> Profile:
    return qkv.profile("qkv-mini", "x = [1, 2]\n" * 60, map_tokens=0, probe=False, progress=False)


@pytest.mark.parametrize("average", [True, False])
def test_pooled_maps_in_a_report_are_those_of_the_profile(pooled: Profile, average: bool) -> None:
    about, packed = pooled_maps(pooled.data, average=average)  # type: ignore[misc]
    names = ["map_max", "map_mean"][: 1 + average]
    visible = np.tri(about["rows"], dtype=bool)
    for at, blob in enumerate(json.loads(packed)):
        got = numbers(about, unpacked(blob).reshape(len(names), about["rows"], about["columns"]))
        head = divmod(at, pooled.data.sizes["head"])
        want = np.stack([pooled.data[name].values[0][head] for name in names])
        large = want >= (low := np.exp(about["low"]))  # visible weights may be 0, too
        np.testing.assert_allclose(got[large], want[large], rtol=0.024)
        assert ((got > 0) == visible).all()
        np.testing.assert_allclose(got[~large & visible], low)
