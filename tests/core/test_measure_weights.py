"""`measure_weights` of the weights of a call equals `measure` of its q and k, and refuses what are no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import qkv
from conftest import rand, refused, triple
from qkv import masks, normalizers
from qkv.statistics import BUILT_IN, PrefixSinkScores, Streaming, measure_weights

UNKNOWN = {"lse", "sink_mass"}  # weights alone do not determine them


def same(found: Any, expected: Any) -> None:
    """All fields that weights determine are equal."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    elif dataclasses.is_dataclass(expected):
        for name in (field.name for field in dataclasses.fields(expected)):
            same(getattr(found, name), None if name in UNKNOWN else getattr(expected, name))
    else:
        assert found == expected


CALLS: dict[str, tuple[int, int, masks.Mask | None, normalizers.Normalizer]] = {
    "causal, several tiles": (300, 300, masks.Causal(), normalizers.Softmax()),
    "window with a learned sink": (37, 37, masks.Window(5), normalizers.Softmax(sink=1.0)),
    "cross-attention": (7, 19, None, normalizers.Softmax()),
    "rows without keys": (9, 9, masks.Padding([6, 3], "left") & masks.Causal(), normalizers.Softmax()),
    "sigmoid": (12, 15, None, normalizers.Sigmoid(bias=0.0)),
}


@pytest.mark.parametrize(("nq", "nk", "mask", "normalizer"), CALLS.values(), ids=CALLS)
def test_statistics_of_weights_equal_those_of_the_queries_and_keys(
    nq: int, nk: int, mask: masks.Mask | None, normalizer: normalizers.Normalizer
) -> None:
    q, k, _ = triple(2, 3, 3, nq, nk, 8)
    weights = qkv.attend(q, k, k, return_weights=True, mask=mask, normalizer=normalizer)[1]
    options: dict[str, Any] = {
        "mass": {"near": masks.Window(3)}, "bins": 5,
        "statistics": [BUILT_IN["entropy"], Streaming(2, 3), PrefixSinkScores(4)],
    }  # fmt: skip
    unnormalized = isinstance(normalizer, normalizers.Sigmoid)
    found = measure_weights(weights, mask, unnormalized=unnormalized, **options)
    same(found, qkv.measure(q, k, mask=mask, normalizer=normalizer, **options))


def test_queries_that_do_not_count_may_hold_nan() -> None:
    q, queries = rand(2, 1, 6, 4), torch.arange(6) < torch.tensor([[6], [4]])
    weights = qkv.attend(q, q, q, mask=masks.Causal(), return_weights=True)[1]
    weights[1, :, 4:] = float("nan")
    found = measure_weights(weights, masks.Causal(), queries=queries)
    same(found, qkv.measure(q, q, mask=masks.Causal(), queries=queries))


def test_results_have_the_form_of_the_weights() -> None:
    weights = rand(3, 5, 7).softmax(-1)
    assert measure_weights(weights).received.shape == (3, 7)
    assert isinstance(measure_weights(weights[0].numpy()).entropy, np.ndarray)
    assert measure_weights(weights[0].tolist()).entropy.shape == (5,)
    half = measure_weights(weights.bfloat16().requires_grad_())
    assert half.entropy.dtype == torch.float32
    assert not half.entropy.requires_grad


REFUSED: list[tuple[Any, masks.Mask | None]] = [
    (rand(4, 4), None),  # scores
    (rand(4, 4).abs() + 1, None),  # positive scores
    (torch.full((4, 4), float("nan")), None),
    (torch.full((4, 4), 0.25), masks.Causal()),  # weight on masked pairs
    (torch.full((300, 300), 1 / 300), masks.Window(4)),  # in tiles that are empty
    (torch.ones(4), None),
    (torch.eye(4).int(), None),
    (torch.eye(4).to_sparse(), None),
    (torch.eye(4, device="meta"), None),
    ((torch.ones(1, 2, 4, 4),) * 3, None),  # all layers at once
]


@pytest.mark.parametrize(("w", "mask"), REFUSED)
def test_arguments_that_are_not_weights_are_refused(w: Any, mask: masks.Mask | None) -> None:
    with refused("w"):
        measure_weights(w, mask)


@pytest.mark.slow
def test_no_copy_of_the_weights_is_made() -> None:
    w = torch.full((1, 4, 1024, 1024), 1 / 1024)  # 16 MiB
    measure_weights(w)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        measure_weights(w)
    assert 0 < max(event.cpu_memory_usage for event in profiled.events()) <= w.nbytes / 8
