"""Masks against their definitions, and laws of the block status of tiles."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkv
from conftest import MASKS, fits, grids, mask_trees, refused, set_sizes, set_tile, unchecked
from qkv._engine.call import Call
from qkv.biases import Dense as Bias
from qkv.kernels.flash import blocks as parts
from qkv.kernels.flash import decompose as cuts
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
    longformer,
    patterns,
)
from qkv.reference.parts import is_visible

mpl.use("Agg")
SIZES = [(1, 1), (7, 11), (11, 7), (1, 5), (5, 1)]


def defined(mask: Mask | None, grid: Grid) -> Tensor:
    """The mask from the definition of each, pair by pair."""
    nq, nk = grid.n_queries, grid.n_keys
    seen = np.empty((grid.batch, grid.heads, nq, nk), dtype=bool)
    with unchecked():
        for b, h, i, j in np.ndindex(*seen.shape):
            seen[b, h, i, j] = is_visible(mask, b, h, i, j, nq, nk)
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
    grid = data.draw(grids(most=8))
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    assert torch.equal(shown(mask, grid), defined(mask, grid))


@given(st.data())
def test_visible_of_a_region_is_a_slice_of_dense(data: st.DataObject) -> None:
    grid = data.draw(grids())
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    cuts = []
    for size in (grid.batch, grid.heads, grid.n_queries, grid.n_keys):
        start = data.draw(st.integers(0, size - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, size))))
    b, h, rows, columns = cuts
    part = mask.visible(Region(rows, columns, b, h), grid)
    want = shown(mask, grid)[b, h, rows, columns]
    assert torch.equal(part.expand_as(want), want)


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
    assert picture(longformer(2, [0]), 4, 4) == ["xxxx", "xxx.", "xxxx", "x.xx"]
    assert picture(longformer(2, [0], causal=True), 5, 5) == ["x....", "xx...", "xxx..", "xxxx.", "x.xxx"]
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


def test_shifted_aligns_queries_in_a_buffer_with_unused_rows() -> None:
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


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 49])
def test_visible_entries_grow_linearly(n: int) -> None:
    """n·g for global tokens (each both ways), n·r for random keys, n·√n for strides of √n."""

    def entries(mask: Mask) -> int:
        count = int(mask.dense(n, n).sum())
        assert mask.sparsity(n) == pytest.approx(1 - count / n**2)
        return count

    root = round(n**0.5)
    assert entries(Global([0, 3, -1])) == 2 * 3 * n - 3 * 3
    assert entries(Global([-1, n - 1])) == 2 * n - 1  # one token, named twice
    assert entries(RandomKeys(5, seed=3)) == 5 * n
    assert entries(Strided(root)) == n * root
    assert entries((Strided(root) | Window(root)) & Causal()) < 2 * n * root
    assert entries(Dilated(3, 2)) == 3 * n - 2 - 4


@given(st.data())
def test_visible_keys_and_sparsity_count_visible_pairs(data: st.DataObject) -> None:
    grid = data.draw(grids())
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    seen = shown(mask, grid)
    for counted in (mask.visible_keys(grid), base._count(mask, grid, data.draw(st.integers(1, 5)))):
        assert torch.equal(counted.expand(seen.shape[:3]), seen.sum(-1))
    if mask.band is not None:
        of_keys = base.band_counts(mask.band, grid)[1]
        assert torch.equal(of_keys.expand(*seen.shape[:2], grid.n_keys), seen.sum(-2))
    sizes = {"batch": grid.batch, "heads": grid.heads}
    assert mask.sparsity(grid.n_queries, grid.n_keys, **sizes) == pytest.approx(1 - seen.double().mean().item())


@pytest.mark.parametrize("size", [0, 1, 3, 6, 12, 13, 99])
@pytest.mark.parametrize("seed", [0, 7])
def test_random_keys_are_distinct_and_reproducible(size: int, seed: int) -> None:
    seen = RandomKeys(size, seed).dense(13, 13)
    assert (seen.sum(-1) == min(size, 13)).all()  # a key drawn twice would be missing
    patterns._draw.cache_clear()
    assert torch.equal(RandomKeys(size, seed).dense(13, 13), seen)
    assert torch.equal(RandomKeys(size, seed).dense(5, 13), seen[:, :, 8:])  # a chunk of queries has the same keys
    if 0 < size < 13:
        assert not torch.equal(RandomKeys(size, seed + 1).dense(13, 13), seen)


def test_random_keys_are_drawn_evenly() -> None:
    counts = torch.stack([RandomKeys(4, seed).dense(32, 32)[0, 0].sum(0) for seed in range(50)]).double().sum(0)
    assert counts.sum() == 50 * 32 * 4
    assert ((counts - 200).abs() < 5 * 200**0.5).all()


@pytest.mark.parametrize("near", [Window(3, ahead=2), Global([0, -1]), Causal(), Prefix(0), ~Prefix(0)], ids=str)
@pytest.mark.parametrize("size", [1, 4, 20])
@pytest.mark.parametrize("rows", [3, 1024])
def test_random_keys_besides_a_mask_are_additional(
    near: Mask, size: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "DRAW_ROWS", rows)
    patterns._draw.cache_clear()
    seen, more = near.dense(11, 11), RandomKeys(size, besides=near).dense(11, 11)
    assert not (seen & more).any()
    assert torch.equal(more.sum(-1), (11 - seen.sum(-1)).clamp(max=size))
    patterns._draw.cache_clear()


@pytest.mark.parametrize(("nq", "nk"), [(13, 13), (7, 13), (13, 7), (1, 5)])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("inner", [Causal(), Window(2), Window(1, ahead=1), Global([0, -1]), ~Strided(2)], ids=str)
def test_blockwise_is_the_mask_of_the_blocks(inner: Mask, size: int, nq: int, nk: int) -> None:
    position = torch.arange(nq) + nk - nq
    first = position[0].item() // size  # blocks of queries before the first key are negative
    blocks = Grid(1, 1, position[-1].item() // size - first + 1, -(-nk // size), first)
    table = inner.visible(Region(slice(0, blocks.n_queries), slice(0, blocks.n_keys)), blocks)[0, 0]
    want = table[position.div(size, rounding_mode="floor") - first][:, torch.arange(nk) // size]
    assert torch.equal(Blockwise(inner, size).dense(nq, nk)[0, 0], want)


@pytest.mark.parametrize("block", [1, 2, 4, 5])
@pytest.mark.parametrize("random", [0, 1, 2])
@pytest.mark.parametrize("n", [40, 38])
def test_bigbird_block_by_block(block: int, random: int, n: int) -> None:
    """First and last blocks are global; other blocks attend to three blocks around their own and `random` more."""
    seen = bigbird(block, random, seed=3).dense(n, n)[0, 0]
    count = -(-n // block)
    table = seen[::block, ::block]
    assert torch.equal(table.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :n], seen)  # whole blocks
    for ends in (table[0], table[-1], table[:, 0], table[:, -1]):
        assert ends.all()
    i = torch.arange(count)
    near = ((i[:, None] - i).abs() <= 1) | torch.isin(i, torch.tensor([0, count - 1]))
    inside = slice(1, count - 1)
    assert table[near].all()
    assert torch.equal((table & ~near)[inside].sum(-1), (count - near.sum(-1)).clamp(max=random)[inside])


@pytest.mark.parametrize("window", [2, 4, 6])
def test_longformer_has_half_its_window_on_each_side(window: int) -> None:
    seen = longformer(window, []).dense(20, 20)[0, 0]
    middle = slice(window, 20 - window)
    assert (seen.sum(-1)[middle] == window + 1).all()  # and its own
    assert torch.equal(seen, seen.T)
    causal = longformer(window, [3], causal=True).dense(20, 20)[0, 0]
    assert not causal.triu(1).any()
    assert causal[3:, 3].all()
    assert causal[3, : 3 + 1].all()
    assert (longformer(window, [], causal=True).dense(20, 20)[0, 0].sum(-1)[window:] == window + 1).all()


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nq", "nk"), [(13, 13), (5, 13)])
@pytest.mark.parametrize("mask", [Causal(), longformer(2), bigbird(2, 1), Padding([9]), ~Window(3)], ids=str)
def test_a_plot_shows_the_dense_mask(mask: Mask, nq: int, nk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, seen = Grid.of(nq, nk), mask.dense(nq, nk)[0, 0].double()
    assert np.array_equal(base.shares(mask, grid), seen.numpy())
    axes = mask.plot(nq, nk)
    (image,) = axes.get_images()
    assert np.array_equal(np.asarray(image.get_array()), seen.numpy())
    assert tuple(image.get_extent()) == (-0.5, nk - 0.5, nq - 0.5, -0.5)
    assert f"{1 - seen.mean():.0%} masked" in axes.get_title()
    monkeypatch.setattr(base, "PAIRS", 4)  # a cell is now the visible share of a tile, also at the edges
    size = -(-nk // 4)
    shares = base.shares(mask, grid)
    for (r, c), share in np.ndenumerate(shares):
        assert share == pytest.approx(seen[r * size : (r + 1) * size, c * size : (c + 1) * size].mean().item())
    assert shares.shape == (-(-nq // size), -(-nk // size))


def test_a_plot_of_tiles_shows_their_block_status() -> None:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots()
    assert Causal().plot(5, tile=2, ax=axes) is axes
    kinds, _ = axes.get_images()
    tiles = [[2 * (c < r) + (c == r) for c in range(3)] for r in range(3)]
    want = np.repeat(np.repeat(tiles, 2, 0), 2, 1)[:5, :5]
    want[4, 4] = FULL  # a tile of one pair
    assert np.array_equal(np.asarray(kinds.get_array()), want)


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
        Dense(torch.tensor([[True]])), Global([0, -1]), Global([2, 3, 4]), Global([]), ~Global([1, 2]),
        Strided(1), Strided(3), ~Strided(2), Dilated(3, 2), Dilated(1, 5), Dilated(2, 3, ahead=1),
        Blockwise(Causal(), 3), Blockwise(Window(2, ahead=1), 4), Blockwise(Global([-1]), 2), Blockwise(Strided(2), 2),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_block_status_of_simple_masks_is_exact(mask: Mask, nq: int, nk: int, size: int) -> None:
    grid = Grid.of(nq, nk, 2, 1)
    tiles = Tiles.of(grid, size, size + 1)
    want = truth(mask, tiles, grid)
    assert torch.equal(mask.classify(tiles, grid).expand_as(want), want)


@pytest.mark.parametrize(("nq", "nk"), [(13, 13), (7, 19)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_block_status_of_random_keys_is_exact(nq: int, nk: int, size: int) -> None:
    grid = Grid.of(nq, nk)
    tiles = Tiles.of(grid, size, size + 1)
    for mask in (RandomKeys(3), RandomKeys(nk - 1, seed=2), RandomKeys(99), RandomKeys(2, besides=Window(3))):
        for one in (mask, ~mask, Blockwise(mask, 2)):
            assert torch.equal(one.classify(tiles, grid), truth(one, tiles, grid))


def test_tiles_cover_the_matrix_once() -> None:
    tiles = Tiles.of(Grid.of(11, 7), 4, 3, start=2, stop=9)
    assert tiles.q_first.tolist() == [-2, 2]  # query i has position i − 4
    assert tiles.q_last.tolist() == [1, 4]
    assert tiles.k_first.tolist() == [0, 3, 6]
    assert tiles.k_last.tolist() == [2, 5, 6]


def test_bands_describe_the_visible_pairs() -> None:
    assert Causal().band == (0, float("inf"))
    assert Window(3, ahead=2).band == (-2, 2)
    assert (Causal() & Window(3, ahead=2)).band == (0, 2)
    for mask in (Prefix(3), Causal() & Prefix(3), Causal() | Window(2), ~Causal(), Shifted(Causal(), 1)):
        assert mask.band is None


# --- cutting a mask into calls ----------------------------------------------------------------------------------------


def pieces(mask: Mask | None, grid: Grid, *, biased: bool = False) -> list[parts.DenseBlock | parts.GatheredBlock]:
    """What the flash kernel would call the stock kernel with."""
    q, k = (torch.zeros(grid.batch, grid.heads, n, 1) for n in (grid.n_queries, grid.n_keys))
    bias = (Bias(torch.zeros(1, 1)),) if biased else ()
    cut = cuts.decompose(Call.of(q, k, k, mask, bias), training=False)
    return [part for cover in cut for block in cover for part in block]


def covered(mask: Mask | None, grid: Grid, *, biased: bool) -> Tensor:
    """How many of the flash kernel's calls show each pair."""
    count = torch.zeros(grid.batch, grid.heads, grid.n_queries, grid.n_keys, dtype=torch.int64)
    for part in pieces(mask, grid, biased=biased):
        if isinstance(part, parts.GatheredBlock):
            count_gathered(part, count, grid)
            continue
        for call in range(part.count):
            rows, keys = (slice(x.start + call * part.step, x.stop + call * part.step) for x in (part.rows, part.keys))
            where = count[part.batch][:, :, rows, keys]
            assert where.shape[2:] == (rows.stop - rows.start, keys.stop - keys.start)  # inside the matrix
            seen = torch.ones(where.shape[2:], dtype=torch.bool) if part.visible is None else part.visible
            if part.pattern is not None:
                assert part.visible is None
                seen = part.pattern == 0
                assert seen.any(3).all()  # the kernel assumes that every row of a pattern has a visible key
            where += (seen.tril() if part.causal else seen).long()
    return count


def count_gathered(part: parts.GatheredBlock, count: Tensor, grid: Grid) -> None:
    """Add the pairs of gathered tiles; a row must not contain a key twice."""
    size = part.tile
    for t, (row, columns) in enumerate(zip(part.row_tiles.tolist(), part.key_tiles.tolist(), strict=True)):
        assert len(set(columns)) == len(columns)
        for c, column in enumerate(columns):
            where = count[part.item, :, row * size : (row + 1) * size, column * size : (column + 1) * size]
            seen = torch.ones(1, size, size, dtype=torch.bool)
            if part.visible is not None:
                seen = part.visible[t, :, :, c * size : (c + 1) * size]
                assert not seen[..., where.shape[2] :].any()  # beyond the last key
            where += seen[..., : where.shape[2]].long()


@given(st.data())
def test_calls_of_the_flash_kernel_cover_each_visible_pair_once(data: st.DataObject) -> None:
    grid = data.draw(grids(most=40))
    mask = data.draw(mask_trees(grid.n_queries, grid.n_keys, grid.batch, grid.heads))
    with pytest.MonkeyPatch.context() as patch:
        set_tile(patch, data.draw(st.sampled_from([4, 8])))
        set_sizes(patch, sparse_keys=data.draw(st.sampled_from([1, 1000])))
        patch.setattr(cuts, "SPARSE_SHARE", data.draw(st.sampled_from([0.3, 0.8])))
        patch.setattr(cuts, "GATHERED", data.draw(st.sampled_from([1, 100])))
        patch.setattr(cuts, "MASK_ELEMENTS", data.draw(st.sampled_from([1, 100, 2**22])))
        got = covered(mask, grid, biased=data.draw(st.booleans()))
    assert torch.equal(got, shown(mask, grid).long())


@pytest.mark.parametrize(("nq", "nk"), [(41, 41), (41, 53), (53, 41), (97, 29)])
@pytest.mark.parametrize("tile", [4, 8, 16])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_bands_are_covered_once_mostly_by_one_call(
    nq: int, nk: int, tile: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, tile)
    grid = Grid.of(nq, nk, 2, 3)
    for size in (1, 2, tile - 1, tile, tile + 1):
        mask = Window(size, ahead=ahead)
        assert torch.equal(covered(mask, grid, biased=False), shown(mask, grid).long())
        assert torch.equal(covered(mask, grid, biased=True), shown(mask, grid).long())
        if min(nq, nk) > 40 and tile < 16:
            assert max(part.count for part in pieces(mask, grid) if isinstance(part, parts.DenseBlock)) >= 2


def test_no_mask_and_causal_need_no_mask_tensor() -> None:
    for mask in (None, Causal(), Window(99), Window(99, ahead=99)):
        for nq, nk in ((9, 9), (5, 9), (9, 5), (1, 9)):
            assert all(part.visible is None and part.pattern is None for part in pieces(mask, Grid.of(nq, nk)))
            seen = Causal().dense(nq, nk) if mask in (Causal(), Window(99)) else torch.ones(1, 1, nq, nk)
            assert torch.equal(covered(mask, Grid.of(nq, nk), biased=False), seen.long())


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "argument", "match"),
    [
        (lambda: Window(0), "size", None),
        (lambda: Window(3, ahead=-1), "ahead", None),
        (lambda: Prefix(-1), "length", None),
        (lambda: Padding([1.5]), "lengths", "float32"),
        (lambda: Padding([True]), "lengths", "bool"),
        (lambda: Padding(torch.ones(2, 3, dtype=torch.int64)), "lengths", r"\(2, 3\)"),
        (lambda: Padding([1], "top"), "side", None),
        (lambda: Document([0.0, 1.0]), "ids", "float32"),
        (lambda: Document(torch.zeros(1, 2, 3, dtype=torch.int64)), "ids", r"\(1, 2, 3\)"),
        (lambda: Dense(torch.ones(2, 3)), "mask", "float32"),
        (lambda: Dense(torch.ones(2, 3, dtype=torch.int64)), "mask", "int64"),
        (lambda: Dense([[True]]), "mask", "list"),
        (lambda: Dense(torch.tensor([True])), "mask", "1 dim"),
        (lambda: Dense(torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)), "mask", "5 dim"),
        (lambda: Causal() & torch.ones(2, 2, dtype=torch.bool), "mask", "combined with Tensor"),
        (lambda: Causal() | Causal, "mask", "combined with the class Causal"),
        (lambda: Padding([1, 2]).dense(2, 3, batch=3), "lengths", "2 numbers"),
        (lambda: Padding([4]).dense(2, 3), "lengths", r"4\.\.4"),
        (lambda: Padding([-1, 2]).dense(2, 3, batch=2), "lengths", r"-1\.\.2"),
        (lambda: Document([0, 0]).dense(2, 3), "ids", r"\(1, 2\)"),
        (lambda: Document([[0], [0]]).dense(1, 1, batch=3), "ids", r"\(2, 1\)"),
        (lambda: Document([0, 0]).dense(3, 2), "ids", "positions -1 to 1"),
        (lambda: Shifted(Document([0, 0]), 1).dense(2, 2), "ids", "positions 1 to 2"),
        (lambda: Global([0.5]), "indices", "float32"),
        (lambda: Global([[1]]), "indices", r"\(1, 1\)"),
        (lambda: Global([True]), "indices", "bool"),
        (lambda: Global([3]).dense(5, 3), "indices", "contains 3"),
        (lambda: Global([0, -4]).dense(3, 3), "indices", "contains -4"),
        (lambda: Strided(0), "step", None),
        (lambda: Dilated(0, 2), "size", None),
        (lambda: Dilated(2, 0), "step", None),
        (lambda: Dilated(2, 2, ahead=-1), "ahead", None),
        (lambda: RandomKeys(-1), "size", None),
        (lambda: RandomKeys(2).dense(4, 3), "n_queries", "before the first"),
        (lambda: Shifted(RandomKeys(2), 2).dense(2, 3), "n_queries", "after the last"),
        (lambda: RandomKeys(2, besides=Padding([9])), "besides", None),
        (lambda: Blockwise(Causal(), 0), "size", None),
        (lambda: Blockwise(Global([4]), 2).dense(7, 7), "indices", "contains 4"),
        (lambda: longformer(3), "window", None),
        (lambda: longformer(0), "window", None),
        (lambda: bigbird(0), "size", None),
        (lambda: bigbird(window=2), "window", None),
        (lambda: bigbird(random=-1), "random", None),
        (lambda: Causal().plot(0), "n_queries", None),
        (lambda: Causal().plot(3, 0), "n_keys", None),
        (lambda: Causal().plot(3, tile=0), "tile", None),
        (lambda: Padding([9]).plot(3), "lengths", r"9\.\.9"),
        (lambda: Dense(torch.ones(2, 3, dtype=torch.bool)).dense(3, 3), "mask", "broadcast"),
    ],
)  # fmt: skip
def test_masks_reject_wrong_arguments(make: object, argument: str, match: str | None) -> None:
    with unchecked(), refused(argument, match):
        make()  # type: ignore[operator]


def test_checks_reach_into_compositions() -> None:
    wrong = Padding([9])
    for mask in (wrong & Causal(), Causal() | wrong, ~wrong, Shifted(wrong, 0), Blockwise(wrong, 1)):
        with refused("lengths", match=r"9\.\.9"):
            mask.dense(2, 3)


def test_masks_compare_by_value() -> None:
    assert Window(3) & Causal() == Window(3) & Causal()
    assert Window(3) != Window(4)
    assert len({Causal(), Causal(), Window(2)}) == 2
    assert qkv.masks.Causal is Causal


def test_masks_reject_attributes_that_hide_a_method() -> None:
    class Own(Mask):
        def __init__(self) -> None:
            self.visible = torch.ones(3, dtype=torch.bool)  # type: ignore[assignment, method-assign]

        def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
            return k >= 0

    with refused("mask", match="hides the method"):
        qkv.attend(*torch.zeros(3, 1, 1, 3, 2), mask=Own())
