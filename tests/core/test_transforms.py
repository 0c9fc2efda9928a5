"""Autocast, torch.func, forward mode and second derivatives: correct results, or a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import qkv
from conftest import close, rand, refused, triple, unchecked
from own_objects import HEADS, HeavyTail, Manhattan, Ramp, SoftplusSquared, Squeeze
from qkv import InputError, attend, biases, masks, normalizers, scores

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in its jvp

EXPLICIT: dict[str, dict[str, Any]] = {  # compositions whose weights need no search
    "plain": {},
    "causal, a sink": {"mask": masks.Causal(), "normalizer": normalizers.Softmax(0.7, sink=0.3)},
    "sigmoid": {"mask": masks.Window(3), "normalizer": normalizers.Sigmoid()},
    "relative positions": {"bias": biases.RelativePosition(rand(5, 6), rand(5, 5))},
    "cap": {"bias": (biases.SoftCap(1.5), biases.ALiBi())},
    "additive": {"score": scores.Additive(rand(6, seed=3))},
    "pointwise of one's own": {"normalizer": Ramp(), "bias": Squeeze(), "score": Manhattan()},
}
SOLVED = {"entmax": normalizers.Entmax(1.5), "one's own": SoftplusSquared(sink=0.2)}


def tensors(n: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    return triple(1, HEADS, 2, n, n + 2, 6, 5)


# --- torch.func -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPLICIT)
@pytest.mark.parametrize("n", [7, 140])
def test_torch_func_grad_equals_backward(name: str, n: int) -> None:
    q, k, v = tensors(n)
    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(attend(leaf, k, v, **EXPLICIT[name]).sin().sum(), leaf)
    with unchecked():
        close(torch.func.grad(lambda x: attend(x, k, v, **EXPLICIT[name]).sin().sum())(q), want, eps=512)


@pytest.mark.parametrize("name", EXPLICIT)
@pytest.mark.parametrize("n", [7, 140])
def test_forward_mode_equals_finite_differences(name: str, n: int) -> None:
    q, k, v = tensors(n)
    way, step = rand(*q.shape, seed=8), 1e-6
    values = [attend(q + sign * step * way, k, v, **EXPLICIT[name]).detach() for sign in (1, -1)]
    want = (values[0] - values[1]) / (2 * step)
    with unchecked():
        _, got = torch.func.jvp(lambda x: attend(x, k, v, **EXPLICIT[name]), (q,), (way,))
        torch.testing.assert_close(got.detach(), want, atol=1e-7, rtol=1e-6)
        with forward_ad.dual_level():
            out = attend(forward_ad.make_dual(q, way), k, v, **EXPLICIT[name])
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent.detach(), want, atol=1e-7, rtol=1e-6)
            # A call without a forward derivative is served as ever.
            assert qkv.plan(*tensors(140)).kernel == "flash"


@pytest.mark.parametrize("name", SOLVED)
def test_transforms_of_a_searched_level_raise(name: str) -> None:
    q, k, v = tensors()
    with unchecked(), pytest.raises(InputError, match=r"in torch.func transforms"):
        torch.func.grad(lambda x: attend(x, k, v, normalizer=SOLVED[name]).sum())(q)
    with unchecked(), pytest.raises(InputError, match=r"in torch.func transforms"):
        torch.func.jvp(lambda x: attend(x, k, v, normalizer=SOLVED[name]), (q,), (q,))


@pytest.mark.parametrize("kernel", ["auto", "flash", "tiled", "eager"])
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(3)])
def test_vmap_raises(kernel: str, mask: masks.Mask | None) -> None:
    q, k, v = (x.expand(3, *x.shape) for x in tensors())
    with unchecked(), pytest.raises(InputError, match=r"vmap|torch\.func"):
        torch.func.vmap(lambda q, k, v: attend(q, k, v, mask=mask, kernel=kernel))(q, k, v)
    with unchecked(), pytest.raises(InputError, match=r"vmap|torch\.func"):
        torch.func.vmap(lambda q, k: qkv.measure(q, k, mask=mask).entropy)(q, k)


@pytest.mark.parametrize("kernel", ["flash", "tiled"])
def test_the_error_of_a_requested_kernel_recommends_eager(kernel: str) -> None:
    q, k, v = tensors()
    with unchecked(), pytest.raises(InputError, match="eager does"):
        torch.func.grad(lambda x: attend(x, k, v, kernel=kernel).sum())(q)


# --- second derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXPLICIT, *SOLVED])
def test_second_derivatives_of_eager_equal_finite_differences(name: str) -> None:
    asked = EXPLICIT.get(name) or ({"normalizer": SOLVED[name]} if name in SOLVED else {})
    q, k, v = triple(1, HEADS, 2, 3, 4, 6, 5, grad=True)
    with unchecked():
        assert torch.autograd.gradgradcheck(
            lambda *x: attend(*x, kernel="eager", **asked), (q, k, v), fast_mode=True, atol=1e-4
        )


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        ({"mask": masks.Window(5)}, "flash"),
        ({"normalizer": normalizers.Softmax(sink=0.1)}, "flash"),
        ({"normalizer": normalizers.Sigmoid()}, "tiled"),
        ({"normalizer": SoftplusSquared()}, "tiled"),
    ],
)
def test_second_derivatives_of_other_kernels_raise_when_computed(asked: dict[str, Any], kernel: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(140))
    assert qkv.plan(q, k, v, **asked).kernel == kernel
    for loss in (lambda out: out.sum(), lambda out: out.square().sum()):
        first = torch.autograd.grad(loss(attend(q, k, v, **asked)), (q, k, v), create_graph=True)
        want = torch.autograd.grad(loss(attend(q, k, v, **asked)), (q, k, v))
        for x, y in zip(first, want, strict=True):
            close(x.detach(), y, eps=1)
        with pytest.raises(InputError, match=r"only first derivatives.*kernel='eager'"):
            first[0].square().sum().backward()


def test_second_derivatives_with_learned_tensors_in_a_searched_level_raise() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    out = attend(q, k, v, normalizer=HeavyTail(), kernel="eager")
    with refused("create_graph"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [7, 140])
@pytest.mark.parametrize("name", [*EXPLICIT, *SOLVED])
def test_autocast_gives_one_dtype_to_every_composition(name: str, n: int) -> None:
    asked = EXPLICIT.get(name) or ({"normalizer": SOLVED[name]} if name in SOLVED else {})
    q, k, v = (x.float() for x in tensors(n))
    half = [x.bfloat16() for x in (q, k, v)]
    with unchecked():
        want = attend(*half, **asked)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = attend(q, k, v, **asked)
            assert torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == got.dtype == torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
            wide = attend(q.double(), k.double(), v.double(), **asked)
            assert wide.dtype == torch.float64
        close(got.detach(), want.detach(), eps=4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            measured = qkv.measure(q, k, v, **asked).entropy
        assert measured.dtype == torch.float32
        close(measured, qkv.measure(*half, **asked).entropy)


def test_gradients_pass_through_autocast() -> None:
    q, k, v = (x.float().requires_grad_() for x in tensors(140))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v, bias=biases.ALiBi())
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert q.grad.abs().max() > 0
