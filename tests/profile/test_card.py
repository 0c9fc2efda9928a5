"""The recorder on a card: launches and waits on meta tensors, and its numbers with a CPU in place of the card."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import qkv
from benchmarks.launches import Card
from qkv.engine import Result, sizes
from qkv.errors import InputError
from qkv.profiler.capture import probes, record, residual
from qkv.profiler.capture.checking import Checks
from qkv.profiler.capture.inputs import sequences_of
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer
from qkv.profiler.capture.record import Measures, ObservedCall, Recorder, copied_to_cpu
from qkv.profiler.capture.residual import Residuals, attention_modules, by_stack, nth, observe_residual

pytest.importorskip("triton", reason="Triton is not installed")


def llama(layers: int) -> transformers.LlamaModel:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaModel(config).eval()


def cost(layers: int, *, padded: bool, recording: bool) -> tuple[int, int]:
    """Launches and waits of a forward on meta tensors that is recorded, or whose attention costs nothing."""
    with torch.device("meta"):
        model = llama(layers).to(torch.bfloat16)
        batch = {"input_ids": torch.zeros(1 + padded, 128, dtype=torch.long)}
        real = {128: torch.ones(2, 128, dtype=torch.bool)} if padded else {}
    recorder, hidden = Recorder(Measures(map_tokens=0)), Residuals(real)
    sequences = dataclasses.replace(sequences_of(model, batch), real_source=real, real_target=real)
    observer = Observer(model, receive=recorder if recording else unmeasured, sequences=sequences)
    observer.checks.append(record)  # as if its attention had been compared: once for each model
    with Card() as card:
        with observe(observer), observe_residual(model, attention_modules(model) if recording else [], hidden.record):
            model(**batch)
        if recording:
            assert len(observer.records) == layers
            by_stack([hidden])
    attention = card.names.count("_flash_attention_forward")  # which the model itself would launch
    assert attention == layers * recording
    return card.count - attention, len(card.waits)


def unmeasured(observed: ObservedCall, result: Result | None, changed: object) -> Result:
    return Result(torch.empty_like(observed.call.q), None)


@pytest.mark.parametrize(("padded", "most"), [(False, 12), (True, 24)])
def test_a_layer_adds_few_launches_and_waits_for_nothing(padded: bool, most: int) -> None:
    """Texts this short are summarised together after the forward."""
    cost(2, padded=padded, recording=True)  # what is kept for later forwards
    (few, few_waits), (many, waits) = (cost(n, padded=padded, recording=True) for n in (2, 6))
    beside = cost(6, padded=padded, recording=False)[0] - cost(2, padded=padded, recording=False)[0]
    assert (many - few - beside) / 4 <= most
    assert waits == few_waits
    assert waits == 2 or padded  # the copies of the statistics and of the hidden states, at the end


def test_probes_run_on_the_device_of_the_model_and_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checks, "of_rows", lambda *of_layer: None)  # which compares numbers, once for each model
    with torch.device("meta"):
        model = llama(3)
    with Card() as card:
        found = probes.probe(model, torch.arange(9)[None])
    assert len(found) == 3
    assert {x.device.type for scores in found.values() for x in scores.values()} == {"cpu"}
    assert card.waits == ["_to_copy"] * 3  # two texts to the card, and the scores of all layers back


@pytest.fixture
def cpu_as_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "HOSTS", ())


@pytest.mark.parametrize("padding", [None, "left"])
def test_the_profile_of_a_card_equals_that_of_a_cpu(padding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, ids = llama(2), torch.randint(64, (2, 37))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if padding is not None:
        batch["attention_mask"][1, :5] = 0
    settings = {"probe": False, "progress": False, "map_tokens": 0, "map_bins": 8}
    want = qkv.profile(model, batch, **settings)
    monkeypatch.setattr(sizes, "HOSTS", ())
    if padding is None:
        monkeypatch.setattr(record, "ON_CARD", 0)  # the statistics of each layer are copied
    got = qkv.profile(model, batch, **settings)
    for mine, other in ((got.data, want.data), (got.residual["layers"], want.residual["layers"])):
        assert set(mine) == set(other)
        for name in mine.data_vars:
            np.testing.assert_allclose(mine[name], other[name], rtol=2e-4, atol=1e-4, err_msg=name)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_a_layer_that_computes_nan_is_named_after_the_forward(cpu_as_card: None) -> None:
    model = llama(2)
    nn.init.constant_(model.layers[1].self_attn.k_proj.weight, torch.nan)
    with pytest.raises(InputError, match=r"NaN in layers\.1\.self_attn"):
        qkv.profile(model, torch.arange(9), probe=False, progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_median_on_a_card_is_the_middle_value(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "AT_ONCE", 64)
    values = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    values[1], values[2] = values[1].round(), 1.5
    values[3, ::3] = torch.nan
    values = values.to(dtype).abs()  # a NaN may have a sign
    for at in (0, 1, 500, 667, 1000):
        torch.testing.assert_close(nth(values, at), values.sort().values[:, at], equal_nan=True, rtol=0, atol=0)


def test_one_copy_from_a_card_keeps_every_dtype(cpu_as_card: None) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    values = {"a": x.bfloat16(), "b": (x.mT, None), "c": x.double(), "d": x.argsort(), "e": x > 0}
    copies = copied_to_cpu(values)
    assert copies["b"][1] is None
    for name, one in copies.items():
        copy, want = (one[0], x.mT) if name == "b" else (one, values[name])
        assert torch.equal(copy, want)
        assert copy.dtype == want.dtype
        assert copy.data_ptr() != want.data_ptr()
