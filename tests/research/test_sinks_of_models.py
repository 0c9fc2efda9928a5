"""`research.sinks`: models whose sinks are known in closed form, dense float64 interventions."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import qkv
import sink_models as made
from conftest import close, enlarged, refused
from hf_models import build
from qkv.edits import HideFirst, Patch
from qkv.models import DecoderConfig, DecoderLM
from qkv_lab.experiments.evidence import FAILS, HOLDS, UNSEEN
from research.sinks import Study, effects, measure, result, study
from research.sinks.criteria import Sinks
from research.sinks.effects import FirstKey, Magnitudes, Rows, others, peaks, replaced
from research.sinks.measure import Chosen
from research.sinks.run import NAMES, RESULTS
from research.sinks.subject import Subject, Texts, default_texts, evaluated, prepared, self_attention

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


def test_known_head() -> None:
    """One layer whose query i gives the first token e^s / (e^s + i)."""
    model, ids = made.with_known_head(), made.texts(1, 20)
    subject = Subject.of(model, ids)
    call = self_attention(model, ids)[0].call
    size = math.exp(made.STRENGTH)
    want = torch.tensor([size / (size + i) for i in range(20)], dtype=torch.float64)
    close(Rows.of(call).first[0, 0], want, eps=1e6)
    key, value = FirstKey.of(call, 0), 15 / 16
    along, across = 4 * made.STRENGTH, value**-0.5
    assert key.key_norm == pytest.approx(math.hypot(along, across) / (14 / 16) ** -0.5)
    assert key.value_norm == pytest.approx((14 / 15) ** 0.5)
    assert (key.nearest, key.angle) == pytest.approx((1, math.degrees(math.atan(across / along))))
    assert key.angle_others == pytest.approx(90)
    with effects.removed(subject, [(0, 0)], masked=True, zero_value=False), evaluated(model):
        uniform = subject.states(ids)[-1][0, -1, 2:]
    x = model.embedding.weight[ids[0]].detach()[:, 2:]
    close(uniform, x[-1] + x[1:].mean(0) * (16 / 14) ** 0.5, eps=1e6)


def expected_alpha(score: float) -> Tensor:
    """α of two texts of 20 tokens in which the first key has this score, and the others 0."""
    return torch.full((2,), sum(math.exp(score) / (math.exp(score) + i) for i in range(20)) / 20, dtype=torch.float64)


def test_removing_a_peak_destroys_the_sink_of_a_head_that_reads_it() -> None:
    ids = made.texts(2, 20)
    for read in (True, False):
        subject = Subject.of(made.with_peak(read=read), ids)
        chosen = Chosen.of(subject, ids)
        assert (chosen.heads, chosen.peaks, chosen.later_heads) == ([(1, 0)], {1: [made.PEAK]}, [(1, 0)])
        for by in ("mean", "zero"):
            with replaced(subject, chosen.peaks, by):
                alpha = Rows.of(self_attention(subject.model, ids)[1].call).alpha
            close(alpha[:, 0], expected_alpha(0.0 if read else made.STRENGTH), eps=1e12)
        close(Rows.of(self_attention(subject.model, ids)[1].call).alpha[:, 0], expected_alpha(made.STRENGTH), eps=1e6)


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
    studied = {read: study(made.with_peak(read=read), made.texts(), progress=False) for read in (True, False)}
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
REFUSALS: list[tuple[str, Any]] = [
    ("Sigmoid", lambda: DecoderLM(SIGMOID)),
    ("Reversed", Reversed),
    ("sequence of tokens", lambda: build("bart")),
    ("forms its weights", lambda: build("gptj")),
    ("one stack", lambda: build("albert")),  # the same block several times
    ("residual stream", with_hook),
]


@pytest.mark.parametrize(("reason", "make"), REFUSALS, ids=[reason for reason, _ in REFUSALS])
def test_models_that_cannot_be_studied_are_refused(reason: str, make: Any) -> None:
    with refused("model", reason):
        Subject.of(make(), IDS)


@pytest.mark.parametrize("name", NAMES)
def test_stored_results_have_the_verdicts_of_their_measurements(name: str) -> None:
    model, tokenizer = qkv.load(name)
    assert isinstance(prepared(model, default_texts(name), tokenizer), Texts), "the default texts are enough"
    file = json.loads((RESULTS / f"{name}.json").read_text())
    assert json.loads(json.dumps(result(name))) == file
    assert [(found["tokens"], len(found["texts"])) for found in file["lengths"]] == [(64, 12), (512, 12)]
    with refused("name"):
        result("no model")
