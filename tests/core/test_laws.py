"""Laws of attention: properties that hold for any inputs, and promises about memory, caches, draws and plans.

That outputs and gradients of every composition are right on every kernel is in test_oracle.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qkv
from conftest import MASKS, close, largest_tensor, mask_trees, oracle, rand, set_sizes, set_tile, triple
from qkv import attend, masks
from qkv.biases import RelativePosition, SoftCap, TensorBias
from qkv.engine import tiles
from qkv.masks import Causal, Padding, Window
from qkv.native import library
from qkv.normalizers import EluPlusOne, Entmax, Hard, Normalizer, ReLU, Sigmoid, Softmax
from qkv.scores import Dot

H, D = 6, 3
KERNELS = ("tiled", "eager")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def weights_of(q: Tensor, k: Tensor, **asked: Any) -> Tensor:
    """Weights (b, h, nq, nk) of any kernel: its output for unit vectors as values."""
    unit = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return attend(q, k, unit, **asked)


def gradients(run: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of a number that depends on all of it."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in leaves)
    out = run(*leaves)
    return (out.detach(), *torch.autograd.grad((out * rand(*out.shape, seed=9)).sum(), leaves))


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.data())
def test_random_compositions_of_masks(data: st.DataObject) -> None:
    """Output, lse and gradients on every kernel: fuzz/ varies the other parts, but does not shrink a failure."""
    b, hkv, group, nq, nk = (data.draw(st.integers(1, n)) for n in (2, 2, 3, 9, 9))
    tensors = triple(b, hkv * group, hkv, nq, nk, seed=data.draw(st.integers(0, 99)))
    mask = data.draw(mask_trees(nq, nk, b, hkv * group))
    temperature, sink = data.draw(st.sampled_from([0.5, 1.0, 3.0])), rand(hkv * group)
    want = oracle(*tensors, mask=mask, normalizer=Softmax(temperature, sink))
    slopes: list[tuple[Tensor, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        set_tile(patch, data.draw(st.sampled_from([2, 4])))
        for kernel in ("eager", "tiled"):
            leaves = [x.detach().clone().requires_grad_() for x in (*tensors, sink)]
            normalizer = Softmax(temperature, leaves[3])
            out, lse = attend(*leaves[:3], mask=mask, normalizer=normalizer, kernel=kernel, return_lse=True)
            close(out, want[0])
            close(lse, want[1])
            total = (out * rand(*out.shape, seed=11)).sum() + (lse.sin() * rand(*lse.shape, seed=12)).sum()
            slopes.append(torch.autograd.grad(total, leaves))
            for x, y in zip(slopes[-1], slopes[0], strict=True):
                close(x, y, eps=256)


# --- extreme numbers --------------------------------------------------------------------------------------------------


@each_kernel
def test_large_scores_do_not_overflow(kernel: str) -> None:
    q, k, v = triple(dtype=torch.float32)
    asked = {"mask": Causal(), "score": Dot(300.0)}
    out, lse = attend(q, k, v, kernel=kernel, return_lse=True, **asked)
    want = oracle(q, k, v, **asked)
    assert want[1].abs().max() > 1000
    close(lse, want[1])
    # A rounding of a score of 1,000 is a relative error of the weights.
    close(out, want[0], eps=64 * want[1].abs().max().item())


@each_kernel
@pytest.mark.parametrize(("dtype", "sink"), [(torch.float32, 1e4), (torch.float64, 1e30), (torch.bfloat16, 1e30)])
def test_a_sink_far_above_all_scores_takes_everything(kernel: str, dtype: torch.dtype, sink: float) -> None:
    """And one far below, nothing."""

    def run(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> Tensor:
        return attend(q, k, v, normalizer=Softmax(sink=logit), mask=Causal(), kernel=kernel).double()

    tensors = triple(dtype=dtype)
    assert all((x == 0).all() for x in gradients(run, *tensors, torch.full((H,), sink)))
    out, *_, slope = gradients(run, *tensors, torch.full((H,), -sink))
    assert (slope == 0).all()
    assert torch.equal(out, attend(*tensors, mask=Causal(), kernel=kernel).double())


@each_kernel
def test_a_sink_of_minus_infinity_is_no_sink(kernel: str) -> None:
    """Also for a fully masked query, whose lse is −inf, and whose gradient of the lse is not NaN."""
    q, k, v = triple(1, 2, 2, 5, 3, 4, 4, grad=True)
    sink = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    asked: dict[str, Any] = {"mask": Causal(), "kernel": kernel, "return_lse": True}  # the first two see nothing
    got, want = attend(q, k, v, normalizer=Softmax(sink=sink), **asked), attend(q, k, v, **asked)
    for found in (got, want):
        torch.testing.assert_close(found[0], want[0])
        grads = torch.autograd.grad(found[0].sum() + found[1].sum(), (q, k, v))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][:, :, :2] == 0).all()
    if kernel != "eager":
        out, _ = attend(q, k, v, normalizer=Softmax(sink=sink), **asked)
        assert (torch.autograd.grad(out.sum(), sink)[0] == 0).all()


@each_kernel
@pytest.mark.parametrize("name", ["none", "causal", "window", "padding"])
@pytest.mark.parametrize(("n", "bad"), [(13, math.nan), (67, math.nan), (8, math.inf)])
def test_a_nan_or_infinite_query_gives_nan_only_in_its_own_row(kernel: str, name: str, n: int, bad: float) -> None:
    q, k, v = (x.abs() for x in triple(h=2, hkv=1, nq=n, nk=n, dtype=torch.float32))
    mask = MASKS[name](n, n, 2, 2)
    clean = attend(q, k, v, mask=mask, kernel=kernel)
    q[0, 1, 5] = bad
    got = attend(q, k, v, mask=mask, kernel=kernel)
    assert got[0, 1, 5].isnan().all()
    got[0, 1, 5] = clean[0, 1, 5]
    close(got, clean)


# --- inputs -----------------------------------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("name", ["none", "causal", "window"])
def test_layouts_in_memory_do_not_matter(kernel: str, name: str) -> None:
    """Projections are transposed; entries of a vector may be apart, or all the same one."""
    tensors, mask = triple(nq=23, nk=23, d=5, dv=5), MASKS[name](23, 23, 2, 6)
    for strided in (
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors],
        [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors],
        [x[..., :1].expand(*x.shape) for x in tensors],
    ):
        assert not any(x.is_contiguous() for x in strided)
        found = []
        for inputs in (strided, [x.contiguous() for x in strided]):
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = attend(*leaves, mask=mask, kernel=kernel)
            found.append((out, *torch.autograd.grad(out.sum(), leaves)))  # whose gradient is one number, expanded
        for got, want in zip(*found, strict=True):
            close(got, want)


@pytest.mark.usefixtures("tile4")
def test_in_place_changes_of_a_mask_tensor_take_effect() -> None:
    """Decompositions of masks by position are cached; those of masks with data are not."""
    q, k, v = triple(nq=23, nk=23)
    tensor = rand(23, 23, seed=6) > 1
    assert torch.equal(attend(q, k, v, mask=tensor), attend(q, k, v, mask=masks.Dense(tensor)))
    mask = (masks.Dense(tensor) | masks.Prefix(1)) & Causal()
    for _ in range(2):
        close(attend(q, k, v, mask=mask, kernel="tiled"), attend(q, k, v, mask=mask, kernel="eager"))
        tensor.logical_not_()


class Until(masks.Mask):
    last = 0

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return k <= self.last


@pytest.mark.parametrize("n", [13, 1100])
def test_a_mask_that_changes_between_calls_is_not_kept(n: int) -> None:
    q, k, v = triple(1, 2, 1, n, n, dtype=torch.float32)
    mask = Until()
    for last in (n // 2, 3):
        mask.last = last
        for kernel in KERNELS:
            want = attend(q, k[:, :, : last + 1], v[:, :, : last + 1])
            torch.testing.assert_close(attend(q, k, v, mask=mask, kernel=kernel), want)


def test_masks_made_in_a_transform_or_a_dispatch_mode_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_CACHE", {})
    q, k, v = triple(dtype=torch.float32)
    torch.func.grad(lambda q: attend(q, k, v, mask=Window(3)).sum())(q)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        attend(q, k, v, mask=Window(3), kernel="eager")
    assert not tiles._CACHE
    attend(q, k, v, mask=Window(3), kernel="eager")
    assert tiles._CACHE


def test_one_query_that_sees_no_key_has_output_zero() -> None:
    class Future(Until):
        band = (-math.inf, -1)
        last = -1

    q, (k, v) = rand(1, 2, 1, 8, dtype=torch.float32), rand(2, 1, 2, 9, 8, dtype=torch.float32)
    out, lse = attend(q, k, v, mask=Future(), return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_returned_values_and_their_order() -> None:
    q, k, v = triple()
    parts: dict[str, Any] = {"mask": Causal(), "bias": SoftCap(1.0), "score": Dot(0.5), "normalizer": Softmax(2.0)}
    composed = qkv.Attention(**parts)
    out, lse, weights = attend(q, k, v, return_lse=True, return_weights=True, **parts)
    close(weights.sum(-1), torch.ones(2, 6, 11))
    close(weights @ v.repeat_interleave(3, 1), out)
    for got, want in (
        (composed(q, k, v, return_lse=True), (out, lse)), (composed(q, k, v, return_weights=True), (out, weights)),
        (composed(q, k, v, return_lse=True, return_weights=True, return_statistics=True)[:3], (out, lse, weights)),
    ):  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    for kernel in ("tiled", "auto"):
        assert torch.equal(composed(q, k, v, kernel=kernel), attend(q, k, v, kernel=kernel, **parts))
    assert composed.plan(q, k, v) == qkv.plan(q, k, v, **parts)
    got, want = composed.measure(q, k, mass={"near": Window(2)}), qkv.measure(q, k, mass={"near": Window(2)}, **parts)
    assert torch.equal(got.entropy, want.entropy)
    assert torch.equal(got.mass["near"], want.mass["near"])
    with pytest.raises(AttributeError):
        composed.mask = None


# --- gradients and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["native", "tiled"])
def test_an_in_place_change_before_the_backward_raises(kernel: str) -> None:
    q, k, v = triple(dtype=torch.float32)
    q = q.requires_grad_() * 1
    out = attend(q, k, v, kernel=kernel)
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("tiled", Window(33, ahead=32)), ("tiled", None), ("tiled", Causal()), ("tiled", Window(64)),
        ("tiled", masks.Prefix(4) & Causal() | Window(64)),  # whose partial tiles need a mask tensor
    ],
    ids=str,
)  # fmt: skip
def test_training_takes_linear_memory(kernel: str, mask: masks.Mask | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, panel=2**17)
    n, d, heads = 2048, 8, 2
    q, k, v = triple(1, heads, 1, n, n, d, d, dtype=torch.float32, grad=True)

    def step() -> None:
        out, lse = attend(q, k, v, mask=mask, kernel=kernel, return_lse=True)
        (out.sum() + lse.sum()).backward()

    # A block of 2^17 scores, or a band of 2 · 256 keys a query: far from heads · n².
    most = 3 * 256 * n if "Prefix" in str(mask) else max(heads * 256 * 256, 4 * heads * n * (d + 1))
    assert largest_tensor(step) <= most < heads * n * n / 5
    assert largest_tensor(lambda: attend(q[:, :, :512], k, v, kernel="eager")) >= heads * 512 * n  # it measures
    assert all(x.grad.abs().max() > 0 for x in (q, k, v))


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_reports_the_kernel_and_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = triple(dtype=torch.float32)
    few = qkv.plan(q, k, v, bias=SoftCap(1.0))
    assert (few.kernel, few.rejected["tiled"]) == ("native", "slower")
    assert qkv.plan(q.double(), k.double(), v.double(), bias=SoftCap(1.0)).kernel == "eager"
    set_sizes(monkeypatch, few_scores=0)
    learned = TensorBias(torch.zeros(11, 13, requires_grad=True))
    for asked, kernel, against in (
        ({}, "native", {"tiled": "slower", "eager": "slower", "reference": "specification", "fused": "", "flex": ""}),
        ({"bias": RelativePosition(torch.zeros(3, 3))}, "tiled", {"native": "not one by distance"}),
        ({"return_weights": True}, "eager", {"native": "never forms", "tiled": "never forms"}),
        ({"dropout_p": 0.1}, "tiled", {"native": "dropout", "reference": "dropout", "linear": ""}),
        ({"bias": learned}, "native", {"reference": "gradients"}),
        ({"normalizer": Hard(sample=True)}, "tiled", {"reference": "sample"}),
        ({"kernel": "eager"}, "eager", {}),
    ):
        plan = qkv.plan(q, k, v, **asked)
        assert plan.kernel == kernel
        assert plan.statistics in str(plan)
        for name, reason in against.items():
            assert reason in plan.rejected[name]
            assert name in str(plan)
            if reason not in ("", "slower", "specification"):
                with pytest.raises(qkv.InputError, match=f"kernel='{name}' cannot serve this call: .*{reason}"):
                    attend(q, k, v, **{**asked, "kernel": name})
    with torch.no_grad():
        assert qkv.plan(q, k, v, bias=learned).kernel == "native"
    monkeypatch.setattr(library, "compiled", lambda: "it was not compiled")
    assert qkv.plan(q, k, v).kernel == "tiled"
    assert "not compiled" in qkv.plan(q, k, v).rejected["native"]


def test_plan_reports_flops_and_bytes() -> None:
    b, h, hkv, n, d, dv = 2, 6, 2, 512, 3, 5
    q, k, v = triple(b, h, hkv, n, n, d, dv, dtype=torch.float32)
    whole = 2 * b * h * n * n * (d + dv)
    moved = 4 * (b * h * n * d + b * hkv * n * (d + dv) + b * h * n * dv + b * h * n)
    assert (qkv.plan(q, k, v).flops, qkv.plan(q, k, v).traffic_bytes) == (whole, moved)
    for mask, flops in (
        (Causal(), whole // 2), (Padding([256]), whole // 2),
        (Window(2), whole * 15 // 128),  # 8 diagonal tiles of 64 and the 7 beside them, halved
    ):  # fmt: skip
        assert qkv.plan(q, k, v, mask=mask).flops == flops
    eager = qkv.plan(q, k, v, mask=Causal(), kernel="eager")
    assert (eager.flops, eager.traffic_bytes) == (whole, moved + 4 * b * h * n * n)
    half = [x.bfloat16() for x in (q, k, v)]
    assert qkv.plan(*half).traffic_bytes == moved // 2 + 2 * b * h * n  # the lse stays float32


@pytest.mark.parametrize("part", [{"normalizer": Sigmoid()}, {"normalizer": Hard()},
                                  {"normalizer": Softmax(sink=torch.zeros(2))}, {"bias": SoftCap(5.0)}])  # fmt: skip
def test_calls_that_docs_comparison_md_names_plan_linear_memory(part: dict[str, Any]) -> None:
    q = torch.zeros(1, 2, 4096, 8)
    few, many = (qkv.plan(*[q[:, :, :n]] * 3, mask=Causal(), **part) for n in (2048, 4096))
    assert many.kernel not in ("eager", "reference")
    assert many.traffic_bytes < 3 * few.traffic_bytes, "four times would be quadratic"


# --- draws and dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", [Softmax(2.5, sink=rand(H)), Sigmoid(), EluPlusOne("sum"), ReLU(), Entmax(1.5)])
@pytest.mark.usefixtures("tile4")
def test_the_same_seed_drops_the_same_pairs_on_every_kernel(normalizer: Normalizer) -> None:
    q, k, v = triple()
    asked: dict[str, Any] = {"mask": Causal(), "normalizer": normalizer, "dropout_p": 0.3}

    def run(kernel: str, seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return gradients(lambda q, k, v: attend(q, k, v, kernel=kernel, **asked), q, k, v)

    for x, y in zip(run("tiled", 5), run("eager", 5), strict=True):
        close(x, y, eps=256)
    assert (run("tiled", 5)[0] - run("tiled", 6)[0]).abs().max() > 1e-3
    torch.manual_seed(5)
    weights = weights_of(q, k, kernel="tiled", **asked)
    plain = weights_of(q, k, mask=Causal(), normalizer=normalizer)
    close(weights, torch.where(weights == 0, 0, plain / 0.7))
    torch.manual_seed(5)
    out, returned = attend(q, k, v, return_weights=True, **asked)
    close(returned, weights)
    close(out, returned @ v.repeat_interleave(3, 1))
    if normalizer.has_lse:  # that of the scores, none of which is dropped
        lse, whole = (attend(q, k, v, return_lse=True, **asked | {"dropout_p": p})[1] for p in (0.3, 0.0))
        close(lse, whole)


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
def test_dropout_keeps_its_rate_and_the_mean(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 64)
    q, k, v = triple(b=1, h=2, hkv=1, nq=60, nk=100)
    p, seeds = 0.25, 200
    torch.manual_seed(0)
    kept = torch.stack([weights_of(q, k, dropout_p=p, kernel=kernel) != 0 for _ in range(20)]).double()
    n = kept.numel()
    assert abs(kept.mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    for dim in (2, 3, 4):  # heads, queries and keys: none is favoured
        share = kept.mean([i for i in range(5) if i != dim])
        assert (share - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / (n / len(share)))
    small = [x[:, :, :8] for x in (q, k, v)]
    outs = torch.stack([attend(*small, dropout_p=p, kernel=kernel) for _ in range(seeds)])
    assert ((outs.mean(0) - attend(*small)).abs() < 5 * outs.std(0) / math.sqrt(seeds)).all()


def test_dropout_takes_its_seed_from_torch_and_only_when_it_drops() -> None:
    q, k, v = triple()
    for asked in ({}, {"dropout_p": 0.0}, {"normalizer": Hard()}):
        before = torch.get_rng_state()
        attend(q, k, v, **asked)
        assert torch.equal(torch.get_rng_state(), before)
    drawn: list[dict[str, Any]] = [{"dropout_p": 0.5, "kernel": kernel} for kernel in ("tiled", "eager")]
    for asked in (*drawn, {"normalizer": Hard(sample=True)}):
        torch.manual_seed(4)
        first = attend(q, k, v, **asked)
        assert not torch.equal(first, attend(q, k, v, **asked))
        torch.manual_seed(4)
        assert torch.equal(first, attend(q, k, v, **asked))
