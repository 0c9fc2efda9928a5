"""The sentences about a profile: the same numbers in every place, and commands that work."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler.data.findings import Findings


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
        rows = Findings(profile.data).by_type()
        assert {row.type: row.heads for row in rows} == types.value_counts().to_dict()


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
