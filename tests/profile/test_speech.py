"""Word times of speech: equal to those of transformers on the same heads; planted heads and words are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
from conftest import refused

transformers = pytest.importorskip("transformers")
FRAMES = 100
HEADS = [(0, 1), (1, 0)]


@pytest.fixture(scope="module")
def whisper() -> Any:
    """A small random Whisper, which hears 2 seconds."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=FRAMES, max_target_positions=64, decoder_start_token_id=50, pad_token_id=51,
        eos_token_id=51, bos_token_id=51,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.4)
    settings = {"no_timestamps_token_id": 55, "suppress_tokens": None, "begin_suppress_tokens": None}
    for name, value in (settings | {"alignment_heads": [list(one) for one in HEADS]}).items():
        setattr(model.generation_config, name, value)
    return model


def spoken(model: Any, sound: torch.Tensor, ids: torch.Tensor, **options: Any) -> qkv.Profile:
    batch = {"input_features": sound, "decoder_input_ids": ids}
    return qkv.profile(model, batch, progress=False, probe=False, **options)


def test_times_of_tokens_are_those_of_transformers(whisper: Any) -> None:
    sound = torch.randn(1, 8, 2 * FRAMES, generator=torch.Generator().manual_seed(200))
    made = whisper.generate(
        sound, return_token_timestamps=True, return_dict_in_generate=True, max_new_tokens=24,
        attention_mask=torch.ones(1, 2 * FRAMES, dtype=torch.long),
    )  # fmt: skip
    ids, prompt = made["sequences"], 2  # the start, and "no timestamps"
    profile = spoken(whisper, sound, ids[:, :-1])  # it knows no row of the last token
    found = profile.alignment(heads=HEADS, prompt=prompt).tokens
    np.testing.assert_allclose(found["start"], made["token_timestamps"][0, prompt:-1], atol=1e-6)
    assert found["start"].nunique() > 3
    weights = torch.from_numpy(profile.groups["cross"]["weights"].values[0])
    outputs = transformers.generation.GenerateEncoderDecoderOutput(
        sequences=ids, cross_attentions=([layer[None] for layer in weights],)
    )
    for mel in (2 * FRAMES, 120, 50):
        want = whisper._extract_token_timestamps(outputs, HEADS, num_frames=mel, num_input_ids=prompt)[0, prompt:-1]
        found = profile.alignment(heads=HEADS, prompt=prompt, seconds=mel / 100).tokens
        np.testing.assert_allclose(found["start"], want, atol=1e-6)
        assert found["end"].iloc[-1] == pytest.approx(mel / 100)


def planted(words: list[str], spans: list[tuple[int, int]], width: float = 1.0) -> Any:
    """A profile in which head 1 of layer 0 hears each token in its span; the others attend evenly, and to one frame."""
    import xarray as xr

    n = len(words)
    rng = np.random.default_rng(0)
    weights = np.full((1, 2, 2, n, FRAMES), 0.2 / FRAMES) * rng.uniform(0.5, 1.5, (1, 2, 2, n, FRAMES))
    for token, (first, stop) in enumerate(spans):
        weights[0, 0, 1, token, first:stop] += 0.8 / (stop - first)
    weights[0, 1, 0, :, 0] += 0.8  # a sink
    weights[0, 1, 1, :, 40:60] += 0.8 / 20
    return xr.Dataset(
        {"weights": (("text", "layer", "head", "query", "key"), weights)},
        {
            "layer": [0, 1], "head": [0, 1], "query_token": (("text", "query"), np.array([words], object)),
            "n_queries": ("text", [n]), "n_keys": ("text", [FRAMES]),
        },
    )  # fmt: skip


def test_the_head_that_follows_the_text_is_found_and_its_words_have_their_times() -> None:
    from qkv.profiler.data.alignment import alignment

    words = ["<start>", " the", " old", " light", "house", ".", "<end>"]
    spans = [(0, 1), (8, 20), (20, 31), (31, 52), (52, 70), (70, 74), (74, 100)]
    found = alignment(planted(words, spans), ["<start>", "<end>"], None, None, None, 0.02)
    best = found.heads.iloc[0]
    assert (best["layer"], best["head"]) == (0, 1)
    assert found.heads["used"].tolist() == [True, False, False, False]
    assert best["score"] > 2 * found.heads["score"].iloc[1]
    assert found.words["word"].tolist() == ["the", "old", "lighthouse."]
    assert np.abs(found.words["start"].iloc[1:] - [0.40, 0.62]).max() <= 0.0601  # the median is over 7 frames
    assert np.abs(found.words["end"] - [0.40, 0.62, 1.48]).max() <= 0.0601


def test_alignment_refuses_in_one_sentence(whisper: Any) -> None:
    sound = torch.randn(1, 8, 2 * FRAMES)
    ids = torch.tensor([[50, 55, *range(10, 30)]])
    short = spoken(whisper, sound, ids, map_tokens=20)
    with refused("profile", r"keeps no weights of 100 frames; profile with map_tokens=47"):
        short.alignment(prompt=2)
    assert spoken(whisper, sound, ids, map_tokens=47).alignment(heads=HEADS, prompt=2).heads["used"].sum() == 2
    whole = spoken(whisper, sound, ids)
    with refused("heads", r"is \[\(9, 9\)\], expected pairs"):
        whole.alignment(heads=[(9, 9)], prompt=2)
    with refused("prompt", "is 22, expected 0 to 21"):
        whole.alignment(heads=HEADS, prompt=22)
    with refused("heads", "no head follows the text"):
        whole.alignment(prompt=2)
    with refused("group", "this profile has"):
        qkv.profile("qkv-mini", "x = 1", progress=False, probe=False).alignment()
