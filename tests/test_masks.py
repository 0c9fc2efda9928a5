"""Masks: what they show, against the definitions; how they classify tiles, as laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkv
from conftest import MASKS, fits, grids, mask_trees, unchecked
from qkv import InputError
from qkv.kernels import flash
from qkv.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    Causal,
    Dense,
    Document,
    Grid,
    Mask,
    Padding,
    Predicate,
    Prefix,
    Region,
    Shifted,
    Tiles,
    Window,
)  # fmt: skip
from qkv.reference import sees

SIZES = [(1, 1), (7, 11), (11, 7), (1, 5), (5, 1)]


def defined(mask: Mask | None, grid: Grid) -> Tensor:
    """The mask from the definition of each, pair by pair."""
    nq, nk = grid.n_queries, grid.n_keys
    seen = np.empty((grid.batch, grid.heads, nq, nk), dtype=bool)
    with unchecked():
        for b, h, i, j in np.ndindex(*seen.shape):
            seen[b, h, i, j] = sees(mask, b, h, i, j, nq, nk)
    return torch.from_numpy(seen)


def shown(mask: Mask, grid: Grid) -> Tensor:
    """The mask from its own `dense`, for every batch item and head."""
    seen = mask.dense(grid.n_queries, grid.n_keys, batch=grid.batch, heads=grid.heads)
    return seen.expand(grid.batch, grid.heads, -1, -1)


def truth(mask: Mask, tiles: Tiles, grid: Grid) -> Tensor:
    """The tightest class of every tile."""
    seen = shown(mask, grid)
    out = torch.empty(grid.batch, grid.heads, len(tiles.q_first), len(tiles.k_first), dtype=torch.int8)
    for r, (top, bottom) in enumerate(zip(tiles.q_first, tiles.q_last, strict=True)):
        for c, (left, right) in enumerate(zip(tiles.k_first, tiles.k_last, strict=True)):
            tile = seen[:, :, top - grid.offset : bottom - grid.offset + 1, left : right + 1].flatten(2)
            out[:, :, r, c] = torch.where(tile.all(-1), FULL, torch.where(tile.any(-1), PARTIAL, EMPTY))
    return out


# --- what they show ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nq", "nk"), [(name, *size) for name in MASKS for size in SIZES if name != "none" and fits(name, *size)]
)
def test_dense_is_the_definition(name: str, nq: int, nk: int) -> None:
    mask = MASKS[name](nq, nk, 2, 3)
    grid = Grid.of(nq, nk, 2, 3)
    assert torch.equal(shown(mask, grid), defined(mask, grid))


@given(st.data())
def test_compositions_are_the_definition(data: st.DataObject) -> None:
    grid = data.draw(grids(most=8))
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    assert torch.equal(shown(mask, grid), defined(mask, grid))


@given(st.data())
def test_a_region_is_a_part_of_the_whole(data: st.DataObject) -> None:
    grid = data.draw(grids())
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    cuts = []
    for size in (grid.batch, grid.heads, grid.n_queries, grid.n_keys):
        start = data.draw(st.integers(0, size - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, size))))
    b, h, rows, columns = cuts
    part = mask.allowed(Region(rows, columns, b, h), grid)
    want = shown(mask, grid)[b, h, rows, columns]
    assert torch.equal(part.expand_as(want), want)


def test_worked_out_by_hand() -> None:
    def picture(mask: Mask, nq: int, nk: int) -> list[str]:
        return ["".join("x" if seen else "." for seen in row) for row in mask.dense(nq, nk)[0, 0].tolist()]

    assert picture(Causal(), 3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert picture(Causal(), 4, 2) == ["..", "..", "x.", "xx"]
    assert picture(Window(2), 4, 4) == ["x...", "xx..", ".xx.", "..xx"]
    assert picture(Window(2, ahead=1), 4, 4) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert picture(Prefix(2), 2, 3) == ["xx.", "xx."]
    assert picture(Padding([2]), 2, 3) == ["xx.", "xx."]
    assert picture(Padding([2], "left"), 2, 3) == [".xx", ".xx"]
    assert picture(Document([0, 0, -1, 1]), 4, 4) == ["xx..", "xx..", "....", "...x"]
    assert picture(Document([0, 0, -1, 1]), 2, 4) == ["....", "...x"]
    assert picture(~Causal(), 2, 3) == ["..x", "..."]
    assert picture(Shifted(Causal(), 0), 2, 3) == ["x..", "xx."]
    assert picture(Dense(torch.tensor([[True, False]])), 2, 2) == ["x.", "x."]
    assert picture(Predicate(lambda b, h, q, k: q == k), 2, 3) == [".x.", "..x"]


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (5, 11)])
@pytest.mark.parametrize("w", [1, 2, 3, 5])
def test_a_window_keeps_w_keys_its_own_included(w: int, nq: int, nk: int) -> None:
    seen = Window(w).dense(nq, nk)[0, 0]
    own = torch.arange(nq) + nk - nq
    assert torch.equal(seen.sum(-1), (own + 1).clamp(max=w))
    assert seen[torch.arange(nq), own].all()


@pytest.mark.parametrize("mask", [Causal(), Window(3), Window(2, ahead=2)], ids=str)
def test_bottom_right_alignment_is_the_end_of_the_square(mask: Mask) -> None:
    square = mask.dense(11, 11)
    assert torch.equal(mask.dense(4, 11), square[:, :, 7:])
    assert torch.equal(mask.dense(11, 4), mask.dense(11, 11)[:, :, :, 7:])  # keys before the first do not exist


@given(st.data())
def test_shifted_by_the_alignment_changes_nothing(data: st.DataObject) -> None:
    grid = data.draw(grids())
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    assert torch.equal(shown(Shifted(mask, grid.offset), grid), shown(mask, grid))


def test_shifted_is_a_cache_with_room_to_spare() -> None:
    whole = Window(3).dense(9, 9)[0, 0]
    chunk = Shifted(Window(3), 4).dense(2, 9)[0, 0]  # queries at positions 4 and 5 of 9 slots
    assert torch.equal(chunk, whole[4:6])


@given(st.data())
def test_boolean_algebra(data: st.DataObject) -> None:
    grid = data.draw(grids())
    tree = mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads)
    a, b = data.draw(tree), data.draw(tree)
    seen_a, seen_b = shown(a, grid), shown(b, grid)
    assert torch.equal(shown(a & b, grid), seen_a & seen_b)
    assert torch.equal(shown(a | b, grid), seen_a | seen_b)
    assert torch.equal(shown(~a, grid), ~seen_a)
    assert torch.equal(shown(~(a & b), grid), shown(~a | ~b, grid))  # De Morgan
    assert torch.equal(shown(~~a, grid), seen_a)
    assert not shown(a & ~a, grid).any()


# --- classes of tiles -------------------------------------------------------------------------------------------------


@given(st.data())
def test_full_tiles_are_full_and_empty_tiles_are_empty(data: st.DataObject) -> None:
    grid = data.draw(grids())
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    start = data.draw(st.integers(0, grid.n_queries - 1))
    stop = data.draw(st.integers(start + 1, grid.n_queries))
    tiles = Tiles.of(grid, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), start, stop)
    kinds, want = mask.classify(tiles, grid), truth(mask, tiles, grid)
    kinds = kinds.expand_as(want)
    assert ((kinds == PARTIAL) | (kinds == want)).all()


@pytest.mark.parametrize(("nq", "nk"), [(13, 13), (7, 19), (19, 7)])
@pytest.mark.parametrize(
    "mask",
    [
        Causal(), Window(1), Window(3), Window(5, ahead=4), Prefix(0), Prefix(4), Prefix(99), ~Causal(), ~Prefix(5),
        Padding([5]), Padding([3], "left"), Padding([0, 6]), Shifted(Causal(), 2),
        Dense(torch.tensor([[True]])),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_classes_of_simple_masks_are_as_tight_as_can_be(mask: Mask, nq: int, nk: int, size: int) -> None:
    grid = Grid.of(nq, nk, 2, 1)
    tiles = Tiles.of(grid, size, size + 1)
    want = truth(mask, tiles, grid)
    assert torch.equal(mask.classify(tiles, grid).expand_as(want), want)


def test_tiles_cover_the_matrix_once() -> None:
    tiles = Tiles.of(Grid.of(11, 7), 4, 3, start=2, stop=9)
    assert tiles.q_first.tolist() == [-2, 2]  # positions: query i stands at i − 4
    assert tiles.q_last.tolist() == [1, 4]
    assert tiles.k_first.tolist() == [0, 3, 6]
    assert tiles.k_last.tolist() == [2, 5, 6]


def test_bands_say_what_they_show() -> None:
    assert Causal().band == (0, float("inf"))
    assert Window(3, ahead=2).band == (-2, 2)
    assert (Causal() & Window(3, ahead=2)).band == (0, 2)
    for mask in (Prefix(3), Causal() & Prefix(3), Causal() | Window(2), ~Causal(), Shifted(Causal(), 1)):
        assert mask.band is None


# --- cutting a mask into calls ----------------------------------------------------------------------------------------


def covered(mask: Mask | None, grid: Grid, *, biased: bool) -> Tensor:
    """How many of the flash kernel's calls show each pair."""
    count = torch.zeros(grid.batch, grid.heads, grid.n_queries, grid.n_keys, dtype=torch.int64)
    for part in (part for block in flash.blocks(mask, grid, torch.float64, biased=biased) for part in block):
        for call in range(part.count):
            rows, keys = (slice(x.start + call * part.step, x.stop + call * part.step) for x in (part.rows, part.keys))
            where = count[part.batch][:, :, rows, keys]
            assert where.shape[2:] == (rows.stop - rows.start, keys.stop - keys.start)  # inside the matrix
            seen = torch.ones(where.shape[2:], dtype=torch.bool) if part.allowed is None else part.allowed
            if part.pattern is not None:
                assert part.allowed is None
                seen = part.pattern == 0
                assert seen.any(3).all()  # what the kernel relies on: every row of a pattern sees a key
            where += (seen.tril() if part.causal else seen).long()
    return count


@given(st.data())
def test_calls_of_the_flash_kernel_cover_each_visible_pair_once(data: st.DataObject) -> None:
    grid = data.draw(grids(most=40))
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "TILE", data.draw(st.sampled_from([4, 8])))
        patch.setattr(flash, "MASK_ELEMENTS", data.draw(st.sampled_from([1, 100, 2**22])))
        got = covered(mask, grid, biased=data.draw(st.booleans()))
    assert torch.equal(got, shown(mask, grid).long())


@pytest.mark.parametrize(("nq", "nk"), [(41, 41), (41, 53), (53, 41), (97, 29)])
@pytest.mark.parametrize("tile", [4, 8, 16])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_bands_are_covered_once_mostly_by_one_call(
    nq: int, nk: int, tile: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "TILE", tile)
    grid = Grid.of(nq, nk, 2, 3)
    for size in (1, 2, tile - 1, tile, tile + 1):
        mask = Window(size, ahead=ahead)
        assert torch.equal(covered(mask, grid, biased=False), shown(mask, grid).long())
        assert torch.equal(covered(mask, grid, biased=True), shown(mask, grid).long())
        if min(nq, nk) > 40 and tile < 16:
            assert max(part.count for block in flash.blocks(mask, grid, torch.float64) for part in block) >= 2


def test_no_mask_and_causal_need_no_mask_tensor() -> None:
    for mask in (None, Causal(), Window(99), Window(99, ahead=99)):
        for nq, nk in ((9, 9), (5, 9), (9, 5), (1, 9)):
            parts = [part for block in flash.blocks(mask, Grid.of(nq, nk), torch.float64) for part in block]
            assert all(part.allowed is None and part.pattern is None for part in parts)
            seen = Causal().dense(nq, nk) if mask in (Causal(), Window(99)) else torch.ones(1, 1, nq, nk)
            assert torch.equal(covered(mask, Grid.of(nq, nk), biased=False), seen.long())


# --- what they refuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0), r"Window: size is 0, expected at least 1"),
        (lambda: Window(3, ahead=-1), r"Window: ahead is -1, expected 0 or more"),
        (lambda: Prefix(-1), r"Prefix: length is -1, expected 0 or more"),
        (lambda: Padding([1.5]), r"Padding: lengths is torch.float32 of shape \(1,\), expected one integer"),
        (lambda: Padding([True]), r"Padding: lengths is torch.bool"),
        (lambda: Padding(torch.ones(2, 3, dtype=torch.int64)), r"Padding: lengths .* of shape \(2, 3\)"),
        (lambda: Padding([1], "top"), r"Padding: side is 'top', expected 'left' or 'right'"),
        (lambda: Document([0.0, 1.0]), r"Document: ids is torch.float32 of shape \(2,\), expected integers"),
        (lambda: Document(torch.zeros(1, 2, 3, dtype=torch.int64)), r"Document: ids .* of shape \(1, 2, 3\)"),
        (lambda: Dense(torch.ones(2, 3)), r"mask: got torch.float32.*True where.*bias=qkv.biases.Dense"),
        (lambda: Dense(torch.ones(2, 3, dtype=torch.int64)), r"mask: got torch.int64.*compare an integer mask with =="),
        (lambda: Dense([[True]]), r"mask: got list, expected a boolean tensor"),
        (lambda: Dense(torch.tensor([True])), r"mask: a tensor of 1 dimensions, expected \(nq, nk\)"),
        (lambda: Dense(torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)), r"mask: a tensor of 5 dimensions"),
        (lambda: Causal() & torch.ones(2, 2, dtype=torch.bool), r"cannot combine a mask with Tensor; wrap"),
        (lambda: Causal() | Causal, r"mask: cannot combine a mask with ABCMeta|with type"),
        (lambda: Padding([1, 2]).dense(2, 3, batch=3), r"Padding: 2 lengths for a batch of 3"),
        (lambda: Padding([4]).dense(2, 3), r"Padding: lengths lie in 4..4, expected 0..3"),
        (lambda: Padding([-1, 2]).dense(2, 3, batch=2), r"Padding: lengths lie in -1..2, expected 0..3"),
        (lambda: Document([0, 0]).dense(2, 3), r"Document: ids has shape \(1, 2\), expected \(1 or 1, 3\)"),
        (lambda: Document([[0], [0]]).dense(1, 1, batch=3), r"Document: ids has shape \(2, 1\)"),
        (lambda: Document([0, 0]).dense(3, 2), r"Document: 3 queries cannot have ids among 2 keys"),
        (lambda: Shifted(Document([0, 0]), 1).dense(2, 2), r"Document: 2 queries cannot have ids among 2 keys"),
        (lambda: Dense(torch.ones(2, 3, dtype=torch.bool)).dense(3, 3), r"shape \(1, 1, 2, 3\) does not broadcast"),
    ],
)  # fmt: skip
def test_what_masks_refuse(make: object, message: str) -> None:
    with unchecked(), pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_checks_reach_into_compositions() -> None:
    wrong = Padding([9])
    for mask in (wrong & Causal(), Causal() | wrong, ~wrong, Shifted(wrong, 0)):
        with pytest.raises(InputError, match=r"lengths lie in 9\.\.9"):
            mask.dense(2, 3)


def test_masks_are_values() -> None:
    assert Window(3) & Causal() == Window(3) & Causal()
    assert Window(3) != Window(4)
    assert len({Causal(), Causal(), Window(2)}) == 2
    assert qkv.masks.Causal is Causal
