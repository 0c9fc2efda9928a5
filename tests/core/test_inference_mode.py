"""Tensors cached in inference mode work in training, too: a tensor made there could not be saved for a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv
from qkv.biases import ALiBi, T5Bias
from qkv.kernels.flash import decompose
from qkv.masks import Causal, Dilated, Global, RandomKeys, Window, patterns
from qkv.statistics import at_once, sums
from qkv.statistics.triton import host

CPU = torch.device("cpu")
CACHED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "numbers on a device": (host._on_device, ((3, 1), CPU)),
    "no keys": (host._zeros, (5, CPU)),
    "pairs of bins": (sums._pairs_of_bins, (9, 7, 4, 2, torch.float32, CPU)),
    "powers of a cell": (sums._powers, (6, torch.float32, CPU)),
    "powers of all keys": (at_once._powers, (6, CPU)),
    "band": (decompose._band_pattern, (0, 3, 4, 7, torch.float32)),
    "chosen keys": (patterns._chosen, ((0, 2), 5)),
    "drawn keys": (patterns._draw, (2, 0, None, 9)),
    "drawn keys besides a mask": (patterns._draw, (2, 0, Causal(), 9)),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_cached_tensor_is_an_ordinary_one(name: str) -> None:
    make, arguments = CACHED[name]
    make.cache_clear()
    with torch.inference_mode():
        assert not make(*arguments).is_inference()


CALLS: dict[str, Callable[..., Tensor]] = {
    "window": lambda q, k, v: qkv.attend(q, k, v, mask=Window(20)),
    "window, alibi": lambda q, k, v: qkv.attend(q, k, v, mask=Window(20), bias=ALiBi()),
    "dilated": lambda q, k, v: qkv.attend(q, k, v, mask=Dilated(5, 3)),
    "drawn keys": lambda q, k, v: qkv.attend(q, k, v, mask=RandomKeys(3, besides=Causal()) | Causal()),
    "chosen keys, T5": lambda q, k, v: qkv.attend(q, k, v, mask=Global([0, 3]), bias=T5Bias(torch.zeros(32, 2))),
    "statistics": lambda q, k, v: _statistics(q, k),
}


def _statistics(q: Tensor, k: Tensor) -> Tensor:
    training = q.requires_grad
    more: dict[str, Any] = {} if training else {"prefix_keys": 8, "bins": 8}
    found = qkv.measure(q, k, mask=Causal(), mass={"near": Window(9)}, differentiable=training, **more)
    return found.entropy + found.distance + found.mass["near"]


@pytest.mark.parametrize("n", [40, 300])
@pytest.mark.parametrize("name", CALLS)
def test_training_after_inference(name: str, n: int) -> None:
    for make, _ in CACHED.values():
        make.cache_clear()
    q, k, v = torch.randn(3, 1, 2, n, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = CALLS[name](q, k, v).clone()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = CALLS[name](*leaves)
    torch.testing.assert_close(out.detach(), want, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    assert q.grad is not None
