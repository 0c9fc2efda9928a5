"""Edited heads: weights and outputs equal those of a model built with the other normalizer; no state is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_watch import in_threads

import qkv
from conftest import refused
from qkv.engine import Call
from qkv.errors import InputError
from qkv.kernels import eager, watching
from qkv.models import DecoderConfig, DecoderLM
from qkv.normalizers import Softmax
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


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("softmax", {"positions": "alibi"}),
        ("off-by-one", {"positions": "rotary", "kv_heads": 2}),
        ("sigmoid", {"window": 5}),
    ],
)
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
    normalizers = {0: Softmax(sink=0.0), 1: Softmax(), 3: Softmax(3.0)}
    seen: dict[int, torch.Tensor] = {}
    calls: list[Call] = []
    with watching(lambda call, result: calls.append(call)):  # type: ignore[arg-type]
        model(ids)
    with edited(model, edits, on_weights=seen.__setitem__):
        result = model(ids)
    with edited(model, edits):
        torch.testing.assert_close(model(ids), result, rtol=0, atol=1e-5)  # recording changes nothing
    assert (result - model(ids)).abs().max() > 1e-3
    assert list(seen) == [0, 1, 2]
    plain = eager.forward(calls[1])  # layer 1: no earlier layer is edited, so its inputs are unchanged
    torch.testing.assert_close(seen[0], eager.forward(calls[0]).weights, rtol=0, atol=1e-6)
    given = calls[1].given
    for head, normalizer in normalizers.items():
        call = Call.of(given.q, given.k, given.v, given.mask, given.biases, given.score, normalizer)
        expected = eager.forward(call).weights[:, head]  # type: ignore[index]
        torch.testing.assert_close(seen[1][:, head], expected, rtol=0, atol=1e-5)
    # The sigmoid by hand: σ(score / 0.5 − ln n), n the visible keys; scores are −inf where masked.
    scores = plain.weights[:, 2].log() + plain.lse[:, 2, :, None]  # type: ignore[index]
    expected = torch.sigmoid(scores / 0.5 - torch.arange(1, 21).log()[:, None])
    torch.testing.assert_close(seen[1][:, 2], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_edits_act_in_cached_generation_as_in_a_full_forward() -> None:
    model, ids = model_of(positions="rotary"), ids_of(12)
    with edited(model, [Edit(0, 1, "sigmoid"), Edit(1, 3, "off-by-one", 0.5)]):
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
    weights: dict[int, torch.Tensor] = {}
    with edited(model, everywhere(model, "sigmoid", 2.0)):
        data = qkv.profile(model, ids, progress=False, probe=False).data
    with edited(model, everywhere(model, "sigmoid", 2.0), on_weights=weights.__setitem__):
        model(ids)
    for layer in range(3):
        want = weights[layer][0].numpy()
        np.testing.assert_allclose(np.nan_to_num(data["weights"].values[0, layer]), want, rtol=0, atol=1e-5)
        shares = want / want.sum(-1, keepdims=True)
        np.testing.assert_allclose(data["sink"].values[0, layer], shares[:, :, 0], rtol=0, atol=1e-5)
    with edited(model, [Edit(1, 2, "sigmoid")]), pytest.raises(InputError, match="all heads of a layer"):
        qkv.profile(model, ids, progress=False, probe=False)


@torch.no_grad()
def test_edits_do_not_reach_other_models_or_threads_and_end_with_an_error() -> None:
    model, other, ids = model_of(), model_of(), ids_of()
    before, result = model(ids), list[torch.Tensor]()

    def run() -> None:
        with torch.no_grad():
            result.append(model(ids))

    with edited(model, everywhere(model, "sigmoid")):
        assert torch.equal(other(ids), before)
        in_threads([run])
        assert not torch.equal(model(ids), before)
    with pytest.raises(ZeroDivisionError), edited(model, everywhere(model, "sigmoid")):
        raise ZeroDivisionError
    assert torch.equal(result[0], before)
    assert torch.equal(model(ids), before)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("model", lambda: attention_layers(torch.nn.Linear(2, 2))),
    ("layer", lambda: edited(model_of(), [Edit(3, 0)]).__enter__()),
    ("head", lambda: edited(model_of(), [Edit(0, 4)]).__enter__()),
    ("head", lambda: edited(model_of(), [Edit(0, -1)]).__enter__()),
    ("edits", lambda: edited(model_of(), [Edit(0, 0), Edit(0, 0, "sigmoid")]).__enter__()),
    ("normalizer", lambda: Edit(0, 0, "softmin")),
    *(("temperature", lambda t=t: Edit(0, 0, "softmax", t)) for t in (0.0, -1.0, float("nan"), float("inf"), 1e4)),
]


@pytest.mark.parametrize(("argument", "call"), REFUSALS)
def test_unknown_layers_heads_normalizers_and_temperatures_are_refused(
    argument: str, call: Callable[[], object]
) -> None:
    with refused(argument):
        call()


@pytest.mark.parametrize("normalizer", ["entmax", "sigmoid"])
def test_a_temperature_divides_the_scores_of_any_normalizer(normalizer: str) -> None:
    """The same effect as smaller queries, but for one head only."""
    model = model_of(normalizer=normalizer)
    result = {}
    for temperature in (1.0, 2.0, 1e3):
        with edited(model, [Edit(0, 0, AS_TRAINED, temperature)]):
            result[temperature] = model(ids_of())
    assert torch.equal(result[1.0], model(ids_of()))
    with torch.no_grad():
        layer = model.blocks[0].attention
        for parameter in (layer.in_proj.weight, layer.in_proj.bias):
            parameter[:8] /= 2.0  # the queries of the first head
    torch.testing.assert_close(result[2.0], model(ids_of()), rtol=0, atol=1e-5)
    assert not torch.equal(result[1e3], result[2.0])
