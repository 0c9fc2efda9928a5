"""Masks against their definitions, and laws of the block status of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkv
from conftest import MASKS, fits, grids, mask_trees, refusals, refused
from qkv.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    Blockwise,
    Causal,
    Dense,
    Dilated,
    Document,
    Global,
    Grid,
    Mask,
    Padding,
    Predicate,
    Prefix,
    RandomKeys,
    Region,
    Shifted,
    Strided,
    Tiles,
    Window,
    base,
    bigbird,
    built_in,
    longformer,
)  # fmt: skip
from qkv.reference import is_visible

mpl.use("Agg")
from qkv.masks.convert import mask_bits

SIZES = [(1, 1), (7, 11), (11, 7), (1, 5)]


def defined(mask: Mask | None, grid: Grid) -> Tensor:
    """The mask from the definition of each, pair by pair."""
    nq, nk = grid.n_queries, grid.n_keys
    seen = np.empty((grid.batch, grid.heads, nq, nk), dtype=bool)
    for b, h, i, j in np.ndindex(*seen.shape):
        seen[b, h, i, j] = is_visible(mask, b, h, i, j, nq, nk)
    return torch.from_numpy(seen)


def drawn(data: st.DataObject, most: int = 12) -> tuple[Grid, Mask]:
    """A grid and a random composition of masks for it."""
    grid = data.draw(grids(most))
    return grid, data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))


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


# --- visible pairs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nq", "nk"), [(name, *size) for name in MASKS for size in SIZES if name != "none" and fits(name, *size)]
)
def test_dense_is_the_definition(name: str, nq: int, nk: int) -> None:
    mask = MASKS[name](nq, nk, 2, 3)
    grid = Grid.of(nq, nk, 2, 3)
    assert torch.equal(shown(mask, grid), defined(mask, grid))


@given(st.data())
def test_compositions_are_the_definition(data: st.DataObject) -> None:
    """And a part, and counts, are those of the whole."""
    grid, mask = drawn(data, most=8)
    seen = shown(mask, grid)
    assert torch.equal(seen, defined(mask, grid))
    cuts = []
    for size in (grid.batch, grid.heads, grid.n_queries, grid.n_keys):
        start = data.draw(st.integers(0, size - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, size))))
    b, h, rows, columns = cuts
    part = mask.visible(Region(rows, columns, b, h), grid)
    assert torch.equal(part.expand_as(seen[b, h, rows, columns]), seen[b, h, rows, columns])
    for counted in (mask.visible_keys(grid), base._count(mask, grid, data.draw(st.integers(1, 5)))):
        assert torch.equal(counted.expand(seen.shape[:3]), seen.sum(-1))
    sizes = {"batch": grid.batch, "heads": grid.heads}
    assert mask.sparsity(grid.n_queries, grid.n_keys, **sizes) == pytest.approx(1 - seen.double().mean().item())


def test_masks_match_examples_by_hand() -> None:
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
    assert picture(Global([1, -1]), 4, 4) == [".x.x", "xxxx", ".x.x", "xxxx"]
    assert picture(Global([1, -1]), 2, 4) == [".x.x", "xxxx"]
    assert picture(Global([0]), 4, 2) == ["x.", "x.", "xx", "x."]  # query 2 has position 0
    assert picture(Strided(3), 4, 4) == ["x..x", ".x..", "..x.", "x..x"]
    assert picture(Strided(2), 2, 5) == [".x.x.", "x.x.x"]
    assert picture(Dilated(2, 2), 4, 4) == ["x...", ".x..", "x.x.", ".x.x"]
    assert picture(Dilated(2, 2, ahead=1), 3, 5) == ["x.x.x", ".x.x.", "..x.x"]
    assert picture(Blockwise(Causal(), 2), 3, 5) == ["xxxx.", "xxxx.", "xxxxx"]  # queries have positions 2, 3 and 4
    assert picture(Blockwise(Global([-1]), 2), 5, 5) == ["....x"] * 4 + ["xxxxx"]
    assert picture(longformer(4, []), 5, 5) == ["xxx..", "xxxx.", "xxxxx", ".xxxx", "..xxx"]
    assert picture(longformer(2, [0]), 4, 4) == ["xxxx", "xxx.", "xxxx", "x.xx"]
    assert picture(longformer(2, [0], causal=True), 5, 5) == ["x....", "xx...", "xxx..", "xxxx.", "x.xxx"]
    assert picture(Predicate(lambda b, h, q, k: q == k), 2, 3) == [".x.", "..x"]


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 6, 12, 13, 99])
def test_random_keys_are_distinct_and_reproducible(size: int) -> None:
    seen = RandomKeys(size, 7).dense(13, 13)
    assert (seen.sum(-1) == min(size, 13)).all()  # a key drawn twice would be missing
    built_in._draw.cache_clear()
    assert torch.equal(RandomKeys(size, 7).dense(13, 13), seen)
    assert torch.equal(RandomKeys(size, 7).dense(5, 13), seen[:, :, 8:])  # a chunk of queries has the same keys
    if 0 < size < 13:
        assert not torch.equal(RandomKeys(size, 8).dense(13, 13), seen)


@pytest.mark.parametrize("near", [Window(3, ahead=2), Global([0, -1]), Causal(), Prefix(0), ~Prefix(0)], ids=str)
@pytest.mark.parametrize("size", [1, 4, 20])
def test_random_keys_besides_a_mask_are_additional(near: Mask, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_in, "DRAW_ROWS", 3)  # rows drawn at once
    built_in._draw.cache_clear()
    seen, more = near.dense(11, 11), RandomKeys(size, besides=near).dense(11, 11)
    assert not (seen & more).any()
    assert torch.equal(more.sum(-1), (11 - seen.sum(-1)).clamp(max=size))
    built_in._draw.cache_clear()


# --- classes of tiles -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.data())
def test_full_tiles_are_full_and_empty_tiles_are_empty(data: st.DataObject) -> None:
    grid, mask = drawn(data)
    start = data.draw(st.integers(0, grid.n_queries - 1))
    stop = data.draw(st.integers(start + 1, grid.n_queries))
    tiles = Tiles.of(grid, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), start, stop)
    kinds, want = mask.classify(tiles, grid), truth(mask, tiles, grid)
    kinds = kinds.expand_as(want)
    assert ((kinds == PARTIAL) | (kinds == want)).all()


@pytest.mark.parametrize(
    "mask",
    [
        Causal(), Window(1), Window(3), Window(5, ahead=4), Prefix(0), Prefix(4), Prefix(99), ~Causal(), ~Prefix(5),
        Padding([5]), Padding([3], "left"), Padding([0, 6]), Shifted(Causal(), 2),
        Dense(torch.tensor([[True]])), Global([0, -1]), Global([2, 3, 4]), Global([]), ~Global([1, 2]),
        Strided(1), Strided(3), ~Strided(2), Dilated(3, 2), Dilated(1, 5), Dilated(2, 3, ahead=1),
        Blockwise(Causal(), 3), Blockwise(Window(2, ahead=1), 4), Blockwise(Global([-1]), 2), Blockwise(Strided(2), 2),
    ],
    ids=str,
)  # fmt: skip
def test_block_status_of_simple_masks_is_exact(mask: Mask) -> None:
    for nq, nk, size in ((13, 13, 1), (7, 19, 2), (19, 7, 3), (13, 13, 4), (7, 19, 4), (19, 7, 5)):
        grid = Grid.of(nq, nk, 2, 1)
        tiles = Tiles.of(grid, size, size + 1)
        want = truth(mask, tiles, grid)
        assert torch.equal(mask.classify(tiles, grid).expand_as(want), want), (nq, nk, size)


@pytest.mark.parametrize(("nq", "nk", "size"), [(13, 13, 1), (13, 13, 3), (7, 19, 2), (7, 19, 4)])
def test_block_status_of_random_keys_is_exact(nq: int, nk: int, size: int) -> None:
    grid = Grid.of(nq, nk)
    tiles = Tiles.of(grid, size, size + 1)
    for mask in (RandomKeys(3), RandomKeys(nk - 1, seed=2), RandomKeys(99), RandomKeys(2, besides=Window(3))):
        for one in (mask, ~mask, Blockwise(mask, 2)):
            assert torch.equal(one.classify(tiles, grid), truth(one, tiles, grid))


# --- a mask as bits ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.data())
def test_bits_of_a_mask_differ_from_its_visible_pairs(data: st.DataObject) -> None:
    grid, mask = drawn(data, most=150)
    want = mask.dense(grid.n_queries, grid.n_keys, batch=grid.batch, heads=grid.heads)
    for one in (mask, Dense(want), Dense(want.mT.contiguous().mT)):
        found = mask_bits(one, grid, 2**20)
        assert found is not None
        bits = torch.cat([torch.tensor([0, -1])[:, None].expand(2, 64), found.bits])[found.status.long()]
        pairs = (bits[..., None] >> torch.arange(64) & 1).bool()  # (b, h, rows, columns, 64, 64)
        dense = pairs.transpose(3, 4).flatten(2, 3).flatten(3, 4)[:, :, : grid.n_queries, : grid.n_keys]
        assert torch.equal(dense, want.expand_as(dense))
        assert not any(bool((x == y).all(-1).any()) for x, y in ((found.bits, 0), (found.bits, -1)))
        assert mask_bits(one, grid, 0) is None or not len(found.bits)


# --- wrong arguments --------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("size", lambda: Window(0)),
    ("ahead", lambda: Window(3, ahead=-1)),
    ("length", lambda: Prefix(-1)),
    ("lengths", lambda: Padding([1.5])),
    ("lengths", lambda: Padding(torch.ones(2, 3, dtype=torch.int64))),
    ("lengths", lambda: Padding([1, 2]).dense(2, 3, batch=3)),
    ("lengths", lambda: Padding([4]).dense(2, 3)),
    ("lengths", lambda: Padding([-1, 2]).dense(2, 3, batch=2)),
    ("side", lambda: Padding([1], "top")),
    ("ids", lambda: Document([0.0, 1.0])),
    ("ids", lambda: Document(torch.zeros(1, 2, 3, dtype=torch.int64))),
    ("ids", lambda: Document([0, 0]).dense(2, 3)),
    ("ids", lambda: Document([[0], [0]]).dense(1, 1, batch=3)),
    ("ids", lambda: Document([0, 0]).dense(3, 2)),
    ("ids", lambda: Shifted(Document([0, 0]), 1).dense(2, 2)),
    ("mask", lambda: Dense(torch.ones(2, 3))),
    ("mask", lambda: Dense([[True]])),
    ("mask", lambda: Dense(torch.tensor([True]))),
    ("mask", lambda: Dense(torch.ones(1, 1, 1, 1, 1, dtype=torch.bool))),
    ("mask", lambda: Dense(torch.ones(2, 3, dtype=torch.bool)).dense(3, 3)),
    ("mask", lambda: Causal() & torch.ones(2, 2, dtype=torch.bool)),
    ("indices", lambda: Global([True])),
    ("indices", lambda: Global([[1]])),
    ("indices", lambda: Global([3]).dense(5, 3)),
    ("indices", lambda: Blockwise(Global([4]), 2).dense(7, 7)),
    ("step", lambda: Strided(0)),
    ("size", lambda: Dilated(0, 2)),
    ("step", lambda: Dilated(2, 0)),
    ("ahead", lambda: Dilated(2, 2, ahead=-1)),
    ("size", lambda: RandomKeys(-1)),
    ("n_queries", lambda: RandomKeys(2).dense(4, 3)),
    ("n_queries", lambda: Shifted(RandomKeys(2), 2).dense(2, 3)),
    ("besides", lambda: RandomKeys(2, besides=Padding([9]))),
    ("size", lambda: Blockwise(Causal(), 0)),
    ("size", lambda: Window(4.5)),  # type: ignore[arg-type]
    ("step", lambda: Strided(4.5)),  # type: ignore[arg-type]
    ("length", lambda: Prefix(torch.ones(2))),  # type: ignore[arg-type]
    ("window", lambda: longformer(3)),
    ("window", lambda: longformer(0)),
    ("size", lambda: bigbird(0)),
    ("window", lambda: bigbird(window=2)),
    ("random", lambda: bigbird(random=-1)),
    ("n_queries", lambda: Causal().plot(0)),
    ("n_keys", lambda: Causal().plot(3, 0)),
    ("tile", lambda: Causal().plot(3, tile=0)),
]
REFUSALS += [
    ("lengths", lambda mask=mask: mask.dense(2, 3))  # checks reach into compositions
    for wrong in (Padding([9]),)
    for mask in (wrong & Causal(), Causal() | wrong, ~wrong, Shifted(wrong, 0), Blockwise(wrong, 1))
]


def test_a_size_of_numpy_or_torch_is_another_mask() -> None:
    for size in (np.int64(3), torch.tensor(3)):
        made: Any = size
        for mask, same in (
            (Strided(made), Strided(3)),
            (Dilated(made, made), Dilated(3, 3)),
            (Window(made), Window(3)),
        ):
            assert mask == same
            assert torch.equal(mask.dense(9, 9), same.dense(9, 9))


test_masks_reject_wrong_arguments = refusals(REFUSALS)


def test_masks_compare_by_value() -> None:
    assert Window(3) & Causal() == Window(3) & Causal()
    assert Window(3) != Window(4)
    assert len({Causal(), Causal(), Window(2)}) == 2


def test_masks_reject_attributes_that_hide_a_method() -> None:
    class Own(Mask):
        def __init__(self) -> None:
            self.visible = torch.ones(3, dtype=torch.bool)  # type: ignore[assignment, method-assign]

        def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
            return k >= 0

    with refused("mask", match="hides the method"):
        qkv.attend(*torch.zeros(3, 1, 1, 3, 2), mask=Own())
