"""Autocast, torch.func, forward mode, second derivatives and inference mode: correct results, or a clear error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import qkv
from conftest import close, rand, refused, triple
from own_objects import HEADS, HeavyTail, Manhattan, Ramp, SoftplusSquared, Squeeze
from qkv import InputError, attend, biases, masks, normalizers, scores
from qkv.masks import Causal, Global, RandomKeys, Window, built_in
from qkv.statistics import PrefixSinkScores
from qkv.statistics.triton import host

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in its jvp

EXPLICIT: dict[str, dict[str, Any]] = {  # compositions whose weights need no search
    "causal, a sink": {"mask": Causal(), "normalizer": normalizers.Softmax(0.7, sink=0.3)},
    "sigmoid": {"mask": Window(3), "normalizer": normalizers.Sigmoid()},
    "relative positions": {"bias": biases.RelativePosition(rand(5, 6), rand(5, 5))},
    "cap": {"bias": (biases.SoftCap(1.5), biases.ALiBi())},
    "additive": {"score": scores.Additive(rand(6, seed=3))},
    "pointwise of one's own": {"normalizer": Ramp(), "bias": Squeeze(), "score": Manhattan()},
}
SOLVED: dict[str, dict[str, Any]] = {
    "entmax": {"normalizer": normalizers.Entmax(1.5)}, "one's own": {"normalizer": SoftplusSquared(sink=0.2)},
}  # fmt: skip
EVERY = EXPLICIT | SOLVED | {"plain": {}}


def tensors(n: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    return triple(1, HEADS, 2, n, n + 2, 6, 5)


# --- torch.func -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "n"), [*((name, 7) for name in EXPLICIT), ("plain", 140), ("sigmoid", 140)])
def test_torch_func_and_forward_mode_equal_backward_and_finite_differences(name: str, n: int) -> None:
    q, k, v = tensors(n)
    leaf = q.clone().requires_grad_()
    way, step = rand(*q.shape, seed=8), 1e-6

    def run(x: Tensor) -> Tensor:
        return attend(x, k, v, **EVERY[name])

    (slope,) = torch.autograd.grad(run(leaf).sin().sum(), leaf)
    want = ((run(q + step * way) - run(q - step * way)) / (2 * step)).detach()
    for gradient in (torch.func.grad, *((torch.func.jacfwd, torch.func.jacrev) if n == 7 else ())):
        close(gradient(lambda x: run(x).sin().sum())(q), slope, eps=512)
    got = torch.func.jvp(run, (q,), (way,))[1]
    torch.testing.assert_close(got.detach(), want, atol=1e-7, rtol=1e-6)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(run(forward_ad.make_dual(q, way))).tangent
        torch.testing.assert_close(got.detach(), want, atol=1e-7, rtol=1e-6)


def test_transforms_that_are_not_served_raise() -> None:
    q, k, v = tensors()
    batch = [x.expand(3, *x.shape) for x in (q, k, v)]
    refusals: list[tuple[str, Callable[[], object]]] = [
        *(("in torch.func transforms", lambda asked=asked: torch.func.grad(lambda x: attend(x, k, v, **asked).sum())(q))
          for asked in SOLVED.values()),
        ("in torch.func transforms", lambda: torch.func.jvp(lambda x: attend(x, k, v, **SOLVED["entmax"]), (q,), (q,))),
        *(("eager does", lambda kernel=kernel: torch.func.grad(lambda x: attend(x, k, v, kernel=kernel).sum())(q))
          for kernel in ("native", "tiled")),
        *(("vmap|torch.func", lambda kernel=kernel, mask=mask: torch.func.vmap(
            lambda *x: attend(*x, mask=mask, kernel=kernel))(*batch))
          for kernel, mask in (("auto", None), ("native", Causal()), ("tiled", Window(3)), ("eager", Causal()))),
        ("vmap|torch.func", lambda: torch.func.vmap(lambda q, k: qkv.measure(q, k).entropy)(*batch[:2])),
    ]  # fmt: skip
    for reason, run in refusals:
        with pytest.raises(InputError, match=reason):
            run()


# --- second derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_second_derivatives_of_eager_equal_finite_differences(name: str) -> None:
    q, k, v = triple(1, HEADS, 2, 3, 4, 6, 5, grad=True)
    assert torch.autograd.gradgradcheck(
        lambda *x: attend(*x, kernel="eager", **EVERY[name]), (q, k, v), fast_mode=True, atol=1e-4
    )


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        ({"mask": Window(5)}, "native"), ({"normalizer": normalizers.Softmax(sink=0.1)}, "native"),
        ({"normalizer": normalizers.Sigmoid()}, "tiled"), ({"normalizer": SoftplusSquared()}, "tiled"),
    ],
)  # fmt: skip
def test_second_derivatives_of_other_kernels_raise_when_computed(asked: dict[str, Any], kernel: str) -> None:
    dtype = torch.float32 if kernel == "native" else torch.float64
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors(140))
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


@pytest.mark.parametrize(("name", "n"), [*((name, 7) for name in EVERY), ("plain", 140), ("one's own", 140)])
def test_autocast_gives_one_dtype_to_every_composition(name: str, n: int) -> None:
    asked = EVERY[name]
    q, k, v = (x.float().requires_grad_() for x in tensors(n))
    half = [x.detach().bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(q, k, v, **asked)
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == got.dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
        assert attend(q.double(), k.double(), v.double(), **asked).dtype == torch.float64
        entropy = qkv.measure(q.detach(), k.detach(), **asked).entropy
    close(got.detach(), attend(*half, **asked).detach(), eps=4)
    assert entropy.dtype == torch.float32
    close(entropy, qkv.measure(*half[:2], **asked).entropy)
    got.float().square().sum().backward()
    assert q.grad.dtype == torch.float32
    assert q.grad.abs().max() > 0


# --- inference mode: a tensor made there could not be saved for a backward --------------------------------------------

CPU = torch.device("cpu")
CACHED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "numbers on a device": (host._on_device, ((3, 1), CPU)),
    "chosen keys": (built_in._chosen, ((0, 2), 5)),
    "drawn keys": (built_in._draw, (2, 0, None, 9)),
    "drawn keys besides a mask": (built_in._draw, (2, 0, Causal(), 9)),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_tensor_cached_in_inference_mode_is_an_ordinary_one(name: str) -> None:
    make, arguments = CACHED[name]
    make.cache_clear()
    with torch.inference_mode():
        assert not make(*arguments).is_inference()


def _statistics(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    training = q.requires_grad
    more: dict[str, Any] = {} if training else {"statistics": [PrefixSinkScores(8)], "bins": 8}
    found = qkv.measure(q, k, mask=Causal(), mass={"near": Window(9)}, differentiable=training, **more)
    return found.entropy + found.distance + found.mass["near"]


def attention(**asked: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(q, k, v, **asked)


CALLS: dict[str, Callable[..., Tensor]] = {
    "window, alibi": attention(mask=Window(20), bias=biases.ALiBi()),
    "dilated": attention(mask=masks.Dilated(5, 3)),
    "drawn keys": attention(mask=RandomKeys(3, besides=Causal()) | Causal()),
    "chosen keys, T5": attention(mask=Global([0, 3]), bias=biases.T5Bias(torch.zeros(32, 2))),
    "eager, a mask kept": attention(mask=Window(3, ahead=1) & ~Window(1), kernel="eager"),
    "tiled, a mask kept": attention(mask=Window(3, ahead=1) & ~Window(1), kernel="tiled"),
    "statistics": _statistics,
}


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


def test_a_result_keeps_its_parts_under_transforms_checkpoints_and_copies() -> None:
    q, k, v = triple()

    def asked(q: Tensor) -> Any:
        return attend(q, k, v, return_lse=True)

    want = asked(q)
    result, tangent = torch.func.jvp(asked, (q,), (torch.ones_like(q),))
    copies = copy.deepcopy(want), pickle.loads(pickle.dumps(want))
    for got in (result, *copies, checkpoint(asked, q, use_reentrant=False)):
        assert got.weights is None
        close(got.lse, want.lse)
    assert tangent.lse.shape == want.lse.shape
    out, lse = checkpoint(asked, q.requires_grad_(), use_reentrant=True)  # torch makes a plain tuple of it
    slope = torch.autograd.grad(sum(x.sum() for x in asked(q)), q)[0]
    (out.sum() + lse.sum()).backward()
    assert q.grad is not None
    close(q.grad, slope)
