"""`attend` on every kernel against the NumPy reference, and basic laws of attention."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qkv
from conftest import MASKS, close, fits, mask_trees, oracle, rand, set_sizes, set_tile, triple
from qkv import InputError, attend, biases, masks
from qkv._engine import tiles
from qkv.kernels.flash import kernel as flash
from qkv.masks import Causal, Dense, Document, Padding, Window
from qkv.normalizers import Hard, Softmax
from qkv.scores import Dot

FAST = ["flash", "tiled"]
KERNELS = [*FAST, "eager"]
HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1)}
LOW = [torch.bfloat16, torch.float16]


def check(kernel: str, q: Tensor, k: Tensor, v: Tensor, want: tuple[Tensor, ...], **asked: object) -> None:
    """out, lse and, where they are formed, weights are the oracle's."""
    formed = kernel == "eager"
    got = attend(q, k, v, kernel=kernel, return_lse=True, return_weights=formed, **asked)
    for x, y in zip(got, want, strict=False):
        assert x.shape == y.shape
        close(x, y)
    assert got[0].dtype == q.dtype
    assert got[1].dtype == torch.promote_types(q.dtype, torch.float32)


# --- every mask × every kernel × every grouping of heads --------------------------------------------------------------


@functools.cache
def small(name: str, heads: str, nq: int, nk: int) -> tuple:
    h, hkv = HEADS[heads]
    q, k, v = triple(h=h, hkv=hkv, nq=nq, nk=nk)
    mask = MASKS[name](nq, nk, 2, h)
    return q, k, v, mask, oracle(q, k, v, mask=mask)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("name", "nq", "nk"), [(name, *n) for name in MASKS for n in [(11, 13), (13, 7)] if fits(name, *n)]
)
@pytest.mark.usefixtures("tile4")
def test_masks_and_head_groupings_match_the_reference(kernel: str, heads: str, name: str, nq: int, nk: int) -> None:
    q, k, v, mask, want = small(name, heads, nq, nk)
    check(kernel, q, k, v, want, mask=mask)


@functools.cache
def awkward(name: str, nq: int, nk: int) -> tuple:
    q, k, v = triple(b=1, h=2, hkv=1, nq=nq, nk=nk, dtype=torch.float32)
    mask = MASKS[name](nq, nk, 1, 2)
    return q, k, v, mask, oracle(q, k, v, mask=mask)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "causal", "window ahead", "padding, window"])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 63), (63, 1), (63, 63), (65, 65), (17, 257), (257, 17)])
def test_awkward_lengths(kernel: str, name: str, nq: int, nk: int) -> None:
    q, k, v, mask, want = awkward(name, nq, nk)
    check(kernel, q, k, v, want, mask=mask)


@functools.cache
def banded(size: int, ahead: int, nq: int, nk: int) -> tuple:
    q, k, v = triple(b=2, h=2, hkv=1, nq=nq, nk=nk, d=2, dv=3)
    mask = Window(size, ahead=ahead)
    return q, k, v, mask, oracle(q, k, v, mask=mask)


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize(("nq", "nk"), [(41, 41), (29, 43), (43, 29)])
@pytest.mark.parametrize(("size", "ahead"), [(1, 0), (4, 0), (5, 0), (3, 2), (1, 7), (17, 0)])
def test_batched_window_blocks_match_the_reference(
    kernel: str, nq: int, nk: int, size: int, ahead: int, tile: int
) -> None:
    q, k, v, mask, want = banded(size, ahead, nq, nk)
    check(kernel, q, k, v, want, mask=mask)


@given(st.data())
def test_random_compositions_match_the_reference(data: st.DataObject) -> None:
    b, hkv, group, nq, nk = (data.draw(st.integers(1, n)) for n in (2, 2, 3, 9, 9))
    q, k, v = triple(b, hkv * group, hkv, nq, nk, seed=data.draw(st.integers(0, 99)))
    mask = data.draw(mask_trees(nq, nk, b, hkv * group))
    normalizer = Softmax(data.draw(st.sampled_from([0.5, 1.0, 3.0])), data.draw(st.sampled_from([None, 0.7, -2.0])))
    want = oracle(q, k, v, mask=mask, normalizer=normalizer)
    with pytest.MonkeyPatch.context() as patch:
        set_tile(patch, data.draw(st.sampled_from([2, 4])))
        for kernel in KERNELS:
            check(kernel, q, k, v, want, mask=mask, normalizer=normalizer)


def test_the_reference_is_a_kernel() -> None:
    q, k, v = triple(b=1, h=4, hkv=2, nq=5, nk=7, dtype=torch.float32)
    asked = {
        "mask": Causal() | masks.Prefix(2), "bias": (biases.SoftCap(2.0), biases.Dense(rand(5, 7))), "score": Dot(0.7),
        "normalizer": Softmax(0.6, rand(4)),
    }  # fmt: skip
    got = attend(q, k, v, kernel="reference", return_lse=True, return_weights=True, **asked)
    for x, y in zip(got, oracle(q, k, v, **asked), strict=True):
        assert x.dtype == torch.float32
        close(x, y, eps=1)


def test_grouped_heads_are_contiguous() -> None:
    q, k, v = triple(h=6, hkv=2)
    repeated = [x.repeat_interleave(3, 1) for x in (k, v)]
    for kernel in KERNELS:
        close(attend(q, k, v, kernel=kernel), attend(q, *repeated, kernel=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_in_memory_do_not_matter(kernel: str) -> None:
    """Projections give (batch, length, heads, head_dim) and the caller transposes."""
    tensors = triple(nq=23, nk=23)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert not any(x.is_contiguous() for x in strided)
    for mask in (None, Causal(), Window(3)):
        close(attend(*strided, mask=mask, kernel=kernel), attend(*tensors, mask=mask, kernel=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "causal", "window"])
def test_non_contiguous_vectors_give_the_same_result(kernel: str, name: str) -> None:
    """Entries of a vector apart, or all the same one."""
    tensors = triple(nq=23, nk=23, d=5, dv=5)
    apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors]
    same = [x[..., :1].expand(*x.shape) for x in tensors]
    mask = MASKS[name](23, 23, 2, 6)
    for strided in (apart, same):
        assert all(x.stride(-1) != 1 for x in strided)
        found = []
        for inputs in (strided, [x.contiguous() for x in strided]):
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = attend(*leaves, mask=mask, kernel=kernel)
            assert isinstance(out, Tensor)
            found.append((out, *torch.autograd.grad(out.sum(), leaves)))  # whose gradient is one number, expanded
        for got, want in zip(*found, strict=True):
            close(got, want)


@pytest.mark.usefixtures("tile4")
def test_in_place_changes_of_a_mask_tensor_take_effect() -> None:
    """Decompositions of masks by position are cached; those of masks with data are not."""
    q, k, v = triple(nq=23, nk=23)
    tensor = rand(23, 23, seed=6) > 1
    mask = (Dense(tensor) | masks.Prefix(1)) & Causal()
    for _ in range(2):
        close(attend(q, k, v, mask=mask, kernel="flash"), attend(q, k, v, mask=mask, kernel="eager"))
        tensor.logical_not_()


# --- scores, biases, normalizers --------------------------------------------------------------------------------------

BIASES = {
    "soft cap": biases.SoftCap(0.8),
    "dense": biases.Dense(rand(2, 6, 11, 13, seed=8)),
    "dense columns": biases.Dense(rand(1, 13, seed=8)),
    "dense rows of heads": biases.Dense(rand(6, 11, 1, seed=8)),
    "dense that hides": biases.Dense(torch.where(rand(11, 13, seed=8) > 0.4, -torch.inf, rand(11, 13, seed=9))),
    "dense that hides the first keys": biases.Dense(torch.where(torch.arange(13) < 6, -torch.inf, 0.5).double()[None]),
    "dense that hides a row": biases.Dense(torch.where(torch.arange(11) == 5, -torch.inf, 0.5).double()[:, None]),
    "cap, then dense": (biases.SoftCap(0.8), biases.Dense(rand(11, 13, seed=8))),
    "dense, then cap": (biases.Dense(rand(11, 13, seed=8)), biases.SoftCap(0.8)),
    "two dense": (biases.Dense(rand(11, 13, seed=8)), biases.Dense(rand(6, 1, 13, seed=9))),
}


@pytest.mark.parametrize("name", ["none", "causal", "window", "padding", "dense of heads"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.usefixtures("tile4")
def test_biases(bias: str, name: str) -> None:
    q, k, v = triple()
    asked = {"mask": MASKS[name](11, 13, 2, 6), "bias": BIASES[bias], "normalizer": Softmax(0.7, rand(6))}
    want = oracle(q, k, v, **asked)
    for kernel in KERNELS:
        if kernel == "flash" and "cap" in bias:
            with pytest.raises(InputError, match="is not additive"):
                attend(q, k, v, kernel=kernel, **asked)
        else:
            check(kernel, q, k, v, want, **asked)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.1, 0.0, -0.5])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
@pytest.mark.usefixtures("tile4")
def test_scale_and_temperature(kernel: str, scale: float | None, temperature: float) -> None:
    q, k, v = triple(b=1, h=2, hkv=1)
    for bias in (None, biases.Dense(rand(11, 13, seed=4))):
        asked = {"score": Dot(scale), "normalizer": Softmax(temperature), "mask": Causal(), "bias": bias}
        check(kernel, q, k, v, oracle(q, k, v, **asked), **asked)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "causal", "window", "padding", "nothing", "sink and window"])
@pytest.mark.parametrize("sink", [0.0, -3.0, "each head", "far above", "far below"])
@pytest.mark.usefixtures("tile4")
def test_sink(kernel: str, name: str, sink: float | str) -> None:
    """One logit without a value, counted once however the keys are split."""
    far = {"each head": rand(6, seed=3), "far above": 1e4 + rand(6, seed=3), "far below": -1e4 + rand(6, seed=3)}
    q, k, v = triple()
    asked = {"mask": MASKS[name](11, 13, 2, 6), "normalizer": Softmax(sink=far.get(sink, sink))}
    check(kernel, q, k, v, oracle(q, k, v, **asked), **asked)


@pytest.mark.parametrize("kernel", KERNELS)
def test_off_by_one_by_hand(kernel: str) -> None:
    """Three equal scores of ln 2 and softmax-off-by-one: 3·2 / (3·2 + 1)."""
    q, k = torch.tensor([[[[math.log(2)]]]]), torch.ones(1, 1, 3, 1)
    out, lse = attend(
        q, k, torch.ones(1, 1, 3, 2), score=Dot(1.0), normalizer=Softmax(sink=0.0), kernel=kernel, return_lse=True
    )
    close(out, torch.full((1, 1, 1, 2), 6 / 7))
    close(lse, torch.full((1, 1, 1), math.log(7)))


def test_one_constant_vector_added_to_every_key_changes_nothing() -> None:
    q, k, v = triple()
    for kernel in KERNELS:
        close(attend(q, k + rand(3, seed=6), v, kernel=kernel), attend(q, k, v, kernel=kernel), eps=256)


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_scores_do_not_overflow(kernel: str) -> None:
    q, k, v = triple(dtype=torch.float32)
    asked = {"mask": Causal(), "score": Dot(300.0)}
    out, lse = attend(q, k, v, kernel=kernel, return_lse=True, **asked)
    want = oracle(q, k, v, **asked)
    assert want[1].abs().max() > 1000
    close(lse, want[1])
    # A rounding of a score of 1,000 is a relative error of the weights.
    close(out, want[0], eps=64 * want[1].abs().max().item())


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "window", "padding", "sink and window"])
@pytest.mark.usefixtures("tile4")
def test_dtypes(kernel: str, dtype: torch.dtype, name: str) -> None:
    q, k, v = triple(dtype=dtype)
    asked = {"mask": MASKS[name](11, 13, 2, 6), "normalizer": Softmax(0.8, rand(6, dtype=dtype))}
    want = oracle(q, k, v, **asked)
    out, lse = attend(q, k, v, kernel=kernel, return_lse=True, **asked)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    close(out, want[0], eps=64 if dtype == torch.float32 else 4)
    close(lse, want[1], eps=1024 if kernel == "flash" and dtype in LOW else 64)  # torch: a quick exp for halves


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.usefixtures("tile4")
def test_dtypes_of_biases(dtype: torch.dtype) -> None:
    """A bias of another dtype is accepted and does not change the dtype of the output."""
    q, k, v = triple(dtype=dtype)
    for bias in (torch.float64, torch.float32, torch.bfloat16):
        asked = {"mask": Causal(), "bias": biases.Dense(rand(11, 13, seed=2, dtype=bias))}
        want = oracle(q, k, v, **asked)
        for kernel in KERNELS:
            out, lse = attend(q, k, v, kernel=kernel, return_lse=True, **asked)
            assert (out.dtype, lse.dtype) == (dtype, torch.float32)
            close(out, want[0], eps=64 if dtype == torch.float32 else 4)
            close(lse, want[1], eps=1024 if kernel == "flash" and dtype in LOW else 64)


# --- fully masked queries, and NaN in masked keys ---------------------------------------------------------------------

EMPTY_ROWS = {
    "nothing": (~masks.Prefix(13), slice(0, 11)),
    "before the first key": (masks.Shifted(Causal(), -4), slice(0, 4)),
    "dense": (Dense((torch.arange(11) != 6)[:, None]), slice(6, 7)),
    "left padding": (Padding([8, 8], "left") & masks.Shifted(Causal(), 0), slice(0, 5)),
    "document": (Document([0] * 5 + [-1] * 3 + [1] * 5) & Causal(), slice(3, 6)),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", EMPTY_ROWS)
@pytest.mark.usefixtures("tile4")
def test_fully_masked_queries_give_zero(kernel: str, name: str) -> None:
    mask, rows = EMPTY_ROWS[name]
    q, k, v = triple(grad=True)
    assert not mask.dense(11, 13, batch=2)[:, :, rows].any()
    out, lse = attend(q, k, v, mask=mask, kernel=kernel, return_lse=True)
    seen = lse > -torch.inf
    assert not seen[:, :, rows].any()
    assert seen.any() == (name != "nothing")
    assert (out[:, :, rows] == 0).all()
    # Through the lse, too: a gradient of −inf is nothing.
    (out.square().sum() + (lse * rand(2, 6, 11)).masked_fill(~seen, 0).sum() + lse[seen].sum()).backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
    assert (q.grad[:, :, rows] == 0).all()
    if kernel == "eager":
        weights = attend(q, k, v, mask=mask, return_weights=True)[1]
        assert (weights[:, :, rows] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_of_minus_infinity_is_not_nan(kernel: str) -> None:
    q, k, v = triple(grad=True)
    _, lse = attend(q, k, v, mask=EMPTY_ROWS["dense"][0], kernel=kernel, return_lse=True)
    lse.sum().backward()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("nq", [1, 5])
def test_more_queries_than_keys_before_the_first_key(kernel: str, nq: int) -> None:
    """Causal is bottom-right aligned: queries before the first key are fully masked."""
    q, k, v = triple(nq=nq + 6, nk=nq)
    out, lse = attend(q, k, v, mask=Causal(), kernel=kernel, return_lse=True)
    assert (out[:, :, :6] == 0).all()
    assert (lse[:, :, :6] == -torch.inf).all()
    close(out[:, :, 6:], attend(q[:, :, 6:], k, v, mask=Causal(), kernel=kernel))


NAN = {
    "padding": (Padding([9, 13]), 9, 13),
    "left padding": (Padding([9, 13], "left"), 0, 4),
    "padding, causal": (Padding([9, 13]) & Causal(), 9, 13),
    "left padding, causal": (Padding([9, 13], "left") & Causal(), 0, 4),
    "padding, window": (Padding([9, 13]) & Window(3), 9, 13),
    "document": (Document([[0] * 4 + [1] * 5 + [-1] * 4, [0] * 13]), 9, 13),
    "dense": (Dense((torch.arange(13) < torch.tensor([9, 13])[:, None])[:, None, None]), 9, 13),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", NAN)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.usefixtures("tile4")
def test_nan_in_padding_does_not_spread(kernel: str, name: str, bad: float) -> None:
    mask, start, stop = NAN[name]
    q, k, v = triple()
    results = []
    for filler in (bad, 0.0):
        tensors = [q.clone(), k.clone(), v.clone()]
        for x in tensors[1:]:
            x[0, :, start:stop] = filler
        tensors = [x.requires_grad_() for x in tensors]
        out, lse = attend(*tensors, mask=mask, kernel=kernel, return_lse=True, normalizer=Softmax(sink=0.3))
        (out.square().sum() + lse.sin().sum()).backward()
        results.append((out, lse, *(x.grad for x in tensors)))
    for dirty, clean in zip(*results, strict=True):
        assert dirty.isfinite().all()
        close(dirty, clean)
    for grad in results[0][3:]:
        assert (grad[0, :, start:stop] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "causal", "window", "padding"])
@pytest.mark.parametrize("n", [13, 67])
@pytest.mark.usefixtures("tile4")
def test_a_nan_query_gives_nan_only_in_its_own_row(kernel: str, name: str, n: int) -> None:
    q, k, v = triple(h=2, hkv=1, nq=n, nk=n, dtype=torch.float32)
    mask = MASKS[name](n, n, 2, 2)
    clean = attend(q, k, v, mask=mask, kernel=kernel, return_lse=True)
    q[0, 1, 5] = math.nan
    for got, want in zip(attend(q, k, v, mask=mask, kernel=kernel, return_lse=True), clean, strict=True):
        assert got[0, 1, 5].isnan().all()
        got[0, 1, 5] = want[0, 1, 5]
        close(got, want)


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
@pytest.mark.usefixtures("tile4")
def test_nan_in_padding_does_not_spread_under_a_cap(kernel: str) -> None:
    q, k, v = triple()
    k[0, :, 9:] = v[0, :, 9:] = math.nan
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*tensors, mask=Padding([9, 13]), bias=biases.SoftCap(2.0), kernel=kernel)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in tensors)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("tile4")
def test_results_do_not_depend_on_the_rest_of_the_batch(kernel: str) -> None:
    q, k, v = triple(b=3)
    lengths = [13, 5, 9]
    whole = attend(q, k, v, mask=Padding(lengths) & Window(4), kernel=kernel)
    for i in range(3):
        alone = [x[i : i + 1] for x in (q, k, v)]
        close(attend(*alone, mask=Padding(lengths[i : i + 1]) & Window(4), kernel=kernel), whole[i : i + 1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [Causal(), Window(3), Causal() & masks.Prefix(7)], ids=str)
@pytest.mark.parametrize("nq", [11, 17])
@pytest.mark.usefixtures("tile4")
def test_the_future_cannot_change_the_past(kernel: str, mask: masks.Mask, nq: int) -> None:
    q, k, v = triple(nq=nq, nk=17)
    now = nq - 4  # the last four queries, and the keys at their positions, are the future
    past = attend(q, k, v, mask=mask, kernel=kernel)[:, :, :now]
    for x, first in ((q, now), (k, 13), (v, 13)):
        x[:, :, first:] = 1e3 * rand(*x[:, :, first:].shape, seed=9)
    close(attend(q, k, v, mask=mask, kernel=kernel)[:, :, :now], past)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("tile4")
def test_permutations(kernel: str) -> None:
    """Keys come in no order; queries keep theirs."""
    q, k, v = triple()
    seen = rand(11, 13, seed=7) > 0
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.randperm(11, generator=generator), torch.randperm(13, generator=generator)
    out = attend(q, k, v, mask=seen, kernel=kernel)
    moved = attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask=seen[rows][:, columns], kernel=kernel)
    close(moved, out[:, :, rows])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("tile4")
def test_chunks_of_queries_equal_the_whole(kernel: str) -> None:
    """Prefill in chunks: the keys so far, the last query at the last key."""
    q, k, v = triple(nq=13, nk=13)
    for mask in (Causal(), Window(5), masks.Prefix(2) & Causal() | Window(3)):
        whole = attend(q, k, v, mask=mask, kernel=kernel)
        for start, stop in ((0, 5), (5, 6), (6, 13)):
            chunk = attend(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask=mask, kernel=kernel)
            close(chunk, whole[:, :, start:stop])


@pytest.mark.parametrize("kernel", KERNELS)
def test_out_is_linear_in_the_values(kernel: str) -> None:
    q, k, v = triple()
    w = rand(*v.shape, seed=9)
    together = attend(q, k, 2 * v - w, mask=Causal(), kernel=kernel)
    close(together, 2 * attend(q, k, v, mask=Causal(), kernel=kernel) - attend(q, k, w, mask=Causal(), kernel=kernel))


def test_a_boolean_tensor_is_a_mask() -> None:
    q, k, v = triple()
    seen = rand(6, 11, 13, seed=3) > 0
    assert torch.equal(attend(q, k, v, mask=seen), attend(q, k, v, mask=Dense(seen)))


def test_order_of_returned_values() -> None:
    q, k, v = triple()
    out = attend(q, k, v)
    assert isinstance(out, Tensor)
    assert out.shape == (2, 6, 11, 5)
    with_lse = attend(q, k, v, return_lse=True)
    with_weights = attend(q, k, v, return_weights=True)
    all_three = attend(q, k, v, return_lse=True, return_weights=True)
    shapes = [tuple(tuple(x.shape) for x in got) for got in (with_lse, with_weights, all_three)]
    o, l, w = (2, 6, 11, 5), (2, 6, 11), (2, 6, 11, 13)  # noqa: E741
    assert shapes == [(o, l), (o, w), (o, l, w)]
    close(all_three[2].sum(-1), torch.ones(l))
    close(all_three[2] @ v.repeat_interleave(3, 1), out)


def test_attention_equals_attend() -> None:
    q, k, v = triple()
    parts = {"mask": Causal(), "bias": biases.SoftCap(1.0), "score": Dot(0.5), "normalizer": Softmax(2.0, sink=0.1)}
    composed = qkv.Attention(**parts)
    for kernel in ("tiled", "eager", "auto"):
        assert torch.equal(composed(q, k, v, kernel=kernel), attend(q, k, v, kernel=kernel, **parts))
    assert len(composed(q, k, v, return_lse=True, return_weights=True)) == 3
    assert composed.plan(q, k, v) == qkv.plan(q, k, v, **parts)
    assert torch.equal(composed.measure(q, k).entropy, qkv.measure(q, k, **parts).entropy)
    assert torch.equal(
        composed.measure(q, k, mass={"near": Window(2)}).mass["near"],
        qkv.measure(q, k, **parts, mass={"near": Window(2)}).mass["near"],
    )
    with pytest.raises(AttributeError, match="cannot assign"):
        composed.mask = None  # type: ignore[misc]


# --- the log-sum-exp --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("tile4")
def test_the_gradient_of_the_lse_is_the_mean_key(kernel: str) -> None:
    """d lse_i / d q_i = scale · Σ_j A_ij k_j: attention whose values are the keys."""
    q, k, v = triple(h=2, hkv=2, grad=True)
    _, lse = attend(q, k, v, mask=Window(4), kernel=kernel, return_lse=True)
    lse.sum().backward()
    with torch.no_grad():
        close(q.grad, attend(q, k, k, mask=Window(4), kernel="eager") / math.sqrt(3))
    assert v.grad is None or (v.grad == 0).all()


# --- decoding, and what is kept between calls ------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [Causal(), Window(3), Window(3) & Causal(), None], ids=str)
def test_one_query_of_grouped_heads_reads_its_visible_keys_only(mask: masks.Mask | None) -> None:
    q, (k, v) = rand(2, 6, 1, 8, dtype=torch.float32), rand(2, 2, 3, 9, 8, dtype=torch.float32)
    want = attend(q, k, v, mask=mask, kernel="eager", return_lse=True)
    assert qkv.plan(q, k, v, mask=mask).reason.startswith("decoding")
    hidden = ~mask.dense(1, 9)[0, 0, 0] if mask is not None else torch.zeros(9, dtype=torch.bool)
    k, v = (x.masked_fill(hidden[:, None], torch.nan) for x in (k, v))
    for got, expected in zip(attend(q, k, v, mask=mask, return_lse=True), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_one_query_that_sees_no_key_has_output_zero() -> None:
    class Future(masks.Mask):
        band = (-math.inf, -1)

        def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
            return k > q

    q, (k, v) = rand(1, 2, 1, 8, dtype=torch.float32), rand(2, 1, 2, 9, 8, dtype=torch.float32)
    out, lse = attend(q, k, v, mask=Future(), return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
def test_masks_kept_from_inference_can_be_trained_with(kernel: str) -> None:
    q, k, v = triple(dtype=torch.float32)
    mask = Window(3, ahead=1) & ~Window(1)
    with torch.inference_mode():
        want = attend(q, k, v, mask=mask, kernel=kernel)
    q.requires_grad_()
    got = attend(q, k, v, mask=mask, kernel=kernel)
    got.sum().backward()
    torch.testing.assert_close(got.detach(), want.clone())


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


def test_a_mask_that_changes_between_calls_is_not_kept() -> None:
    class Until(masks.Mask):
        last = 3

        def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
            return k <= self.last

    q, k, v = triple(dtype=torch.float32)
    mask = Until()
    for last in (3, 5):
        mask.last = last
        for kernel in ("flash", "tiled", "eager"):
            want = attend(q, k[:, :, : last + 1], v[:, :, : last + 1])
            torch.testing.assert_close(attend(q, k, v, mask=mask, kernel=kernel), want)


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_reports_the_kernel_and_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = triple(dtype=torch.float32)
    few = qkv.plan(q, k, v, bias=biases.SoftCap(1.0))
    assert (few.kernel, few.rejected["tiled"]) == ("eager", "slower")
    assert "so few scores" in few.reason
    set_sizes(monkeypatch, few_scores=0)
    plan = qkv.plan(q, k, v)
    assert plan.kernel == "flash"
    assert "fused" in plan.reason
    assert set(plan.rejected) == {"linear", "fused", "flex", "tiled", "eager", "reference"}
    assert plan.rejected["tiled"] == plan.rejected["eager"] == "slower"

    capped = qkv.plan(q, k, v, bias=biases.SoftCap(1.0))
    assert capped.kernel == "tiled"
    assert "not additive" in capped.rejected["flash"]

    formed = qkv.plan(q, k, v, return_weights=True)
    assert formed.kernel == "eager"
    assert "never forms the weights" in formed.rejected["flash"]
    assert "never forms the weights" in formed.rejected["tiled"]

    dropped = qkv.plan(q, k, v, dropout_p=0.1)
    assert dropped.kernel == "tiled"
    assert all("dropout" in dropped.rejected[name] for name in ("flash", "reference"))

    learned = qkv.plan(q, k, v, bias=biases.Dense(torch.zeros(11, 13, requires_grad=True)))
    assert learned.kernel == "tiled"
    assert "gradient" in learned.rejected["flash"]
    with torch.no_grad():
        assert qkv.plan(q, k, v, bias=biases.Dense(torch.zeros(11, 13, requires_grad=True))).kernel == "flash"

    asked = qkv.plan(q, k, v, kernel="eager")
    assert (asked.kernel, asked.reason) == ("eager", "requested by name")
    assert "flash" in str(plan)
    assert "slower" in str(plan)


def test_plan_reports_flops_and_bytes() -> None:
    b, h, hkv, n, d, dv = 2, 6, 2, 512, 3, 5
    q, k, v = triple(b, h, hkv, n, n, d, dv, dtype=torch.float32)
    whole = 2 * b * h * n * n * (d + dv)
    moved = 4 * (b * h * n * d + b * hkv * n * (d + dv) + b * h * n * dv + b * h * n)
    assert qkv.plan(q, k, v).flops == whole
    assert qkv.plan(q, k, v).bytes == moved
    assert qkv.plan(q, k, v, mask=Causal()).flops == whole // 2
    assert qkv.plan(q, k, v, mask=Padding([256])).flops == whole // 2
    assert (
        qkv.plan(q, k, v, mask=Window(2)).flops == whole * 15 // 128
    )  # 8 diagonal tiles of 64 and the 7 beside them, halved
    eager = qkv.plan(q, k, v, mask=Causal(), kernel="eager")
    assert eager.flops == whole
    assert eager.bytes == moved + 4 * b * h * n * n
    half = [x.bfloat16() for x in (q, k, v)]
    assert qkv.plan(*half).bytes == moved // 2 + 2 * b * h * n  # the lse stays float32


@pytest.mark.parametrize(
    ("kernel", "asked", "why"),
    [
        ("flash", {"dropout_p": 0.5}, "dropout acts on weights"),
        ("reference", {"dropout_p": 0.5}, "it has no dropout"),
        ("flash", {"return_weights": True}, "never forms the weights"),
        ("tiled", {"return_weights": True}, "never forms the weights"),
        ("flash", {"bias": biases.SoftCap(1.0)}, "is not additive"),
        ("flash", {"bias": biases.Dense(torch.zeros(11, 13, requires_grad=True))}, "no gradient for a bias"),
        ("reference", {"normalizer": Hard(sample=True)}, "it does not sample"),
        ("reference", {"normalizer": Softmax(sink=torch.zeros(6, requires_grad=True))}, "it has no gradients"),
    ],
)
def test_a_kernel_requested_by_name_serves_or_raises(kernel: str, asked: dict, why: str) -> None:
    for function in (attend, qkv.plan):
        with pytest.raises(InputError, match=f"kernel='{kernel}' cannot serve this call: .*{why}"):
            function(*triple(), kernel=kernel, **asked)


def test_missing_flash_operators_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_stock_kernel_works", lambda: False)
    plan = qkv.plan(*triple(nq=200, nk=200))
    assert plan.kernel == "tiled"
    assert "lacks the flash kernel" in plan.rejected["flash"]
    with pytest.raises(InputError, match="lacks the flash kernel"):
        attend(*triple(), kernel="flash")


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_seeded_scaled_and_off_at_zero() -> None:
    q, k, v = triple()
    plain, plain_weights = attend(q, k, v, mask=Causal(), return_weights=True)
    assert torch.equal(attend(q, k, v, mask=Causal(), dropout_p=0.0, kernel="eager"), plain)

    def dropped(seed: int) -> tuple[Tensor, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return attend(q, k, v, mask=Causal(), dropout_p=0.25, return_lse=True, return_weights=True)

    out, lse, weights = dropped(3)
    assert torch.equal(out, dropped(3)[0])
    assert not torch.equal(out, dropped(4)[0])
    close(lse, attend(q, k, v, mask=Causal(), return_lse=True)[1])  # of the scores: dropout is not in it
    close(weights, torch.where(weights == 0, 0.0, plain_weights / 0.75))  # the weights after dropout
    close(out, weights @ v.repeat_interleave(3, 1))
    share = (weights[plain_weights > 0] == 0).double().mean().item()
    n = int((plain_weights > 0).sum())
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / n)


def test_dropout_is_right_on_average() -> None:
    q, k, v = (x.expand(2000, -1, -1, -1) for x in triple(b=1, h=1, hkv=1))
    plain = attend(q[:1], k[:1], v[:1])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = attend(q, k, v, dropout_p=0.3)
    error = (out.mean(0, keepdim=True) - plain).abs()
    assert (error < 5 * out.std(0, keepdim=True) / math.sqrt(2000)).all()


@pytest.mark.parametrize("kernel", ["auto", "flash", "tiled", "eager"])
def test_an_infinite_query_on_few_keys_is_not_mistaken_for_a_masked_row(kernel: str) -> None:
    q, k, v = (x.abs() for x in triple(1, 2, 2, 8, 8, 3, 3))
    q[0, 1, 5] = torch.inf
    out = attend(q, k, v, kernel=kernel)
    assert out[0, 1, 5].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[0, 1, :5].isfinite().all()
