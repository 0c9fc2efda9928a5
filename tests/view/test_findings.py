"""The sentences about a profile: the same numbers in every place, and commands that work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import profile_fixture as made
import qkv
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler.comparison import effect_of
from qkv.profiler.data import tables
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.sinks import massive_sentence
from smollm2 import kept, residual


@pytest.fixture(scope="module")
def mini() -> qkv.Profile:
    return qkv.profile("qkv-mini", progress=False)


@pytest.fixture(scope="module")
def bert() -> qkv.Profile:
    return qkv.profile("minilm", "The cat sat on the mat.", progress=False)


@pytest.mark.slow
def test_numbers_of_the_findings_are_those_of_the_tables(mini: qkv.Profile, bert: qkv.Profile) -> None:
    for profile in (mini, bert):
        sinks, types, trend = profile.sinks(), profile.types()["type"], profile.sink_trend()
        by_label = {one.label: one for one in profile.findings()}
        above = (sinks["alpha_first"] > 0.3).sum()
        assert profile.findings()[0].value == f"{above} of {len(sinks)}"
        assert trend["heads"].iloc[0] == above
        assert by_label["heads have one clear type"].value == f"{(types != 'mixed').sum()} of {len(types)}"
        assert Findings(profile.data).kinds == types.value_counts().to_dict()


def test_a_text_too_short_to_tell_sinks_has_no_verdict_about_the_text() -> None:
    for text, short in (("fox", True), ("for name in names: seen.append(name)", False)):
        profile = qkv.profile("qkv-mini", text, progress=False)
        types, found = profile.types(), Findings(profile.data)
        assert (profile.data.sizes["key"] < 10) == short == tables.is_short(profile.data)
        told = {*types["type"]} - {"mixed", *tables.PROBED}
        assert bool(told) != short
        said = " ".join(map(str, found.all))
        assert ("too short" in found.headline) == ("too short" in said) == short
        assert ("Heads with a sink" in said) != short
        assert types["previous token"].notna().all(), "the scores stay"
        other = qkv.profile("qkv-mini", text, probe=False, progress=False).data
        assert ("oo short" in effect_of("sigmoid", profile.data, other)) == short


def test_trend_splits_the_text_into_ranges_whose_mean_is_that_of_the_text(mini: qkv.Profile) -> None:
    trend = mini.sink_trend()
    queries = trend["last"] - trend["first"] + 1
    assert queries.sum() == mini.data.sizes["query"]
    assert (trend["first"].iloc[1:].to_numpy() == trend["last"].iloc[:-1].to_numpy() + 1).all()
    whole = float(mini.sinks()["alpha_whole"].mean())
    assert float((trend["share"] * queries).sum() / queries.sum()) == pytest.approx(whole, abs=1e-6)


def test_untrained_uniform_heads_do_not_count_as_retrieval() -> None:
    torch.manual_seed(0)
    model = DecoderLM(DecoderConfig(vocab_size=100, d_model=32, layers=1, heads=4, context=2048))
    profile = qkv.profile(model, torch.randint(100, (1, 1500)), probe=False, progress=False)
    table = profile.types()
    assert (table["type"] == "uniform").all()
    assert not table["traits"].str.contains("retrieval").any()


@pytest.mark.parametrize(("adds", "said"), [(0.02, "is only 2 %"), (0.45, "is still 45 %")])
def test_the_sentence_about_a_sinks_value_concludes_from_what_it_adds(
    mini: qkv.Profile, adds: float, said: str
) -> None:
    """The value may be short and add much, as in SmolLM2, which the norm alone would have called little."""
    table = mini.sinks().assign(value_norm_first=0.24, contribution_first=adds, alpha_whole=0.0)
    found = Findings(mini.data, mini.attrs)
    found.__dict__["_sink_table"] = table
    assert found.sinks is not None
    assert "0.24 × the mean of the other tokens, and its contribution, " in found.sinks.detail
    assert said in found.sinks.detail
    assert f"{(table['alpha_random'] > 0.3).sum()} heads on random tokens" in found.sinks.detail
    assert found.sinks.heads == tuple(np.flatnonzero(table["alpha_first"] > 0.3))


def test_massive_activations_are_pairs_of_a_token_and_a_dimension() -> None:
    assert kept("chat")["residual"]["massive"].count(1) == 17, "the same pair, at 17 depths"
    said = massive_sentence(residual("chat"), np.array([kept("chat")["tokens"]]))
    assert said.startswith(
        "1 massive activation: “<|im_start|>” at position 0 in dimension 507, at depths 12–28, up to "
    )
    said = massive_sentence(residual("text"))
    assert said.startswith("2 massive activations: the token at position 0 in dimension 507, at depths 12–28, up to ")
    assert "dimension 247, at depth 12, up to" in said


def test_the_head_shown_first_follows_content_and_has_several_targets_and_others_follow(mini: qkv.Profile) -> None:
    types, heads, each = mini.types(), mini.heads(), mini.data.sizes["head"]
    found = [types.iloc[layer * each + head].name for layer, head in tables.telling_heads(mini.data)]
    names = list(types["type"].iloc[found])
    assert sorted(names) == sorted(set(types["type"])), "one head of each type"
    assert names[0] == "induction"
    assert heads["top_key_share"].iloc[found[0]] <= 0.5

    plain = mini.data.copy(deep=True)  # no head copies
    for probe in ("probe_induction", "probe_duplicate"):
        plain[probe][:] = 0
    layer, head = tables.telling_heads(plain)[0]
    assert "content" in types["traits"].iloc[layer * each + head], "then a head whose rows follow tokens"
    plain["probe_positional"][:] = np.nan  # nothing is known of content
    layer, head = tables.telling_heads(plain)[0]
    assert types["type"].iloc[layer * each + head] not in ("previous token", "self", "first token", "uniform")

    sunk = mini.data.copy(deep=True)  # all weight on the first token, but for one head of no type that is a permutation
    sunk["received"][:] = 0
    sunk["received"][..., 0] = sunk.sizes["query"]
    sunk["entropy"][:] = 0
    sunk["received"][0, 1, 3] = 1
    assert tables.telling_heads(sunk)[0] == (1, 3)


def test_the_only_head_of_an_encoder_decoder_is_said_in_the_singular() -> None:
    """Each query looks at a key of its own: the head is spread over the text, and not over keys of one query."""
    source, target = [list("abcdefgh")], [list("ijklmnop")]
    data = made.dataset_from_weights([np.eye(8)[::-1][None, None]], target, source, name="cross")
    found = Findings(data, group="cross")
    assert found.headline == "1 head: it spreads a query's weight over 1.0 of 8 keys on average."
    assert not any("clear type" in one.label for one in found.all)
    assert tables.head_table(data)["goes_to"].tolist() == ["1 key a query"]
