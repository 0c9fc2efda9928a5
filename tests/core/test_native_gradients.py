"""The native kernel: output, log-sum-exp and gradients against autograd through the weights in float64."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv
from conftest import covering
from qkv import native
from qkv.biases import ALiBi, Bias, ByDistance, SoftCap, T5Bias
from qkv.biases import TensorBias as Pairs
from qkv.errors import InputError
from qkv.masks import Blockwise, Causal, Dense, Mask, Prefix, Window
from qkv.normalizers import Softmax
from qkv.statistics.built_in import Local
from qkv.statistics.gradients import DIFFERENTIABLE

SHAPES = {  # batch, query heads, key heads, queries, keys, head size, size of values
    "tiny": (1, 2, 2, 2, 5, 8, 8),
    "grouped heads": (2, 6, 2, 70, 70, 16, 24),
    "few queries": (1, 2, 1, 33, 130, 40, 32),
    "more queries than keys": (2, 2, 2, 130, 33, 8, 20),
    "several tiles": (1, 3, 3, 600, 1100, 64, 80),
}
MASKS: dict[str, Callable[[Tensor], Mask | None]] = {
    "none": lambda keep: None,
    "causal, padded": lambda keep: Causal() & Dense(keep[:, None, None]),
    "window ahead": lambda keep: Window(5, ahead=3),
    "bits": lambda keep: Blockwise(Causal(), 64) & (Window(9) | Prefix(70)),
}
BIASES: dict[str, tuple[Bias, ...]] = {"none": (), "alibi": (ALiBi(),), "alibi, then cap": (ALiBi(), SoftCap(3.0))}


@pytest.fixture(autouse=True)
def compiled() -> None:
    if isinstance(found := native.binding.library(), str):
        assert shutil.which("cc") is None, found
        pytest.skip(found)


def inputs(shape: str) -> list[Tensor]:
    b, h, key_heads, n_queries, n_keys, d, dv = SHAPES[shape]
    sizes = ((n_queries, h, d), (n_keys, key_heads, d), (n_keys, key_heads, dv))
    return [torch.randn(b, *size).transpose(1, 2) for size in sizes]  # strides as in a model


def results(
    tensors: list[Tensor], sink: Tensor | None, kernel: str, *, learned: Sequence[Tensor] = (), **options: Any
) -> list[Tensor]:
    """Output, log-sum-exp where there is one, and the gradients of a random function of both."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *([] if sink is None else [sink]))]
    normalizer = Softmax(sink=None if sink is None else leaves[3], temperature=1.3)
    out, lse = qkv.attend(*leaves[:3], normalizer=normalizer, kernel=kernel, return_lse=True, **options)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    generator = torch.Generator().manual_seed(0)
    grad, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (out, lse))
    return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], [*leaves, *learned], [grad, grad_lse])]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float = 2e-5) -> None:
    for x, y in zip(got, want, strict=True):
        assert float((x.double() - y).abs().max() / y.abs().max().clamp(min=1)) < tolerance


@pytest.mark.parametrize(("shape", "mask", "bias"), covering(SHAPES, MASKS, BIASES))
def test_output_or_gradients_differ_from_those_through_the_weights(shape: str, mask: str, bias: str) -> None:
    options: dict[str, Any] = {
        "mask": MASKS[mask](torch.rand(SHAPES[shape][0], SHAPES[shape][4]) > 0.3), "bias": BIASES[bias],
    }  # fmt: skip
    tensors, sink, double = inputs(shape), None, None
    if bias == "alibi":
        sink = torch.linspace(-2, 2, SHAPES[shape][1])
        sink[1] = -torch.inf
        double = sink.double()
    want = results([x.double() for x in tensors], double, "eager", **options)
    assert_close(results(tensors, sink, "native", **options), want)


MEASURED: dict[str, tuple[str, ...]] = {  # the statistics by bias
    "none": (*(x for x in DIFFERENTIABLE if x != "sink_mass"), "local", "ends"),
    "alibi": (*DIFFERENTIABLE, "ends"),
    "alibi, then cap": ("received", "local"),
}


@pytest.mark.parametrize(("shape", "mask", "bias"), covering(SHAPES, MASKS, BIASES))
def test_gradients_of_statistics_differ_from_those_of_the_tiles(shape: str, mask: str, bias: str) -> None:
    b, h, _, n_queries, n_keys, *_ = SHAPES[shape]
    made, sinks = MASKS[mask](torch.rand(b, n_keys) > 0.3), [torch.linspace(-2, 2, h)] if bias == "alibi" else []
    options = {
        "mask": made, "mass": {"local": Local(2).mask, "ends": Prefix(2) | Window(3)},
        "first": torch.randint(0, n_keys, (b,)), "queries": torch.rand(b, n_queries) > 0.3,
    }  # fmt: skip
    tensors, table = inputs(shape)[:2], torch.randn(1, n_queries + n_keys - 1) / 4

    def found(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).detach().clone().requires_grad_() for x in (*tensors, table, *sinks)]
        normalizer = Softmax(sink=leaves[3] if sinks else None)
        got = qkv.measure(
            *leaves[:2],
            bias=(ByDistance(leaves[2]), *BIASES[bias]),
            normalizer=normalizer,
            differentiable=True,
            **options,
        )
        fields = {name: getattr(got, name) for name in DIFFERENTIABLE} | dict(got.mass)
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), dtype=leaves[0].dtype)
        for name in MEASURED[bias]:
            x = fields[name].masked_fill(fields[name] == -torch.inf, 0)
            total = total + (x * torch.randn(x.shape, generator=generator) / x.detach().abs().max().clamp(min=1)).sum()
        return list(torch.autograd.grad(total, leaves))

    assert_close(found(torch.float32), found(torch.float64))


@pytest.mark.parametrize(("shape", "mask", "bias"), [*covering(SHAPES, MASKS, BIASES)][::3])
def test_one_pass_gives_other_gradients_than_the_weights(shape: str, mask: str, bias: str) -> None:
    made = MASKS[mask](torch.rand(SHAPES[shape][0], SHAPES[shape][4]) > 0.3)
    sinks = [torch.linspace(-2, 2, SHAPES[shape][1])] if bias != "none" else []
    tensors, names = inputs(shape), [x for x in DIFFERENTIABLE if sinks or x != "sink_mass"]

    def found(dtype: torch.dtype, kernel: str) -> list[Tensor]:
        leaves = [x.to(dtype).detach().clone().requires_grad_() for x in (*tensors, *sinks)]
        normalizer = Softmax(sink=leaves[3] if sinks else None)
        out, *_, got = qkv.attend(
            *leaves[:3], mask=made, bias=BIASES[bias], normalizer=normalizer, kernel=kernel, return_statistics=True
        )
        results = [x.masked_fill(x == -torch.inf, 0) for x in (out, *(getattr(got, name) for name in names))]
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(x.shape, generator=generator) / x.detach().abs().max().clamp(min=1) for x in results]
        loss = sum(((x * grad).sum() for x, grad in zip(results, grads, strict=True)), torch.zeros(()))
        return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves)]

    assert_close(found(torch.float32, "auto"), found(torch.float64, "eager"))


def test_half_precision_differs_from_the_weights_by_more_than_its_rounding() -> None:
    tensors = [x.bfloat16() for x in inputs("several tiles")]
    want = results([x.double() for x in tensors], None, "eager", mask=Causal())
    assert_close(results(tensors, None, "native", mask=Causal()), want, 0.02)


def test_threads_change_gradients_or_the_same_number_of_them_gives_other_bits() -> None:
    tensors, threads = inputs("several tiles"), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first, second = (results(tensors, torch.zeros(3), "native", mask=Causal()) for _ in range(2))
        torch.set_num_threads(1)
        alone = results(tensors, torch.zeros(3), "native", mask=Causal())
    finally:
        torch.set_num_threads(threads)
    assert [i for i, x in enumerate(first) if not torch.equal(x, second[i])] == []
    assert_close(first, [x.double() for x in alone], 1e-5)


LEARNED: dict[str, tuple[Callable[..., tuple[Bias, ...]], Callable[..., list[tuple[int, ...]]]]] = {
    "slopes": (lambda slopes: (ALiBi(slopes),), lambda b, h, n_queries, n_keys: [(h,)]),
    "caps between biases": (
        lambda table, pairs, shared: (T5Bias(table), SoftCap(3.0), Pairs(pairs), ByDistance(shared), SoftCap(2.0)),
        lambda b, h, n_queries, n_keys: [(8, h), (n_queries, n_keys), (1, n_queries + n_keys - 1)],
    ),
    "pairs, by shape": (
        lambda *tensors: tuple(map(Pairs, tensors)),
        lambda *sizes: list(itertools.product(*((1, size) for size in sizes))),
    ),
}


@pytest.mark.parametrize(("shape", "mask", "learned"), covering(SHAPES, MASKS, LEARNED))
def test_gradients_of_biases_differ_or_are_not_the_same_bits_again(shape: str, mask: str, learned: str) -> None:
    b, h, _, n_queries, n_keys, *_ = SHAPES[shape]
    made, (bias, sizes) = MASKS[mask](torch.rand(b, n_keys) > 0.3), LEARNED[learned]
    tensors, parameters = inputs(shape), [torch.randn(size) / 4 for size in sizes(b, h, n_queries, n_keys)]

    def found(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        mine = [x.to(dtype).requires_grad_() for x in parameters]
        return results(
            [x.to(dtype) for x in tensors], torch.zeros(h).to(dtype), kernel, learned=mine, bias=bias(*mine), mask=made
        )

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first, second = (found("native", torch.float32) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert [i for i, x in enumerate(first) if not torch.equal(x, second[i])] == []
    assert_close(first, found("eager", torch.float64))


def test_a_second_derivative_is_not_refused() -> None:
    q, k, v = (x.requires_grad_() for x in inputs("grouped heads"))
    grad = torch.autograd.grad(qkv.attend(q, k, v, kernel="native").sum(), q, create_graph=True)[0]
    with pytest.raises(InputError, match="native"):
        grad.sum().backward()
