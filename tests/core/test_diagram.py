"""The diagram of a plan has the shapes of the tensors that the call computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import qkv
from qkv import biases, masks, normalizers, scores

Q, K, V = torch.randn(2, 6, 5, 7), torch.randn(2, 3, 11, 4), torch.randn(2, 3, 11, 8)
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "general": {"score": scores.General(torch.randn(6, 7, 4)), "mask": masks.Causal() | masks.Global([0])},
    "pairwise": {"score": scores.Additive(torch.randn(9), torch.randn(9, 7), torch.randn(9, 4))},
    "sink": {
        "score": scores.General(torch.randn(6, 7, 4)),
        "bias": (biases.ALiBi(), biases.SoftCap(30.0)),
        "normalizer": normalizers.Softmax(sink=torch.zeros(6)),
    },
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_steps_have_the_shapes_of_the_call_and_diagrams_connect_every_tensor(name: str) -> None:
    parts = COMPOSITIONS[name]
    plan = qkv.plan(Q, K, V, **parts)
    out, weights = qkv.attend(Q, K, V, **parts, return_weights=True)
    projected = parts["score"].project(Q, K)
    found = {"queries": Q, "keys": K, "values": V, "weights": weights, "scores": weights, "output": out}
    found |= {f"projected {side}": x for side, x in zip(("queries", "keys"), projected, strict=True)}
    for step in plan.steps:
        assert step.shape == found[step.name].shape, step
    assert {*found} - {step.name for step in plan.steps} <= {"projected keys"}  # `General` projects queries only
    text, chart = plan.diagram(), plan.diagram("mermaid")
    for given in parts.values():
        for part in given if isinstance(given, tuple) else (given,):
            assert type(part).__name__ in text
            assert type(part).__name__ in chart
    boxes = dict(re.findall(r'^    (\w+)(?:\["|\(\[")(.*?)(?:"\]|"\]\))$', chart, re.MULTILINE))
    arrows = re.findall(r"^    (\w+) --> (\w+)$", chart, re.MULTILINE)
    assert {end for arrow in arrows for end in arrow} == {*boxes}
    assert [boxes[box] for box in boxes if box not in {start for start, _ in arrows}] == ["output<br/>2 × 6 × 5 × 8"]
