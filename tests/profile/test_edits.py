"""Edited heads: weights and outputs equal those of a model built with the other normalizer; no state is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import qkv
from qkv.engine import Call
from qkv.kernels import eager, watching
from qkv.models import DecoderConfig, DecoderLM
from qkv.normalizers import Sigmoid, Softmax
from qkv.profiler import everywhere

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
    with qkv.edit(model, everywhere(model, name)):
        result = model(ids)
    built = DecoderLM(replace(model.config, normalizer=NAMES[name])).eval()
    built.load_state_dict(model.state_dict())
    torch.testing.assert_close(result, built(ids), rtol=0, atol=1e-6)
    if name != "softmax":
        assert (result - model(ids)).abs().max() > 1e-3


def edited_weights(model: DecoderLM, ids: torch.Tensor, edits: dict[Any, Any]) -> torch.Tensor:
    """The weights of a profile inside `qkv.edit`: (layers, heads, n, n)."""
    with qkv.edit(model, edits):
        data = qkv.profile(model, ids, progress=False, probe=False).data
    return torch.from_numpy(data["weights"].values[0].copy())


@torch.no_grad()
def test_different_edits_in_one_layer_give_the_weights_of_eager() -> None:
    model, ids = model_of(positions="alibi"), ids_of()
    half = qkv.edits.WithNormalizer(Sigmoid().with_temperature(0.5))
    edits = {(1, 0): "off-by-one", (1, 2): half, (1, 3): qkv.edits.Temperature(3.0)}
    normalizers = {0: Softmax(sink=0.0), 1: Softmax(), 3: Softmax(3.0)}
    calls: list[Call] = []
    with watching(lambda call, result: calls.append(call)):  # type: ignore[arg-type]
        plain = model(ids)
    with qkv.edit(model, edits):
        changed = model(ids)
        with watching(lambda call, result: None):
            assert torch.equal(model(ids), changed)  # a watcher inside does not take the edits away
    assert (changed - plain).abs().max() > 1e-3
    seen = edited_weights(model, ids, edits)
    # layer 1: no earlier layer is edited, so its inputs are unchanged
    torch.testing.assert_close(seen[0], eager.forward(calls[0]).weights[0], rtol=0, atol=1e-6)  # type: ignore[index]
    given, of_layer = calls[1].given, eager.forward(calls[1])
    for head, normalizer in normalizers.items():
        call = Call.of(given.q, given.k, given.v, given.mask, given.biases, given.score, normalizer)
        expected = eager.forward(call).weights[0, head]  # type: ignore[index]
        torch.testing.assert_close(seen[1][head], expected, rtol=0, atol=1e-5)
    # The sigmoid by hand: σ(score / 0.5 − ln n), n the visible keys; scores are −inf where masked.
    scores = of_layer.weights[0, 2].log() + of_layer.lse[0, 2, :, None]  # type: ignore[index]
    expected = torch.sigmoid(scores / 0.5 - torch.arange(1, 21).log()[:, None])
    torch.testing.assert_close(seen[1][2], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_learned_sink_is_kept_by_a_temperature_and_removed_by_softmax() -> None:
    model, ids = model_of(sink=True), ids_of()
    torch.nn.init.constant_(model.blocks[0].attention.composition.normalizer_sink, 2.0)
    sums = edited_weights(model, ids, {(0, 0): qkv.edits.Temperature(2.0), (0, 1): "softmax"})[0].sum(-1)
    assert sums[0].min() < 0.9
    torch.testing.assert_close(sums[1], torch.ones(20))
    assert sums[2].min() < 0.9


@torch.no_grad()
def test_lse_and_weights_that_a_layer_returns_are_those_of_its_edits() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return qkv.attend(q, k, v, return_lse=True, return_weights=True)

    layer = Layer()
    inputs = torch.randn(3, 1, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    _, lse, weights = layer(*inputs)
    with qkv.edit(layer, {("Layer", 1): "off-by-one", ("Layer", 2): "zero"}):
        _, edited_lse, edited = layer(*inputs)
    torch.testing.assert_close(edited[:, [0, 2, 3]], weights[:, [0, 2, 3]], rtol=0, atol=0)
    torch.testing.assert_close(edited_lse[:, 1], torch.logaddexp(lse[:, 1], torch.tensor(0.0)))
    torch.testing.assert_close(edited[:, 1], weights[:, 1] * torch.sigmoid(lse[:, 1])[..., None])


@pytest.mark.parametrize("normalizer", ["entmax", "sigmoid"])
def test_a_temperature_divides_the_scores_of_any_normalizer(normalizer: str) -> None:
    """The same effect as smaller queries, but for one head only."""
    model = model_of(normalizer=normalizer)
    result = {}
    for temperature in (1.0, 2.0, 1e3):
        with qkv.edit(model, {(0, 0): qkv.edits.Temperature(temperature)}):
            result[temperature] = model(ids_of())
    assert torch.equal(result[1.0], model(ids_of()))
    with torch.no_grad():
        layer = model.blocks[0].attention
        for parameter in (layer.in_proj.weight, layer.in_proj.bias):
            parameter[:8] /= 2.0  # the queries of the first head
    torch.testing.assert_close(result[2.0], model(ids_of()), rtol=0, atol=1e-5)
    assert not torch.equal(result[1e3], result[2.0])
