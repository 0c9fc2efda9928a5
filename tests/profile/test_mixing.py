"""Over-mixing equals the comparison by hand of hidden states, one variant at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import enlarged, refused
from hf_models import LENGTH, PADDED, TARGET, build, inputs
from qkv.figures.analyses import mixing_figure
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loading import load_model
from qkv.profiler.analyses.mixing import mixing
from qkv_lab.models import EncoderDecoder, EncoderDecoderConfig, RNNSeq2Seq, RNNSeq2SeqConfig

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 8]])


def own(**changes: Any) -> DecoderLM:
    return enlarged(DecoderLM(DecoderConfig(vocab_size=13, context=16, d_model=24, layers=3, heads=2, **changes)))


def states(model: DecoderLM, ids: Tensor) -> Tensor:
    """(depth, n, d), with none of the code that is tested."""
    with torch.no_grad():
        x = model._embedded(ids, 0, None)
        found = [x]
        for block in model.blocks:
            found.append(x := block(x))
    return torch.cat(found)


def moved(before: Tensor, after: Tensor) -> np.ndarray:
    return ((after - before).norm(dim=-1) / before.norm(dim=-1)).numpy()


def test_response_equals_that_of_separate_runs() -> None:
    model, others = own(), [0, 7, 12]
    data = mixing(model, IDS, position=4, replacement=others)
    before, alone = states(model, IDS), []
    for other in others:
        ids = IDS.clone()
        ids[0, 4] = other
        alone.append(moved(before, states(model, ids)))
    response = data["response"].values[0]
    np.testing.assert_allclose(response, np.mean(alone, 0), atol=1e-12)
    np.testing.assert_allclose(data["deviation"].values[0], np.std(alone, 0), atol=1e-12)
    np.testing.assert_allclose(data["later"].values[0], response[:, 5:].mean(1), atol=1e-12)
    assert response.shape == (4, 11)
    assert data["replaced"].values.tolist() == [5]
    assert data["replaced_by"].values.tolist() == [others]
    assert data["token_name"].values[0].tolist() == [str(i) for i in IDS[0].tolist()]


def test_earlier_tokens_and_other_embeddings_do_not_move() -> None:
    response = mixing(own(), IDS, position=4)["response"].values[0]
    assert response[:, :4].max() < 1e-12
    assert response[0, 5:].max() == 0
    assert (response[:, 4] > 0.1).all()
    assert (response[1:, 5:] > 1e-4).all()


def test_without_first_equals_a_shorter_text() -> None:
    model = own()
    whole = mixing(model, IDS, position=4, seed=2)
    data = mixing(model, IDS, position=4, seed=2, without_first=True)
    rest = mixing(model, IDS[:, 1:], position=3, replacement=data["replaced_by"].values[0].tolist())
    assert np.array_equal(data["response"].values, rest["response"].values)
    assert np.array_equal(data["later"].values, rest["later"].values)
    assert data["token"].values.tolist() == list(range(1, 11))
    assert np.array_equal(data["replaced_by"].values, whole["replaced_by"].values)
    assert not np.allclose(data["later"].values, whole["later"].values)


def test_drawn_replacements_are_seeded_ordinary_tokens() -> None:
    drawn = {tuple(mixing(own(), IDS, seed=s, replacements=12)["replaced_by"].values[0]) for s in (0, 0, 1)}
    assert len(drawn) == 2
    assert all(sorted(ids) == [i for i in range(13) if i != 1] for ids in drawn)
    minilm = load_model("minilm")
    data = mixing(minilm.model, "The cat sat.", tokenizer=minilm.tokenizer, replacements=64)
    assert not set(data["replaced_by"].values[0].tolist()) & set(minilm.tokenizer.all_special_ids)
    assert data["token_name"].values[0].tolist() == ["[CLS]", "the", "cat", "sat", ".", "[SEP]"]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_left_out(padding: str) -> None:
    model, batch = build("llama").double(), inputs("llama", padding)
    data = mixing(model, batch, position=3, replacement=96)
    real = batch["attention_mask"].bool()
    for item in range(2):
        ids = batch["input_ids"][item][real[item]]
        alone = mixing(model, ids, position=3, replacement=96)["response"].values[0]
        got = data["response"].values[item]
        np.testing.assert_allclose(got[:, : len(ids)], alone, atol=1e-9)
        assert np.isnan(got[:, len(ids) :]).all()
    assert data.sizes["token"] == LENGTH
    assert np.isnan(data["response"].values[1, 0]).sum() == PADDED
    np.testing.assert_allclose(data["later"].values, np.nanmean(data["response"].values[..., 4:], -1), atol=1e-12)


def test_texts_of_different_lengths_are_padded() -> None:
    data = mixing("minilm", ["The cat sat on the mat.", "A dog."], position=2)
    assert np.isfinite(data["response"].values[:, 0]).sum(1).tolist() == [9, 5]
    assert data["token_name"].values[1].tolist()[-4:] == [""] * 4


@pytest.mark.parametrize("name", ["t5", "own"])
def test_encoder_and_decoder_are_separate_stacks(name: str) -> None:
    if name == "t5":
        model: nn.Module = build("t5")
        batch, stacks = inputs("t5"), ("encoder.block", "decoder.block")
    else:
        config = EncoderDecoderConfig(97, 97, d_model=24, heads=2, layers=2, decoder_layers=3)
        model, stacks = enlarged(EncoderDecoder(config)), ("encoder.blocks", "decoder.blocks")
        batch = dict(zip(("source", "target"), inputs("t5").values(), strict=True))
    encoder = mixing(model, batch, replacements=2)
    decoder = mixing(model, batch, replacements=2, stack=stacks[1])
    assert (encoder.attrs["stack"], decoder.attrs["stack"]) == stacks
    assert dict(encoder["response"].sizes) == {"text": 2, "depth": 3, "token": LENGTH}
    assert dict(decoder["response"].sizes) == {"text": 2, "depth": 4, "token": TARGET}
    assert decoder["response"].values[:, 0].max() == 0  # the target is as it was
    assert (decoder["response"].values[:, 1:] > 0).all()
    np.testing.assert_allclose(decoder["later"].values, decoder["response"].values.mean(-1))
    shorter = mixing(model, batch, replacements=2, stack=stacks[1], without_first=True)
    assert shorter["token"].values.tolist() == list(range(TARGET))


def test_mixing_restores_the_model() -> None:
    model = own().train()
    mixing(model, IDS)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    dropping = own(dropout=0.5).train()
    assert np.array_equal(mixing(dropping, IDS)["response"].values, mixing(dropping.eval(), IDS)["response"].values)


def test_variables_have_units_and_definitions() -> None:
    data = mixing(own(), IDS)
    assert all(v.attrs["units"] == "1" and v.attrs["definition"] for v in data.data_vars.values())
    assert {"position": 1, "without_first": 0, "seed": 0, "stack": "blocks"}.items() <= data.attrs.items()


def test_mixing_rejects_invalid_arguments() -> None:
    model = own()
    with refused("position", match="11 tokens"):
        mixing(model, IDS, position=11)
    with refused("position", match="is -1"):
        mixing(model, IDS, position=-1)
    with refused("position", match="first token"):
        mixing(model, IDS, position=0, without_first=True)
    with refused("replacement"):
        mixing(model, IDS, replacement=1)
    with refused("replacement"):
        mixing(model, IDS, replacement=[0, 13])
    with refused("replacements", match="at least 1"):
        mixing(model, IDS, replacements=0)
    with refused("replacements", match="vocabulary"):
        mixing(model, IDS, replacements=13)
    with refused("stack", match="'encoder'"):
        mixing(model, IDS, stack="encoder")
    with refused("inputs"):
        mixing(build("vit"), inputs("vit"))
    plain = RNNSeq2Seq(RNNSeq2SeqConfig(13, 13))
    with refused("stack", match="None"):
        mixing(plain, {"source": IDS, "target": IDS})


# --- figure -----------------------------------------------------------------------------------------------------------


def test_figure_shows_the_response() -> None:
    model = own()
    data, other = mixing(model, IDS, position=4), mixing(model, IDS, position=4, without_first=True)
    figure = mixing_figure(data, other, name="mini")
    heat, _, curve = figure.axes
    shown = heat.collections[0].get_array().reshape(4, 11)
    np.testing.assert_allclose(shown, data["response"].values[0])
    assert [line.get_xdata().tolist() for line in curve.lines] == [
        pytest.approx((100 * d["later"].values[0]).tolist()) for d in (data, other)
    ]
    title, subtitle = (t.get_text() for t in figure.texts)
    assert f"by {100 * data['later'].values[0, -1]:.0f} % of their norm" in title
    assert "without the" in title.replace("\n", " ")
    assert "mini · “5” at position 4 changed · mean of 4 other tokens" in subtitle
    assert [t.get_text() for t in curve.get_legend().get_texts()] == ["whole text", "without the first token"]


def test_figure_of_the_last_token_and_of_one_replacement() -> None:
    data = mixing(own(), IDS, position=10, replacement=0)
    title, subtitle = (t.get_text() for t in mixing_figure(data).texts)
    assert title == "No token comes after the changed one"
    assert "one other token in its place" in subtitle


def test_figure_rejects_wrong_shapes() -> None:
    data = mixing(own(), IDS)
    with refused("text"):
        mixing_figure(data, text=1)
    with refused("other"):
        mixing_figure(data, data.isel(depth=slice(3)))
