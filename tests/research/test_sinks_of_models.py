"""`research.sinks`: models whose sinks are known in closed form, dense float64 interventions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import qkv
from conftest import close, enlarged, refusals, refused
from hf_models import build
from qkv.edits import HideFirst, Patch
from qkv.models import DecoderConfig, DecoderLM
from qkv_lab.experiments.evidence import FAILS, HOLDS, UNSEEN
from research.sinks import Study, effects, measure, result, study
from research.sinks.criteria import Sinks
from research.sinks.effects import FirstKey, Magnitudes, Rows, others, peaks, replaced
from research.sinks.measure import Chosen, Kept
from research.sinks.run import NAMES, RESULTS
from research.sinks.subject import Subject, Texts, default_texts, evaluated, prepared, self_attention

# --- hand-made decoders whose sinks are known in closed form ----------------------------------------------------------

VOCABULARY, WIDTH = 199, 16
MARK, PEAK = 0, 1
"""Dimensions: that in which only token 0 is not zero, and that which blocks write."""
STRENGTH = 12.0
"""The score of the first key; all other scores are 0."""


def decoder(layers: int) -> DecoderLM:
    """A decoder with one head in each layer whose parameters are all zero, but for the embeddings and norms.

    Every embedding is ±1 in 14 dimensions; token 0 has 1 in the dimension `MARK`, too.
    """
    config = DecoderConfig(
        vocab_size=VOCABULARY, context=64, d_model=WIDTH, layers=layers, heads=1, d_hidden=3, positions="none",
        norm="rmsnorm", norm_eps=1e-12, activation="relu",
    )  # fmt: skip
    model = DecoderLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        signs = torch.randint(2, (VOCABULARY, WIDTH - 2), generator=torch.Generator().manual_seed(0))
        model.embedding.weight[:, 2:] = 2.0 * signs - 1
        model.embedding.weight[0, MARK] = 1
    return model


@torch.no_grad()
def add_head(model: DecoderLM, layer: int, dimension: int, factor: float) -> None:
    """A head with the query (1, 0, 0, …), the keys (factor · x̂[dimension], x̂[2], 0, …), and the values x̂[2:]."""
    attention = model.get_submodule(f"blocks.{layer}.attention")
    _, k, v = attention.in_proj.weight.view(3, WIDTH, WIDTH)  # type: ignore[operator, union-attr]
    attention.in_proj.bias[0] = 1  # type: ignore[index, union-attr]
    k[0, dimension], k[1, 2] = factor, 1
    v[2:, 2:] = torch.eye(WIDTH - 2)
    attention.out_proj.weight.copy_(torch.eye(WIDTH))  # type: ignore[operator, union-attr]


@torch.no_grad()
def with_peak(*, read: bool) -> DecoderLM:
    """Two layers: the first writes a peak at token 0, and a head of the second has its sink there.

    Its key reads the peak, or else the mark that is in the embedding already.
    """
    model = decoder(2)
    feed_forward = model.get_submodule("blocks.0.feed_forward")
    feed_forward.up.weight[0, MARK] = 10  # type: ignore[index, union-attr]
    feed_forward.down.weight[PEAK, 0] = 100  # type: ignore[index, union-attr]
    written = 1000 / (15 / 16) ** 0.5
    rms = ((15 + written**2) / 16) ** 0.5
    add_head(model, 1, PEAK if read else MARK, 4 * STRENGTH * rms / (written if read else 1))
    return model


def texts(count: int = 16, n: int = 64) -> Tensor:
    """Texts that begin with token 0, and do not have it elsewhere."""
    ids = torch.randint(1, VOCABULARY, (count, n), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 0
    return ids


# --- definitions ------------------------------------------------------------------------------------------------------

IDS = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(0))


def own() -> DecoderLM:
    """Grouped heads, rotary positions and a window, in float64 with large weights."""
    config = DecoderConfig.llama(vocab_size=97, d_model=24, layers=2, heads=6, kv_heads=2, head_dim=4, window=7)
    return enlarged(DecoderLM(config))


MODELS = {"qkv": own, **{name: lambda name=name: build(name).double() for name in ("gpt2", "llama", "bert")}}


def dense(subject: Subject, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with −∞ at masked keys, keys and values of all query heads of a layer, by definition in float64."""
    call = self_attention(subject.model, IDS)[layer].call
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (call.k, call.v))
    scores = call.q.double() @ k.transpose(2, 3) * call.factor
    n = scores.shape[2]
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask.dense(n, n), -torch.inf)
    return scores, k, v


def test_an_interrupted_study_resumes_and_another_model_begins_anew(tmp_path: Path) -> None:
    Kept(tmp_path / "x", "a").keep((64, 4), {"often": 0.5})
    assert [Kept(tmp_path / "x", key) for key in "ab"] == [{(64, 4): {"often": 0.5}}, {}]


@pytest.mark.parametrize("name", MODELS)
def test_rows_by_definition(name: str) -> None:
    subject = Subject.of(MODELS[name](), IDS)
    assert subject.causal == (name != "bert")
    for layer in range(2):
        scores, _, _ = dense(subject, layer)
        rows = Rows.of(self_attention(subject.model, IDS)[layer].call)
        for head in range(scores.shape[1]):
            first, uniformity = [], []
            for row in scores[0, head]:
                weights = row[row > -torch.inf].softmax(0)
                if row[0] > -torch.inf:
                    first.append(float(weights[0]))
                if len(weights) > 1:
                    uniformity.append(float(-(weights * weights.log()).sum() / math.log(len(weights))))
            assert float(rows.alpha[0, head]) == pytest.approx(np.mean(first), rel=1e-5)
            assert float(rows.share[0, head]) == pytest.approx(np.mean(np.array(first[1:]) > 0.3))
            assert float(rows.uniformity[0, head]) == pytest.approx(np.mean(uniformity), rel=1e-5)


CASES = list(effects.CASES)


@pytest.mark.parametrize(
    ("name", "case"), [*(("qkv", case) for case in CASES), *zip(("gpt2", "llama", "bert"), CASES, strict=True)]
)
def test_removal_equals_dense_recomputation(name: str, case: str) -> None:
    """The rest of the row divided by its sum, and the first value zero, in two heads of different layers."""
    subject = Subject.of(MODELS[name](), IDS)
    masked, zero_value = effects.CASES[case]
    patches: dict[Any, Patch] = {}
    with evaluated(subject.model):
        for layer, head in ((0, 1), (1, 3)):
            with qkv.edit(subject.model, {**patches}) if patches else nullcontext():
                scores, _, v = dense(subject, layer)
            weights = scores.softmax(-1)
            if masked:
                weights[:, :, 1:, 0] = 0
                weights = weights / weights.sum(-1, keepdim=True)
            if zero_value:
                v[:, :, 0] = 0
            patches[layer, head] = Patch((weights @ v)[:, head])
        with qkv.edit(subject.model, {**patches}):
            want = subject.states(IDS)[-1]
        with effects.removed(subject, list(patches), masked=masked, zero_value=zero_value):
            got = subject.states(IDS)[-1]
        plain = subject.states(IDS)[-1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (got - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_first_key_by_definition(name: str) -> None:
    subject = Subject.of(MODELS[name](), IDS)
    call = self_attention(subject.model, IDS)[1].call
    found = FirstKey.of(call, 3)
    scores, k, v = dense(subject, 1)
    q, k, v = call.q[0, 3].double(), k[0, 3], v[0, 3]
    nearest, angles, angles_others = [], [], []
    for i in range(1, len(q)):
        seen = [j for j in range(len(k)) if scores[0, 3, i, j] > -torch.inf]
        if 0 in seen:
            cosines = {j: float(q[i] @ k[j] / (q[i].norm() * k[j].norm())) for j in seen}
            nearest.append(cosines[0] >= max(cosines.values()))
            angles.append(math.degrees(math.acos(cosines[0])))
            angles_others += [math.degrees(math.acos(x)) for j, x in cosines.items() if j]
    want = [
        float(v[0].norm() / v[1:].norm(dim=1).mean()), float(k[0].norm() / k[1:].norm(dim=1).mean()),
        np.mean(nearest), np.mean(angles), np.mean(angles_others),
    ]  # fmt: skip
    assert list(found) == pytest.approx(want, rel=1e-5)


def expected_alpha(score: float) -> Tensor:
    """α of two texts of 20 tokens in which the first key has this score, and the others 0."""
    return torch.full((2,), sum(math.exp(score) / (math.exp(score) + i) for i in range(20)) / 20, dtype=torch.float64)


def test_removing_a_peak_destroys_the_sink_of_a_head_that_reads_it() -> None:
    ids = texts(2, 20)
    for read in (True, False):
        subject = Subject.of(with_peak(read=read), ids)
        chosen = Chosen.of(subject, ids)
        assert (chosen.heads, chosen.peaks, chosen.later_heads) == ([(1, 0)], {1: [PEAK]}, [(1, 0)])
        for by in ("mean", "zero"):
            with replaced(subject, chosen.peaks, by):
                alpha = Rows.of(self_attention(subject.model, ids)[1].call).alpha
            close(alpha[:, 0], expected_alpha(0.0 if read else STRENGTH), eps=1e12)
        close(Rows.of(self_attention(subject.model, ids)[1].call).alpha[:, 0], expected_alpha(STRENGTH), eps=1e6)


def test_a_dimension_that_is_large_in_the_embedding_is_no_peak() -> None:
    states = torch.ones(4, 2, 3, 5)
    states[:, :, 0, 4] = 50
    states[2, :, 0, 1] = -30
    assert peaks(list(states), written=True) == {2: [1]}
    assert peaks(list(states), written=False) == {0: [4], 1: [4], 2: [1, 4]}
    drawn = others({2: [1, 3]}, 5, torch.Generator().manual_seed(0))
    assert len(drawn[2]) == 2
    assert not {1, 3} & set(drawn[2])
    assert Magnitudes.of(states[2, 0]) == (50, 1, 1)


def test_verdicts_on_hand_made_models_which_are_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two models differ in the cause of the sink alone; both have it for one first token only."""
    monkeypatch.setattr(measure, "JUDGED", 5)
    studied = {read: study(with_peak(read=read), texts(), progress=False) for read in (True, False)}
    for read, found in studied.items():
        holds = {verdict.claim: verdict.holds for verdict in found.verdicts[64]}
        assert list(holds) == list(Sinks.claims)
        for claim in ("C061", "C063", "C064", "C065", "C067", "C068", "C069", "C074", "C077"):
            assert holds[claim] == HOLDS, claim
        assert holds["C062"] == FAILS
        assert holds["C073"] == (HOLDS if read else FAILS)
        assert holds["C076"] == UNSEEN  # every row is heavy
    cost = studied[True].lengths[64]["texts"][0]["cost"]
    assert set(cost) == {"kept", *effects.CASES}
    file = tmp_path / "study.json"
    studied[True].save(file)
    assert Study.load(file).as_dict() == json.loads(json.dumps(studied[True].as_dict()))
    file.write_text("[]")
    with refused("file"):
        Study.load(file)


def test_the_cost_is_the_rise_of_the_loss(tmp_path: Path) -> None:
    """Of a Hugging Face model from a folder: the loss with the sink masked is that with `HideFirst` in its heads."""
    config = LlamaConfig(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=2,
                         num_attention_heads=4, max_position_embeddings=64)  # fmt: skip
    enlarged(LlamaForCausalLM(config)).save_pretrained(tmp_path)
    model = qkv.load(str(tmp_path), head=True)[0]
    subject = Subject.of(model, IDS)
    heads = [(0, 1), (1, 2)]
    cost = effects.cost(subject, IDS[:1], heads)
    with qkv.edit(model, {head: HideFirst() for head in heads}), torch.no_grad():
        loss = nn.functional.cross_entropy(model(IDS[:1]).logits[0, :-1], IDS[0, 1:])
    assert cost["masked"] == pytest.approx(float(loss), rel=1e-4)
    assert abs(cost["masked"] - cost["kept"]) > 1e-3


class Reversed(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.flip(1)


def with_hook() -> DecoderLM:
    """Its second block reads twice what the first wrote."""
    model = own()
    model.blocks[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]), prepend=True)
    return model


SIGMOID = DecoderConfig(vocab_size=97, d_model=24, layers=1, heads=2, normalizer="sigmoid")
REFUSALS: list[tuple[str, str, Callable[[], object]]] = [
    ("model", "Sigmoid", lambda: Subject.of(DecoderLM(SIGMOID), IDS)),
    ("model", "Reversed", lambda: Subject.of(Reversed(), IDS)),
    ("model", "sequence of tokens", lambda: Subject.of(build("bart"), IDS)),
    ("model", "forms its weights", lambda: Subject.of(build("gptj"), IDS)),
    ("model", "one stack", lambda: Subject.of(build("albert"), IDS)),  # the same block several times
    ("model", "residual stream", lambda: Subject.of(with_hook(), IDS)),
]

test_models_that_cannot_be_studied_are_refused = refusals(REFUSALS)


@pytest.mark.parametrize("name", NAMES)
def test_stored_results_have_the_verdicts_of_their_measurements(name: str) -> None:
    if name != "smollm2":  # its package is no part of the environment of the tests
        model, tokenizer = qkv.load(name)
        assert isinstance(prepared(model, default_texts(name), tokenizer), Texts), "the default texts are enough"
    assert json.loads(json.dumps(result(name))) == (file := json.loads((RESULTS / f"{name}.json").read_text()))
    assert [(found["tokens"], len(found["texts"])) for found in file["lengths"]] == [(64, 12), (512, 12)]
    with refused("name"):
        result("no model")
