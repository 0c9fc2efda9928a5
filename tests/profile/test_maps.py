"""Pooled attention maps of one head: against materialised weights pooled by plain loops, and invariants."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MASKS, close, fits, largest_tensor, oracle, rand, refused, set_sizes, triple
from qkv import biases, masks, normalizers
from qkv.engine import Call
from qkv.engine.sizes import BY_DEVICE
from qkv.scores import Additive, Dot
from qkv.statistics import maps
from qkv.statistics.measure import row_state


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few tokens span many of them and some bins are wider than a tile."""
    set_sizes(monkeypatch, picture=(4, 6))


def by_loops(
    weights: Tensor, is_visible: Tensor, rows: list[int], columns: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum, mean and visible share of every bin of weights (nq, nk), one bin at a time."""
    a, shown = weights.double().numpy(), is_visible.numpy()
    shape = (len(rows) - 1, len(columns) - 1)
    top, mean, visible = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            inside = slice(rows[i], rows[i + 1]), slice(columns[j], columns[j + 1])
            top[i, j], mean[i, j], visible[i, j] = a[inside].max(), a[inside].mean(), shown[inside].mean()
    return top, mean, visible


def edges(start: int, stop: int, most: int) -> list[int]:
    """Edges by definition: bin b begins at ⌊b n / B⌋."""
    n = stop - start
    bins = min(n, most)
    return [start + (b * n) // bins for b in range(bins + 1)]


def expect(
    got: maps.Picture, weights: Tensor, visible: Tensor, rows: list[int], columns: list[int], eps: float = 64
) -> None:
    assert got.row_edges.tolist() == rows
    assert got.column_edges.tolist() == columns
    for name, value in zip(("maximum", "mean", "visible"), by_loops(weights, visible, rows, columns), strict=True):
        close(getattr(got, name), value, eps=eps)


def check(
    arguments: dict[str, Any],
    nq: int,
    nk: int,
    *,
    at: Iterable[tuple[int, ...]] = ((1, 1),),
    windows: tuple[tuple[int, int, int, int], ...] = (),
    sizes: tuple[tuple[int, int], ...] = ((2, 3),),
    **shapes: int,
) -> None:
    """Maps of these items and heads: the whole of each size, and each window; and the weights of these parts."""
    q, k, v = triple(nq=nq, nk=nk, **shapes)
    _, _, weights = oracle(q, k, v, **arguments)
    seen = arguments["mask"] or ~masks.Prefix(0)
    visible = seen.dense(nq, nk, batch=2, heads=q.shape[1]).expand(weights.shape)
    given = {name: value for name, value in arguments.items() if name != "bias"}
    call = Call.of(q, k, v, **given, bias=arguments.get("bias"))
    rows = row_state(call)
    for item, head in at:
        parts = [((0, nq, 0, nk), size) for size in sizes] + [(window, (2, 3)) for window in windows]
        for (top, bottom, left, right), size in parts:
            queries, keys = slice(top, bottom), slice(left, right)
            got = maps.pooled(call, rows, item=item, head=head, queries=queries, keys=keys, size=size)
            edge = edges(top, bottom, size[0]), edges(left, right, size[1])
            expect(got, weights[item, head], visible[item, head], *edge, 256)
        for top, bottom, left, right in dict.fromkeys(part for part, _ in parts):
            queries, keys = slice(top, bottom), slice(left, right)
            want = weights[item, :, queries, keys]
            close(maps.rectangle(call, rows, queries, keys, item=item), want, eps=256)
            close(maps.rectangle(call, rows, queries, keys, item=item, head=head), want[[head]], eps=256)


OTHERS: list[dict[str, Any]] = [
    {},
    {"normalizer": normalizers.Softmax(0.7, sink=0.5)},
    {"normalizer": normalizers.Softmax(sink=rand(3, seed=3))},
    {"normalizer": normalizers.Softmax(key=rand(3, 3, seed=4))},
    {"normalizer": normalizers.Sigmoid(-1.5)},
    {"normalizer": normalizers.Entmax(1.5)},
    {"normalizer": normalizers.Entmax(2.0), "bias": biases.ALiBi()},
    {"normalizer": normalizers.Hard()},
    {"normalizer": normalizers.EluPlusOne()},
    {"bias": biases.RelativePosition(rand(5, 3, seed=4))},
    {"bias": (biases.TensorBias(rand(1, 10, seed=8)), biases.SoftCap(0.8)), "score": Dot(0.9)},
    {"bias": biases.TensorBias(torch.where(rand(9, 10, seed=8) > 0, -torch.inf, 0.0))},
    {"score": Additive(rand(7, seed=1), rand(7, 3, seed=2), rand(7, 3, seed=3))},
]
CASES = list(zip([n for n in MASKS if fits(n, 9, 10)], cycle(OTHERS)))


@pytest.mark.parametrize(("name", "other"), CASES)
def test_maps_and_rectangles_match_dense_weights_for_every_part_of_a_call(name: str, other: dict[str, Any]) -> None:
    sizes = ((1, 1), (5, 7), (99, 99))
    windows = ((3, 9, 5, 6), (8, 9, 0, 10), (0, 5, 6, 10))
    check({"mask": MASKS[name](9, 10, 2, 3)} | other, 9, 10, windows=windows, sizes=sizes, h=3, hkv=1)
    nq, nk = (10, 6) if fits(name, 10, 6) else (1, 10)
    check({"mask": MASKS[name](nq, nk, 2, 3)}, nq, nk, h=3, hkv=1)


@pytest.mark.parametrize(("h", "hkv"), [(6, 2), (5, 1)])
def test_maps_match_dense_weights_for_every_head_and_item(h: int, hkv: int) -> None:
    arguments = {"mask": MASKS["dense of heads"](11, 13, 2, h), "bias": biases.TensorBias(rand(2, h, 11, 13, seed=8))}
    check(arguments, 11, 13, at=np.ndindex(2, h), h=h, hkv=hkv)


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Prefix(6)], ids=str)  # the second masks whole tiles
def test_masked_pairs_count_as_zero_among_negative_weights(mask: masks.Mask) -> None:
    q, k, v = triple(b=1, h=1, hkv=1)
    normalizer = normalizers.Identity()
    _, _, weights = oracle(-q.abs(), k.abs(), v, mask=mask, normalizer=normalizer)
    call = Call.of(-q.abs(), k.abs(), v, mask, normalizer=normalizer)
    visible = mask.dense(11, 13)[0, 0]
    for size in ((1, 1), (2, 2), (11, 13)):
        got = maps.pooled(call, row_state(call), size=size)
        expect(got, weights[0, 0], visible, edges(0, 11, size[0]), edges(0, 13, size[1]))
    assert got.maximum.min() < 0 == got.maximum.max()


@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=str)
def test_uncounted_queries_have_zero_weights(mask: masks.Mask | None) -> None:
    """Padding may hold NaN, which must not spread."""
    q, k, v = triple()
    _, _, weights = oracle(q, k, v, mask=mask)
    real = torch.rand(2, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    call = Call.of(q.masked_fill(~real[:, None, :, None], torch.nan), k, v, mask)
    counts = real[1, :, None].expand(11, 13)
    visible = counts if mask is None else counts & mask.dense(11, 13)[0, 0]
    got = maps.pooled(call, row_state(call), item=1, head=4, size=(4, 3), real=real)
    expect(got, weights[1, 4].masked_fill(~counts, 0), visible, edges(0, 11, 4), edges(0, 13, 3))


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is larger than the inputs, a tile or the picture."""
    monkeypatch.undo()
    n, d = 3001, 3
    q, k, v = triple(b=1, h=2, hkv=1, nq=n, nk=n, d=d, dv=2, dtype=torch.float32)
    call = Call.of(q, k, v, masks.Causal())
    rows = row_state(call)
    for size in ((64, 64), (7, 1024)):
        largest = largest_tensor(lambda s=size: maps.pooled(call, rows, head=1, size=s))
        assert largest <= max(2 * n * d, math.prod(BY_DEVICE["cpu"].picture)), largest
    small = largest_tensor(lambda: maps.HeadMap(call, rows, head=1).pooled(slice(50, 60), slice(0, 20)))
    assert small <= 2 * n * d


@pytest.mark.parametrize(
    "arguments",
    [
        {"item": 2}, {"head": 6}, {"head": -1}, {"size": (0, 4)}, {"queries": slice(3, 3)},
        {"queries": slice(-2, None)}, {"keys": slice(3, 14)}, {"keys": slice(0, 9, 2)},
        {"real": torch.ones(2, 12, dtype=torch.bool)},
    ],
    ids=str,
)  # fmt: skip
def test_pooled_rejects_indices_out_of_range(arguments: dict[str, Any]) -> None:
    call = Call.of(*triple())
    with refused(next(iter(arguments))):
        maps.pooled(call, row_state(call), **arguments)
