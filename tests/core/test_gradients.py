"""Gradients of every kernel: against eager in float64, against finite differences, and in linear memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qkv
from conftest import MASKS, close, fits, largest_tensor, mask_trees, rand, set_tile, triple
from qkv import InputError, attend, biases, masks
from qkv.masks import Causal, Padding, Window
from qkv.normalizers import Softmax

FAST = ["flash", "tiled"]
HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1)}


def gradients(
    kernel: str, tensors: tuple[Tensor, ...], sink: Tensor | None, *, temperature: float = 1.0, lse: bool = True,
    **asked: object,
) -> list[Tensor]:  # fmt: skip
    """Of one scalar that depends on every entry of out and of lse, in q, k, v and the sink."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *([] if sink is None else [sink]))]
    normalizer = Softmax(temperature, leaves[3] if sink is not None else None)
    out, log = attend(*leaves[:3], kernel=kernel, return_lse=True, normalizer=normalizer, **asked)
    total = (out.double() * rand(*out.shape, seed=11)).sum()
    if lse:
        log = torch.where(log == -torch.inf, 0.0, log).double()
        total = total + (log.sin() * rand(*log.shape, seed=12)).sum()
    return list(torch.autograd.grad(total, leaves))


def agree(kernel: str, tensors: tuple[Tensor, ...], sink: Tensor | None = None, **asked: object) -> None:
    wide = tuple(x.double() for x in tensors)
    want = gradients("eager", wide, None if sink is None else sink.double(), **asked)
    got = gradients(kernel, tensors, sink, **asked)
    assert any(x.abs().max() > 0.01 for x in want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        close(x, y, eps=256)


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("name", "nq", "nk"),
    [(name, *n) for name in MASKS for n in [(11, 13), (13, 7)] if fits(name, *n) and name != "nothing"],
)
@pytest.mark.usefixtures("tile4")
def test_masks_and_heads(kernel: str, heads: str, name: str, nq: int, nk: int) -> None:
    h, hkv = HEADS[heads]
    agree(kernel, triple(h=h, hkv=hkv, nq=nq, nk=nk), rand(h, seed=2), mask=MASKS[name](nq, nk, 2, h))


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("name", ["none", "causal", "window", "sink and window"])
@pytest.mark.usefixtures("tile4")
def test_every_path_of_the_backward(kernel: str, sink: bool, lse: bool, temperature: float, name: str) -> None:
    agree(
        kernel, triple(), rand(6) if sink else None, lse=lse, temperature=temperature, mask=MASKS[name](11, 13, 2, 6)
    )  # fmt: skip


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize(("nq", "nk"), [(41, 41), (29, 43), (43, 29)])
@pytest.mark.parametrize(("size", "ahead"), [(1, 0), (4, 0), (5, 0), (3, 2), (1, 7), (17, 0)])
def test_windows_whose_tiles_overlap(kernel: str, nq: int, nk: int, size: int, ahead: int, tile: int) -> None:
    agree(kernel, triple(h=2, hkv=1, nq=nq, nk=nk), rand(2), mask=Window(size, ahead=ahead))


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("name", ["none", "causal", "window ahead", "padding, window"])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 63), (63, 63), (65, 65), (65, 257), (257, 65)])
def test_awkward_lengths_float32(kernel: str, name: str, nq: int, nk: int) -> None:
    tensors = triple(b=1, h=2, hkv=1, nq=nq, nk=nk, dtype=torch.float32)
    agree(kernel, tensors, rand(2, dtype=torch.float32), mask=MASKS[name](nq, nk, 1, 2))


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize(("d", "dv"), [(3, 5), (5, 3), (4, 4), (1, 2)])
def test_head_sizes(kernel: str, d: int, dv: int) -> None:
    agree(kernel, triple(d=d, dv=dv), rand(6), mask=Causal())


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("name", ["none", "causal", "window", "padding"])
@pytest.mark.parametrize(
    "bias",
    [
        biases.Dense(rand(11, 13, seed=8)),
        biases.Dense(rand(6, 1, 13, seed=8)),
        biases.Dense(torch.where(rand(11, 13, seed=8) > 1, -torch.inf, 0.0)),
        biases.SoftCap(0.8),
        (biases.Dense(rand(11, 13, seed=8)), biases.SoftCap(0.8)),
    ],
    ids=["dense", "columns of heads", "hides", "cap", "both"],
)
@pytest.mark.usefixtures("tile4")
def test_gradients_through_biases(kernel: str, temperature: float, name: str, bias: object) -> None:
    if kernel == "flash" and not isinstance(bias, biases.Dense):
        kernel = "tiled"  # flash refuses a cap: tests/core/test_attend.py
    agree(kernel, triple(), rand(6), mask=MASKS[name](11, 13, 2, 6), bias=bias, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [*FAST, "eager"])
@pytest.mark.parametrize("name", ["causal", "window", "padding"])
@pytest.mark.usefixtures("tile4")
def test_low_precision(kernel: str, dtype: torch.dtype, name: str) -> None:
    tensors, sink = triple(dtype=dtype), rand(6, dtype=dtype)
    mask = MASKS[name](11, 13, 2, 6)
    want = gradients("eager", tuple(x.double() for x in tensors), sink.double(), mask=mask)
    for x, y in zip(gradients(kernel, tensors, sink, mask=mask), want, strict=True):
        assert x.dtype == dtype
        close(x, y, eps=16)


@settings(max_examples=40)
@given(st.data())
def test_random_compositions(data: st.DataObject) -> None:
    b, hkv, group, nq, nk = (data.draw(st.integers(1, n)) for n in (2, 2, 3, 9, 9))
    heads = hkv * group
    tensors = triple(b, heads, hkv, nq, nk, seed=data.draw(st.integers(0, 99)))
    mask = data.draw(mask_trees(nq, nk, b, heads))
    with pytest.MonkeyPatch.context() as patch:
        set_tile(patch, data.draw(st.sampled_from([2, 4])))
        want = gradients("eager", tensors, rand(heads), mask=mask)
        for kernel in FAST:
            for x, y in zip(gradients(kernel, tensors, rand(heads), mask=mask), want, strict=True):
                close(x, y, eps=256)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
@pytest.mark.parametrize(
    "mask",
    [None, Causal(), Window(2, ahead=1), Padding([3, 5]), ~masks.Prefix(2) & Causal()],
    ids=["none", "causal", "window", "padding", "empty rows"],
)
@pytest.mark.usefixtures("tile4")
def test_finite_differences(kernel: str, mask: masks.Mask | None) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        return attend(q, k, v, mask=mask, kernel=kernel, return_lse=True, normalizer=Softmax(0.7, sink))

    q, k, v = triple(2, 2, 1, 5, 5, 3, 2, grad=True)
    assert torch.autograd.gradcheck(run, (q, k, v, rand(2).requires_grad_()))


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
@pytest.mark.usefixtures("tile4")
def test_finite_differences_under_a_cap(kernel: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(q, k, v, mask=Causal(), kernel=kernel, return_lse=True, bias=biases.SoftCap(0.5))

    assert torch.autograd.gradcheck(run, triple(1, 2, 1, 5, 5, 3, 2, grad=True))


def test_finite_differences_in_a_learned_bias() -> None:
    def run(bias: Tensor) -> tuple[Tensor, ...]:
        return attend(*triple(1, 2, 1, 5, 5, 3, 2), mask=Causal(), return_lse=True, bias=biases.Dense(bias))

    assert torch.autograd.gradcheck(run, rand(2, 5, 5).requires_grad_())


@pytest.mark.parametrize("kernel", FAST)
def test_only_requested_gradients_are_computed(kernel: str) -> None:
    """A gradient of the lse alone, of out alone, or of one tensor, is the same as when all are requested."""
    q, k, v = triple(grad=True)
    out, lse = attend(q, k, v, kernel=kernel, return_lse=True, mask=Causal())
    seed_out, seed_lse = rand(*out.shape, seed=5), rand(*lse.shape, seed=6)
    both = torch.autograd.grad((out, lse), (q, k, v), (seed_out, seed_lse), retain_graph=True)
    of_out = torch.autograd.grad(out, (q, k, v), seed_out, retain_graph=True)
    of_lse = torch.autograd.grad(lse, (q, k, v), seed_lse)
    for x, y, z in zip(both, of_out, of_lse, strict=True):
        close(x, y + z)
    keys = k.detach().requires_grad_()
    alone = attend(q.detach(), keys, v.detach(), kernel=kernel, mask=Causal())
    close(torch.autograd.grad(alone, keys, seed_out)[0], of_out[1])


@pytest.mark.parametrize("kernel", FAST)
def test_an_in_place_change_before_the_backward_raises(kernel: str) -> None:
    q, k, v = triple(d=4, dv=4)  # unequal head sizes are padded, and the copy is safe
    q = q.requires_grad_() * 1
    out = attend(q, k, v, kernel=kernel)
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kernel", FAST)
def test_second_derivatives_raise_on_fast_kernels(kernel: str) -> None:
    q, k, v = triple(grad=True)
    for out in (attend(q, k, v, kernel=kernel).square().sum(), attend(q, k, v, kernel=kernel).sum()):
        (grad,) = torch.autograd.grad(out, q, create_graph=True)  # of the sum, too, which no gradient depends on
        with pytest.raises(InputError, match="has only first derivatives"):
            grad.sum().backward()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_meter_detects_a_square_tensor() -> None:
    q, k, v = triple(1, 2, 1, 512, 512, 4, 4, dtype=torch.float32)
    assert largest_tensor(lambda: attend(q, k, v, kernel="eager")) >= 2 * 512 * 512


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("flash", Window(64)),
        ("flash", Window(33, ahead=32)),
        ("flash", Causal()),
        ("flash", None),
        ("tiled", Window(64)),
        ("tiled", Causal()),
    ],
    ids=str,
)
def test_training_takes_linear_memory(kernel: str, mask: masks.Mask | None) -> None:
    n, d, heads = 2048, 8, 2
    q, k, v = triple(1, heads, 1, n, n, d, d, dtype=torch.float32, grad=True)

    def step() -> None:
        out, lse = attend(q, k, v, mask=mask, kernel=kernel, return_lse=True)
        (out.sum() + lse.sum()).backward()

    # A tile of 256 × 256 for each head, or a band of 2 · 256 keys a query: far from heads · n².
    assert largest_tensor(step) <= max(heads * 256 * 256, 4 * heads * n * (d + 1)) < heads * n * n / 16
    assert all(x.grad.abs().max() > 0 for x in (q, k, v))


@pytest.mark.parametrize("n", [1024, 2048])
def test_mask_tensors_are_at_most_a_few_tiles(n: int) -> None:
    """Partial tiles of a composition need a mask tensor; full and empty ones do not."""
    q, k, v = triple(1, 1, 1, n, n, 4, 4, dtype=torch.float32, grad=True)
    mask = masks.Prefix(4) & Causal() | Window(64)

    def step() -> None:
        attend(q, k, v, mask=mask, kernel="flash").sum().backward()

    assert largest_tensor(step) <= 3 * 256 * n


@pytest.mark.parametrize("kernel", ["flash", "tiled"])
def test_a_sink_of_minus_infinity_is_no_sink(kernel: str) -> None:
    """Also for a fully masked query, whose lse is −inf."""
    q, k, v = triple(1, 2, 2, 5, 3, 4, 4, grad=True)
    sink = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    asked = {"mask": masks.Causal(), "kernel": kernel}  # five queries, three keys: the first two see nothing
    out = qkv.attend(q, k, v, normalizer=qkv.normalizers.Softmax(sink=sink), **asked)
    torch.testing.assert_close(out, qkv.attend(q, k, v, **asked))
    grads = torch.autograd.grad(out.sum(), (q, k, v, sink))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[3] == 0).all()
