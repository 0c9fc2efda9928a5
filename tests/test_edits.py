"""Editing heads: the weights and outputs are those of a model that was made so, and nothing stays behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import qkv
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


def made_as(model: DecoderLM, normalizer: str) -> DecoderLM:
    """The same parameters in a model that was built with the normalizer."""
    other = DecoderLM(replace(model.config, normalizer=normalizer)).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("more", [{}, {"positions": "alibi"}, {"positions": "rotary", "kv_heads": 2}, {"window": 5}])
@torch.no_grad()
def test_all_heads_edited_are_a_model_made_with_that_normalizer(name: str, more: dict[str, object]) -> None:
    model, ids = model_of(**more), ids_of()
    with edited(model, everywhere(model, name)):
        result = model(ids)
    torch.testing.assert_close(result, made_as(model, NAMES[name])(ids), rtol=0, atol=1e-6)
    if name != "softmax":
        assert (result - model(ids)).abs().max() > 1e-3


@torch.no_grad()
def test_heads_of_one_layer_edited_differently_have_the_weights_of_eager() -> None:
    model, ids = model_of(positions="alibi"), ids_of()
    edits = [Edit(1, 0, "off-by-one"), Edit(1, 2, "sigmoid", 0.5), Edit(1, 3, AS_TRAINED, 3.0)]
    normalizers = [Softmax(sink=0.0), Softmax(), None, Softmax(3.0)]
    seen: dict[int, torch.Tensor] = {}
    calls: list[Call] = []
    with watching(lambda call, result: calls.append(call)):  # type: ignore[arg-type]
        model(ids)
    with edited(model, edits, told=seen.__setitem__):
        result = model(ids)
    assert list(seen) == [0, 1, 2]
    call = calls[1]  # of layer 1, which no edit of an earlier layer reaches
    torch.testing.assert_close(seen[0], eager.forward(calls[0]).weights, rtol=0, atol=1e-6)
    given = call.given
    for head, normalizer in enumerate(normalizers):
        if normalizer is None:
            continue
        made = Call.of(given.q, given.k, given.v, given.mask, given.biases, given.score, normalizer)
        wanted = eager.forward(made).weights
        assert wanted is not None
        torch.testing.assert_close(seen[1][:, head], wanted[:, head], rtol=0, atol=1e-5)
    # The sigmoid by hand: σ(score / 0.5 − ln n), n the visible keys.
    plain = eager.forward(call)
    assert plain.weights is not None
    assert plain.lse is not None
    scores = plain.weights[:, 2].log() + plain.lse[:, 2, :, None]  # −inf where hidden
    wanted = torch.sigmoid(scores / 0.5 - torch.arange(1, 21).log()[:, None])
    torch.testing.assert_close(seen[1][:, 2], wanted, rtol=0, atol=1e-5)
    assert (result - model(ids)).abs().max() > 1e-3


@torch.no_grad()
def test_edits_of_some_heads_give_the_same_output_with_and_without_telling() -> None:
    model, ids = model_of(), ids_of()
    edits = [Edit(0, 1, "sigmoid"), Edit(2, 0, temperature=0.3), Edit(2, 1, temperature=0.3)]
    with edited(model, edits):
        quiet = model(ids)
    with edited(model, edits, told=lambda layer, weights: None):
        torch.testing.assert_close(model(ids), quiet, rtol=0, atol=1e-5)


@torch.no_grad()
def test_generation_with_a_cache_is_edited_as_a_whole_forward_is() -> None:
    model, ids = model_of(positions="rotary"), ids_of(12)
    edits = [Edit(0, 1, "sigmoid"), Edit(1, 3, "off-by-one", 0.5)]
    with edited(model, edits):
        whole = model(ids)[:, -1]
        state = model.start()
        model.step(ids[:, :7], state)
        torch.testing.assert_close(model.step(ids[:, 7:], state), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_learned_sink_stays_as_trained_and_goes_with_softmax() -> None:
    model, ids = model_of(sink=True), ids_of()
    torch.nn.init.constant_(model.blocks[0].attention.composition.normalizer_sink, 2.0)
    seen: dict[int, torch.Tensor] = {}
    with edited(model, [Edit(0, 0, AS_TRAINED, 2.0), Edit(0, 1, "softmax")], told=seen.__setitem__):
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
    with edited(model, everywhere(model, "sigmoid", 2.0), told=weights.__setitem__):
        model(ids)
    for layer in range(3):
        kept = torch.from_numpy(result.data["weights"].isel(text=0, layer=layer).values).nan_to_num()
        torch.testing.assert_close(kept, weights[layer][0], rtol=0, atol=1e-5)
        first = torch.from_numpy(result.data["sink"].isel(text=0, layer=layer).values)
        torch.testing.assert_close(first, weights[layer][0, :, :, 0], rtol=0, atol=1e-5)
    made = qkv.profile(made_as(model, "off_by_one"), ids, progress=False, probe=False)
    with edited(model, everywhere(model, "off-by-one")):
        remedy = qkv.profile(model, ids, progress=False, probe=False)
    for name in ("sink", "entropy", "received"):
        one, other = (torch.from_numpy(x.data[name].values) for x in (made, remedy))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)


@torch.no_grad()
def test_profile_refuses_heads_edited_unlike_others() -> None:
    model, ids = model_of(), ids_of()
    with edited(model, [Edit(1, 2, "sigmoid")]), pytest.raises(InputError, match="all heads of a layer"):
        qkv.profile(model, ids, progress=False, probe=False)


@torch.no_grad()
def test_nothing_stays_behind_even_after_an_error() -> None:
    model, ids = model_of(), ids_of()
    before = model(ids)
    with pytest.raises(ZeroDivisionError), edited(model, everywhere(model, "sigmoid")):
        raise ZeroDivisionError
    assert torch.equal(model(ids), before)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_only_this_model_in_this_thread_is_edited() -> None:
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


def test_models_and_edits_that_do_not_fit_are_told_so() -> None:
    model = model_of()
    assert len(attention_layers(model)) == 3
    with pytest.raises(InputError, match="model is Linear"):
        attention_layers(torch.nn.Linear(2, 2))
    for edit, why in (
        (Edit(3, 0), "layer is 3, expected 0 to 2"),
        (Edit(0, 4), "head is 4, expected 0 to 3"),
        (Edit(0, -1), "head is -1"),
    ):
        with pytest.raises(InputError, match=why), edited(model, [edit]):
            pass
    with pytest.raises(InputError, match="edited twice"), edited(model, [Edit(0, 0), Edit(0, 0, "sigmoid")]):
        pass
    with pytest.raises(InputError, match="normalizer is 'softmin'"):
        Edit(0, 0, "softmin")
    for temperature in (0.0, -1.0, float("nan"), float("inf"), 1e4):
        with pytest.raises(InputError, match="temperature is"):
            Edit(0, 0, "softmax", temperature)


@pytest.mark.parametrize("normalizer", ["relu", "entmax", "sigmoid"])
def test_a_temperature_divides_the_scores_of_any_normalizer(normalizer: str) -> None:
    """As larger queries would, but for a head alone."""
    model = model_of(normalizer=normalizer)
    result = {}
    for temperature in (1.0, 2.0, 1e3):
        with edited(model, [Edit(0, 0, AS_TRAINED, temperature)]):
            result[temperature] = model(ids_of())
    assert torch.equal(result[1.0], model(ids_of()))
    assert not torch.equal(result[2.0], result[1.0])
    assert not torch.equal(result[1e3], result[2.0])


def test_an_editor_may_replace_any_call_and_makes_its_own_calls_unedited() -> None:
    q = torch.randn(1, 2, 5, 8)
    wanted = qkv.attend(q, q, q, normalizer=Sigmoid())

    def editor(call: Call, weights: bool) -> Call:
        qkv.attend(q, q, q)  # would never end if it were edited
        return Call.of(call.given.q, call.given.k, call.given.v, normalizer=Sigmoid())

    with editing(editor):
        assert torch.equal(qkv.attend(q, q, q), wanted)
        with editing(None):
            assert not torch.equal(qkv.attend(q, q, q), wanted)
