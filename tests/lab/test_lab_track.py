"""Attention statistics against explicitly computed weights and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import enlarged
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.decoder import NORMALIZERS
from qkv_lab import heads

TINY = {"vocab_size": 23, "context": 29, "d_model": 12, "layers": 2, "heads": 6, "kv_heads": 2, "d_hidden": 17}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"normalizer {name}": {"normalizer": name} for name in NORMALIZERS},
    "sink, learned positions": {"sink": True, "positions": "learned"},
    "key bias, gate": {"key_bias": True, "gate": "elementwise", "positions": "alibi"},
    "gate by head, rotary": {"gate": "head", "qk_norm": True, "positions": "rotary", "dropout": 0.5},
    "window": {"window": 4, "score_scale": 2.0},
    "window of one": {"window": 1},
    "prefix": {"prefix": 5, "positions": "none"},
    "post-norm": {"place": "post", "norm": "rmsnorm", "bias": False, "activation": "swiglu", "tied": False},
}


def model_of(**changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    return enlarged(DecoderLM(DecoderConfig(**{**TINY, **changes})))


def ids_of(*shape: int) -> Tensor:
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(1))


def by_hand(model: DecoderLM, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (layer, b, h, n, n), values (layer, b, h, n, dv) and hidden states (layer, b, n, d), layer by layer."""
    weights, values, hidden = [], [], []
    x = model._embedded(ids, 0, None)
    for block in model.blocks:
        heads = block.attention
        given = block.attention_norm(x) if block.place == "pre" else x
        weights.append(heads(given, return_weights=True)[1])
        made = heads.in_proj(given)[..., -heads.widths[2] :]
        values.append(made.unflatten(-1, (heads.kv_heads, -1)).transpose(1, 2).repeat_interleave(3, 1))
        x = block(x)
        hidden.append(x)
    return torch.stack(weights), torch.stack(values), torch.stack(hidden)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_statistics_agree_with_explicit_weights(name: str) -> None:
    model, ids = model_of(**VARIANTS[name]), ids_of(3, 11)
    found = heads.attention(model, ids)
    weights, values, hidden = by_hand(model, ids)
    unnormalised = VARIANTS[name].get("normalizer") in ("sigmoid", "elu", "relu")
    shares = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) if unnormalised else weights
    window = min(11, model.config.window or 11)
    first = shares[..., :window, 0]

    def check(key: str, want: Tensor) -> None:
        torch.testing.assert_close(torch.tensor(found[key]).double(), want.double(), rtol=1e-5, atol=1e-6)

    if window > 1:
        check("sink", first[..., 1:].mean((1, 3)))
        check("sink_share", (first[..., 1:] > 0.3).double().mean((1, 3)))
    else:
        assert found["sink"] == found["sink_share"] == [[0.0] * 6] * 2
    assert found["sink_score"] == pytest.approx(float((first.mean((1, 3)) > 0.3).double().mean()))
    assert ("sink_raw" in found) == unnormalised
    if unnormalised:
        check("sink_raw", weights[..., 1:, 0].mean((1, 3)))
    assert ("sink_mass" in found) == (name in ("sink, learned positions", "key bias, gate", "normalizer off_by_one"))
    if "sink_mass" in found:
        check("sink_mass", 1 - weights.sum(-1)[..., 1:].mean((1, 3)))
    rows = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    entropy = -torch.xlogy(rows, rows).sum(-1)[..., 1:]
    check("entropy", entropy.mean((1, 3)))
    visible = torch.ones(11, 11, dtype=torch.bool).tril().triu(-window + 1)
    visible[: model.config.prefix, : model.config.prefix] = True
    check("entropy_ratio", (entropy / visible.sum(-1)[1:].clamp(min=2).log()).mean((1, 3)))
    norms = values.norm(dim=-1)
    check("value_drain", (norms[..., 0] / norms[..., 1:].mean(-1)).mean(1))
    lengths = hidden.norm(dim=-1)
    check("hidden_norm", (lengths[..., 0] / lengths[..., 1:].mean(-1)).mean(1))
    check("massive", (hidden[:, :, 0].abs().amax(-1) / hidden.abs().flatten(2).median(-1).values).mean(1))
