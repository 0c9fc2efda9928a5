"""Models whose weights are offloaded, or that several processes share, are profiled, watched and edited, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import disk_offload, dispatch_model
from torch import nn

import hf_models as hf
import qkv
from conftest import refused
from qkv.profiler.capture import probes

WAYS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "disk": lambda model, folder: disk_offload(model, str(folder), execution_device=torch.device("cpu")),
    "device map": lambda model, folder: dispatch_model(
        model,
        {"embed_tokens": "cpu", "layers.0": "disk", "layers.1": "cpu", "norm": "cpu", "rotary_emb": "cpu"},
        main_device="cpu", offload_dir=str(folder), force_hooks=True,
    ),
}  # fmt: skip


def entropy(model: nn.Module) -> Any:
    return qkv.profile(model, hf.inputs("llama"), probe=False, progress=False).data["entropy"].values


@torch.no_grad()
def edited(model: nn.Module) -> torch.Tensor:
    with qkv.edit(model, {(0, 1): "zero"}):
        found: torch.Tensor = model(**hf.inputs("llama"))[0]
    return found


def check(model: nn.Module, want: Any, want_edited: torch.Tensor) -> None:
    """The model is profiled, watched and edited as before it was placed."""
    np.testing.assert_array_equal(entropy(model), want)
    with qkv.watch(model) as watched, torch.no_grad():
        model(**hf.inputs("llama"))
    np.testing.assert_allclose(watched.profile().data["entropy"].values, want, atol=2e-5)
    torch.testing.assert_close(edited(model), want_edited)


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_weights_give_the_same_profile(way: str, tmp_path: Path) -> None:
    model = hf.build("llama")
    want = entropy(model), edited(model)
    parameters = sum(p.numel() for p in model.parameters())
    WAYS[way](model, tmp_path)
    if way != "device map":
        assert next(model.parameters()).is_meta
    check(model, *want)
    got = qkv.profile(model, hf.inputs("llama"), progress=False)
    assert (got.attrs["parameters"], got.attrs["probes"]) == (parameters, "run")
    key = probes.fingerprint(model)
    assert key is not None
    entropy(model)
    assert probes.fingerprint(model) == key  # so that it is probed once


def test_tensor_parallel_models_are_refused_because_each_process_has_some_heads_only() -> None:
    model = hf.build("llama")
    model._tp_size = 2
    for run in (lambda: qkv.profile(model, hf.inputs("llama")), lambda: qkv.watch(model).__enter__()):
        with refused("model", match="tensor parallelism"):
            run()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_data_parallel_models_are_profiled_watched_and_edited(kind: str, tmp_path: Path) -> None:
    import torch.distributed as dist

    model = hf.build("llama")
    want = entropy(model), edited(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        check(nn.parallel.DistributedDataParallel(model) if kind == "DDP" else sharded(model), *want)
    finally:
        dist.destroy_process_group()


def sharded(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    found: nn.Module = fully_shard(model, mesh=mesh)
    return found
