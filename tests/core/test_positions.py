"""Positional encodings against those of Hugging Face, and the laws they must satisfy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch

from conftest import close, rand, refusals
from hf_models import build
from qkv.cache.evicting import policies_of
from qkv.models.pretrained import ROTATE_AS_LLAMA, tell_rotary
from qkv.positions import NTK, DynamicNTK, Linear, Llama3, Proportional, Rotary, Scaling, Sinusoidal, YaRN

SCALINGS: dict[str, tuple[Scaling | None, dict]] = {
    "default": (None, {"rope_type": "default"}),
    "linear": (Linear(4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (DynamicNTK(3.0, 64), {"rope_type": "dynamic", "factor": 3.0}),
    "yarn": (YaRN(8.0, 64), {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}),
    "yarn of its own": (
        YaRN(8.0, 64, fast=16.0, slow=2.0, attention=1.3, whole=False),
        {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
            "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False,
        },
    ),
    "proportional": (Proportional(0.6), {"rope_type": "proportional", "partial_rotary_factor": 0.6}),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 256),
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [40, 100])
def test_rotary_is_that_of_hugging_face(name: str, length: int) -> None:
    transformers = pytest.importorskip("transformers", reason="the peer is transformers' own rotary embedding")
    from transformers.models.llama import modeling_llama

    scaling, theirs = SCALINGS[name]
    config = transformers.LlamaConfig(
        hidden_size=96, num_attention_heads=4, max_position_embeddings=64,
        rope_parameters={"rope_theta": 5000.0, **theirs},
    )  # fmt: skip
    positions = torch.arange(length)
    q, k = (rand(2, 4, length, 24, seed=s, dtype=torch.float32) for s in (1, 2))
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = embedding(q, positions[None])
    want = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    ours = Rotary(24, base=5000.0, scaling=scaling)
    for x, y in zip((q, k), want, strict=True):
        close(ours(x, positions), y, eps=1024)


@pytest.mark.parametrize("name", ROTATE_AS_LLAMA)
def test_models_rotate_as_llama(name: str) -> None:
    lm, [cache] = build(name), policies_of(["expected"], 16).values()
    tell_rotary(lm, [cache])
    embedding = next(part for part in lm.modules() if type(part).__name__.endswith("RotaryEmbedding"))
    x = rand(1, 2, 40, cache.rotary.dim, dtype=torch.float32)
    module = sys.modules[type(embedding).__module__]
    close(cache.rotary.span(x), module.apply_rotary_pos_emb(x, x, *embedding(x, torch.arange(40)[None]))[0], eps=1024)


def test_interleaved_is_that_of_gpt_j() -> None:
    pytest.importorskip("transformers", reason="the peer is transformers' GPT-J")
    from transformers.models.gptj import modeling_gptj

    table = modeling_gptj.create_sinusoidal_positions(50, 16)
    sin, cos = table[None].chunk(2, -1)
    x = rand(1, 50, 3, 16, dtype=torch.float32)  # (batch, length, heads, size), as there
    want = modeling_gptj.apply_rotary_pos_emb(x, sin, cos).transpose(1, 2)
    close(Rotary(16, interleaved=True)(x.transpose(1, 2), torch.arange(50)), want, eps=1024)


def test_ntk_is_dynamic_ntk_of_a_fixed_length() -> None:
    """At n tokens the dynamic factor is f·n/original − (f − 1). It stretches the longest wavelength alone."""
    found = NTK(4.0).frequencies(16, 1e4, 10)
    close(found, DynamicNTK(4.0, 100).frequencies(16, 1e4, 175))
    assert found[0].item() == 1.0
    assert found[-1].item() == pytest.approx(1e4 ** (-14 / 16) / 4)


def test_positions_of_each_item() -> None:
    x, positions = rand(2, 3, 5, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    both = Rotary(8)(x, positions)
    for item in range(2):
        close(both[item], Rotary(8)(x[item : item + 1], positions[item])[0])


def test_bfloat16_distinguishes_late_positions() -> None:
    """Tables in bfloat16 would not: 257 rounds to 256."""
    x = torch.ones(1, 1, 2, 8, dtype=torch.bfloat16)
    out = Rotary(8)(x, torch.tensor([256, 257]))
    assert out.dtype == torch.bfloat16
    want = Rotary(8)(x.double(), torch.tensor([256, 257]))
    close(out, want, eps=4, dtype=torch.bfloat16)
    assert (out[0, 0, 0] - out[0, 0, 1]).abs().max() > 0.5


def test_far_positions_are_exact() -> None:
    cos, sin = Rotary(4).tables(torch.tensor([10**6]))
    for i in range(2):
        angle = 10**6 * 10_000.0 ** (-2 * i / 4)
        assert cos[0, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert sin[0, i].item() == pytest.approx(math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients_are_rotated_back(interleaved: bool) -> None:
    """The derivative of a rotation is the rotation the other way; YaRN's magnitude multiplies both."""
    x, slope, positions = rand(1, 2, 3, 6).requires_grad_(), rand(1, 2, 3, 6, seed=3), torch.arange(3)
    rotary = Rotary(4, interleaved=interleaved, scaling=YaRN(2.0, 16))
    (found,) = torch.autograd.grad((rotary(x, positions, length=3) * slope).sum(), x)
    close(found, rotary(slope, -positions, length=3), dtype=torch.float32)


def test_sinusoidal_by_its_definition() -> None:
    table = Sinusoidal(6)(torch.tensor([0, 1, 5000]))
    for row, p in enumerate((0, 1, 5000)):
        for i in range(3):
            angle = p / 10_000 ** (2 * i / 6)
            assert table[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("dim", lambda: Sinusoidal(5)),
    ("dim", lambda: Rotary(3)),
    ("base", lambda: Rotary(4, base=1.0)),
    ("factor", lambda: Linear(0.5)),
    ("factor", lambda: NTK(math.inf)),
    ("dim", lambda: NTK(2.0).frequencies(2, 1e4, 9)),
    ("original", lambda: YaRN(2.0, 0)),
    ("low", lambda: Llama3(low=4.0, high=1.0)),
    ("share", lambda: Proportional(1.5)),
    ("x", lambda: Rotary(8)(torch.ones(1, 1, 2, 4), torch.arange(2))),
    ("positions", lambda: Rotary(4)(torch.ones(1, 1, 2, 4), torch.arange(3))),
]

test_positions_reject_wrong_arguments = refusals(REFUSALS)


def test_tables_of_a_trace_are_not_cached() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        Rotary(8).span(torch.randn(1, 1, 77, 8))
    x = rand(1, 1, 77, 8)
    close(Rotary(8).span(x), Rotary(8)(x, torch.arange(77)))
