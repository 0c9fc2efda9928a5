"""What docs/comparison.md says that qkv computes in linear memory, and other libraries refuse."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, normalizers

CASES = {
    "sigmoid": {"normalizer": normalizers.Sigmoid()},
    "hard": {"normalizer": normalizers.Hard()},
    "sink": {"normalizer": normalizers.Softmax(sink=torch.zeros(2))},
    "soft cap": {"bias": qkv.biases.SoftCap(5.0)},
}


@pytest.mark.parametrize("name", CASES)
def test_memory_is_linear(name: str) -> None:
    q = torch.zeros(1, 2, 4096, 8)
    few, many = (qkv.plan(*[q[:, :, :n]] * 3, mask=masks.Causal(), **CASES[name]) for n in (2048, 4096))
    assert many.kernel not in ("eager", "reference")
    assert many.bytes < 3 * few.bytes, "four times would be quadratic"
