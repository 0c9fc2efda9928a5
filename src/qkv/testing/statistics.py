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

from qkv._engine.call import at_least_float32
from qkv.masks import Causal, Dense, Mask, Region
from qkv.statistics import Statistic, WeightTile
from qkv.statistics.measure import measure
from qkv.testing.agreement import check_copies
from qkv.testing.inputs import (
    CheckFailed,
    Size,
    calling,
    difference,
    fail,
    key_heads_of,
    normal,
    number,
    shape_of,
    with_holes,
)

SHAPES = ((7, 11), (11, 7), (1, 5))
"""Numbers of queries and keys of the matrices that are split into tiles."""
LARGE = (140, 150)
"""Queries and keys of a call that spans several tiles of `measure`."""
CUTS = ((1, 1), (2, 5), (4, 3), (64, 64))
"""Numbers of queries and keys of a tile."""
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
    if not isinstance(statistic, Statistic):
        raise CheckFailed(
            f"check_statistic: got {shape_of(statistic)}, expected an object of a class that inherits from "
            "qkv.statistics.Statistic"
        )
    with calling(statistic, "tile", "required attributes"):
        statistic.require()
    _check_words(statistic)
    for case in _cases(heads):
        whole = _evaluated(statistic, case)
        _check_numbers(statistic, whole, case)
        _check_merge(statistic, case)
        _check_cuts(statistic, case, whole)
    _check_measure(statistic, heads)
    _check_by_head(statistic)
    case = next(iter(_cases(heads)))
    check_copies(statistic, lambda made: _evaluated(made, case), "number")


# --- name, unit and definition ----------------------------------------------------------------------------------------


def _check_words(s: Statistic) -> None:
    for attribute, most in (("label", 40), ("unit", 20), ("definition", 400)):
        line = getattr(s, attribute)
        if not isinstance(line, str) or not line.strip() or len(line) > most or line != line.strip() or "\n" in line:
            fail(s, attribute, f"is {line!r}, expected one line of text, of at most {most} characters")
    if s.unit in ("%", "share", "ratio"):
        fail(s, "unit", f"is {s.unit!r}, expected '1'; with share = True numbers are printed as percentages")
    for attribute in ("share", "logarithmic", "one_text", "from_second"):
        if not isinstance(getattr(s, attribute), bool):
            fail(s, attribute, f"is {getattr(s, attribute)!r}, expected True or False")
    if not isinstance(s.highest, int | float) or not isfinite(s.highest) or s.highest <= 0:
        fail(s, "highest", f"is {s.highest!r}, expected a positive number, the upper end of histograms")
    if s.share and (s.unit != "1" or s.highest != 1):
        fail(s, "share", f"is True, but the unit is {s.unit!r} and highest {s.highest:g}, expected '1' and 1")
    if s.share and s.logarithmic:
        fail(s, "share", "is True, and so is logarithmic, expected one of them")
    if not isinstance(s.parts, int) or s.parts < 1:
        fail(s, "parts", f"is {s.parts!r}, expected the number of values that a tile adds for each {s.over}")
    if not isinstance(s.zero, int | float):
        fail(s, "zero", f"is {s.zero!r}, expected the neutral element of merge, a number")


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

    def tile(self, region: Region, *, log: bool = False) -> WeightTile:
        """A tile of the weights, as new float64 tensors."""
        weights = region.of(self.weights).clone()
        visible = None if self.visible is None else region.of(self.visible).clone()
        logs = torch.where(weights > 0, weights.log(), -1e30) if log else None
        return WeightTile(weights, region, self.size.grid, visible, logs)


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


def _added(s: Statistic, tile: WeightTile, where: str) -> Tensor:
    """`tile` in float64; fails unless it has the right shape and a real dtype and leaves its input unchanged."""
    tensors = {name: getattr(tile, name) for name in ("weights", "visible", "log")}
    before = {name: None if x is None else x.clone() for name, x in tensors.items()}
    what = f"weights {tuple(tile.weights.shape)}"
    with calling(s, "tile", f"called for {what}"):
        made = s.tile(tile)
    if isinstance(made, Tensor) and made.dtype.is_complex:
        fail(s, "tile", f"returned {shape_of(made)} for {what}, expected real numbers")
    with calling(s, "tile", f"called for {what}"):
        contribution = s.added(tile)
    for name, x in tensors.items():
        was = before[name]
        if x is not None and was is not None and not torch.equal(x, was):
            fail(s, "tile", f"wrote to tile.{name}, expected a new tensor")
    if bool(contribution.isnan().any()):
        fail(s, "tile", f"is NaN for {where}, expected a number, also for queries without visible keys")
    return contribution


def _finished(s: Statistic, total: Tensor, mass: Tensor) -> Tensor:
    totals, masses = total.clone(), mass.clone()
    with calling(s, "finish", f"called for a total {tuple(total.shape)} and a mass {tuple(mass.shape)}"):
        made = s.finish(totals, masses)
    if not torch.equal(masses, mass):
        fail(s, "finish", "wrote to the mass, expected a new tensor")
    shape = total.shape[len(s.lead) :]
    if not isinstance(made, Tensor) or made.shape != shape:
        fail(
            s, "finish", f"returned {shape_of(made)} for a total {tuple(total.shape)}, expected the shape "
            f"{tuple(shape)}"
        )  # fmt: skip
    return made


def _start(s: Statistic, like: Tensor) -> Tensor:
    return torch.full_like(like, s.zero)


def _evaluated(s: Statistic, case: _Case) -> Tensor:
    """The statistic computed from the whole matrix as one tile."""
    whole = _added(s, case.tile(case.size.whole), str(case))
    return _finished(s, _merged(s, _start(s, whole), whole), case.mass)


def _check_numbers(s: Statistic, values: Tensor, case: _Case) -> None:
    if not bool(values.isfinite().all()):
        place = tuple(int(i) for i in (~values.isfinite()).nonzero()[0])
        empty = bool(case.mass[place] == 0) if s.over == "query" else False
        what = ", a query that is uncounted or without visible keys" if empty else ""
        fail(s, "finish", f"is {number(values[place].item())} at {place}{what}, expected a finite number, in {case}")
    if s.share and not bool(((values >= -ROUNDING) & (values <= 1 + ROUNDING)).all()):
        place = tuple(int(i) for i in ((values < -ROUNDING) | (values > 1 + ROUNDING)).nonzero()[0])
        got = number(values[place].item())
        fail(s, "share", f"is True, but the number at {place} is {got}, expected 0 to 1, in {case}")


# --- merging, and tiles -----------------------------------------------------------------------------------------------


def _merged(s: Statistic, a: Tensor, b: Tensor) -> Tensor:
    first, second = a.clone(), b.clone()
    with calling(s, "merge", f"called for two parts {tuple(a.shape)}"):
        made = s.merge(first, second)
    if not torch.equal(first, a) or not torch.equal(second, b):
        fail(s, "merge", "wrote to its arguments, expected a new tensor")
    if not isinstance(made, Tensor) or made.shape != a.shape or made.dtype != a.dtype:
        fail(s, "merge", f"returned {shape_of(made)} for two parts {a.dtype} {tuple(a.shape)}, expected the same")
    return made


def _close(got: Tensor, want: Tensor) -> Any:
    finite = want[want.isfinite()].abs()
    return difference(got, want, ROUNDING * max(1.0, float(finite.max()) if len(finite) else 1.0))


def _check_merge(s: Statistic, case: _Case) -> None:
    """`merge` is associative and commutative, and `zero` is its neutral element."""
    along, length = ("columns", case.size.keys) if s.over == "query" else ("rows", case.size.queries)
    if length < 3:
        return
    ends = (0, length // 3, 2 * length // 3, length)
    parts = []
    for start, stop in pairwise(ends):
        change: dict[str, Any] = {along: slice(start, stop)}
        parts.append(_added(s, case.tile(replace(case.size.whole, **change)), str(case)))
    a, b, c = parts
    for got, want, says in (
        (_merged(s, a, _start(s, a)), a, f"with zero = {s.zero:g} changes a part"),
        (_merged(s, _start(s, a), a), a, f"of zero = {s.zero:g} and a part is not the part"),
        (_merged(s, a, b), _merged(s, b, a), "depends on the order of two parts"),
        (_merged(s, _merged(s, a, b), c), _merged(s, a, _merged(s, b, c)), "depends on which parts come first"),
    ):
        if (wrong := _close(got, want)) is not None:
            fail(s, "merge", f"{says}: {wrong}, in {case}")


def _check_cuts(s: Statistic, case: _Case, whole: Tensor) -> None:
    """Any split of queries, keys, heads and batch items into tiles gives the result of the whole matrix."""
    size = case.size
    for rows, columns in CUTS:
        made = _in_tiles(s, case, rows, columns, log=columns == 5)
        _compare(s, case, made, whole, f"in tiles of {rows} queries × {columns} keys")
    if case.visible is None:
        shown = replace(case, visible=torch.ones(1, 1, size.queries, size.keys, dtype=torch.bool))
        _compare(s, case, _in_tiles(s, shown, 4, 3), whole, "where tile.visible is not None, but all True", cut=False)


def _in_tiles(s: Statistic, case: _Case, rows: int, columns: int, *, log: bool = False) -> Tensor:
    size = case.size
    total: Tensor | None = None
    half = (size.heads + 1) // 2
    for heads in (slice(0, half), slice(half, size.heads)):
        for item in range(size.batch if heads.stop > heads.start else 0):
            for q in range(0, size.queries, rows):
                for k in range(0, size.keys, columns):
                    region = Region(
                        slice(q, min(q + rows, size.queries)), slice(k, min(k + columns, size.keys)),
                        slice(item, item + 1), heads, size.grid.offset,
                    )  # fmt: skip
                    part = _added(s, case.tile(region, log=log), str(case))
                    if total is None:
                        length = size.queries if s.over == "query" else size.keys
                        total = part.new_full((*s.lead, size.batch, size.heads, length), s.zero)
                    along = region.rows if s.over == "query" else region.columns
                    here = (..., region.batch, region.heads, along)
                    total[here] = _merged(s, total[here], part)
    assert total is not None
    return _finished(s, total, case.mass)


def _compare(s: Statistic, case: _Case, got: Tensor, want: Tensor, how: str, *, cut: bool = True) -> None:
    if (wrong := _close(got, want)) is not None:
        what = "depends on how the weights are split into tiles" if cut else "depends on more than the weights"
        fail(s, "tile", f"{what}: {wrong}, {how} of {case}" if cut else f"{what}: {wrong}, {how}, in {case}")


# --- measure ----------------------------------------------------------------------------------------------------------


def _check_measure(s: Statistic, heads: int) -> None:
    """`measure` gives the same numbers as the definition."""
    for (queries, keys), holes in (((7, 11), True), ((11, 7), False), (LARGE, True)):
        size = Size(2, heads, key_heads_of(heads), queries, keys)
        mask: Mask = with_holes(size) if holes else Causal()
        counted = torch.ones(2, queries, dtype=torch.bool)
        counted[0, : queries // 3] = False
        dtypes = (torch.float64, torch.float32, *(HALF if queries < LARGE[0] else ()))
        for dtype in dtypes:
            q = normal(2, heads, queries, 8, seed=41, dtype=dtype)
            k = normal(2, size.key_heads, keys, 8, seed=42, dtype=dtype)
            _check_one(s, size, q, k, mask, counted)


def _check_one(s: Statistic, size: Size, q: Tensor, k: Tensor, mask: Mask, counted: Tensor) -> None:
    visible = mask.dense(size.queries, size.keys, batch=2, heads=size.heads).expand(2, size.heads, -1, -1)
    shown = visible & counted[:, None, :, None]
    keys = k.double().repeat_interleave(size.heads // size.key_heads, 1)
    scores = (q.double() @ keys.transpose(-1, -2)) / 8**0.5
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
    case = _Case(size, weights, shown, f"{q.dtype}, from measure")
    want = _evaluated(s, case)
    masked = ~visible.any(2).any(1)  # keys that are masked for all queries
    q, k = q.clone(), k.clone()
    q[~counted[:, None].expand(-1, size.heads, -1)] = torch.nan
    k[masked[:, None].expand(-1, size.key_heads, -1)] = torch.nan
    with calling(s, "tile", f"measured for {case}"):
        got = measure(q, k, mask=Dense(visible) if bool(masked.any()) else mask, queries=counted, statistics=[s])
    values = got.own[s.name]
    eps = torch.finfo(at_least_float32(q.dtype)).eps
    if (wrong := difference(values, want, 2000 * eps * max(1.0, float(want.abs().max())) + ROUNDING)) is not None:
        fail(s, "tile", f"measure differs from the definition on the whole matrix: {wrong}, in {case}")


# --- heads, copies ----------------------------------------------------------------------------------------------------


def _check_by_head(s: Statistic) -> None:
    """`by_head` gives one number for each head, from the values that count."""
    values = normal(2, 3, 4, 9, seed=51).abs().numpy().astype(np.float32)
    counted = np.arange(9) < np.array([[9], [5]])
    values[1, ..., 5:] = np.nan  # padding
    with calling(s, "by_head", f"called for values {values.shape}"):
        made = s.by_head(values.copy(), counted.copy())
    if not isinstance(made, np.ndarray) or made.shape != values.shape[:3]:
        got = f"shape {made.shape}" if isinstance(made, np.ndarray) else f"a {type(made).__name__}"
        fail(s, "by_head", f"returned {got} for values {values.shape}, expected an array {values.shape[:3]}")
    other = values.copy()
    other[1, ..., 5:] = 3.0
    with calling(s, "by_head", f"called for values {values.shape}"):
        again = s.by_head(other, counted.copy())
    if not np.array_equal(made, again, equal_nan=True):
        fail(s, "by_head", "depends on values that do not count, expected only those where counted is True")
    if not np.isfinite(made).all():
        fail(s, "by_head", "is not finite although all values that count are, expected a number")
