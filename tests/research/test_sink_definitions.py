"""The definitions of sinks and massive activations agree wherever they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv.profiler import corpora
from qkv.profiler.capture import residual
from qkv.profiler.surveys.accumulators import PREFIX
from qkv_lab import heads
from research.sinks.effects import FirstKey, Magnitudes, Rows
from research.sinks.subject import Subject


@pytest.mark.parametrize(("rest", "largest", "count"), [(1.0, 2000.0, 1), (1.0, 500.0, 0), (0.001, 99.0, 0)])
def test_massive_activations_are_large_and_far_above_the_median(rest, largest, count):
    states = torch.full((3, 5), rest)
    states[0, 2] = -largest
    assert int(residual._summarised(states[None])["massive"]) == count


def test_profile_survey_lab_and_research_measure_the_same_sinks_of_qkv_mini(tmp_path: Path) -> None:
    """One text of 65 tokens: sink scores, norms of the first key and value, the largest activation of each layer."""
    model, tokenizer = qkv.load("qkv-mini")
    text = tokenizer.decode(tokenizer(corpora.default_text("qkv-mini"))["input_ids"][1:65])
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    found = qkv.profile(model, ids, progress=False, probe=False)
    sinks, (states,) = found.sinks(), found.residual.values()
    track, weights = heads.attention_and_weights(model, ids)
    recording = Subject.of(model, ids).record(ids)

    prefix = slice(PREFIX)  # the sink score of a profile is a mean over the first 64 queries
    alpha = np.stack([row.alpha[0] for row in (Rows.of(one.call) for one in recording.calls)])
    of_lab = weights["first"][0]
    np.testing.assert_allclose(sinks["alpha_first"], of_lab[..., prefix].mean(-1).ravel(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(alpha, of_lab.mean(-1), rtol=1e-4, atol=1e-6)
    survey = qkv.profiler.survey(model, [text], tokenizer=tokenizer, out=tmp_path, shards=1)
    np.testing.assert_allclose(survey.heads()["sink"], sinks["share_first"], rtol=1e-4, atol=1e-6)

    first = [
        FirstKey.of(one.call, head) for one in recording.calls for head in range(model.config.heads)
    ]  # fmt: skip
    np.testing.assert_allclose(sinks["value_norm_first"], np.ravel(track["value_drain"]), rtol=1e-5)
    np.testing.assert_allclose(sinks["value_norm_first"], [one.value_norm for one in first], rtol=1e-4)
    np.testing.assert_allclose(sinks["key_norm_first"], [one.key_norm for one in first], rtol=1e-4)

    magnitudes = [Magnitudes.of(x[0]) for x in recording.states[1:]]
    np.testing.assert_allclose(states["first_ratio"].values[0, 1:], track["massive"], rtol=1e-5)
    np.testing.assert_allclose(track["massive"], [m.first / m.median for m in magnitudes], rtol=1e-4)
    largest = [max(m.first, m.others) / m.median for m in magnitudes]
    np.testing.assert_allclose(states["ratio"].values[0, 1:], largest, rtol=1e-4)
