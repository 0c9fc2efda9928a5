"""Models whose weights accelerate keeps elsewhere are profiled, watched and edited as if they were in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn

import hf_models as hf
import qkv

WAYS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, str(folder), execution_device=torch.device("cpu")),
    "device map": lambda model, folder: dispatch_model(
        model,
        {"embed_tokens": "cpu", "layers.0": "disk", "layers.1": "cpu", "norm": "cpu", "rotary_emb": "cpu"},
        main_device="cpu", offload_dir=str(folder), force_hooks=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_weights_give_the_same_profile(way: str, tmp_path: Path) -> None:
    model, inputs = hf.build("llama"), hf.inputs("llama")
    want = qkv.profile(model, inputs, probe=False, progress=False)
    with qkv.edit(model, {(0, 1): "zero"}), torch.no_grad():
        edited = model(**inputs)[0]
    WAYS[way](model, tmp_path)
    if way != "device map":
        assert next(model.parameters()).is_meta
    got = qkv.profile(model, inputs, progress=False)
    np.testing.assert_array_equal(got.data["entropy"].values, want.data["entropy"].values)
    assert got.attrs["parameters"] == want.attrs["parameters"]
    assert got.attrs["probes"] == "run"
    with qkv.watch(model) as watched, torch.no_grad():
        model(**inputs)
    np.testing.assert_allclose(watched.profile().data["entropy"].values, want.data["entropy"].values, atol=2e-5)
    with qkv.edit(model, {(0, 1): "zero"}), torch.no_grad():
        assert torch.equal(model(**inputs)[0], edited)
