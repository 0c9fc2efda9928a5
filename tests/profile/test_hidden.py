"""The hidden maps of linear layers are what the model's own function does to values."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from conftest import close, refused
from hf_models import build, enliven, inputs
from qkv.huggingface import hidden_maps
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler.capture import hidden
from qkv.profiler.explore import explorer
from qkv.report.html import render

IDS = torch.arange(2, 22).view(2, 10) % 13
SIZES: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
    "head_dim": 8,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "head_dim": 4, "num_experts": 2,
    "moe_intermediate_size": 4, "num_experts_per_token": 1, "linear_head_dim": 4, "linear_num_heads": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2, "mlp_layer_types": ["dense"] * 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # class without its ending, settings
    "qwen3_next": ("Qwen3Next", DELTA | {"num_experts": 0}),
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "olmo_hybrid": ("OlmoHybrid", DELTA | {"linear_num_value_heads": 2}),
    "kimi_linear": ("KimiLinear", KIMI),
}


def made(family: str) -> Any:
    name, settings = MODELS[family]
    module = importlib.import_module(f"transformers.models.{family}")
    torch.manual_seed(0)
    model = getattr(module, f"{name}Model")(getattr(module, f"{name}Config")(**SIZES | settings))
    enliven(model)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("family", MODELS)
def test_hidden_maps_are_what_the_models_own_rule_does_to_a_unit_matrix(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wants = made(family), []
    before = model(input_ids=IDS).last_hidden_state
    names = vars(sys.modules[type(model).__module__])
    name = next(x for x in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention") if x in names)
    rule = names[name]

    def kept(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        unit = torch.eye(10)[None, :, None].expand(2, 10, value.shape[2], 10)
        wants.append(rule(query, key, unit, **options)[0].transpose(1, 2))
        return rule(query, key, value, **options)

    monkeypatch.setitem(names, name, kept)
    maps = hidden_maps(model, input_ids=IDS)
    assert names[name] is kept
    linear = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    assert list(maps) == linear
    for got, want in zip(maps.values(), wants, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.triu(1).abs().max() < 1e-6
        assert got.min() < 0
    assert model(input_ids=IDS).last_hidden_state.equal(before)


def test_what_has_no_hidden_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("model", "Gated DeltaNet"):
        hidden_maps(build("llama"), **inputs("llama"))
    model = made("qwen3_next")
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    with refused("inputs", "continue a cache"):
        hidden_maps(model, input_ids=IDS, past_key_values=cache)
    names = vars(sys.modules[type(model).__module__])
    rule = names["torch_chunk_gated_delta_rule"]
    monkeypatch.setitem(names, "torch_chunk_gated_delta_rule", lambda *x, **o: (1.01 * rule(*x, **o)[0], None))
    with refused("model", "does not compute"):
        hidden_maps(model, input_ids=IDS)
    assert not model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def own(**settings: Any) -> DecoderLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 24, "layers": 4, "heads": 3, "positions": "rotary"}
    model = DecoderLM(DecoderConfig(**sizes | settings)).eval()
    enliven(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize(("strip", "tokens"), [(2**22, 10), (2**8, 100)])
def test_a_profile_of_a_hybrid_lacks_layers_or_their_statistics_are_not_those_of_absolute_weights(
    strip: int, tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(hidden, "STRIP", strip)
    model = own(layer_types=("gated_delta", "kimi_delta", "attention", "retention"))
    ids = torch.randint(13, (2, tokens), generator=torch.Generator().manual_seed(1))
    before, wants = model(ids), model(ids, return_weights=True)[1]
    profile = qkv.profile(model, ids, progress=False, map_tokens=50, map_bins=25)
    assert model(ids).equal(before)
    assert (list(profile.groups), profile.main) == (["self", "linear"], "self")
    data = profile.groups["linear"]
    assert (data["layer"].values.tolist(), profile.data["layer"].values.tolist()) == ([0, 1, 3], [2])
    assert not any(profile.attrs["without_map"].values())
    signed = torch.stack([wants[i] for i in (0, 1, 3)], 1).double()
    total = signed.abs().sum(-1)
    shares = signed.abs() / total[..., None]
    for name, want in {
        "negative": -signed.clamp(max=0).sum(-1) / total, "row_sum": total, "entropy": -shares.xlogy(shares).sum(-1),
        "received": shares.sum(-2), "self": shares.diagonal(dim1=-2, dim2=-1), "sink": shares[..., 0],
    }.items():  # fmt: skip
        torch.testing.assert_close(torch.from_numpy(data[name].values).double(), want, rtol=1e-4, atol=1e-5)
    if tokens == 10:
        close(torch.from_numpy(data["signed"].values), signed.float(), eps=256)
        close(torch.from_numpy(data["weights"].values), signed.abs().float(), eps=256)
    else:
        means = torch.nn.functional.avg_pool2d(signed.flatten(0, 1), 4).unflatten(0, (2, 3))
        close(torch.from_numpy(data["map_signed"].values), means.float(), eps=256)
        assert "signed" not in data
    found = qkv.profiler.attention_map(model, ids, layer=0, head=1)
    assert found.layer == 0
    assert found.picture(size=4).maximum.max() == pytest.approx(float(signed[0, 0, 1].abs().max()), rel=1e-4)
    with refused("layers", "expected 2"):
        qkv.profiler.attention_map(model, ids, layer=4, head=1)
    row = explorer.of(model, ids).row("linear", 1, 2, 1, 7)
    close(torch.from_numpy(row), signed[1, 2, 1, 7].abs().float(), eps=256)

    kept = qkv.Profile.load(profile.save(tmp_path / "hybrid.qkv.zip"))
    assert kept.findings("linear")[0] == profile.findings("linear")[0]
    images = kept.plot.signed(group="linear").axes[0].images
    assert len(images) == 9
    drawn = np.ma.filled(images[0].get_array(), 0)
    assert np.abs(drawn).max() == pytest.approx(1, abs=0.01)
    assert drawn.min() < 0 < drawn.max()
    assert "signed-title" in render(kept)
    assert kept.plot.signed() is None


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_a_profile_of_a_hugging_face_hybrid_has_other_maps_or_other_numbers_of_layers(family: str) -> None:
    model = made(family)
    wants, profile = hidden_maps(model, input_ids=IDS), qkv.profile(model, IDS, progress=False, probe=False)
    data = profile.groups["linear"]
    assert data["layer"].values.tolist() == list(wants)
    assert sorted([*wants, *profile.data["layer"].values.tolist()]) == [0, 1, 2, 3]
    close(torch.from_numpy(data["signed"].values), torch.stack([*wants.values()], 1), eps=256)
    padded = {"input_ids": torch.cat([IDS[:1, :3] * 0, IDS[:1]], 1), "attention_mask": torch.arange(13)[None] > 2}
    of_padded = qkv.profile(model, padded, progress=False, probe=False).groups["linear"]["signed"].values
    close(torch.from_numpy(of_padded[..., :10, :10]), torch.stack([*wants.values()], 1)[:1], eps=4096)


@torch.no_grad()
def test_the_signed_maps_of_own_differential_layers_are_not_those_that_act() -> None:
    model, ids = own(layer_types=("attention", "differential")), IDS
    profile, wants = qkv.profile(model, ids, progress=False, probe=False), model(ids, return_weights=True)[1]
    data = profile.groups["self-2"]
    assert data["layer"].values.tolist() == [1, 3]
    drawn = profile.plot.signed(group="self-2").axes[0].images[3:]
    for image, want in zip(drawn, wants[3][0], strict=True):
        np.testing.assert_allclose(np.ma.filled(image.get_array(), 0), want, atol=1e-6)
    assert profile.plot.signed() is None
