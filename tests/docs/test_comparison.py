"""The statements of docs/comparison.md about other libraries, checked against the installed versions."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, normalizers

CASES = {  # x-transformers' setting, its refusal, and ours
    "sigmoid": ({"sigmoid": True}, "not available for flash", {"normalizer": normalizers.Sigmoid()}),
    "hard": ({"hard": True}, "not available for flash", {"normalizer": normalizers.Hard()}),
    "sink": (
        {"head_learned_sink": True, "heads": 2}, "not supported for flash",
        {"normalizer": normalizers.Softmax(sink=torch.zeros(2))},
    ),
    "soft cap": ({"softclamp_logits": True}, "not compatible", {"bias": qkv.biases.SoftCap(5.0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_qkv_computes_the_same_in_linear_memory(name: str) -> None:
    q = torch.zeros(1, 2, 4096, 8)
    few, many = (qkv.plan(*[q[:, :, :n]] * 3, mask=masks.Causal(), **CASES[name][2]) for n in (2048, 4096))
    assert many.kernel not in ("eager", "reference")
    assert many.bytes < 3 * few.bytes, "four times would be quadratic"
