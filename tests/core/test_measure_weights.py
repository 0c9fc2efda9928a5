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
from conftest import refused
from qkv import masks, normalizers
from qkv.statistics import BUILT_IN, Streaming

UNKNOWN = {"lse", "sink_mass"}  # weights alone do not determine them


def same(found: Any, expected: Any) -> None:
    """All fields that weights determine are equal."""
    for field in dataclasses.fields(expected):
        ours, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name in UNKNOWN:
            assert ours is None
        elif isinstance(other, Tensor):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
        elif isinstance(other, Mapping):
            assert ours.keys() == other.keys()
            for name in other:
                torch.testing.assert_close(ours[name], other[name], rtol=1e-5, atol=1e-5)
        elif dataclasses.is_dataclass(other):
            same(ours, other)
        else:
            assert ours == other


CALLS: dict[str, tuple[int, int, dict[str, Any], bool]] = {
    "causal, several tiles": (300, 300, {"mask": masks.Causal()}, False),
    "window with a learned sink": (
        37,
        37,
        {"mask": masks.Window(5), "normalizer": normalizers.Softmax(sink=1.0)},
        False,
    ),
    "cross-attention": (7, 19, {}, False),
    "rows without keys": (9, 9, {"mask": masks.Padding([6, 3], "left") & masks.Causal()}, False),
    "sigmoid": (12, 15, {"normalizer": normalizers.Sigmoid(bias=0.0)}, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_statistics_of_weights_equal_those_of_the_queries_and_keys(name: str) -> None:
    n_queries, n_keys, call, unnormalized = CALLS[name]
    q, k = torch.randn(2, 3, n_queries, 8, dtype=torch.float64), torch.randn(2, 3, n_keys, 8, dtype=torch.float64)
    weights = qkv.attend(q, k, k, return_weights=True, **call)[1]
    options: dict[str, Any] = {
        "mass": {"near": masks.Window(3)}, "prefix_keys": 4, "bins": 5,
        "statistics": [BUILT_IN["entropy"], Streaming(2, 3)],
    }  # fmt: skip
    found = qkv.statistics.measure_weights(weights, call.get("mask"), unnormalized=unnormalized, **options)
    same(found, qkv.measure(q, k, mask=call.get("mask"), normalizer=call.get("normalizer"), **options))


def test_queries_that_do_not_count_may_hold_nan() -> None:
    q, queries = torch.randn(2, 1, 6, 4), torch.arange(6) < torch.tensor([[6], [4]])
    weights = qkv.attend(q, q, q, mask=masks.Causal(), return_weights=True)[1]
    weights[1, :, 4:] = float("nan")
    found = qkv.statistics.measure_weights(weights, masks.Causal(), queries=queries)
    same(found, qkv.measure(q, q, mask=masks.Causal(), queries=queries))


def test_results_have_the_form_of_the_weights() -> None:
    weights = torch.rand(3, 5, 7).softmax(-1)
    assert qkv.statistics.measure_weights(weights).received.shape == (3, 7)
    assert isinstance(qkv.statistics.measure_weights(weights[0].numpy()).entropy, np.ndarray)
    assert qkv.statistics.measure_weights(weights[0].tolist()).entropy.shape == (5,)
    half = qkv.statistics.measure_weights(weights.bfloat16().requires_grad_())
    assert half.entropy.dtype == torch.float32
    assert not half.entropy.requires_grad


@pytest.mark.parametrize(
    ("w", "mask"),
    [
        (torch.randn(4, 4), None),  # scores
        (torch.rand(4, 4) + 1, None),  # positive scores
        (torch.full((4, 4), float("nan")), None),
        (torch.full((4, 4), 0.25), masks.Causal()),  # weight on masked pairs
        (torch.full((300, 300), 1 / 300), masks.Window(4)),  # in tiles that are empty
        (torch.ones(4), None),
        (torch.eye(4).int(), None),
        (torch.eye(4).to_sparse(), None),
        (torch.eye(4, device="meta"), None),
        ((torch.rand(1, 2, 4, 4),) * 3, None),  # all layers at once
    ],
)
def test_arguments_that_are_not_weights_are_refused(w: Any, mask: masks.Mask | None) -> None:
    with refused("w"):
        qkv.statistics.measure_weights(w, mask)


def test_no_copy_of_the_weights_is_made() -> None:
    w = torch.full((1, 4, 1024, 1024), 1 / 1024)  # 16 MiB
    qkv.statistics.measure_weights(w)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        qkv.statistics.measure_weights(w)
    assert 0 < max(event.cpu_memory_usage for event in profiled.events()) <= w.nbytes / 8
