"""Products with the weight matrix A of an attention call from either side, in memory linear in the sequence.

A is made a tile at a time, as in `qkv.measure`, and each tile multiplies its share before the next is made. From the
left, Aᵀw, keys gather from the queries: what each key gives to queries that count as much as w says. From the right,
A x, queries gather from the keys, as in attention itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.call import Call, at_least_float32, detached
from qkv._engine.row_state import Rows
from qkv._engine.threads import each
from qkv._engine.tiles import ScoreTiles, heads_together, spans
from qkv._engine.weight_tiles import WeightTiles
from qkv.errors import InputError
from qkv.masks import EMPTY, PARTIAL

TILE = 256
HEADS = 8  # heads worked on together: a tile of all of them should stay in cache


@torch.no_grad()
def column_sums(
    call: Call, rows: Rows, w: Float[Tensor, "b #h nq m"], *, queries: Bool[Tensor, "b nq"] | None = None
) -> Float[Tensor, "b h nk m"]:
    """Aᵀw: for each key Σ_i A_ij w_i, exactly, for m columns at once. No gradients.

    With one column of ones that is the attention each key has received. Blocks of queries whose w is 0 take no time.

    Args:
        call: the attention call.
        rows: what its rows know: `qkv.statistics.measure.settled(call)`.
        w: how much each query counts, the same for all heads if it has but one; any sign, all finite.
        queries: True where a query counts; others may hold NaN.

    Returns:
        float32 (float64 for float64 inputs).

    Raises:
        InputError: if `w` does not fit the call.

    >>> from qkv.measure import settled
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> call = Call.of(q, k, k)  # every query gives each of four keys 1/4
    >>> column_sums(call, settled(call), torch.tensor([1.0, 1, 0, 0]).view(1, 1, 4, 1)).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    call, w = _ready(call, "w", w, call.q.shape[2], queries)
    out = call.q.new_zeros(*call.q.shape[:2], call.k.shape[2], w.shape[3], dtype=torch.float64)
    for part in _parts(call, rows, queries):
        factors = part.tiles.of(w)
        assert factors is not None
        shares: list[Tensor] = []
        desk = _Desk(part, shares, w.shape[3])
        each(partial(_add_columns, part, factors, desk), part.longest_first, call.q.device)
        out[part.tiles.batch, part.tiles.heads] = sum(shares)
    return out.to(at_least_float32(call.q.dtype))


@torch.no_grad()
def row_sums(
    call: Call, rows: Rows, x: Float[Tensor, "b #h nk m"], *, queries: Bool[Tensor, "b nq"] | None = None
) -> Float[Tensor, "b h nq m"]:
    """A x: for each query Σ_j A_ij x_j, exactly, for m columns at once. No gradients.

    With one column of ones that is the mass of each query's weights. Blocks of keys whose x is 0 take no time.

    Args:
        call: the attention call.
        rows: what its rows know: `qkv.statistics.measure.settled(call)`.
        x: of each key, the same for all heads if it has but one; any sign, all finite.
        queries: True where a query counts; others give zeros, and may hold NaN.

    Returns:
        float32 (float64 for float64 inputs).

    Raises:
        InputError: if `x` does not fit the call.

    >>> from qkv.measure import settled
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> call = Call.of(q, k, k)
    >>> row_sums(call, settled(call), torch.tensor([1.0, 1, 0, 0]).view(1, 1, 4, 1)).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    call, x = _ready(call, "x", x, call.k.shape[2], queries)
    out = call.q.new_zeros(*call.q.shape[:3], x.shape[3], dtype=torch.float64)
    for part in _parts(call, rows, queries):
        values = part.tiles.of(x)
        assert values is not None
        sums = out[part.tiles.batch, part.tiles.heads]
        each(partial(_add_rows, part, values, _Desk(part, [], 0), sums), part.longest_first, call.q.device)
    return out.to(at_least_float32(call.q.dtype))


def _ready(call: Call, name: str, x: Tensor, length: int, queries: Tensor | None) -> tuple[Call, Tensor]:
    """The call without gradients, and without the NaN that queries which do not count may hold; x in its dtype."""
    b, h, n_queries, _ = call.q.shape
    if x.ndim != 4 or x.shape[0] != b or x.shape[1] not in (1, h) or x.shape[2] != length or not x.is_floating_point():
        raise InputError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)}, expected floats of shape ({b}, 1 or {h}, {length}, m)"
        )
    if queries is not None and (queries.dtype != torch.bool or queries.shape != (b, n_queries)):
        raise InputError(
            f"queries is {queries.dtype} of shape {tuple(queries.shape)}, expected bool of shape {(b, n_queries)}"
        )
    call = detached(call)
    if queries is not None:
        call = replace(call, q=call.q.masked_fill(~queries[:, None, :, None], 0))
    return call, x.to(call.q.device, at_least_float32(call.q.dtype))


class _Part:
    """One batch item and some heads of it."""

    def __init__(self, tiles: ScoreTiles, rows: Rows, queries: Tensor | None) -> None:
        grid = tiles.call.grid
        self.tiles, self.weights = tiles, WeightTiles(tiles, rows, queries)
        self.kinds = tiles.classes(tiles.call.mask, TILE)
        self.rows, self.columns = list(spans(grid.n_queries, TILE)), list(spans(grid.n_keys, TILE))
        self.longest_first = range(len(self.rows) - 1, -1, -1)  # of a causal mask: the threads then end together

    def row(self, r: int, desk: _Desk, wanted: list[bool] | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The tiles of weights of block r of the queries, but empty and unwanted ones; each good until the next."""
        rows = self.rows[r]
        for c, columns in enumerate(self.columns):
            if self.kinds[r][c] == EMPTY or (wanted is not None and not wanted[c]):
                continue
            shape = (*self.tiles.shape, rows.stop - rows.start, columns.stop - columns.start)
            weights, scratch = (x[: math.prod(shape)].view(shape) for x in desk.buffers)
            hidden = self.tiles.hidden(rows, columns) if self.kinds[r][c] == PARTIAL else None
            self.weights.fill(rows, columns, hidden, weights, scratch)
            yield columns, weights


class _Desk(threading.local):
    """What one thread works with: buffers for tiles, and its own share of sums that all queries add to, float64 so
    that ten thousand tiles add up without loss."""

    def __init__(self, part: _Part, shares: list[Tensor], columns: int) -> None:
        tiles = part.tiles
        self.buffers = tiles.k.new_empty(2, math.prod(tiles.shape) * TILE * TILE)
        self.sums = tiles.k.new_zeros(*tiles.shape, tiles.k.shape[1], columns, dtype=torch.float64)
        shares.append(self.sums)


def _add_columns(part: _Part, factors: Tensor, desk: _Desk, r: int) -> None:
    """What block r of the queries gives to all keys."""
    these = factors[:, :, part.rows[r]]
    if these.any():
        for columns, weights in part.row(r, desk):
            desk.sums[:, :, columns] += weights.transpose(2, 3) @ these


def _add_rows(part: _Part, values: Tensor, desk: _Desk, sums: Tensor, r: int) -> None:
    """What block r of the queries gets from all keys."""
    wanted = [bool(values[:, :, columns].any()) for columns in part.columns]
    for columns, weights in part.row(r, desk, wanted):
        sums[:, :, part.rows[r]] += weights @ values[:, :, columns]


def _parts(call: Call, rows: Rows, queries: Tensor | None) -> Iterator[_Part]:
    for item in range(len(call.q)):
        for heads in spans(call.k.shape[1], heads_together(call, HEADS)):
            yield _Part(ScoreTiles(call, slice(item, item + 1), heads), rows, queries)
