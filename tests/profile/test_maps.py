"""Pooled attention maps of one head: against materialised weights pooled by plain loops, and invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MASKS, close, fits, largest_tensor, oracle, rand, refused, set_sizes, triple, unchecked
from qkv import attend, biases, masks, normalizers
from qkv._engine.call import Call, as_biases
from qkv._engine.sizes import BY_DEVICE
from qkv.scores import Additive, Dot
from qkv.statistics import maps
from qkv.statistics.measure import row_state


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few tokens span many of them and some bins are wider than a tile."""
    set_sizes(monkeypatch, picture=(4, 6))
    monkeypatch.setattr(maps, "SERIAL_PAIRS", 0)


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


def check(
    arguments: dict[str, Any],
    shapes: dict[str, int],
    *,
    item: int = 1,
    head: int = 1,
    windows: tuple[tuple[int, int, int, int], ...] = ((0, 11, 0, 13),),
    sizes: tuple[tuple[int, int], ...] = ((3, 5),),
    eps: float = 64,
) -> None:
    q, k, v = triple(**shapes)
    _, _, weights = oracle(q, k, v, **arguments)
    mask = arguments.get("mask")
    nq, nk = q.shape[2], k.shape[2]
    visible = (
        torch.ones(1, 1, nq, nk, dtype=torch.bool) if mask is None else mask.dense(nq, nk, batch=2, heads=q.shape[1])
    )
    visible = visible.expand(*q.shape[:2], -1, -1)[item, head]
    call_arguments = dict(arguments)
    call_arguments["biases"] = as_biases(call_arguments.pop("bias", None))
    call = Call.of(q, k, v, **call_arguments)
    rows = row_state(call)
    for top, bottom, left, right in windows:
        for size in sizes:
            got = maps.pooled(
                call, rows, item=item, head=head, queries=slice(top, bottom), keys=slice(left, right), size=size
            )
            down, across = edges(top, bottom, size[0]), edges(left, right, size[1])
            assert got.row_edges.tolist() == down
            assert got.column_edges.tolist() == across
            want = by_loops(weights[item, head], visible, down, across)
            for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
                close(getattr(got, name), value, eps=eps)


SIZES = ((1, 1), (2, 3), (5, 7), (7, 2), (11, 13), (99, 99))


@pytest.mark.parametrize(
    ("name", "nq", "nk"), [(name, *n) for name in MASKS for n in [(11, 13), (13, 7), (1, 13)] if fits(name, *n)]
)
def test_pooled_matches_loops_for_every_mask(name: str, nq: int, nk: int) -> None:
    check({"mask": MASKS[name](nq, nk, 2, 6)}, {"nq": nq, "nk": nk}, windows=((0, nq, 0, nk),), sizes=SIZES)


@pytest.mark.parametrize(("h", "hkv"), [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("item", [0, 1])
def test_pooled_matches_loops_for_every_head_and_item(h: int, hkv: int, item: int) -> None:
    for head in range(h):
        arguments = {"mask": MASKS["dense of heads"](11, 13, 2, h), "bias": biases.Dense(rand(2, h, 11, 13, seed=8))}
        check(arguments, {"h": h, "hkv": hkv}, item=item, head=head)


@pytest.mark.parametrize("window", [(0, 1, 0, 1), (3, 10, 5, 6), (10, 11, 0, 13), (2, 9, 4, 13), (0, 5, 8, 13)])
@pytest.mark.parametrize("name", ["none", "causal", "window", "left padding, causal", "dense of items", "global"])
def test_pooled_matches_loops_in_part_of_the_matrix(window: tuple[int, int, int, int], name: str) -> None:
    check({"mask": MASKS[name](11, 13, 2, 6)}, {}, windows=(window,), sizes=SIZES)


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Softmax(0.7, sink=0.5),
        normalizers.Softmax(sink=rand(6, seed=3)),
        normalizers.Softmax(key=rand(6, 3, seed=4)),
        normalizers.Sigmoid(),
        normalizers.Sigmoid(-1.5),
        normalizers.Entmax(1.5),
        normalizers.Entmax(2.0),
        normalizers.Hard(),
        normalizers.EluPlusOne(),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["none", "causal", "padding", "nothing"])
def test_pooled_matches_loops_for_every_normalizer(normalizer: normalizers.Normalizer, name: str) -> None:
    check({"mask": MASKS[name](11, 13, 2, 6), "normalizer": normalizer}, {}, sizes=((2, 3), (11, 13)), eps=256)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bias": biases.SoftCap(0.8)},
        {"bias": biases.ALiBi()},
        {"bias": biases.Dense(torch.where(rand(11, 13, seed=8) > 0, -torch.inf, 0.0))},
        {"bias": (biases.Dense(rand(1, 13, seed=8)), biases.SoftCap(0.8)), "score": Dot(0.9)},
        {"score": Additive(rand(7, seed=1), rand(7, 3, seed=2), rand(7, 3, seed=3))},
    ],
    ids=["cap", "alibi", "hides", "both", "additive"],
)
def test_pooled_matches_loops_for_biases_and_scores(arguments: dict[str, Any]) -> None:
    check(arguments | {"mask": masks.Causal()}, {}, sizes=((2, 3), (11, 13)), eps=256)


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Prefix(6)], ids=str)  # the second masks whole tiles
def test_masked_pairs_count_as_zero_among_negative_weights(mask: masks.Mask) -> None:
    q, k, v = triple(b=1, h=1, hkv=1)
    normalizer = normalizers.Identity()
    _, _, weights = oracle(-q.abs(), k.abs(), v, mask=mask, normalizer=normalizer)
    call = Call.of(-q.abs(), k.abs(), v, mask, normalizer=normalizer)
    visible = mask.dense(11, 13)[0, 0]
    for size in ((1, 1), (2, 2), (3, 4), (11, 13)):
        got = maps.pooled(call, row_state(call), size=size)
        top, mean, _ = by_loops(weights[0, 0], visible, edges(0, 11, size[0]), edges(0, 13, size[1]))
        close(got.maximum, top)
        close(got.mean, mean)
    assert got.maximum.min() < 0 == got.maximum.max()


def test_default_tile_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows, columns = BY_DEVICE["cpu"].picture
    nq, nk = 2 * rows + 37, columns + 101
    q, k, v = triple(b=1, h=2, hkv=1, nq=nq, nk=nk)
    mask = masks.Causal()
    _, weights = attend(q, k, v, mask=mask, kernel="eager", return_weights=True)
    call = Call.of(q, k, v, mask)
    head = maps.HeadMap(call, row_state(call), head=1)
    visible = mask.dense(nq, nk)[0, 0]
    for window, size in ((slice(0, nq), (2, 1)), (slice(0, nq), (97, 89)), (slice(101, 230), (41, 7))):
        got = head.pooled(window, slice(5, None), size)
        want = by_loops(weights[0, 1], visible, edges(window.start, window.stop, size[0]), edges(5, nk, size[1]))
        for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
            close(getattr(got, name), value)


@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=str)
def test_uncounted_queries_have_zero_weights(mask: masks.Mask | None) -> None:
    """Padding may hold NaN, which must not spread."""
    q, k, v = triple()
    _, _, weights = oracle(q, k, v, mask=mask)
    real = torch.rand(2, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    call = Call.of(q.masked_fill(~real[:, None, :, None], torch.nan), k, v, mask)
    counts = real[1, :, None].expand(11, 13)
    visible = counts if mask is None else counts & mask.dense(11, 13)[0, 0]
    want = by_loops(weights[1, 4].masked_fill(~counts, 0), visible, edges(0, 11, 4), edges(0, 13, 3))
    got = maps.pooled(call, row_state(call), item=1, head=4, size=(4, 3), real=real)
    for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
        close(getattr(got, name), value)


def test_threads_draw_the_same_picture() -> None:
    q, k, v = triple(nq=53, nk=59)
    call = Call.of(q, k, v, masks.Causal())
    rows = row_state(call)
    one = maps.pooled(call, rows, item=1, head=5, size=(7, 11))
    torch.set_num_threads(3)
    try:
        three = maps.pooled(call, rows, item=1, head=5, size=(7, 11))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one.mean, three.mean)
    assert torch.equal(one.maximum, three.maximum)


def test_pooling_preserves_mass_and_reports_progress() -> None:
    """Mean × pairs is the mass of a bin, and the masses of all bins sum to the number of queries."""
    q, k, v = triple(nq=31, nk=37)
    call = Call.of(q, k, v, masks.Window(9))
    progress: list[int] = []
    head = maps.HeadMap(call, row_state(call), item=0, head=2)
    got = head.pooled(size=(5, 3), on_rows=progress.append)
    pairs = got.row_edges.diff()[:, None] * got.column_edges.diff()
    close((got.mean * pairs).sum(), torch.tensor(31.0))
    assert sum(progress) == 31
    assert (got.maximum >= got.mean).all()
    assert repr(got) == "Picture(5 × 3 bins of queries 0:31 and keys 0:37)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = triple(dtype=dtype)
    _, _, weights = oracle(q, k, v)
    call = Call.of(q, k, v)
    got = maps.pooled(call, row_state(call), item=1, head=3, size=(4, 3))
    assert got.mean.dtype == got.maximum.dtype == got.visible.dtype == torch.float32
    want = by_loops(weights[1, 3], torch.ones(11, 13), edges(0, 11, 4), edges(0, 13, 3))
    close(got.mean, want[1], eps=64 if dtype == torch.float32 else 1024)


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


def test_a_part_of_the_map_computes_only_its_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = triple(b=1, h=1, hkv=1, nq=97, nk=101)
    call = Call.of(q, k, v, masks.Causal())
    head = maps.HeadMap(call, row_state(call))
    made: list[tuple[slice, slice]] = []
    fill = maps.WeightTiles.fill
    monkeypatch.setattr(maps.WeightTiles, "fill", lambda s, r, c, *x: made.append((r, c)) or fill(s, r, c, *x))
    head.pooled(slice(40, 50), slice(3, 20))
    assert 0 < sum((r.stop - r.start) * (c.stop - c.start) for r, c in made) == 10 * 17
    made.clear()
    head.pooled(slice(0, 40), slice(60, 90))  # all keys lie after all queries
    assert not made


@pytest.mark.parametrize(
    "arguments",
    [
        {"item": 2},
        {"head": 6},
        {"head": -1},
        {"size": (0, 4)},
        {"queries": slice(3, 3)},
        {"queries": slice(-2, None)},
        {"keys": slice(3, 14)},
        {"keys": slice(0, 9, 2)},
        {"real": torch.ones(2, 12, dtype=torch.bool)},
    ],
    ids=str,
)
def test_pooled_rejects_indices_out_of_range(arguments: dict[str, Any]) -> None:
    call = Call.of(*triple())
    rows = row_state(call)
    with unchecked(), refused(next(iter(arguments))):
        maps.pooled(call, rows, **arguments)
