"""The hidden maps of linear layers are what the model's own function does to values."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import refused
from hf_models import build, enliven, inputs
from qkv.huggingface import hidden_maps

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
