"""Products with the weight matrix A of an attention call from either side, in memory linear in the sequence.

A is computed a tile at a time, as in `qkv.measure`, and each tile is multiplied before the next is computed. Aᵀw sums
over queries: the attention each key receives, with queries weighted by w. A x sums over keys, as attention does with
values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.call import Call, RowState, at_least_float32, detached
from qkv._engine.sweep import Block, Group, Reducer, Tile, groups, reduce_tiles
from qkv._engine.tiles import WeightTiles
from qkv.errors import InputError


@torch.no_grad()
def weights_transposed_matmul(
    call: Call, rows: RowState, w: Float[Tensor, "b #h nq m"], *, queries: Bool[Tensor, "b nq"] | None = None
) -> Float[Tensor, "b h nk m"]:
    """Aᵀw: for each key Σ_i A_ij w_i, exactly, for m columns at once. No gradients.

    For a column of ones, that is the attention each key receives. Blocks of queries whose w is 0 are skipped.

    Args:
        call: the attention call.
        rows: its normalizer state, `qkv.statistics.measure.row_state(call)`.
        w: weight of each query, shared by all heads if its second dimension is 1; any sign, all finite.
        queries: True where a query counts; the rest (padding) may hold NaN.

    Returns:
        float32 (float64 for float64 inputs).

    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> call = Call.of(q, k, k)  # every query gives each of four keys 1/4
    >>> w = torch.tensor([1.0, 1, 0, 0]).view(1, 1, 4, 1)
    >>> weights_transposed_matmul(call, row_state(call), w).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    call, w = _ready(call, "w", w, call.q.shape[2], queries)
    out = call.q.new_zeros(*call.q.shape[:2], call.k.shape[2], w.shape[3], dtype=torch.float64)
    reduce_tiles(groups(call, batched=True), _Transposed(rows, w, queries, out))
    return out.to(at_least_float32(call.q.dtype))


@torch.no_grad()
def weights_matmul(
    call: Call, rows: RowState, x: Float[Tensor, "b #h nk m"], *, queries: Bool[Tensor, "b nq"] | None = None
) -> Float[Tensor, "b h nq m"]:
    """A x: for each query Σ_j A_ij x_j, exactly, for m columns at once. No gradients.

    For a column of ones, that is the sum of each query's weights. Blocks of keys whose x is 0 are skipped.

    Args:
        call: the attention call.
        rows: its normalizer state, `qkv.statistics.measure.row_state(call)`.
        x: values of each key, shared by all heads if its second dimension is 1; any sign, all finite.
        queries: True where a query counts; the rest (padding) may hold NaN, and their results are 0.

    Returns:
        float32 (float64 for float64 inputs).

    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> call = Call.of(q, k, k)
    >>> weights_matmul(call, row_state(call), torch.tensor([1.0, 1, 0, 0]).view(1, 1, 4, 1)).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    call, x = _ready(call, "x", x, call.k.shape[2], queries)
    out = call.q.new_zeros(*call.q.shape[:3], x.shape[3], dtype=torch.float64)
    reduce_tiles(groups(call, batched=True), _Product(rows, x, queries, out))
    return out.to(at_least_float32(call.q.dtype))


def _ready(call: Call, name: str, x: Tensor, length: int, queries: Tensor | None) -> tuple[Call, Tensor]:
    """The call without gradients and with padding queries set to 0 (they may hold NaN), and x in its dtype."""
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


@dataclass(frozen=True, eq=False)
class _Job:
    """The weight tiles of a group, its slice of the factor, and the sums of their products."""

    known: WeightTiles
    factor: Tensor
    sums: Tensor
    """float64, so that ten thousand tiles add up without loss."""


class _Factor(Reducer[_Job, _Job]):
    """The weight matrix of a call, from either side, times a factor."""

    def __init__(self, rows: RowState, factor: Tensor, queries: Tensor | None, out: Tensor) -> None:
        self.rows, self.factor, self.queries, self.out = rows, factor, queries, out

    def _job(self, group: Group, sums: Tensor) -> _Job:
        factor = group.tiles.of(self.factor)
        assert factor is not None
        return _Job(WeightTiles(group.tiles, self.rows, self.queries), factor, sums)


class _Transposed(_Factor):
    def start(self, group: Group) -> _Job:
        tiles = group.tiles
        size = (*tiles.shape, tiles.k.shape[1], self.factor.shape[3])
        return self._job(group, tiles.k.new_zeros(*size, dtype=torch.float64))

    def blocks(self, block: Block) -> Iterator[Block]:
        factor = block.group.tiles.of(self.factor)
        assert factor is not None
        if factor[:, :, block.rows].any():
            yield block

    def tile(self, job: _Job, tile: Tile) -> None:
        weights = tile.weights(job.known)[0]
        job.sums[:, :, tile.columns] += weights.transpose(2, 3) @ job.factor[:, :, tile.rows]

    def finish(self, group: Group, job: _Job) -> None:
        self.out[group.tiles.batch, group.tiles.heads] += job.sums


class _Product(_Factor):
    def start(self, group: Group) -> _Job:
        return self._job(group, self.out[group.tiles.batch, group.tiles.heads])

    def tile(self, job: _Job, tile: Tile) -> None:
        values = job.factor[:, :, tile.columns]
        if values.any():
            job.sums[:, :, tile.rows] += tile.weights(job.known)[0] @ values
