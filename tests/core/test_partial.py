"""Partial attention is a commutative monoid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkv
from conftest import close, oracle, rand, triple
from qkv import Partial, attend, merge
from qkv.normalizers import Softmax
from qkv.partial import sink_gradient


def nothing(*shape: int, d: int = 3) -> Partial:
    return Partial(torch.zeros(*shape, d).double(), torch.full(shape, -torch.inf).double())


@st.composite
def partials(draw: st.DrawFn, rows: int = 5) -> Partial:
    """Some rows are fully masked; scores are far apart."""
    lse = draw(st.lists(st.floats(-800, 800) | st.just(-float("inf")), min_size=rows, max_size=rows))
    lse = torch.tensor(lse, dtype=torch.float64)
    out = rand(rows, 3, seed=draw(st.integers(0, 99)))
    return Partial(torch.where(lse[:, None] == -torch.inf, 0.0, out), lse)


def same(a: Partial, b: Partial, eps: float = 64) -> None:
    close(a.lse, b.lse, eps=eps)
    # The share of a part is exp of a difference of scores of up to 800: a rounding of them is 800 of the share.
    close(a.out, b.out, eps=1000 * eps)


@given(partials(), partials(), partials())
def test_a_commutative_monoid(a: Partial, b: Partial, c: Partial) -> None:
    whole = merge(a, b, c)
    same(merge(merge(a, b), c), whole)
    same(merge(a, merge(b, c)), whole)
    same(merge(a, b), merge(b, a))
    for got in (merge(a, nothing(5)), merge(nothing(5), a), merge(a), merge(nothing(5), a, nothing(5))):
        close(got.lse, a.lse)
        close(got.out, a.out)
    got = Partial(whole.out.clone(), whole.lse.clone())
    sink = torch.full((5,), 0.5, dtype=torch.float64)
    same(got.with_sink(sink, in_place=True), whole.with_sink(sink))


@given(partials(), partials())
def test_the_definition(a: Partial, b: Partial) -> None:
    """lse = logaddexp, out = the mean weighted by exp(lse)."""
    got = merge(a, b)
    lse = torch.logaddexp(a.lse, b.lse)
    close(got.lse, lse)
    seen = lse > -torch.inf
    want = a.out * (a.lse - lse).exp()[:, None] + b.out * (b.lse - lse).exp()[:, None]
    close(got.out[seen], want[seen], eps=64_000)
    assert (got.out[~seen] == 0).all()


@given(partials(), partials(), st.floats(-900, 900))
def test_a_sink_is_a_partial_result_without_a_value_that_counts_once(a: Partial, b: Partial, sink: float) -> None:
    logit = torch.full((5,), sink, dtype=torch.float64)
    same(a.with_sink(logit), merge(a, Partial(torch.zeros(5, 3).double(), logit)))
    same(merge(a, b).with_sink(logit), merge(a.with_sink(logit), b))


def test_chunks_then_one_sink_are_attention_with_a_sink() -> None:
    """A sink merged in, or a learned key of value 0 (Gu et al.) as one more part; gradients are those of the whole."""
    q, k, v = triple(grad=True)
    sink, key = rand(6), rand(1, 6, 1, 3, seed=9)
    parts = [Partial(*attend(q, k[:, :, s], v[:, :, s], return_lse=True)) for s in (slice(0, 4), slice(4, 13))]
    no_value = Partial(torch.zeros(2, 6, 11, 5).double(), (q @ key.mT)[..., 0] / 3**0.5)
    for got, normalizer in (
        (merge(*parts).with_sink(sink[:, None]), Softmax(sink=sink)),
        (merge(*parts, no_value), Softmax(key=key[0, :, 0])),
    ):
        out, lse, _ = oracle(q, k, v, normalizer=normalizer)
        close(got.out, out)
        close(got.lse, lse)
        whole = Partial(*attend(q, k, v, normalizer=normalizer, return_lse=True))
        found = [
            torch.autograd.grad(x.out.cos().sum() + x.lse.sin().sum(), (q, k, v), retain_graph=True)
            for x in (got, whole)
        ]
        for x, y in zip(*found, strict=True):
            close(x, y, eps=256)


def test_finite_differences() -> None:
    def run(a: Tensor, b: Tensor, c: Tensor, d: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        got = merge(Partial(a, b), Partial(c, d)).with_sink(sink)
        return got.out, got.lse

    inputs = rand(2, 5, 3), rand(2, 5, seed=1), rand(2, 5, 3, seed=2), rand(2, 5, seed=3), rand(5, seed=4)
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


def test_gradients_of_fully_masked_rows_are_finite() -> None:
    leaves = [rand(5, 3), rand(5), torch.zeros(5, 3).double(), torch.full((5,), -torch.inf).double()]
    leaves[0][2], leaves[1][2] = 0, -torch.inf
    a, x, b, y = (t.requires_grad_() for t in leaves)
    got = merge(Partial(a, x), Partial(b, y))
    sunk = got.with_sink(torch.zeros(5).double())
    seen = got.lse > -torch.inf
    assert seen.tolist() == [True, True, False, True, True]
    (got.out.square().sum() + got.lse[seen].sum() + sunk.out.square().sum() + sunk.lse.sum()).backward()
    for t in (a, x, b, y):
        assert t.grad.isfinite().all()


def test_the_gradient_of_a_sink_by_hand_is_autograds() -> None:
    q, k, v = triple()
    sink = rand(6).requires_grad_()
    part = Partial(*attend(q, k, v, return_lse=True)).with_sink(sink[:, None])
    grad, grad_lse = rand(2, 6, 11, 5, seed=4), rand(2, 6, 11, seed=5)
    for of_lse in (None, grad_lse):
        outputs = (part.out,) if of_lse is None else (part.out, part.lse)
        seeds = (grad,) if of_lse is None else (grad, of_lse)
        (want,) = torch.autograd.grad(outputs, sink, seeds, retain_graph=True)
        close(sink_gradient(sink[None, :, None], part, grad, of_lse), want[None, :, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_kept_in_the_dtype_of_the_lse(dtype: torch.dtype) -> None:
    """300 parts of one key each: adding up in a dtype of 8 bits would stop at 256."""
    parts = [Partial(torch.ones(1, 3, dtype=dtype), torch.zeros(1)) for _ in range(300)]
    whole = merge(*parts)
    assert whole.out.dtype == dtype
    assert whole.lse.dtype == torch.float32
    close(whole.lse, torch.tensor([300.0]).log())
    close(whole.out, torch.ones(1, 3), eps=1)


def test_states_of_linear_attention_merge() -> None:
    k, v = rand(2, 3, 7, 4), rand(2, 3, 7, 5)
    zero = qkv.LinearState.zero(2, 3, 4, 5, torch.float64)
    parts = zero.plus(k[:, :, :3], v[:, :, :3]).merge(zero).merge(zero.plus(k[:, :, 3:], v[:, :, 3:]))
    whole = zero.plus(k, v)
    close(parts.kv, whole.kv)
    close(parts.k_sum, whole.k_sum)
