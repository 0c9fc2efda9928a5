"""Edited heads: weights and outputs equal those of a model built with the other normalizer; no state is left behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import qkv
from conftest import refused
from qkv import models
from qkv._engine.call import Call
from qkv.errors import InputError
from qkv.kernels import eager, editing, watching
from qkv.models import DecoderConfig, DecoderLM
from qkv.normalizers import Sigmoid, Softmax
from qkv.profiler.analyses.edits import AS_TRAINED, Edit, attention_layers, edited, everywhere

NAMES = {"softmax": "softmax", "off-by-one": "off_by_one", "sigmoid": "sigmoid"}


def model_of(**changes: object) -> DecoderLM:
    torch.manual_seed(3)
    config = DecoderConfig(vocab_size=50, context=64, d_model=32, layers=3, heads=4, **changes)  # type: ignore[arg-type]
    model = DecoderLM(config).eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.in_proj.weight, std=0.5)  # scores far from equal
    return model


def ids_of(n: int = 20) -> torch.Tensor:
    return torch.randint(50, (1, n), generator=torch.Generator().manual_seed(0))


def built_with(model: DecoderLM, normalizer: str) -> DecoderLM:
    """The same parameters in a model built with another normalizer."""
    other = DecoderLM(replace(model.config, normalizer=normalizer)).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("more", [{}, {"positions": "alibi"}, {"positions": "rotary", "kv_heads": 2}, {"window": 5}])
@torch.no_grad()
def test_editing_all_heads_equals_a_model_built_with_the_normalizer(name: str, more: dict[str, object]) -> None:
    model, ids = model_of(**more), ids_of()
    with edited(model, everywhere(model, name)):
        result = model(ids)
    torch.testing.assert_close(result, built_with(model, NAMES[name])(ids), rtol=0, atol=1e-6)
    if name != "softmax":
        assert (result - model(ids)).abs().max() > 1e-3


@torch.no_grad()
def test_different_edits_in_one_layer_give_the_weights_of_eager() -> None:
    model, ids = model_of(positions="alibi"), ids_of()
    edits = [Edit(1, 0, "off-by-one"), Edit(1, 2, "sigmoid", 0.5), Edit(1, 3, AS_TRAINED, 3.0)]
    normalizers = [Softmax(sink=0.0), Softmax(), None, Softmax(3.0)]
    seen: dict[int, torch.Tensor] = {}
    calls: list[Call] = []
    with watching(lambda call, result: calls.append(call)):  # type: ignore[arg-type]
        model(ids)
    with edited(model, edits, on_weights=seen.__setitem__):
        result = model(ids)
    assert list(seen) == [0, 1, 2]
    call = calls[1]  # layer 1: no earlier layer is edited, so its inputs are unchanged
    torch.testing.assert_close(seen[0], eager.forward(calls[0]).weights, rtol=0, atol=1e-6)
    given = call.given
    for head, normalizer in enumerate(normalizers):
        if normalizer is None:
            continue
        edited_call = Call.of(given.q, given.k, given.v, given.mask, given.biases, given.score, normalizer)
        expected = eager.forward(edited_call).weights
        assert expected is not None
        torch.testing.assert_close(seen[1][:, head], expected[:, head], rtol=0, atol=1e-5)
    # The sigmoid by hand: σ(score / 0.5 − ln n), n the visible keys.
    plain = eager.forward(call)
    assert plain.weights is not None
    assert plain.lse is not None
    scores = plain.weights[:, 2].log() + plain.lse[:, 2, :, None]  # −inf where masked
    expected = torch.sigmoid(scores / 0.5 - torch.arange(1, 21).log()[:, None])
    torch.testing.assert_close(seen[1][:, 2], expected, rtol=0, atol=1e-5)
    assert (result - model(ids)).abs().max() > 1e-3


@torch.no_grad()
def test_recording_weights_does_not_change_the_output() -> None:
    model, ids = model_of(), ids_of()
    edits = [Edit(0, 1, "sigmoid"), Edit(2, 0, temperature=0.3), Edit(2, 1, temperature=0.3)]
    with edited(model, edits):
        quiet = model(ids)
    with edited(model, edits, on_weights=lambda layer, weights: None):
        torch.testing.assert_close(model(ids), quiet, rtol=0, atol=1e-5)


@torch.no_grad()
def test_edits_act_in_cached_generation_as_in_a_full_forward() -> None:
    model, ids = model_of(positions="rotary"), ids_of(12)
    edits = [Edit(0, 1, "sigmoid"), Edit(1, 3, "off-by-one", 0.5)]
    with edited(model, edits):
        whole = model(ids)[:, -1]
        state = model.start()
        model.step(ids[:, :7], state)
        torch.testing.assert_close(model.step(ids[:, 7:], state), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_learned_sink_is_kept_as_trained_and_removed_by_softmax() -> None:
    model, ids = model_of(sink=True), ids_of()
    torch.nn.init.constant_(model.blocks[0].attention.composition.normalizer_sink, 2.0)
    seen: dict[int, torch.Tensor] = {}
    with edited(model, [Edit(0, 0, AS_TRAINED, 2.0), Edit(0, 1, "softmax")], on_weights=seen.__setitem__):
        model(ids)
    sums = seen[0].sum(-1)[0]
    assert sums[0].min() < 0.9
    torch.testing.assert_close(sums[1], torch.ones(20))
    assert sums[2].min() < 0.9


@torch.no_grad()
def test_profile_inside_measures_the_edited_weights() -> None:
    model, ids = model_of(), ids_of()
    with edited(model, everywhere(model, "sigmoid", 2.0)):
        result = qkv.profile(model, ids, progress=False, probe=False)
    weights: dict[int, torch.Tensor] = {}
    with edited(model, everywhere(model, "sigmoid", 2.0), on_weights=weights.__setitem__):
        model(ids)
    for layer in range(3):
        kept = torch.from_numpy(result.data["weights"].isel(text=0, layer=layer).values).nan_to_num()
        torch.testing.assert_close(kept, weights[layer][0], rtol=0, atol=1e-5)
        first = torch.from_numpy(result.data["sink"].isel(text=0, layer=layer).values)
        shares = weights[layer][0] / weights[layer][0].sum(-1, keepdim=True)
        torch.testing.assert_close(first, shares[:, :, 0], rtol=0, atol=1e-5)
    made = qkv.profile(built_with(model, "off_by_one"), ids, progress=False, probe=False)
    with edited(model, everywhere(model, "off-by-one")):
        intervention = qkv.profile(model, ids, progress=False, probe=False)
    for name in ("sink", "entropy", "received"):
        one, other = (torch.from_numpy(x.data[name].values) for x in (made, intervention))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)


@torch.no_grad()
def test_profile_rejects_different_edits_in_one_layer() -> None:
    model, ids = model_of(), ids_of()
    with edited(model, [Edit(1, 2, "sigmoid")]), pytest.raises(InputError, match="all heads of a layer"):
        qkv.profile(model, ids, progress=False, probe=False)


@torch.no_grad()
def test_edits_are_removed_after_an_error() -> None:
    model, ids = model_of(), ids_of()
    before = model(ids)
    with pytest.raises(ZeroDivisionError), edited(model, everywhere(model, "sigmoid")):
        raise ZeroDivisionError
    assert torch.equal(model(ids), before)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_edits_do_not_reach_other_models_or_threads() -> None:
    model, other, ids = model_of(), model_of(), ids_of()
    before = model(ids)
    result: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            result.append(model(ids))

    with edited(model, everywhere(model, "sigmoid")):
        assert torch.equal(other(ids), before)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not torch.equal(model(ids), before)
    assert torch.equal(result[0], before)


@torch.no_grad()
def test_a_classifier_can_be_edited() -> None:
    config = models.ClassifierConfig(50, classes=3, d_model=32, layers=2, heads=4)
    model = models.Classifier(config).eval()
    before = model(ids_of())
    with edited(model, [Edit(1, 3, "sigmoid")]):
        assert not torch.equal(model(ids_of()), before)


def test_edits_reject_unknown_layers_heads_normalizers_and_temperatures() -> None:
    model = model_of()
    assert len(attention_layers(model)) == 3
    with refused("model"):
        attention_layers(torch.nn.Linear(2, 2))
    for edit, argument in ((Edit(3, 0), "layer"), (Edit(0, 4), "head"), (Edit(0, -1), "head")):
        with refused(argument), edited(model, [edit]):
            pass
    with refused("edits"), edited(model, [Edit(0, 0), Edit(0, 0, "sigmoid")]):
        pass
    with refused("normalizer"):
        Edit(0, 0, "softmin")
    for temperature in (0.0, -1.0, float("nan"), float("inf"), 1e4):
        with refused("temperature"):
            Edit(0, 0, "softmax", temperature)


@pytest.mark.parametrize("normalizer", ["relu", "entmax", "sigmoid"])
def test_a_temperature_divides_the_scores_of_any_normalizer(normalizer: str) -> None:
    """The same effect as smaller queries, but for one head only."""
    model = model_of(normalizer=normalizer)
    result = {}
    for temperature in (1.0, 2.0, 1e3):
        with edited(model, [Edit(0, 0, AS_TRAINED, temperature)]):
            result[temperature] = model(ids_of())
    assert torch.equal(result[1.0], model(ids_of()))
    assert not torch.equal(result[2.0], result[1.0])
    assert not torch.equal(result[1e3], result[2.0])


def test_an_editor_replaces_calls_except_those_it_makes_itself() -> None:
    q = torch.randn(1, 2, 5, 8)
    expected = qkv.attend(q, q, q, normalizer=Sigmoid())

    def editor(call: Call, weights: bool) -> Call:
        qkv.attend(q, q, q)  # infinite recursion if this call were edited
        return Call.of(call.given.q, call.given.k, call.given.v, normalizer=Sigmoid())

    with editing(editor):
        assert torch.equal(qkv.attend(q, q, q), expected)
        with editing(None):
            assert not torch.equal(qkv.attend(q, q, q), expected)
