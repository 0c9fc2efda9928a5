"""Over-mixing equals the comparison by hand of hidden states, one variant at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import enlarged, refusals
from hf_models import LENGTH, PADDED, TARGET, build, inputs
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
    assert response[:, :4].max() < 1e-12  # earlier tokens, and other embeddings, do not move
    assert response[0, 5:].max() == 0
    assert (response[:, 4] > 0.1).all()
    assert data["replaced"].values.tolist() == [5]
    assert data["replaced_by"].values.tolist() == [others]
    assert data["token_name"].values[0].tolist() == [str(i) for i in IDS[0].tolist()]
    assert all(v.attrs["units"] == "1" and v.attrs["definition"] for v in data.data_vars.values())
    assert {"position": 4, "without_first": 0, "seed": 0, "stack": "blocks"}.items() <= data.attrs.items()


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
    data = mixing(minilm.model, ["The cat sat.", "A dog."], tokenizer=minilm.tokenizer, position=2)
    assert np.isfinite(data["response"].values[:, 0]).sum(1).tolist() == [6, 5]
    assert data["token_name"].values[1].tolist() == ["[CLS]", "a", "dog", ".", "[SEP]", ""]


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


def test_encoder_and_decoder_are_separate_stacks() -> None:
    model = enlarged(EncoderDecoder(EncoderDecoderConfig(97, 97, d_model=24, heads=2, layers=2, decoder_layers=3)))
    batch = dict(zip(("source", "target"), inputs("t5").values(), strict=True))
    encoder = mixing(model, batch, replacements=2)
    decoder = mixing(model, batch, replacements=2, stack="decoder.blocks")
    assert (encoder.attrs["stack"], decoder.attrs["stack"]) == ("encoder.blocks", "decoder.blocks")
    assert dict(encoder["response"].sizes) == {"text": 2, "depth": 3, "token": LENGTH}
    assert dict(decoder["response"].sizes) == {"text": 2, "depth": 4, "token": TARGET}
    assert decoder["response"].values[:, 0].max() == 0  # the target is as it was
    assert (decoder["response"].values[:, 1:] > 0).all()
    np.testing.assert_allclose(decoder["later"].values, decoder["response"].values.mean(-1))
    shorter = mixing(model, batch, replacements=2, stack="decoder.blocks", without_first=True)
    assert shorter["token"].values.tolist() == list(range(TARGET))


def test_mixing_runs_without_dropout_and_restores_the_model() -> None:
    model = own(dropout=0.5).train()
    data = mixing(model, IDS)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert np.array_equal(data["response"].values, mixing(model.eval(), IDS)["response"].values)


REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("position", "11 tokens", lambda: mixing(own(), IDS, position=11)),
    ("position", "is -1", lambda: mixing(own(), IDS, position=-1)),
    ("position", "first token", lambda: mixing(own(), IDS, position=0, without_first=True)),
    ("replacement", None, lambda: mixing(own(), IDS, replacement=1)),
    ("replacement", None, lambda: mixing(own(), IDS, replacement=[0, 13])),
    ("replacements", "at least 1", lambda: mixing(own(), IDS, replacements=0)),
    ("replacements", "vocabulary", lambda: mixing(own(), IDS, replacements=13)),
    ("stack", "'encoder'", lambda: mixing(own(), IDS, stack="encoder")),
    ("inputs", None, lambda: mixing(build("vit"), inputs("vit"))),
    ("stack", "None", lambda: mixing(RNNSeq2Seq(RNNSeq2SeqConfig(13, 13)), {"source": IDS, "target": IDS})),
]

test_invalid_arguments_are_refused = refusals(REFUSALS)
