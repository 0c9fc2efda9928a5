"""The number of kernel launches that `plan` expects on CUDA, against the operations that are called."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import qkv
from conftest import rand, triple
from qkv import _launches, biases, masks, normalizers
from qkv._engine.call import Call
from qkv._engine.launches import Launches
from qkv.kernels import tiled
from qkv.kernels.flex import kernel as flex
from qkv.kernels.fused import kernel as fused
from qkv.scores import Additive, Dot
from qkv.statistics.triton import host

B, H, HKV, D = 2, 6, 2, 16


@pytest.fixture
def cpu_is_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_launches, fused, flex):
        monkeypatch.setattr(module, "GPUS", ("cpu",))
    monkeypatch.setattr(fused, "_wrong", lambda *_: None)


def call_of(asked: dict[str, Any], n: int, **shape: Any) -> Call:
    q, k, v = (x.float() for x in triple(B, H, HKV, n, n + 40, D, D, **shape))
    settings = {"mask": None, "biases": (), "score": None, "normalizer": None} | asked
    return Call.of(q, k, v, *settings.values())


TILED: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda n: {},
    "causal": lambda n: {"mask": masks.Causal()},
    "window": lambda n: {"mask": masks.Window(300)},
    "padding": lambda n: {"mask": masks.Padding([n + 40, n - 200]) & masks.Causal()},
    "alibi, soft cap": lambda n: {"mask": masks.Causal(), "biases": (biases.ALiBi(), biases.SoftCap(3.0))},
    "values by distance": lambda n: {"biases": (biases.RelativePosition(rand(5, D), rand(5, D)),)},
    "sink": lambda n: {"mask": masks.Causal(), "normalizer": normalizers.Softmax(0.5, 0.3)},
    "relu": lambda n: {"mask": masks.Causal(), "normalizer": normalizers.ReLU()},
    "sigmoid": lambda n: {"mask": masks.Window(300), "normalizer": normalizers.Sigmoid()},
    "identity by sum": lambda n: {"mask": masks.Causal(), "normalizer": normalizers.Identity("sum")},
    "additive": lambda n: {"mask": masks.Causal(), "score": Additive(rand(4), rand(4, D), rand(4, D))},
}


@pytest.mark.parametrize("n", [600, 1100])
@pytest.mark.parametrize("name", TILED)
@pytest.mark.usefixtures("cpu_is_a_card")
def test_tiled(name: str, n: int) -> None:
    call = call_of(TILED[name](n), n)
    tiled.forward(call)  # keeps the patterns of masks
    with Launches() as found:
        tiled.forward(call)
    assert _launches.expected_launches("tiled", call) == found.count
    assert found.count > n // 10


FUSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "negative scale": {"score": Dot(scale=-0.3)},
    "a sink": {"normalizer": normalizers.Softmax(sink=0.3)},
}


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize(("d", "dtype"), [(16, torch.float32), (12, torch.bfloat16), (12, torch.float32)])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("cpu_is_a_card")
def test_fused(name: str, d: int, dtype: torch.dtype, triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, *_: object, **named: object) -> tuple[Any, ...]:
        return torch.empty_like(q), lse, *[None] * 4

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **named: launched.append("sink")

    for module in (fused, _launches):
        monkeypatch.setattr(module, "has_triton", lambda: triton)
    monkeypatch.setattr(fused, "_OPERATORS", {"flash": attention, "efficient": attention})
    monkeypatch.setattr(fused, "_sink_kernel", Kernel)
    for n in (32, 64):
        launched: list[str] = []
        lse, settings = torch.empty(B, H, n), {"mask": None, "score": None, "normalizer": None} | FUSED[name]
        q, k, v = (torch.zeros(B, heads, n, d, dtype=dtype) for heads in (H, HKV, HKV))
        call = Call.of(q, k, v, settings["mask"], (), settings["score"], settings["normalizer"])
        with Launches() as found:
            fused.forward(call)
        assert _launches.expected_launches("fused", call) == 1 + found.count + len(launched), found.names


FLEX: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi, causal": {"mask": masks.Causal(), "biases": (biases.ALiBi(),)},
    "a sink": {"normalizer": normalizers.Softmax(sink=0.3)},
    "padding": {"mask": masks.Padding([20, 30])},
    "no visible key": {"mask": masks.Window(3) & masks.Padding([20, 30])},
    "relu by keys": {"mask": masks.Causal(), "normalizer": normalizers.ReLU()},
    "relu by sum": {"normalizer": normalizers.ReLU("sum")},
    "sigmoid": {"normalizer": normalizers.Sigmoid(torch.zeros(H))},
}


@pytest.mark.parametrize("d", [16, 8])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", FLEX)
@pytest.mark.usefixtures("cpu_is_a_card")
def test_flex(name: str, train: bool, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 0

    def attention(q: Tensor, k: Tensor, v: Tensor, **named: object) -> tuple[Tensor, SimpleNamespace]:
        nonlocal number
        number += 1
        return torch.empty(*q.shape[:3], v.shape[3]), SimpleNamespace(lse=torch.empty(q.shape[:3]))

    monkeypatch.setattr(flex, "_attention", lambda device: attention)
    for n in (32, 64):
        number = 0
        q, k, v = (torch.zeros(B, heads, n, d, requires_grad=train) for heads in (H, HKV, HKV))
        settings = {"mask": None, "biases": (), "score": None, "normalizer": None} | FLEX[name]
        call = Call.of(q, k, v, *settings.values())
        flex.forward(call)  # keeps the blocks of the mask
        number = 0
        with Launches() as found:
            flex.forward(call)
        assert number == 1
        assert _launches.expected_launches("flex", call) == _launches.ATTENTION + found.count, found.names


@pytest.mark.usefixtures("cpu_is_a_card")
def test_where_the_number_is_not_known() -> None:
    x = torch.zeros(1, 2, 300, 16)
    for kernel in ("tiled", "flex"):
        assert _launches.expected_launches(kernel, Call.of(x, x, x, normalizer=normalizers.Entmax())) is None
    for kernel in ("eager", "linear", "reference", "flash"):
        assert _launches.expected_launches(kernel, Call.of(x, x, x)) is None


def test_on_cpu_there_are_none() -> None:
    x = torch.zeros(1, 2, 300, 16)
    assert qkv.plan(x, x, x).launches is None
    assert "launches" not in str(qkv.plan(x, x, x))


@pytest.mark.slow
def test_the_published_tables_are_up_to_date() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("make_launches", docs / "make_launches.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["make_launches"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page, table in (("gpu", module.page_on_gpus()), ("scale", module.page_on_surveys(module.of_a_survey()))):
        assert "\n".join(table) in (docs / f"{page}.md").read_text(), "run docs/make_launches.py"


def test_bytes_that_operations_read_and_write() -> None:
    x = torch.zeros(4, 6)
    with Launches() as found:
        x.exp()
        x[:2].add_(torch.ones(6))
        x[:1].expand(4, 6).sum()
    assert found.names == ["exp", "ones", "add_", "sum"]
    assert found.bytes == 4 * (24 + 24 + 6 + 12 + 6 + 12 + 6 + 1)


# --- plans for devices that are not there, by torch's fake tensors ----------------------------------------------------


def fake(device: str) -> Tensor:
    with FakeTensorMode():
        return torch.empty(1, 2, 3000, 64, device=device)


@pytest.mark.parametrize("hip", [None, "6.2"])
def test_plan_on_cuda_and_on_amd_cards(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD cards are CUDA devices to torch: the same kernels serve attention, if they pass the same check."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(fused, "_wrong", lambda *_: None)
    monkeypatch.setattr(flex, "has_triton", lambda: True)
    monkeypatch.setattr(host, "_capability", lambda index: (9, 0))
    x = fake("cuda")
    found = qkv.plan(x, x, x, mask=masks.Causal(), normalizer=normalizers.Softmax(sink=0.0))
    assert found.kernel == "fused"
    assert found.launches == 2
    assert "launches" in str(found)
    why = host.unsupported_reason(Call.of(x, x, x, masks.Causal()), {}, ())
    assert why is None if hip is None else "AMD" in str(why)
    monkeypatch.setattr(fused, "_wrong", lambda *_: "torch's fused kernels on this card are not usable")
    found = qkv.plan(x, x, x)
    assert (found.kernel, found.launches) == ("flex", 2)
    assert "not usable" in found.rejected["fused"]


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_plan_on_other_accelerators_says_that_tiles_serve_the_call(device: str) -> None:
    x = fake(device)
    found = qkv.plan(x, x, x, mask=masks.Causal())
    assert (found.kernel, found.launches) == ("tiled", None)
    assert all(f"tensors are on {device}" in found.rejected[name] for name in ("flash", "fused", "flex"))
    assert device in str(host.unsupported_reason(Call.of(x, x, x, masks.Causal()), {}, ()))
