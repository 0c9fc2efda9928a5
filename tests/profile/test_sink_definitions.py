"""The definitions of sinks and massive activations agree wherever they are used."""

from __future__ import annotations

import pytest
import torch

from qkv.profiler.capture import residual
from qkv.profiler.data import tables
from qkv.profiler.surveys import accumulators
from qkv.tracking import tracker
from qkv_lab import heads


def test_one_sink_threshold():
    assert tables.SINK_THRESHOLD == accumulators.SINK_THRESHOLD == tracker.SINK_THRESHOLD == heads.THRESHOLD == 0.3


@pytest.mark.parametrize(("rest", "largest", "count"), [(1.0, 2000.0, 1), (1.0, 500.0, 0), (0.001, 99.0, 0)])
def test_massive_activations_are_large_and_far_above_the_median(rest, largest, count):
    states = torch.full((3, 5), rest)
    states[0, 2] = -largest
    assert int(residual._summarised(states).massive) == count
