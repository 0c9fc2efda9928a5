"""`check_mask` and `check_edit`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from qkv._contract import require
from qkv.edits import Edit, Head, Placed, edited
from qkv.engine import Call
from qkv.errors import InputError, kind_of
from qkv.kernels import serve
from qkv.masks import EMPTY, FULL, PARTIAL, Causal, Grid, Mask, Padding, Region, Tiles
from qkv.normalizers import Identity, Sigmoid
from qkv.testing.laws import (
    MANY,
    Composition,
    Size,
    Sizes,
    calling,
    check_class,
    check_half,
    check_kernels,
    check_masked,
    check_measure,
    check_output_of_copies,
    check_slopes,
    fail,
    forbid,
    key_heads_of,
    normal,
    parts,
    same,
    sizes_of,
)

MASK_SIZES: Sizes = ((7, 9), (9, 7), (33, 40), (130, 150), (300, 320), (90, 1100))
"""Queries and keys; with more than 1024 keys, kernels gather the keys of a sparse mask."""
TILES = ((1, 1), (2, 3), (4, 4), (7, 5), (16, 64), (64, 64), (256, 256))
STATUS = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}


def check_mask(mask: Mask, *, sizes: Sizes | None = None, batch: int = 2, heads: int = 4) -> None:
    """Check that a mask fulfils the contract of its base class; for use in your own tests.

    It checks: that ``sees`` returns booleans that broadcast and depend only on its positions, not on the tile; each
    shortcut (``classify`` on tiles of many sizes, ``band``, ``key_mask``, ``visible_keys``, ``factors``,
    ``alternatives``, ``ready``, ``visible``, ``by_value``) against ``sees``; output, weights and gradients of `attend`
    on every kernel against a dense definition in float64, where queries without visible keys give 0; finite
    differences; bfloat16 and float16; NaN in masked keys; `measure`; pickle and copy.deepcopy.

    Args:
        mask: the object.
        sizes: pairs (queries, keys), for a mask that fits only some sizes, such as ``Document``; by default several,
            except those that the mask rejects with `InputError`.
        batch: number of batch items, which must fit a mask that holds data.
        heads: number of query heads.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.masks import Causal, Mask, Window
    >>> check_mask(Window(3), sizes=[(5, 7)])
    >>> class Even(Mask):
    ...     band = (0, 4)
    ...     def sees(self, b, h, q, k, grid):
    ...         return (q - k) % 2 == 0
    >>> try:
    ...     check_mask(Even(), sizes=[(5, 7)])
    ... except AssertionError as error:
    ...     print(error)
    Even.band: (0, 4) says: got True at query position 2 and key 1 (batch item 0, head 0), expected False as sees says
    """
    check_class("check_mask", mask, Mask, "qkv.masks.Mask")
    with calling(mask, "sees", "checked"):
        require(mask, Mask, "sees", "b, h, q, k, grid", "True where a query may attend")
    fitting = _fitting(mask, sizes, batch, heads)
    for size in fitting:
        visible = _visible(mask, size.whole, size.grid).expand(size.batch, size.heads, -1, -1)
        _check_tiles(mask, size, visible)
        _check_status(mask, size, visible)
        with calling(mask, "shortcuts", f"read for {size}"):
            _check_shortcuts(mask, size, visible)
    with calling(mask, "by_value", "is True, but the mask has no hash"):
        copy = deepcopy(mask)
        if mask.by_value and not (hash(copy) == hash(mask) and copy == mask):
            fail(mask, "by_value", "is True, but a copy of the mask is not equal to it, or has another hash")
    _check_attend(mask, fitting)


def _fitting(mask: Mask, sizes: Sizes | None, batch: int, heads: int) -> list[Size]:
    """The sizes that the mask accepts, with one batch item if they are large; it must accept all that were passed."""
    fitting, refusal = [], ""
    for size in sizes_of(MASK_SIZES if sizes is None else sizes, (), batch, heads, key_heads_of(heads)):
        large = sizes is None and size.queries * size.keys > MANY
        for some in (replace(size, batch=1), size) if large else (size,):
            with calling(mask, "check", f"called for {some}"):
                try:
                    mask.check(some.grid)
                except InputError as error:
                    if sizes is not None:
                        raise
                    refusal = str(error)
                else:
                    fitting.append(some)
                    break
    if not fitting:
        fail(mask, "check", f"refuses all sizes of the check, the last by {refusal!r}; expected sizes=[(queries, "
             "keys)] that fit")  # fmt: skip
    return fitting


def _visible(mask: Mask, region: Region, grid: Grid) -> Tensor:
    """The pairs of a region that `sees` shows, checked, with four dimensions, of which batch and heads may be 1."""
    with calling(mask, "sees", f"called for a grid of {grid.n_queries} queries and {grid.n_keys} keys"):
        return Mask.visible(mask, region, grid)


def _check_tiles(mask: Mask, size: Size, visible: Tensor) -> None:
    """`sees` of a tile, and of a list of pairs, equals that of the whole matrix."""
    grid, whole = size.grid, " as sees says of the whole matrix"
    for name, region in parts(size):
        what, want = f"of a tile of {name}: ", region.of(visible)
        same(mask, "sees", what, _visible(mask, region, grid), want, expected=whole)
        with calling(mask, "visible", "called"):
            same(mask, "visible", what, mask.visible(region, grid), want, expected=whole)
    some = torch.randint(2**30, (4, 50), generator=torch.Generator().manual_seed(3))
    b, h, i, k = (x % n for x, n in zip(some, visible.shape, strict=True))
    with calling(mask, "sees", "does not broadcast: called with a list of 50 pairs"):
        pairs = mask.is_visible(b, h, i + grid.offset, k, grid).expand(50)
    same(mask, "sees", "of a list of pairs: ", pairs, visible[b, h, i, k], expected=whole)


def _check_status(mask: Mask, size: Size, visible: Tensor) -> None:
    """`classify` returns EMPTY only for tiles without visible pairs, and FULL only for tiles without masked pairs."""
    grid = size.grid
    for rows, columns in TILES:
        if (size.queries // rows) * (size.keys // columns) > 4096:
            continue
        for start, stop in ((0, None), (size.queries // 2, size.queries)):
            tiles = Tiles.of(grid, rows, columns, start, stop)
            shape = (size.batch, size.heads, len(tiles.q_first), len(tiles.k_first))
            with calling(mask, "classify", f"called for {shape[2]} × {shape[3]} tiles of {rows} × {columns}"):
                status = mask.classify(tiles, grid)
                if status.ndim != 4 or status.shape[2:] != shape[2:]:
                    fail(mask, "classify", f"returned {kind_of(status)} for {shape[2]} × {shape[3]} tiles")
                status = status.expand(shape)
            wrong = (status < EMPTY) | (status > FULL)
            forbid(mask, "classify", wrong, status, "EMPTY, PARTIAL or FULL", what="a status ")
            count = _counts(visible[:, :, start:], rows, columns)
            area = _counts(torch.ones_like(visible[:1, :1, start:]), rows, columns).expand(shape)
            wrong = ((status == EMPTY) & (count > 0)) | ((status == FULL) & (count < area))
            if bool(wrong.any()):
                b, h, r, c = place = tuple(int(x) for x in wrong.nonzero()[0])
                fail(
                    mask, "classify", f"says {STATUS[int(status[place])]} of query positions {int(tiles.q_first[r])} "
                    f"to {int(tiles.q_last[r])} and keys {int(tiles.k_first[c])} to {int(tiles.k_last[c])} of batch "
                    f"item {b}, head {h}, where sees is True for {int(count[place])} of {int(area[place])} pairs"
                )  # fmt: skip


def _counts(visible: Tensor, rows: int, columns: int) -> Tensor:
    """The number of visible pairs of each tile."""
    spare = (0, -visible.shape[3] % columns, 0, -visible.shape[2] % rows)
    whole = torch.nn.functional.pad(visible.to(torch.int32), spare)
    return whole.unflatten(3, (-1, columns)).sum(4).unflatten(2, (-1, rows)).sum(3)


def _check_shortcuts(mask: Mask, size: Size, visible: Tensor) -> None:
    """The other shortcuts show the same pairs as `sees`, or count them."""
    grid = size.grid

    def where(place: tuple[int, ...]) -> str:
        b, h, i, k = place
        return f"query position {i + grid.offset} and key {k} (batch item {b}, head {h})"

    def agree(method: str, says: str, got: Tensor) -> None:
        same(mask, method, says, got.expand_as(visible), visible, expected=" as sees says", where=where)

    if (band := mask.band) is not None:
        back = grid.rows(0, size.queries)[:, None] - grid.columns(0, size.keys)
        agree("band", f"{band} says: ", (back >= band[0]) & (back <= band[1]))
    if (keys := mask.key_mask(grid)) is not None:
        if keys.dtype != torch.bool or keys.ndim != 2:
            fail(mask, "key_mask", f"returned {kind_of(keys)}, expected booleans (1 or {size.batch}, {size.keys})")
        agree("key_mask", "says: ", keys[:, None, None])
    agree("ready", "for this grid says: ", _visible(mask.ready(grid), size.whole, grid))
    counts = mask.visible_keys(grid)
    if counts.ndim != 3:
        fail(mask, "visible_keys", f"returned {kind_of(counts)}, expected numbers (batch, heads, queries)")
    same(mask, "visible_keys", "", counts, visible.sum(-1), expected=" keys where sees is True")
    for method, together in (("factors", torch.logical_and), ("alternatives", torch.logical_or)):
        components = getattr(mask, method)()
        if not (isinstance(components, tuple) and components and all(isinstance(x, Mask) for x in components)):
            fail(mask, method, f"returned {components!r}, expected a tuple of masks")
        if len(components) > 1 or components[0] is not mask:
            made = _visible(components[0], size.whole, grid)
            for part in components[1:]:
                made = together(made, _visible(part, size.whole, grid))
            agree(method, "all of them say: " if method == "factors" else "one of them says: ", made)


def _check_attend(mask: Mask, sizes: list[Size]) -> None:
    first = sizes[0]
    plain = Composition(subject="mask", mask=mask)
    for size in sizes:
        check_kernels(plain, size, torch.float64 if size.small else torch.float32)
    for size in dict.fromkeys((first, sizes[min(3, len(sizes) - 1)])):
        check_masked(plain, size)
        lengths = [max(1, size.keys - 2 - item) for item in range(size.batch)]
        padding = mask & Padding(lengths)
        check_masked(Composition(subject="mask", mask=padding, label="padding on the right", about=mask), size)
    for normalizer in (Identity("keys"), Identity(), Sigmoid()):  # `Sigmoid` counts the visible keys
        label = f"normalizer {type(normalizer).__name__}"
        for size in sizes[:2]:
            check_kernels(Composition(subject="mask", mask=mask, normalizer=normalizer, label=label), size)
    check_slopes(plain, first)
    check_half(plain, sizes[min(2, len(sizes) - 1)])
    for size in dict.fromkeys((first, sizes[min(3, len(sizes) - 1)], sizes[-1])):
        check_measure(plain, size)
    check_output_of_copies(plain, first)


LENGTH, WIDTH = 9, 6
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_edit(edit: Edit, *, heads: int = 4, width: int = WIDTH) -> None:
    """Check that an edit fulfils the contract of its base class; for use in your own tests.

    It checks, with grouped heads, padding and three dtypes: that ``apply`` returns a tensor of the shape of the head's
    output, which is finite at real tokens; that it does not write to its input; and that it returns the same twice.

    Args:
        edit: the object.
        heads: number of query heads, at least 2.
        width: size of a head's values, if the object requires a particular one.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.edits import Edit, Scale
    >>> check_edit(Scale(2.0))
    >>> class InPlace(Edit):
    ...     def apply(self, head):
    ...         return head.output.mul_(2)
    >>> try:
    ...     check_edit(InPlace())
    ... except AssertionError as error:
    ...     print(error)
    InPlace.apply: wrote to head.output, expected it unchanged: with torch.float64
    """
    with calling(edit, "apply", "before any call"):
        edit.check()
    queries = torch.ones(2, LENGTH, dtype=torch.bool)
    queries[1, -2:] = False
    for dtype in DTYPES:
        where = f"with {dtype}"
        q = normal(2, heads, LENGTH, 8, seed=0).to(dtype)
        k, v = (normal(2, heads // 2, LENGTH, n, seed=s).to(dtype) for s, n in ((1, 8), (2, width)))
        call = Call.of(q, k, v, Causal())
        out = serve(call).out
        found = []
        for _ in range(2):
            head = Head("head 1 of a test call", out[:, 1].clone(), lambda: Placed(0, 0, queries, 0), True, 1, call)
            with calling(edit, "apply", where):
                found.append(edited(edit, head))
            if not torch.equal(head.output, out[:, 1]):
                fail(edit, "apply", f"wrote to head.output, expected it unchanged: {where}")
        first, second = found
        if not bool(first[queries].isfinite().all()):
            fail(edit, "apply", f"returned numbers that are not finite, expected finite ones: {where}")
        if not torch.equal(first, second):
            fail(edit, "apply", f"returned other numbers the second time, expected the same: {where}")
