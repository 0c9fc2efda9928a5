"""What the live page gets is exact: the profiler's weights, eager's with edits, and the distributions of the model."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from conftest import refused
from qkv.models import ByteTokenizer, DecoderConfig, DecoderLM, Sampler, generate
from qkv.models.loading import Loaded, load_model
from qkv.models.text import load_text_model
from qkv.server.live import EXAMPLE, Live, _change


def edit(layer: int, head: int, normalizer: str = "softmax", temperature: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(layer=layer, head=head, normalizer=normalizer, temperature=temperature)


def asked(text: str = EXAMPLE, edits: Sequence[SimpleNamespace] = (), **changed: Any) -> SimpleNamespace:
    """A request of the page."""
    usual = {"layer": 1, "head": 2, "k": 12, "sampling_temperature": 1.0, "seed": 0, "step": 0, "ids": None}
    return SimpleNamespace(text=text, edits=edits, **usual | changed)


@pytest.fixture(scope="module")
def live() -> Live:
    return Live(load_model("qkv-mini"))


def decoded(text: str, n: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(n, n)


def test_without_interventions_weights_equal_the_profile(live: Live) -> None:
    answer = live.answer(asked())
    profile = qkv.profile("qkv-mini", EXAMPLE, progress=False, probe=False)
    n = len(answer["tokens"])
    assert answer["tokens"] == profile.data["key_token"].values[0].tolist()
    weights = np.nan_to_num(profile.data["weights"].values[0])
    np.testing.assert_allclose(answer["rows"], weights[:, :, -1], atol=2e-5)
    np.testing.assert_allclose(decoded(answer["after"]["map"], n), weights[1, 2], atol=2e-5)
    assert answer["after"] == answer["before"]
    sink = profile.data["sink"].values[0][:, :, 1:].mean(-1)
    entropy = profile.data["entropy"].values[0].mean(-1)
    for when in ("before", "after"):
        np.testing.assert_allclose(answer[when]["sink"], sink, atol=2e-5)
        np.testing.assert_allclose(answer[when]["entropy"], entropy, atol=1e-4)
    assert answer["divergence"] == 0


def test_next_token_probabilities_equal_the_model(live: Live) -> None:
    mini = load_text_model("qkv-mini")
    ids = mini.encode(EXAMPLE)
    with torch.no_grad():
        chances = mini.model(torch.tensor([ids]))[0, -1].double().softmax(-1)
    found = live.answer(asked(k=5))["before"]["next"]
    top = chances.topk(5)
    assert [x["probability"] for x in found] == pytest.approx(top.values.tolist(), rel=1e-4)
    assert [x["token"] for x in found] == [mini.tokenizer.decode([int(i)]) for i in top.indices]


@pytest.mark.parametrize("edits", [[edit(1, 2, "off-by-one")], "all sigmoid", [edit(0, 5, "softmax", 4)]])
def test_interventions_change_weights_and_divergence_as_in_the_edited_model(
    live: Live, edits: list[SimpleNamespace] | str
) -> None:
    layers, heads = live.description.layers, live.description.heads
    edits = [edit(*at, "sigmoid") for at in np.ndindex(layers, heads)] if isinstance(edits, str) else edits
    answer = live.answer(asked(edits=edits, k=8))
    ids = torch.tensor([load_text_model("qkv-mini").encode(EXAMPLE)])
    model = live.loaded.model
    with torch.no_grad():
        p = model(ids)[0, -1].double().softmax(-1)
        with qkv.edit(model, {(e.layer, e.head): _change(e.normalizer, e.temperature) for e in edits}):
            q = model(ids)[0, -1].double().softmax(-1)
            found = qkv.profile(model, ids, probe=False, progress=False).data["weights"].values
    weights = {i: torch.from_numpy(found[:, i].copy()) for i in range(layers)}
    assert answer["divergence"] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-3, abs=1e-8)
    assert answer["divergence"] > 0
    np.testing.assert_allclose(decoded(answer["after"]["map"], ids.shape[1]), weights[1][0, 2], atol=1e-6)
    np.testing.assert_allclose(answer["rows"], torch.stack([weights[i][0, :, -1] for i in range(layers)]), atol=1e-6)
    shares = {i: w / w.sum(-1, keepdim=True) if edits[0].normalizer == "sigmoid" else w for i, w in weights.items()}
    first = torch.stack([shares[i][0, :, 1:, 0].mean(-1) for i in range(layers)])
    np.testing.assert_allclose(answer["after"]["sink"], first, atol=1e-6)
    before, after = (answer[when]["next"] for when in ("before", "after"))
    assert [x["token"] for x in before] == [x["token"] for x in after]
    likeliest = {int(i) for x in (p, q) for i in x.topk(8).indices}
    assert len(before) == len(likeliest)
    assert sum(x["probability"] for x in after) == pytest.approx(float(q[list(likeliest)].sum()), rel=1e-3)


def test_intervention_with_the_trained_normalizer_changes_nothing() -> None:
    torch.manual_seed(0)
    model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=2, normalizer="off_by_one")).eval()
    live = Live(Loaded("tiny", model, ByteTokenizer()))
    said = live.description
    assert said.normalizers[0] == "off-by-one"
    answer = live.answer(asked("héé", [edit(0, 0, "off-by-one")], layer=0, head=0))
    assert answer["divergence"] == 0
    assert len(answer["tokens"]) == 5
    assert live.answer(asked("héé", [edit(0, 0, "softmax")], layer=0, head=0))["divergence"] > 0


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.7, 6)])
def test_steps_equal_generate(live: Live, temperature: float, seed: int) -> None:
    mini = load_text_model("qkv-mini")
    prompt, steps = "import os\n", 6
    ids = mini.encode(prompt)
    sampler = Sampler(temperature=temperature)
    [wanted] = generate(
        mini.model, mini.model.start(), torch.tensor([ids]), max_new_tokens=steps, sampling=sampler, seed=seed
    )
    found = {"text": prompt, "ids": None}
    for step in range(steps):
        request = asked(found["text"], ids=found["ids"], sampling_temperature=temperature, seed=seed, step=step)
        found = live.step(request)
        assert found == live.step(request)
        assert len(found["tokens"]) == len(found["row"]) == len(ids) + step
    assert found["row"] == pytest.approx(live.answer(asked(prompt, ids=ids + wanted[:-1]))["rows"][1][2], abs=1e-6)
    assert found["ids"] == ids + wanted
    assert found["text"] == prompt + mini.tokenizer.after(ids).decode(wanted)


def test_bytes_of_a_character_are_joined() -> None:
    class Says(DecoderLM):
        """é after anything: its first byte, then its second."""

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            super().forward(ids)  # so that there are weights
            says = torch.where(ids == 0xC3, 0xA9, 0xC3)
            return torch.nn.functional.one_hot(says, 256) * 50.0

    live = Live(Loaded("says", Says(DecoderConfig(d_model=16, layers=1, heads=2)).eval(), ByteTokenizer()))
    first = live.step(asked("a", layer=0, head=0, sampling_temperature=0))
    assert first["text"] == "a\ufffd"
    second = live.step(asked(first["text"], ids=first["ids"], layer=0, head=0, sampling_temperature=0))
    assert second["text"] == "aé"
    assert second["ids"] == list("aé".encode())


def test_single_token_has_no_queries_after_the_first(live: Live) -> None:
    answer = live.answer(asked(""))
    assert answer["tokens"] == ["<s>"]
    said = live.description
    assert answer["after"]["sink"] == [[0.0] * said.heads] * said.layers
    assert all(math.isfinite(x["probability"]) for x in answer["after"]["next"])


REFUSALS = [
    ("text", "1201", asked("x\n" * 600)),
    ("text", "513 tokens", asked("x", ids=[1] * 513)),
    ("text", "0 tokens", asked("x", ids=[])),
    ("tokens", None, asked("x", ids=[1, 2048])),
    ("layer", "is 99", asked(layer=99)),
    ("head", None, asked(head=99)),
    ("layer", "is 99", asked(edits=[edit(99, 0, "sigmoid")])),
    ("edits", None, asked(edits=[edit(0, 0, "sigmoid"), edit(0, 0, "off-by-one")])),
]


@pytest.mark.parametrize(("argument", "match", "request_"), REFUSALS)
def test_invalid_requests_name_the_argument(
    live: Live, argument: str, match: str | None, request_: SimpleNamespace
) -> None:
    for ask in (live.answer, live.step):
        with refused(argument, match):
            ask(request_)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_hugging_face_answers_with_its_own_weights_and_those_of_the_edit(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = (
        transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=257, n_positions=64)
        if kind == "gpt2"
        else transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
            vocab_size=257, max_position_embeddings=64,
        )
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert Live(Loaded("body", model.base_model, ByteTokenizer())).description is None, "it has no next token"
    live = Live(Loaded("tiny", model, ByteTokenizer()))
    said = live.description
    assert (said.layers, said.heads, said.most_tokens) == (2, 4, 64)
    ids, _ = live._read(asked("import os"))
    plain = live._run(ids, {})
    with torch.no_grad():
        want = model(torch.tensor([ids]), output_attentions=True)
    torch.testing.assert_close(plain.logits, want.logits[:, -1])
    for got, weights in zip(plain.weights, want.attentions, strict=True):
        torch.testing.assert_close(got, weights[0], atol=1e-5, rtol=1e-4)
    lse = torch.from_numpy(qkv.profile(model, torch.tensor([ids]), probe=False, progress=False).data["lse"].values)[0]
    edited = live._run(ids, {(0, 1): _change("off-by-one", 1.0), (1, 0): _change("softmax", 2.0)})
    share = torch.sigmoid(lse[0, 1])[:, None]  # of a row that the additional logit of 0 leaves to the keys
    torch.testing.assert_close(edited.weights[0][1], plain.weights[0][1] * share, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(edited.weights[0][0], plain.weights[0][0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(edited.logits, plain.logits)
