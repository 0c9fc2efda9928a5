"""`check_mask` and `check_edit`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from qkv._contract import require
from qkv._engine.call import Call
from qkv.edits.base import Edit, Head, edited
from qkv.errors import InputError
from qkv.kernels import serve
from qkv.masks import EMPTY, FULL, PARTIAL, Causal, Grid, Mask, Padding, Tiles
from qkv.normalizers import Identity, Sigmoid
from qkv.testing import definition
from qkv.testing.agreement import (
    check_half,
    check_kernels,
    check_masked,
    check_measure,
    check_output_of_copies,
    check_slopes,
)
from qkv.testing.definition import Composition
from qkv.testing.inputs import (
    MANY,
    CheckFailed,
    Size,
    Sizes,
    calling,
    difference,
    fail,
    key_heads_of,
    normal,
    parts,
    shape_of,
    sizes_of,
)

MASK_SIZES: Sizes = ((7, 9), (9, 7), (33, 40), (130, 150), (300, 320), (90, 1100))
"""Queries and keys; with more than 1024 keys, kernels gather the keys of a sparse mask."""
TILES = ((1, 1), (2, 3), (4, 4), (7, 5), (16, 64), (64, 64), (256, 256))
T = TypeVar("T")
STATUS = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}


def check_mask(mask: Mask, *, sizes: Sizes | None = None, batch: int = 2, heads: int = 4) -> None:
    """Check that a mask fulfils the contract of its base class; for use in your own tests.

    It checks: that ``sees`` returns booleans that broadcast and depend only on its positions, not on the tile; each
    shortcut (``classify`` on tiles of many sizes, ``band``, ``key_mask``, ``visible_keys``,
    ``factors``, ``alternatives``, ``visible``, ``by_value``) against ``sees``; output, weights and gradients of
    `attend` on every kernel against a dense definition in float64, where queries without visible keys give 0; finite
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
    Even.band: (0, 4) says that query position 2 sees key 1, but sees says False
    """
    if not isinstance(mask, Mask):
        raise CheckFailed(
            f"check_mask: got {shape_of(mask)}, expected an object of a class that inherits from qkv.masks.Mask"
        )
    with calling(mask, "sees", "checked"):
        require(mask, Mask, "sees", "b, h, q, k, grid", "True where a query may attend")
    fitting = _fitting(mask, [*_all_sizes(sizes, batch, heads)], explicit=sizes is not None)
    for size in fitting:
        visible = definition.visible_pairs(mask, size.whole, size.grid).expand(size.batch, size.heads, -1, -1)
        _check_tiles(mask, size, visible)
        _check_status(mask, size, visible)
        _check_shortcuts(mask, size, visible)
    _check_value(mask, fitting[0])
    _check_attend(mask, fitting)


def _all_sizes(sizes: Sizes | None, batch: int, heads: int) -> list[Size]:
    return sizes_of(MASK_SIZES if sizes is None else sizes, (), batch, heads, key_heads_of(heads))


def _fitting(mask: Mask, sizes: list[Size], *, explicit: bool) -> list[Size]:
    """The sizes that the mask accepts; if the caller passed sizes, it must accept all of them."""
    fitting, refusal = [], None
    for size in sizes:
        if not explicit and size.queries * size.keys > MANY and _fits(mask, replace(size, batch=1)):
            fitting.append(replace(size, batch=1))
            continue
        with calling(mask, "check", f"called for {size}"):
            try:
                mask.check(size.grid)
            except InputError as error:
                if explicit:
                    raise
                refusal = error
                continue
        fitting.append(size)
    if not fitting:
        fail(mask, "check", f"refuses all sizes of the check, the last by {str(refusal)!r}; expected sizes=[(queries, "
             "keys)] that fit")  # fmt: skip
    return fitting


def _fits(mask: Mask, size: Size) -> bool:
    try:
        mask.check(size.grid)
    except InputError:
        return False
    return True


def _check_tiles(mask: Mask, size: Size, visible: Tensor) -> None:
    """`sees` of a tile, and of a list of pairs, equals that of the whole matrix."""
    grid = size.grid
    for name, region in parts(size):
        _same(mask, "sees", f"of a tile of {name}", definition.visible_pairs(mask, region, grid), region.of(visible))
        with calling(mask, "visible", "called"):
            made = mask.visible(region, grid)
        _same(mask, "visible", f"of a tile of {name}", made, region.of(visible))
    some = torch.randint(2**30, (4, 50), generator=torch.Generator().manual_seed(3))
    b, h, i, k = (x % n for x, n in zip(some, visible.shape, strict=True))
    with calling(mask, "sees", "called with a list of pairs, all indices of shape (50,)"):
        pairs = mask.sees(b, h, i + grid.offset, k, grid)
    if not isinstance(pairs, Tensor) or pairs.dtype != torch.bool or pairs.numel() not in (1, 50):
        fail(mask, "sees", "does not broadcast: a list of 50 pairs does not give 50 booleans")
    if (wrong := difference(pairs.expand(50), visible[b, h, i, k])) is not None:
        n = wrong.place[0]
        fail(
            mask, "sees", f"of a list of pairs says {wrong.got} for batch item {int(b[n])}, head {int(h[n])}, position "
            f"{int(i[n]) + grid.offset}, key {int(k[n])}, and of the whole matrix {wrong.want}"
        )  # fmt: skip


def _same(mask: Mask, method: str, what: str, got: Tensor, want: Tensor) -> None:
    if (wrong := difference(got, want)) is not None:
        b, h, i, k = wrong.place
        fail(
            mask, method, f"{what} is {wrong.got} for batch item {b}, head {h}, row {i}, column {k} of the tile, "
            f"expected {wrong.want}, the result of sees for the whole matrix"
        )  # fmt: skip


# --- shortcuts --------------------------------------------------------------------------------------------------------


def _check_status(mask: Mask, size: Size, visible: Tensor) -> None:
    """`classify` returns EMPTY only for tiles without visible pairs, and FULL only for tiles without masked pairs."""
    grid = size.grid
    for rows, columns in TILES:
        if (size.queries // rows) * (size.keys // columns) > 4096:
            continue
        for start, stop in ((0, None), (size.queries // 2, size.queries)):
            tiles = Tiles.of(grid, rows, columns, start, stop)
            with calling(mask, "classify", f"called for tiles of {rows} × {columns}"):
                made = mask.classify(tiles, grid)
            want = (len(tiles.q_first), len(tiles.k_first))
            fits = isinstance(made, Tensor) and made.ndim == 4 and made.shape[2:] == want
            if not fits or any(x not in (1, y) for x, y in zip(made.shape, visible.shape[:2], strict=False)):
                got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                fail(
                    mask, "classify", f"returned {got} for {want[0]} × {want[1]} tiles, expected (1 or {size.batch}, 1 "
                    f"or {size.heads}, {want[0]}, {want[1]})"
                )  # fmt: skip
            if bool(((made < EMPTY) | (made > FULL)).any()):
                fail(mask, "classify", f"returned {int(made.max())}, expected EMPTY, PARTIAL or FULL")
            count = _counts(visible[:, :, start:], rows, columns)
            area = _counts(torch.ones_like(visible[:1, :1, start:]), rows, columns)
            wrong = ((made == EMPTY) & (count > 0)) | ((made == FULL) & (count < area))
            if bool(wrong.any()):
                b, h, r, c = (int(x) for x in wrong.nonzero()[0])
                status = int(made[b if len(made) > 1 else 0, h if made.shape[1] > 1 else 0, r, c])
                fail(
                    mask, "classify", f"says {STATUS[status]} of query positions {int(tiles.q_first[r])} to "
                    f"{int(tiles.q_last[r])} and keys {int(tiles.k_first[c])} to {int(tiles.k_last[c])} of batch item "
                    f"{b}, head {h}, where sees is True for {int(count[b, h, r, c])} of {int(area[0, 0, r, c])} pairs"
                )  # fmt: skip


def _counts(visible: Tensor, rows: int, columns: int) -> Tensor:
    """The number of visible pairs of each tile."""
    spare = (0, -visible.shape[3] % columns, 0, -visible.shape[2] % rows)
    whole = torch.nn.functional.pad(visible.to(torch.int32), spare)
    return whole.unflatten(3, (-1, columns)).sum(4).unflatten(2, (-1, rows)).sum(3)


def _check_shortcuts(mask: Mask, size: Size, visible: Tensor) -> None:
    grid = size.grid
    position, key = grid.rows(0, size.queries)[:, None], grid.columns(0, size.keys)
    if (band := _read(mask, "band", lambda: mask.band)) is not None:
        back = position - key
        inside = ((back >= band[0]) & (back <= band[1])).expand_as(visible)
        _claims(mask, "band", f"{band} says", inside, visible, grid)
    keys = _read(mask, "key_mask", lambda: mask.key_mask(grid))
    if keys is not None:
        if keys.dtype != torch.bool or keys.ndim != 2 or len(keys) not in (1, size.batch) or keys.shape[1] != size.keys:
            fail(mask, "key_mask", f"returned {keys.dtype} of shape {tuple(keys.shape)}, expected booleans (1 or "
                 f"{size.batch}, {size.keys})")  # fmt: skip
        _claims(mask, "key_mask", "says", keys[:, None, None].expand_as(visible), visible, grid)
    counts = _read(mask, "visible_keys", lambda: mask.visible_keys(grid))
    want = visible.sum(-1)
    fits = counts.ndim == 3 and all(x in (1, y) for x, y in zip(counts.shape, want.shape, strict=True))
    wrong = difference(counts, want) if fits else None
    if not fits or wrong is not None:
        problem = f"returned shape {tuple(counts.shape)}" if wrong is None else str(wrong)
        fail(mask, "visible_keys", f"{problem}, the number of keys where sees is True, for {size}")
    for method, together in (("factors", torch.logical_and), ("alternatives", torch.logical_or)):
        components = _read(mask, method, getattr(mask, method))
        if (
            not isinstance(components, tuple)
            or not components
            or not all(isinstance(part, Mask) for part in components)
        ):
            fail(mask, method, f"returned {components!r}, expected a tuple of masks")
        if len(components) == 1 and components[0] is mask:
            continue
        made = definition.visible_pairs(components[0], size.whole, grid)
        for part in components[1:]:
            made = together(made, definition.visible_pairs(part, size.whole, grid))
        quantifier = "all of them say" if method == "factors" else "one of them says"
        _claims(mask, method, quantifier, made.expand_as(visible), visible, grid)


def _read(mask: Mask, method: str, read: Callable[[], T]) -> T:
    with calling(mask, method, "called"):
        return read()


def _claims(mask: Mask, method: str, says: str, got: Tensor, visible: Tensor, grid: Grid) -> None:
    wrong = (got != visible).nonzero()
    if len(wrong):
        b, h, i, k = (int(x) for x in wrong[0])
        verb = "sees" if bool(got[b, h, i, k]) else "does not see"
        where = "" if bool((visible[:1, :1] == visible).all()) else f" of batch item {b}, head {h}"
        fail(
            mask, method, f"{says} that query position {i + grid.offset}{where} {verb} key {k}, but sees says "
            f"{bool(visible[b, h, i, k])}"
        )  # fmt: skip


def _check_value(mask: Mask, size: Size) -> None:
    """With `by_value`, the mask is hashable and equal to its copy."""
    if not _read(mask, "by_value", lambda: mask.by_value):
        return
    with calling(mask, "by_value", "is True, but the mask has no hash"):
        copy = deepcopy(mask)
        same = hash(copy) == hash(mask)
    if not (same and copy == mask):
        fail(mask, "by_value", "is True, but a copy of the mask is not equal to it, or has another hash")


# --- attend -----------------------------------------------------------------------------------------------------------


def _check_attend(mask: Mask, sizes: list[Size]) -> None:
    first = sizes[0]
    plain = Composition("mask", mask)
    for size in sizes:
        check_kernels(plain, size, torch.float64 if size.small else torch.float32)
    for size in dict.fromkeys((first, sizes[min(3, len(sizes) - 1)])):
        check_masked(plain, size)
        check_masked(_with_padding(mask, size), size)
    for normalizer in (Identity("keys"), Identity(), Sigmoid()):  # `Sigmoid` counts the visible keys
        label = f"normalizer {type(normalizer).__name__}"
        for size in sizes[:2]:
            check_kernels(Composition("mask", mask, normalizer=normalizer, label=label), size)
    check_slopes(plain, first)
    check_half(plain, sizes[min(2, len(sizes) - 1)])
    for size in dict.fromkeys((first, sizes[min(3, len(sizes) - 1)], sizes[-1])):
        check_measure(plain, size)
    check_output_of_copies(plain, first)


def _with_padding(mask: Mask, size: Size) -> Composition:
    lengths = [max(1, size.keys - 2 - item) for item in range(size.batch)]
    return Composition("mask", mask & Padding(lengths), label="padding on the right", about=mask)


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
            head = Head("head 1 of a test call", 1, out[:, 1].clone(), queries, 0, call)
            with calling(edit, "apply", where):
                found.append(edited(edit, head))
            if not torch.equal(head.output, out[:, 1]):
                fail(edit, "apply", f"wrote to head.output, expected it unchanged: {where}")
        first, second = found
        if not bool(first[queries].isfinite().all()):
            fail(edit, "apply", f"returned numbers that are not finite, expected finite ones: {where}")
        if not torch.equal(first, second):
            fail(edit, "apply", f"returned other numbers the second time, expected the same: {where}")
