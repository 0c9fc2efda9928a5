"""Checks of what chooses, reads and changes weights: `check_mask`, `check_statistic` and `check_edit`."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from qkv._contract import require
from qkv.attention import attend
from qkv.edits import Edit, Head, Placed, edited
from qkv.engine import Call, at_least_float32
from qkv.errors import InputError, kind_of
from qkv.kernels import serve
from qkv.masks import EMPTY, FULL, PARTIAL, Causal, Dense, Grid, Mask, Region, Tiles
from qkv.normalizers import Identity, Sigmoid
from qkv.statistics import Statistic, WeightTile
from qkv.statistics.measure import measure
from qkv.testing.laws import (
    MANY,
    Composition,
    Size,
    Sizes,
    calling,
    check_attend,
    check_class,
    check_copies,
    check_returned,
    fail,
    forbid,
    key_heads_of,
    largest,
    normal,
    parts,
    same,
    sizes_of,
    triple,
    with_holes,
    without_writing,
)

MASK_SIZES: Sizes = ((7, 9), (33, 40), (9, 7), (130, 150), (300, 320), (90, 1100))
"""Queries and keys."""
TILES = ((1, 1), (2, 3), (4, 4), (7, 5), (16, 64), (64, 64), (256, 256))
STATUS = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}


def check_mask(mask: Mask, *, sizes: Sizes | None = None, batch: int = 2, heads: int = 4) -> None:
    """Check that a mask fulfils the contract of its base class; for use in your own tests.

    It checks: that ``sees`` returns booleans that broadcast and depend only on its positions, not on the tile; each
    shortcut (``classify`` on tiles of many sizes, ``band``, ``key_mask``, ``visible_keys``, ``factors``,
    ``alternatives``, ``specialize``, ``visible``, ``cacheable``) against ``sees``; output, weights and gradients of
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
    with calling(mask, "cacheable", "is True, but the mask has no hash"):
        copy = deepcopy(mask)
        if mask.cacheable and not (hash(copy) == hash(mask) and copy == mask):
            fail(mask, "cacheable", "is True, but a copy of the mask is not equal to it, or has another hash")
    plain = Composition(subject="mask", mask=mask)
    counting = (Identity("keys"), Identity(), Sigmoid())  # `Sigmoid` counts the visible keys
    more = [replace(plain, normalizer=x, label=f"normalizer {type(x).__name__}") for x in counting]
    check_attend(plain, fitting, more)


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
    if (keys := mask.key_mask(grid)) is not None:  # the block status follows from it by default
        if keys.dtype != torch.bool or keys.ndim != 2:
            fail(mask, "key_mask", f"returned {kind_of(keys)}, expected booleans (1 or {size.batch}, {size.keys})")
        pairs = keys[:, None, None].expand_as(visible)
        same(mask, "key_mask", "says: ", pairs, visible, expected=" as sees says")
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
            some, masked = (
                max_pool2d(x[:, :, start:].float(), (rows, columns), ceil_mode=True) > 0 for x in (visible, ~visible)
            )
            wrong = ((status == EMPTY) & some) | ((status == FULL) & masked)
            if bool(wrong.any()):
                b, h, r, c = place = tuple(int(x) for x in wrong.nonzero()[0])
                tile = visible[b, h, start:][r * rows :][:rows, c * columns :][:, :columns]
                fail(
                    mask, "classify", f"says {STATUS[int(status[place])]} of query positions {int(tiles.q_first[r])} "
                    f"to {int(tiles.q_last[r])} and keys {int(tiles.k_first[c])} to {int(tiles.k_last[c])} of batch "
                    f"item {b}, head {h}, where sees is True for {int(tile.sum())} of {tile.numel()} pairs"
                )  # fmt: skip


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
    agree("specialize", "for this grid says: ", _visible(mask.specialize(grid), size.whole, grid))
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


# --- statistics -------------------------------------------------------------------------------------------------------


SHAPES = ((7, 11), (11, 7), (1, 5))
"""Numbers of queries and keys of the matrices that are split into tiles."""
LARGE = (140, 150)
"""Queries and keys of a call that spans several tiles of `measure`."""
CUTS = ((1, 1), (2, 5), (4, 3), (64, 64))
"""Numbers of queries and keys of a tile; one pair each, which takes longest, for the first case with a mask only."""
ROUNDING = 1e-9
HALF = (torch.float16, torch.bfloat16)


def check_statistic(statistic: Statistic, *, heads: int = 4) -> None:
    """Check that a statistic fulfils the contract of its base class; for use in your own tests.

    It checks: name, label, unit and definition; the shape and dtype of ``tile``, which must not write to its input;
    that ``merge`` is associative and commutative with the neutral element ``zero``; that any split of queries, keys,
    heads and batch items into tiles gives the result of one whole tile in float64, with masks, padding, queries without
    visible keys, and different numbers of queries and keys; `measure` against that, with grouped heads, NaN in masked
    keys and padding, and in float16 and bfloat16; that results are finite, and between 0 and 1 for a share;
    ``by_head``; pickle and copy.deepcopy.

    Args:
        statistic: the object.
        heads: number of query heads, if the object requires a particular one.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.statistics import BUILT_IN, Statistic
    >>> check_statistic(BUILT_IN["entropy"])
    >>> class Largest(Statistic):
    ...     name, definition = "largest", "the largest weight of a query"
    ...     def tile(self, tile):
    ...         return tile.weights.amax(-1)
    >>> try:
    ...     check_statistic(Largest())
    ... except AssertionError as error:
    ...     print(str(error)[:61])
    Largest.tile: depends on how the weights are split into tiles
    """
    check_class("check_statistic", statistic, Statistic, "qkv.statistics.Statistic")
    with calling(statistic, "tile", "required attributes"):
        statistic.require()
    _check_attributes(statistic)
    cases = list(_cases(heads))
    for case in cases:
        whole = _evaluated(statistic, case)
        finite = f"a finite number, also for queries without visible keys, in {case}"
        forbid(statistic, "finish", ~whole.isfinite(), whole, finite)
        if statistic.share:
            wrong = (whole < -ROUNDING) | (whole > 1 + ROUNDING)
            forbid(statistic, "share", wrong, whole, f"0 to 1, in {case}", what="is True, but a number ")
        _check_merge(statistic, case)
        for rows, columns in CUTS if case is cases[1] else CUTS[1:]:
            what = f"depends on how the weights are split into tiles: for {rows} × {columns} pairs of {case} "
            _same(statistic, "tile", what, _in_tiles(statistic, case, rows, columns, log=columns == 5), whole)
        if case.visible is None:
            shown = replace(case, visible=torch.ones(1, 1, case.size.queries, case.size.keys, dtype=torch.bool))
            what = f"depends on more than the weights: where tile.visible is all True instead of None, in {case}, "
            _same(statistic, "tile", what, _in_tiles(statistic, shown, 4, 3), whole)
    _check_measure(statistic, heads)
    _check_by_head(statistic)
    check_copies(statistic, lambda made: _evaluated(made, cases[0]), "number")


def _check_attributes(s: Statistic) -> None:
    for attribute, most in (("label", 40), ("unit", 20), ("definition", 400)):
        line = getattr(s, attribute)
        if not isinstance(line, str) or not line.strip() or len(line) > most or line != line.strip() or "\n" in line:
            fail(s, attribute, f"is {line!r}, expected one line of text, of at most {most} characters")
    flags = ("share", "logarithmic", "one_text", "from_second")
    for attribute, right, expected in (
        *((flag, isinstance(getattr(s, flag), bool), "True or False") for flag in flags),
        ("unit", s.unit not in ("%", "share", "ratio"), "'1'; with share = True numbers are printed as percentages"),
        ("highest", isinstance(s.highest, int | float) and isfinite(s.highest) and s.highest > 0,
         "a positive number, the upper end of histograms"),
        ("share", not s.share or (s.unit == "1" and s.highest == 1), "False, or unit '1' and highest 1"),
        ("share", not (s.share and s.logarithmic), "False with logarithmic = True"),
        ("parts", isinstance(s.parts, int) and s.parts >= 1, "the number of values that a tile adds for each"),
        ("zero", isinstance(s.zero, int | float), "the neutral element of merge, a number"),
    ):  # fmt: skip
        if not right:
            fail(s, attribute, f"is {getattr(s, attribute)!r}, expected {expected}")


# --- weights, and the definition on one whole tile --------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A weight matrix with masked pairs and uncounted queries."""

    size: Size
    weights: Tensor
    visible: Tensor | None
    label: str

    def __str__(self) -> str:
        return f"{self.size}, {self.label}"

    @property
    def mass(self) -> Tensor:
        return self.weights.sum(-1)


def _cases(heads: int) -> Iterator[_Case]:
    for at, (queries, keys) in enumerate(SHAPES):
        size = Size(2, heads, key_heads_of(heads), queries, keys)
        scores = 2 * normal(2, heads, queries, keys, seed=20 + at)
        yield _Case(size, scores.softmax(-1), None, "no mask")
        counted = torch.ones(2, queries, dtype=torch.bool)
        counted[1, queries // 2 :] = False
        for mask, label in ((with_holes(size), "a mask with holes"), (Causal(), "a causal mask with padding")):
            visible = mask.dense(queries, keys, batch=2, heads=heads).expand(2, heads, -1, -1)
            visible = visible & counted[:, None, :, None]
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
            yield _Case(size, weights, visible, label)
    size = Size(2, heads, key_heads_of(heads), 7, 11)
    weights = torch.sigmoid(2 * normal(2, heads, 7, 11, seed=30)) / 11
    yield _Case(size, weights, None, "weights that do not add up to 1")


def _added(s: Statistic, case: _Case, region: Region, *, log: bool = False) -> Tensor:
    """What `tile` gives for a region, in float64, checked."""

    def added(weights: Tensor, *others: Tensor) -> Tensor:
        visible = None if case.visible is None else others[0]
        with calling(s, "tile", f"called for weights {tuple(weights.shape)}"):
            tile = WeightTile(weights, region, case.size.grid, visible, others[-1] if log else None)
            if (result := s.tile(tile)).is_complex():
                fail(s, "tile", f"returned {kind_of(result)}, expected real numbers, not complex ones")
            return s.added(tile)

    tensors = [region.of(case.weights)]
    if case.visible is not None:
        tensors.append(region.of(case.visible))
    if log:
        tensors.append(torch.where(tensors[0] > 0, tensors[0].log(), -1e30))
    result: Tensor = without_writing(s, "tile", added, *tensors)
    forbid(s, "tile", result.isnan(), result, f"a number, also for queries without visible keys, in {case}")
    return result


def _finished(s: Statistic, total: Tensor, mass: Tensor) -> Tensor:
    with calling(s, "finish", f"called for a total {tuple(total.shape)} and a mass {tuple(mass.shape)}"):
        result = without_writing(s, "finish", s.finish, total, mass)
    return check_returned(s, "finish", result, total.shape[len(s.lead) :], None, f"a total {tuple(total.shape)}")


def _merged(s: Statistic, a: Tensor, b: Tensor) -> Tensor:
    with calling(s, "merge", f"called for two parts {tuple(a.shape)}"):
        result = without_writing(s, "merge", s.merge, a, b)
    return check_returned(s, "merge", result, a.shape, a.dtype, f"two parts {tuple(a.shape)}")


def _evaluated(s: Statistic, case: _Case) -> Tensor:
    """The statistic computed from the whole matrix as one tile."""
    whole = _added(s, case, case.size.whole)
    return _finished(s, _merged(s, torch.full_like(whole, s.zero), whole), case.mass)


# --- merging, and tiles -----------------------------------------------------------------------------------------------


def _same(s: Statistic, method: str, what: str, got: Tensor, want: Tensor) -> None:
    same(s, method, what, got, want, ROUNDING * largest(want))


def _check_merge(s: Statistic, case: _Case) -> None:
    """`merge` is associative and commutative, and `zero` is its neutral element."""
    along, length = ("columns", case.size.keys) if s.over == "query" else ("rows", case.size.queries)
    if length < 3:
        return
    parts = []
    for start, stop in pairwise((0, length // 3, 2 * length // 3, length)):
        change: dict[str, Any] = {along: slice(start, stop)}
        parts.append(_added(s, case, replace(case.size.whole, **change)))
    a, b, c = parts
    zero = torch.full_like(a, s.zero)
    for got, want, says in (
        (_merged(s, a, zero), a, f"with zero = {s.zero:g} changes a part"),
        (_merged(s, zero, a), a, f"of zero = {s.zero:g} and a part is not the part"),
        (_merged(s, a, b), _merged(s, b, a), "depends on the order of two parts"),
        (_merged(s, _merged(s, a, b), c), _merged(s, a, _merged(s, b, c)), "depends on which parts come first"),
    ):
        _same(s, "merge", f"{says}: in {case} ", got, want)


def _in_tiles(s: Statistic, case: _Case, rows: int, columns: int, *, log: bool = False) -> Tensor:
    """The statistic from tiles of rows × columns, of one batch item and half of the heads."""
    size = case.size
    length, half = size.queries if s.over == "query" else size.keys, (size.heads + 1) // 2
    total = torch.full((*s.lead, size.batch, size.heads, length), s.zero, dtype=torch.float64)
    for heads in (slice(0, half), slice(half, size.heads)):
        for item in range(size.batch if heads.stop > heads.start else 0):
            for q in range(0, size.queries, rows):
                for k in range(0, size.keys, columns):
                    spans = slice(q, min(q + rows, size.queries)), slice(k, min(k + columns, size.keys))
                    region = Region(*spans, slice(item, item + 1), heads, size.grid.offset)
                    here = (..., region.batch, heads, spans[0] if s.over == "query" else spans[1])
                    total[here] = _merged(s, total[here], _added(s, case, region, log=log))
    return _finished(s, total, case.mass)


# --- measure ----------------------------------------------------------------------------------------------------------


def _check_measure(s: Statistic, heads: int) -> None:
    """`measure` gives the same numbers as the definition."""
    for (queries, keys), holes in (((7, 11), True), ((11, 7), False), (LARGE, True)):
        size = Size(2, heads, key_heads_of(heads), queries, keys)
        mask: Mask = with_holes(size) if holes else Causal()
        counted = torch.ones(2, queries, dtype=torch.bool)
        counted[0, : queries // 3] = False
        visible = mask.dense(queries, keys, batch=2, heads=heads).expand(2, heads, -1, -1)
        shown, masked = visible & counted[:, None, :, None], ~visible.any(2).any(1)  # keys masked for all queries
        for dtype in (torch.float64, torch.float32, *(HALF if queries < LARGE[0] else ())):
            q, k, _ = triple(size, dtype, seed=41)
            _, weights = attend(
                *(x.double() for x in (q, k, k)), mask=Dense(shown), kernel="eager", return_weights=True
            )
            case = _Case(size, weights, shown, f"{dtype}, from measure")
            want = _evaluated(s, case)
            q[~counted[:, None].expand(-1, heads, -1)] = torch.nan
            k[masked[:, None].expand(-1, size.key_heads, -1)] = torch.nan
            with calling(s, "tile", f"measured for {case}"):
                given = Dense(visible) if bool(masked.any()) else mask
                got = measure(q, k, mask=given, queries=counted, statistics=[s]).own[s.name]
            tolerance = 2000 * torch.finfo(at_least_float32(dtype)).eps * largest(want) + ROUNDING
            what = f"measure differs from the definition on the whole matrix: in {case} "
            same(s, "tile", what, got, want, tolerance)


def _check_by_head(s: Statistic) -> None:
    """`by_head` gives one number for each head, from the values that count."""
    values = normal(2, 3, 4, 9, seed=51).abs().numpy().astype(np.float32)
    counted = np.arange(9) < np.array([[9], [5]])
    values[1, ..., 5:] = np.nan  # padding
    other = values.copy()
    other[1, ..., 5:] = 3.0
    with calling(s, "by_head", f"called for values {values.shape}"):
        result, again = s.by_head(values, counted.copy()), s.by_head(other, counted.copy())
    if not isinstance(result, np.ndarray) or result.shape != values.shape[:3]:
        got = f"shape {result.shape}" if isinstance(result, np.ndarray) else f"a {type(result).__name__}"
        fail(s, "by_head", f"returned {got} for values {values.shape}, expected an array {values.shape[:3]}")
    if not np.array_equal(result, again, equal_nan=True):
        fail(s, "by_head", "depends on values that do not count, expected only those where counted is True")
    if not np.isfinite(result).all():
        fail(s, "by_head", "is not finite although all values that count are, expected a number")


# --- edits ------------------------------------------------------------------------------------------------------------


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
