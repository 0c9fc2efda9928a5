"""Pictures of one head: against materialised weights pooled by plain loops, and as laws; what a user types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MASKS, close, fits, largest_tensor, oracle, rand, set_sizes, triple, unchecked
from qkv import InputError, attend, biases, masks, normalizers
from qkv._engine.call import Call, as_biases
from qkv._engine.sizes import BY_DEVICE
from qkv.scores import Additive, Dot
from qkv.statistics import maps
from qkv.statistics.measure import row_state


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a handful of tokens crosses many of them, and that some bins are wider than a tile."""
    set_sizes(monkeypatch, picture=(4, 6))
    monkeypatch.setattr(maps, "SERIAL_PAIRS", 0)


def by_loops(
    weights: Tensor, seen: Tensor, rows: list[int], columns: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum, mean and visible share of every bin of weights (nq, nk), one after the other."""
    a, shown = weights.double().numpy(), seen.numpy()
    shape = (len(rows) - 1, len(columns) - 1)
    top, mean, visible = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            inside = slice(rows[i], rows[i + 1]), slice(columns[j], columns[j + 1])
            top[i, j], mean[i, j], visible[i, j] = a[inside].max(), a[inside].mean(), shown[inside].mean()
    return top, mean, visible


def edges(start: int, stop: int, most: int) -> list[int]:
    """As the definition says: bin b begins at ⌊b n / B⌋."""
    n = stop - start
    bins = min(n, most)
    return [start + (b * n) // bins for b in range(bins + 1)]


def check(
    asked: dict[str, Any],
    shapes: dict[str, int],
    *,
    item: int = 1,
    head: int = 1,
    windows: tuple[tuple[int, int, int, int], ...] = ((0, 11, 0, 13),),
    sizes: tuple[tuple[int, int], ...] = ((3, 5),),
    eps: float = 64,
) -> None:
    q, k, v = triple(**shapes)
    _, _, weights = oracle(q, k, v, **asked)
    mask = asked.get("mask")
    nq, nk = q.shape[2], k.shape[2]
    seen = torch.ones(1, 1, nq, nk, dtype=torch.bool) if mask is None else mask.dense(nq, nk, batch=2, heads=q.shape[1])
    seen = seen.expand(*q.shape[:2], -1, -1)[item, head]
    given = dict(asked)
    given["biases"] = as_biases(given.pop("bias", None))
    call = Call.of(q, k, v, **given)
    rows = row_state(call)
    for top, bottom, left, right in windows:
        for size in sizes:
            got = maps.pooled(
                call, rows, item=item, head=head, queries=slice(top, bottom), keys=slice(left, right), size=size
            )
            down, across = edges(top, bottom, size[0]), edges(left, right, size[1])
            assert got.row_edges.tolist() == down
            assert got.column_edges.tolist() == across
            want = by_loops(weights[item, head], seen, down, across)
            for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
                close(getattr(got, name), value, eps=eps)


SIZES = ((1, 1), (2, 3), (5, 7), (7, 2), (11, 13), (99, 99))


@pytest.mark.parametrize(
    ("name", "nq", "nk"), [(name, *n) for name in MASKS for n in [(11, 13), (13, 7), (1, 13)] if fits(name, *n)]
)
def test_masks(name: str, nq: int, nk: int) -> None:
    check({"mask": MASKS[name](nq, nk, 2, 6)}, {"nq": nq, "nk": nk}, windows=((0, nq, 0, nk),), sizes=SIZES)


@pytest.mark.parametrize(("h", "hkv"), [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("item", [0, 1])
def test_every_head_and_item(h: int, hkv: int, item: int) -> None:
    for head in range(h):
        asked = {"mask": MASKS["dense of heads"](11, 13, 2, h), "bias": biases.Dense(rand(2, h, 11, 13, seed=8))}
        check(asked, {"h": h, "hkv": hkv}, item=item, head=head)


@pytest.mark.parametrize("window", [(0, 1, 0, 1), (3, 10, 5, 6), (10, 11, 0, 13), (2, 9, 4, 13), (0, 5, 8, 13)])
@pytest.mark.parametrize("name", ["none", "causal", "window", "left padding, causal", "dense of items", "global"])
def test_windows(window: tuple[int, int, int, int], name: str) -> None:
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
def test_normalizers(normalizer: normalizers.Normalizer, name: str) -> None:
    check({"mask": MASKS[name](11, 13, 2, 6), "normalizer": normalizer}, {}, sizes=((2, 3), (11, 13)), eps=256)


@pytest.mark.parametrize(
    "asked",
    [
        {"bias": biases.SoftCap(0.8)},
        {"bias": biases.ALiBi()},
        {"bias": biases.Dense(torch.where(rand(11, 13, seed=8) > 0, -torch.inf, 0.0))},
        {"bias": (biases.Dense(rand(1, 13, seed=8)), biases.SoftCap(0.8)), "score": Dot(0.9)},
        {"score": Additive(rand(7, seed=1), rand(7, 3, seed=2), rand(7, 3, seed=3))},
    ],
    ids=["cap", "alibi", "hides", "both", "additive"],
)
def test_biases_and_scores(asked: dict[str, Any]) -> None:
    check(asked | {"mask": masks.Causal()}, {}, sizes=((2, 3), (11, 13)), eps=256)


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Prefix(6)], ids=str)  # whole tiles of the second are hidden
def test_hidden_pairs_are_larger_than_negative_weights(mask: masks.Mask) -> None:
    q, k, v = triple(b=1, h=1, hkv=1)
    normalizer = normalizers.Identity()
    _, _, weights = oracle(-q.abs(), k.abs(), v, mask=mask, normalizer=normalizer)
    call = Call.of(-q.abs(), k.abs(), v, mask, normalizer=normalizer)
    seen = mask.dense(11, 13)[0, 0]
    for size in ((1, 1), (2, 2), (3, 4), (11, 13)):
        got = maps.pooled(call, row_state(call), size=size)
        top, mean, _ = by_loops(weights[0, 0], seen, edges(0, 11, size[0]), edges(0, 13, size[1]))
        close(got.maximum, top)
        close(got.mean, mean)
    assert got.maximum.min() < 0 == got.maximum.max()


def test_tiles_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows, columns = BY_DEVICE["cpu"].picture
    nq, nk = 2 * rows + 37, columns + 101
    q, k, v = triple(b=1, h=2, hkv=1, nq=nq, nk=nk)
    mask = masks.Causal()
    _, weights = attend(q, k, v, mask=mask, kernel="eager", return_weights=True)
    call = Call.of(q, k, v, mask)
    head = maps.HeadMap(call, row_state(call), head=1)
    seen = mask.dense(nq, nk)[0, 0]
    for window, size in ((slice(0, nq), (2, 1)), (slice(0, nq), (97, 89)), (slice(101, 230), (41, 7))):
        got = head.pooled(window, slice(5, None), size)
        want = by_loops(weights[0, 1], seen, edges(window.start, window.stop, size[0]), edges(5, nk, size[1]))
        for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
            close(getattr(got, name), value)


@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=str)
def test_queries_that_do_not_count_see_nothing(mask: masks.Mask | None) -> None:
    """Padding may hold NaN; it stays where it is."""
    q, k, v = triple()
    _, _, weights = oracle(q, k, v, mask=mask)
    real = torch.rand(2, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    call = Call.of(q.masked_fill(~real[:, None, :, None], torch.nan), k, v, mask)
    counts = real[1, :, None].expand(11, 13)
    seen = counts if mask is None else counts & mask.dense(11, 13)[0, 0]
    want = by_loops(weights[1, 4].masked_fill(~counts, 0), seen, edges(0, 11, 4), edges(0, 13, 3))
    got = maps.pooled(call, row_state(call), item=1, head=4, size=(4, 3), real=real)
    for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
        close(getattr(got, name), value)


def test_threads_agree() -> None:
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


def test_mass_is_kept_and_rows_are_heard() -> None:
    """Mean × pairs is the mass of a bin: all of them together weigh as much as there are queries."""
    q, k, v = triple(nq=31, nk=37)
    call = Call.of(q, k, v, masks.Window(9))
    heard: list[int] = []
    head = maps.HeadMap(call, row_state(call), item=0, head=2)
    got = head.pooled(size=(5, 3), on_rows=heard.append)
    pairs = got.row_edges.diff()[:, None] * got.column_edges.diff()
    close((got.mean * pairs).sum(), torch.tensor(31.0))
    assert sum(heard) == 31
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
    """Nothing larger than the inputs, a tile or the picture, however many pairs."""
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


def test_a_window_makes_only_its_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = triple(b=1, h=1, hkv=1, nq=97, nk=101)
    call = Call.of(q, k, v, masks.Causal())
    head = maps.HeadMap(call, row_state(call))
    made: list[tuple[slice, slice]] = []
    fill = maps.WeightTiles.fill
    monkeypatch.setattr(maps.WeightTiles, "fill", lambda s, r, c, *x: made.append((r, c)) or fill(s, r, c, *x))
    head.pooled(slice(40, 50), slice(3, 20))
    assert 0 < sum((r.stop - r.start) * (c.stop - c.start) for r, c in made) == 10 * 17
    made.clear()
    head.pooled(slice(0, 40), slice(60, 90))  # ahead of every one of these queries
    assert not made


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"item": 2}, "item is 2, expected 0..1"),
        ({"head": 6}, "head is 6, expected 0..5"),
        ({"head": -1}, "head is -1, expected 0..5"),
        ({"size": (0, 4)}, r"size is \(0, 4\), expected at least 1 bin"),
        ({"queries": slice(3, 3)}, "queries is 3:3, expected a:b with 0 ≤ a < b ≤ 11"),
        ({"queries": slice(-2, None)}, "queries is -2:11, expected"),
        ({"keys": slice(3, 14)}, "keys is 3:14, expected a:b with 0 ≤ a < b ≤ 13"),
        ({"keys": slice(0, 9, 2)}, "keys is 0:9"),
        ({"real": torch.ones(2, 12, dtype=torch.bool)}, r"real is torch.bool of shape \(2, 12\), expected"),
    ],
)
def test_bad_input(asked: dict[str, Any], sentence: str) -> None:
    call = Call.of(*triple())
    rows = row_state(call)
    with unchecked(), pytest.raises(InputError, match=sentence):
        maps.pooled(call, rows, **asked)
