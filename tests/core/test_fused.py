"""The fused kernel: its own logic with torch's CUDA operators replaced by formulas, and the real ones on a card."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv
from benchmarks.launches import Launches
from conftest import refused
from qkv import attend, biases, normalizers
from qkv.kernels import fused
from qkv.kernels.fused import difference
from qkv.masks import Causal, Padding, Window

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's CUDA kernels need a GPU")


def formula(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int = -1, right: int = -1,
    known: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out and lse of (b, h, n, d), aligned at the bottom right, as FlashAttention defines them.

    With a gradient, out and lse, the gradients of q, k and v.
    """
    heads, share, back = k.shape[1], q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    back = back + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    masked = ((left >= 0) & (back > left)) | ((right >= 0) & (-back > right)) | (causal & (back < 0))
    q, keys, values = q.float(), *(x.float().repeat_interleave(share, 1) for x in (k, v))
    scores = (scale * q @ keys.mT).masked_fill(masked, -math.inf)
    if known is None:
        lse = scores.logsumexp(-1)
        return torch.exp(scores - lse[..., None]) @ values, lse
    grad, out, lse = known
    p = torch.exp(scores - lse[..., None])
    slope = p * (grad.float() @ values.mT - (grad * out).float().sum(-1, keepdim=True)) * scale
    return slope @ keys, *(x.unflatten(1, (heads, share)).sum(2) for x in (slope.mT @ q, p.mT @ grad.float()))


def flash(q, k, v, cq, ck, nq, nk, p, causal, debug, *, scale, window_size_left=-1, window_size_right=-1):
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[3] % 8 == 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = formula(q, k, v, scale, causal, window_size_left, window_size_right)
    return out.to(q.dtype).transpose(1, 2), lse, None, None, None


def flash_backward(grad, q, k, v, out, lse, cq, ck, nq, nk, p, causal, rng, unused, **named):
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    left, right = named.get("window_size_left", -1), named.get("window_size_right", -1)
    grads = formula(q, k, v, named["scale"], causal, left, right, (grad, out, lse))
    return tuple(x.to(q.dtype).transpose(1, 2) for x in grads)


def efficient(q, k, v, bias, cq, ck, nq, nk, p, mask_type, with_lse, *, scale):
    assert q.dtype == torch.float32
    assert q.shape[2] == k.shape[2], "the float32 kernel has no grouped heads"
    out, lse = formula(*(x.transpose(1, 2) for x in (q, k, v)), scale, mask_type == 2)
    return out.transpose(1, 2), torch.nn.functional.pad(lse, (0, -nq % 32), value=math.inf), None, None, nq, nk


def efficient_backward(grad, q, k, v, bias, out, cq, ck, nq, nk, lse, p, seed, offset, mask_type, of_bias, *, scale):
    assert lse.shape[2] % 32 == 0
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    grads = formula(q, k, v, scale, mask_type == 2, known=(grad, out, lse[..., :nq]))
    return *(x.transpose(1, 2) for x in grads), None


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """The contract of torch's CUDA operators, as formulas, and a CPU that counts as a card."""
    made = {"flash": flash, "flash backward": flash_backward}
    made |= {"efficient": efficient, "efficient backward": efficient_backward}
    monkeypatch.setattr(fused, "_OPERATORS", made)
    monkeypatch.setattr(fused, "GPUS", ("cpu",))
    monkeypatch.setattr(fused, "_wrong", functools.cache(fused._wrong.__wrapped__))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("operators")
def test_a_right_kernel_passes_the_check(dtype: torch.dtype) -> None:
    assert difference(CPU, dtype) is None


@pytest.mark.parametrize("fault", ["scale", "top-left causal", "lse", "dropped gradient", "missing"])
def test_a_wrong_kernel_is_refused(fault: str, operators: dict[str, Callable[..., Any]]) -> None:
    def wrong(q, k, v, *rest, scale, **named):
        if fault == "missing":
            raise RuntimeError("no kernel image is available")
        if fault == "top-left causal":
            rest = (*rest[:5], False, *rest[6:])  # sees everything
        out, lse, *more = flash(q, k, v, *rest, scale=scale * (1.2 if fault == "scale" else 1), **named)
        return out, lse * (1.4427 if fault == "lse" else 1), *more

    def wrong_backward(*args, **named):
        dq, dk, dv = flash_backward(*args, **named)
        return dq, dk * 0, dv

    operators["flash"] = flash if fault == "dropped gradient" else wrong
    if fault == "dropped gradient":
        operators["flash backward"] = wrong_backward
    assert difference(CPU, torch.float16) is not None
    x = torch.zeros(1, 2, 8, 16, dtype=torch.float16)
    with refused("kernel", "not usable"):
        attend(x, x, x, kernel="fused")


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Window(6, ahead=2)},
    "sink": {"mask": Causal(), "normalizer": normalizers.Softmax(sink=torch.tensor([0.3, -1.0, 2.0, 0.0]))},
    "temperature": {"normalizer": normalizers.Softmax(temperature=0.5)},
    "negative scale": {"mask": Causal(), "score": qkv.scores.Dot(scale=-0.4)},
    "scale of zero": {"score": qkv.scores.Dot(scale=0.0)},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("operators")
def test_output_lse_and_gradients_equal_the_eager_kernel(name: str) -> None:
    dtype = torch.float16 if name == "window" else torch.float32
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 21, 12), (2, 2, 27, 12), (2, 2, 27, 20))
    tensors = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    found = []
    for kernel in ("fused", "eager"):
        out, lse = attend(*tensors, **CALLS[name], kernel=kernel, return_lse=True)
        loss = (out.float() * torch.linspace(-1, 1, 20)).sum() + (lse * torch.linspace(0, 1, 21)).sum()
        found.append([out, lse, *torch.autograd.grad(loss, tensors)])
    eps = 2e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=eps, rtol=eps)


SINKS = {
    "of heads": torch.tensor([0.3, -1.0, 40.0, -math.inf])[None, :, None],
    "of queries": torch.randn(2, 4, 21, generator=torch.Generator().manual_seed(3)),
    "one": torch.full((1, 4, 1), 200.0),
}


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("name", SINKS)
def test_a_sink_is_merged_in_place(name: str, triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton:
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(fused, "has_triton", lambda: triton)
    generator = torch.Generator().manual_seed(2)
    out = torch.randn(2, 21, 4, 20, generator=generator).transpose(1, 2)  # as FlashAttention returns it
    lse = (10 * torch.randn(2, 4, 32, generator=generator))[..., :21]
    lse[0, 0, 0], lse[1, 3, 5] = -math.inf, -math.inf
    both = torch.logaddexp(lse.double(), SINKS[name].double())
    share = torch.exp(lse.double() - both).nan_to_num(0.0)
    want = out.double() * share[..., None]
    got = fused._with_sink(out, lse, SINKS[name])
    assert got.out.data_ptr() == out.data_ptr()
    torch.testing.assert_close(got.out.double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.lse.double(), both, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [False, True])
def test_attention_with_a_sink_takes_two_launches(
    dtype: torch.dtype, train: bool, operators: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    launched = []

    def attention(q, *_, **named):
        launched.append("attention")
        return out, torch.empty(2, 4, 32), *[None] * 4

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **named: launched.append("sink")

    out = torch.empty(2, 32, 4, 16, dtype=dtype)
    operators["flash"] = operators["efficient"] = attention
    monkeypatch.setattr(fused, "_wrong", lambda *_: None)
    monkeypatch.setattr(fused, "_sink_kernel", Kernel)
    monkeypatch.setattr(fused, "INTERPRETED", True)  # CPU tensors stand for those on a card
    x = torch.zeros(2, 4, 32, 16, dtype=dtype, requires_grad=train)
    sink = normalizers.Softmax(sink=torch.zeros(4, requires_grad=train))
    with Launches() as of_torch:
        attend(x, x, x, mask=Causal(), normalizer=sink, kernel="fused")
    assert (launched, of_torch.names) == (["attention", "sink"], [])


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"mask": Padding([3])}, "Padding"), ({"mask": Window(3)}, "windows"), ({"bias": biases.ALiBi()}, "no biases"),
    ({"normalizer": normalizers.Sigmoid()}, "Sigmoid"), ({"dropout_p": 0.5}, "dropout"), ({}, "on cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
def test_what_it_cannot_serve_has_a_reason(
    settings: dict[str, Any], reason: str, request: pytest.FixtureRequest
) -> None:
    if settings:
        request.getfixturevalue("operators")
    x = torch.zeros(1, 2, 8, 16)
    with refused("kernel", reason):
        attend(x, x, x, kernel="fused", **settings)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_kernels_on_this_card_are_right(dtype: torch.dtype) -> None:
    assert difference(torch.device("cuda"), dtype) is None


def test_on_other_accelerators_plan_says_that_plain_tiles_serve_the_call() -> None:
    """Meta tensors stand for a device that is neither a CPU nor CUDA."""
    x = torch.empty(1, 2, 3000, 64, device="meta")
    found = qkv.plan(x, x, x, mask=Causal())
    assert found.kernel == "tiled"
    assert all("meta" in found.rejected[name] for name in ("native", "fused", "flex"))
