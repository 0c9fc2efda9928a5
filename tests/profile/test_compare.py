"""Two profiles compared, and heads by their maps: the numbers equal those computed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import qkv
from conftest import Command, refused
from profile_fixture import dataset_from_weights, encoder_decoder, gpt, softmax
from qkv import Profile
from qkv.cli.profile import show_comparison as show
from qkv.cli.shared import saved_profile as saved
from qkv.models import DecoderConfig, DecoderLM, loading
from qkv.plot.comparison import ROUNDING, changed_maps_figure, plane
from qkv.profiler.comparison import compare
from qkv.server.live import Live

TEXT = "def mean(values):\n    return sum(values) / len(values)\n"


@cache
def mini(dtype: str = "float32") -> Profile:
    model, tokenizer = qkv.load("qkv-mini", dtype=dtype)
    return qkv.profile(model, TEXT, tokenizer=tokenizer, probe=False, progress=False)


def by_hand(seed: int, tokens: list[list[str]] | None = None, *, sink: float = 0.0, window: int = 8) -> Profile:
    """Two layers × three heads on two texts of 7 and 5 tokens; a share of the weight goes to a learned sink."""
    tokens = tokens or [list("abcdefg"), list("hijkl")]
    rng = np.random.default_rng(seed)
    weights = [softmax(2 * rng.normal(size=(2, 3, len(t), len(t)))) * (1 - sink) for t in tokens]
    masses = [np.full(w.shape[:3], sink) for w in weights] if sink else None
    data = dataset_from_weights(weights, tokens, sink_mass=masses, window=window)
    return Profile({"self": data}, {"model": f"seed {seed}", "dtype": "float32"})


def test_profile_does_not_differ_from_itself() -> None:
    found = compare(mini(), mini())
    for name, values in found.data.data_vars.items():
        finite = np.isfinite(mini().data[name].values) if name != "change" else np.ones(values.shape, bool)
        assert (values.values[finite] == 0).all(), name
    heads = found.heads()
    assert not heads["moved"].any()
    assert (heads.filter(like="_difference").fillna(0) == 0).all(axis=None)
    assert len(found.summary()) == 1
    assert "Nothing changed" in found.plot().texts[0].get_text()


def test_bfloat16_against_float32() -> None:
    a, b = mini(), mini("bfloat16")
    found = compare(a, b)
    data, heads = found.data, found.heads()
    assert {"entropy", "sink", "received", "weights", "change"} <= set(data.data_vars)
    for name in ("entropy", "received", "weights"):
        assert np.array_equal(data[name].values, b.data[name].values - a.data[name].values, equal_nan=True)
    assert data["entropy"].dims == ("text", "layer", "head", "query")
    assert data["change"].attrs["units"] == "1"
    for x in ("entropy", "sink", "local", "effective_keys"):
        assert np.array_equal(heads[f"{x}_a"], a.heads()[x])
        assert np.array_equal(heads[f"{x}_b"], b.heads()[x])
        np.testing.assert_allclose(heads[f"{x}_difference"], b.heads()[x] - a.heads()[x])
    assert 0 < heads["change"].median() < 0.02  # eight bits of mantissa
    assert (heads["module"] == a.heads()["module"]).all()


def test_change_is_the_total_variation_of_received_shares() -> None:
    a, b = by_hand(1), by_hand(2)
    found = compare(a, b)
    want = []
    for text, n in enumerate((7, 5)):
        p, q = (x.data["weights"].values[text, ..., :n, :n].astype(float).mean(-2) for x in (a, b))
        # The largest difference that any set of keys shows: over all of them.
        sets = np.array([[i >> k & 1 for k in range(n)] for i in range(2**n)], float)
        want.append((sets @ (p - q)[..., None]).max((-2, -1)))
    np.testing.assert_allclose(found.data["change"].values, want, atol=1e-6)
    np.testing.assert_allclose(found.heads()["change"], np.mean(want, 0).ravel(), atol=1e-6)


def test_learned_sink_counts_in_change_and_what_one_profile_lacks_is_named() -> None:
    a, b = by_hand(1), by_hand(1, sink=0.25)
    found = compare(a, b)
    np.testing.assert_allclose(found.data["change"].values, 0.25, atol=1e-6)
    assert "sink_mass" not in found.data
    assert found.data.attrs["only_in_a"] == []
    assert found.data.attrs["only_in_b"] == ["sink_mass"]
    both = compare(b, by_hand(2, sink=0.5))
    np.testing.assert_allclose(both.data["sink_mass"].values[0], 0.25, atol=1e-6)
    found = compare(a, Profile({"self": b.data.drop_vars("weights")}, {}))
    assert "weights" not in found.data
    assert found.data.attrs["only_in_a"] == ["weights"]


def test_weights_that_add_up_to_more_than_one_are_scaled() -> None:
    a, b = by_hand(1), by_hand(1)
    b.data["received"] = b.data["received"] * 3
    np.testing.assert_allclose(compare(a, b).data["change"].values, 0, atol=1e-6)


def test_queries_without_visible_keys_do_not_differ() -> None:
    data = by_hand(1).data.copy(deep=True)
    data["lse"].values[:] = 1.5
    data["lse"].values[0, 0, 0, 0] = -np.inf
    one = Profile({"self": data}, {})
    assert (compare(one, one).data["lse"].values[0] == 0).all()


def test_summary_reports_targets_sinks_and_entropy() -> None:
    a = gpt()
    swapped = a.data.isel(head=[1, 0, 2, 3, 4]).assign_coords(head=a.data["head"])
    found = compare(a, Profile({"self": swapped}, {"model": "swapped"}))
    heads = found.heads()
    assert heads.loc[heads["moved"], "head"].tolist() == [0, 1] * 3
    assert heads.loc[0, "goes_to_b"].startswith("previous")
    assert found.summary()[0].startswith("6 of 15 heads")
    data = a.data.copy(deep=True)
    data["sink"] = data["sink"] * 0 + 0.9
    data["entropy"] = data["entropy"] * 0.5
    found = compare(a, Profile({"self": data}, {}))
    entropy = a.heads()["entropy"].mean()
    assert f"falls by {entropy / 2:.2f} nats" in found.summary()[2]
    assert "rises by" in compare(found.b, a).summary()[2]


LETTERS = list("abcdefg")
MISMATCHES: dict[str, Callable[[], Profile]] = {  # by what the error says
    "expected the same as a, self": encoder_decoder,
    r"0\.\.3 \(2\) in b": lambda: Profile({"self": by_hand(1).data.assign_coords(layer=[0, 3])}, {}),
    r"0\.\.1 \(2\) in b": lambda: Profile({"self": by_hand(1).data.isel(head=slice(2))}, {}),
    "2 texts in a and 1 in b": lambda: by_hand(1, [LETTERS]),
    "text 1 in a and 4 in b": lambda: by_hand(1, [LETTERS, list("hijk")]),
    "'j' in a and 'J' in b": lambda: by_hand(1, [LETTERS, list("hiJkl")]),
    "8 in a and 4 in b": lambda: by_hand(1, window=4),
}


@pytest.mark.parametrize("difference", MISMATCHES)
def test_profiles_that_do_not_match_are_refused(difference: str) -> None:
    with refused("b", difference):
        compare(by_hand(1), MISMATCHES[difference]())
    with refused("b"):
        compare(Profile({"decoder": encoder_decoder().groups["decoder"]}, {}), encoder_decoder())


def test_figure_and_command_show_the_most_changed_heads(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(by_hand(1), by_hand(2))
    heads, axes = found.heads(), found.plot().axes
    shown = [np.asarray(x.images[0].get_array()) for x in axes if x.images]
    for values, name in zip(shown, ("entropy", "sink", "local"), strict=True):
        np.testing.assert_allclose(values.ravel(), heads[f"{name}_difference"])
    most = heads.sort_values("change", ascending=False)
    np.testing.assert_allclose([bar.get_width() for bar in axes[-1].patches], 100 * most["change"])
    layer, head = most["layer"].iloc[0], most["head"].iloc[0]
    assert axes[-1].get_yticklabels()[0].get_text() == f"L{layer} · H{head}"
    show(found, most=2)
    assert f"L{layer} · H{head}" in capsys.readouterr().out


def test_maps_of_the_report_show_the_differences_beyond_rounding(tmp_path: Path) -> None:
    a, b = mini(), mini("bfloat16")
    found = compare(a, b)
    figure = changed_maps_figure(found, "self")
    assert figure is not None
    images = [axes.images[0] for axes in figure.axes if axes.images and axes.get_title(loc="left")]
    most = found.heads().sort_values("change", ascending=False).iloc[0]
    before, after = (x.data["weights"].sel(layer=most["layer"], head=most["head"]).values[0] for x in (a, b))
    drawn = np.ma.filled(images[2].get_array(), np.nan)
    seen = np.tril(np.ones_like(before, bool))
    rounds = abs(after - before) <= ROUNDING["float32"]
    np.testing.assert_allclose(drawn[seen], np.where(rounds, 0, after - before)[seen])
    assert np.isnan(drawn[~seen]).all()
    assert images[2].norm.vmax == -images[2].norm.vmin == abs(after - before)[seen].max()
    page = found.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.index("(float32) → ") < page.index('id="maps"')
    assert page.count("data:image/png;base64,") == 2
    same = compare(a, a)
    assert not same.changed()
    page = same.report(tmp_path / "same.html").read_text(encoding="utf-8")
    assert "Nothing changed: all 36 heads" in page
    assert "data:image/png;base64," not in page


@pytest.mark.usefixtures("undrawn")
def test_command_compares_two_dtypes_of_one_model(tmp_path: Path, command: Command) -> None:
    out = command.succeeds("profile", "qkv-mini", "x = 1", "--no-probe", "--dtype", "bfloat16",
                           "--against-dtype", "float32", "--out", tmp_path / "out")  # fmt: skip
    assert "qkv-mini (float32) → qkv-mini (bfloat16)" in out
    assert "compare.png" in out
    profile = tmp_path / "out" / "profile.qkv.zip"
    words = "profile", "qkv-mini", "x = 1", "--against", profile, "--against-dtype", "float16", "--out", tmp_path / "b"
    assert "--against-dtype" in command.refuses(*words)


def test_command_compares_with_a_saved_profile(tmp_path: Path) -> None:
    profile = saved(str(by_hand(1).save(tmp_path / "a.qkv.zip")), "--against")
    assert profile is not None
    assert not compare(by_hand(1), profile).heads()["change"].any()
    assert saved("minilm", "--against") is None
    assert saved(str(tmp_path), "--against") is None
    with refused("--against"):
        saved(str(tmp_path / "b.zip"), "--against")


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Jensen-Shannon divergence of two distributions in bits, by its definition: two Kullback-Leibler divergences."""
    middle = (a + b) / 2
    return sum(float((x[x > 0] * np.log2(x[x > 0] / middle[x > 0])).sum()) for x in (a, b)) / 2


def by_rows(weights: np.ndarray, one: tuple[int, int], other: tuple[int, int], first: int) -> float:
    """The similarity of two heads of `weights` (layer, head, query, key), whose rows sum to 1."""
    rows = zip(weights[one][first:], weights[other][first:], strict=True)
    return 1 - float(np.mean([divergence(a, b) for a, b in rows]))


def test_similarity_is_one_minus_the_mean_divergence_of_the_rows() -> None:
    profile = gpt(23)
    weights = profile.data["weights"].values[0].astype(np.float64)
    table = profile.similarity()
    assert table.attrs["maps"] == "weights"
    for one, other in (((0, 1), (2, 3)), ((1, 0), (1, 4)), ((2, 2), (0, 2))):
        assert abs(table.loc[one, other] - by_rows(weights, one, other, 1)) < 1e-5, "the first query is left out"
    np.testing.assert_array_equal(table, table.T)
    np.testing.assert_array_equal(np.diag(table), 1)
    assert table.index.names == ["layer", "head"]
    assert ((table >= 0) & (table <= 1)).all(axis=None)
    assert gpt(1).similarity().isna().all(axis=None), "one token tells nothing"


def test_a_learned_sink_counts_as_a_key_and_rows_are_shares() -> None:
    rng = np.random.default_rng(3)
    weights, sink = rng.random((1, 3, 7, 5)), rng.random((1, 3, 7))
    tokens = [[*"abcdefg"]], [[*"vwxyz"]]
    data = dataset_from_weights([weights], *tokens, sink_mass=[sink], name="cross")
    full = np.concatenate([weights, sink[..., None]], -1)
    data["weights"][0, 0, 2, 4], data["sink_mass"][0, 0, 2, 4] = 0, 0  # a query that attends to no key
    full[0, 2, 4] = [0, 0, 0, 0, 0, 1]  # is all on the null key
    full /= full.sum(-1, keepdims=True)
    table = Profile({"cross": data}, {}).similarity()
    for pair in ((0, 1), (0, 2), (1, 2)):
        assert abs(table.loc[(0, pair[0]), (0, pair[1])] - by_rows(full, (0, pair[0]), (0, pair[1]), 0)) < 1e-5
    data["weights"] = -data["weights"]
    with refused("maps"):
        Profile({"cross": data}, {}).similarity()


def test_pooled_maps_never_make_heads_less_alike_and_agree_at_one_pair_a_bin() -> None:
    torch.manual_seed(5)
    model = DecoderLM(DecoderConfig(vocab_size=31, d_model=30, layers=2, heads=3))
    for parameter in model.parameters():
        parameter.data *= 3
    ids = torch.randint(31, (1, 29))
    coarse, fine = (qkv.profile(model, ids, probe=False, progress=False, map_bins=bins) for bins in (4, 32))
    exact, pooled = coarse.similarity(), coarse.similarity(maps="pooled")
    assert pooled.attrs["maps"] == "pooled"
    assert (pooled - exact).min(axis=None) > -1e-6
    assert (pooled - exact).max(axis=None) > 0.01
    all_queries = 1 - (1 - exact) * 28 / 29  # pooled maps hold the first query, too, where all heads agree
    np.testing.assert_allclose(fine.similarity(maps="pooled"), all_queries, atol=1e-5)


def test_similarity_refuses_unknown_texts_and_maps_that_are_not_held() -> None:
    profile = gpt()
    with refused("text"):
        profile.similarity(1)
    for maps in ("pooled", "means"):
        with refused("maps"):
            profile.similarity(maps=maps)  # type: ignore[arg-type]
    with refused("maps"):
        Profile({"self": profile.data.drop_vars("weights")}, {}).similarity()


def test_places_of_heads_have_the_distances_of_points_in_a_plane() -> None:
    points = np.random.default_rng(1).random((9, 2)) / 2
    squares = ((points[:, None] - points) ** 2).sum(-1)
    places = plane(1 - squares)
    np.testing.assert_allclose(((places[:, None] - places) ** 2).sum(-1), squares, atol=1e-12)
    axes = gpt(23).plot.similarity().axes[2]
    places = np.concatenate([some.get_offsets() for some in axes.collections])
    np.testing.assert_allclose(axes.viewLim.get_points().sum(0), places.max(0) + places.min(0), atol=1e-9)


def test_one_number_of_heads_with_a_sink_in_findings_comparison_and_live() -> None:
    model, tokenizer = qkv.load("qkv-mini")
    text = "def mean(values):\n    return sum(values) / len(values)\n" * 3
    a = qkv.profile(model, text, tokenizer=tokenizer, probe=False, progress=False)
    with qkv.edit(model, qkv.profiler.everywhere(model, "sigmoid")):
        b = qkv.profile(model, text, tokenizer=tokenizer, probe=False, progress=False)
    weights = [np.nan_to_num(x.data["weights"].values[0].astype(float)) for x in (a, b)]
    firsts = [A[:, :, :64] / np.maximum(A[:, :, :64].sum(-1, keepdims=True), 1e-30) for A in weights]
    before, after = (int((A[..., 0].mean(-1) > 0.3).sum()) for A in firsts)
    assert before != after
    assert [p.findings()[0].value for p in (a, b)] == [f"{n} of 36" for n in (before, after)]
    (said,) = (one for one in compare(a, b).summary() if "sink" in one)
    assert re.match(r"(\d+) heads? .*; (\d+) before", said).groups() == (str(after), str(before))  # type: ignore[union-attr]
    answer = Live(loading.load_model("qkv-mini")).answer(
        SimpleNamespace(text=text, edits=[], layer=0, head=0, k=1, ids=None)
    )
    assert np.sum(answer["before"]["sinks"]) == before
