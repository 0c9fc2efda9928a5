"""`check_statistic`: a statistic fulfils the contract of `qkv.statistics.Statistic`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.attention import attend
from qkv.engine import at_least_float32
from qkv.errors import kind_of
from qkv.masks import Causal, Dense, Mask, Region
from qkv.statistics import Statistic, WeightTile
from qkv.statistics.measure import measure
from qkv.testing.laws import (
    Size,
    calling,
    check_class,
    check_copies,
    check_returned,
    fail,
    forbid,
    key_heads_of,
    largest,
    normal,
    same,
    triple,
    with_holes,
    without_writing,
)

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

    >>> from qkv.statistics import Entropy, Statistic
    >>> check_statistic(Entropy())
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
