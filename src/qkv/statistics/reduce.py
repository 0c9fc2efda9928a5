"""Statistics by their definitions, and products with the weights: each is added up over the tiles of final weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv.engine.call import Call, RowState, at_least_float32, detached
from qkv.engine.tiles import RunningExtremes, Tile, tiles
from qkv.errors import InputError, kind_of
from qkv.masks import Grid
from qkv.results import bin_size
from qkv.statistics.base import Product, Request, Statistic, WeightTile, check_queries

SMALLEST = 1e-150  # a row with less mass counts as empty: the squares of its weights underflow


class StatisticsReducer:
    """Adds up statistics over tiles of the final weights of a call; in float64, so that ten thousand lose nothing.

    They are all that are requested, or those passed. They see the matrix `grid`; that of the call if None.
    """

    corner = 0, 0
    """The first query and key of the call in `grid`, if the call is a rectangle of it."""

    def __init__(
        self, call: Call, rows: RowState, request: Request, statistics: Mapping[str, Statistic] | None = None,
        grid: Grid | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.request, self.grid = rows, request, call.grid if grid is None else grid
        self.statistics = request.every() if statistics is None else dict(statistics)
        lengths = {"query": call.q.shape[2], "key": call.k.shape[2]}
        self.totals = {
            name: call.q.new_full((*s.lead, *call.q.shape[:2], lengths[s.over]), s.zero, dtype=torch.float64)
            for name, s in self.statistics.items()
        }
        self.extremes = RunningExtremes.of(call, whole=request.extremes) if statistics is None else None
        self.pooled: Tensor | None = None  # the maxima and sums of the bins of the thumbnail
        if request.bins is not None and statistics is None:
            self.bins = bin_size(lengths["query"], request.bins), bin_size(lengths["key"], request.bins)
            sides = (-(-n // size) for n, size in zip(lengths.values(), self.bins, strict=True))
            self.pooled = call.q.new_zeros(2, *call.q.shape[:2], *sides, dtype=at_least_float32(call.q.dtype))

    @torch.no_grad()
    def add_tiles(self, call: Call) -> None:
        """Add all tiles of `call`."""
        for tile in tiles(call, batched=len(set(self.request.firsts)) == 1):  # a tile has one first key
            self.tile(tile)

    def finished(self, mass: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the values of all statistics, given the sum of each row of weights."""
        mass = mass.masked_fill(mass.abs() <= SMALLEST, 0)
        return {name: s.finish(self.totals[name], mass).to(dtype) for name, s in self.statistics.items()}

    def tile(self, tile: Tile) -> None:
        """Add a tile to all statistics."""
        weights, log2 = tile.weights(self.rows, self.request.queries, self.extremes)
        if log2 is None and "entropy" in self.statistics and weights.min() < 0:
            raise InputError(
                f"measure: normalizer {type(tile.call.user.normalizer).__name__} gives negative weights "
                "with these scores, which have no entropy; expected weights of 0 or more"
            )
        self.add(tile, weights, None if log2 is None else log2 * math.log(2))

    def add(self, tile: Tile, weights: Tensor, log: Tensor | None) -> None:
        """Add a tile of final weights, and their natural logarithms, to all statistics."""
        batch, heads, rows = tile.at
        masked = tile.masked_for(self.request.queries)
        region = tile.region.moved(*self.corner, self.grid.offset)
        seen = WeightTile(
            weights, region, self.grid, None if masked is None else ~masked, log, self.request.firsts[batch.start]
        )
        for name, s in self.statistics.items():
            total = self.totals[name][..., batch, heads, rows if s.over == "query" else tile.columns]
            total.copy_(s.merge(total, s.added(seen)))
        if self.pooled is not None:
            self._pool(self.pooled[:, batch, heads], weights, tile)

    def _pool(self, pooled: Tensor, weights: Tensor, tile: Tile) -> None:
        """Add a tile to the thumbnail."""
        query_bin, key_bin = (
            min(size, 1 << (n - 1).bit_length()) for size, n in zip(self.bins, weights.shape[-2:], strict=True)
        )
        before = tile.columns.start % key_bin
        ragged = before, -(weights.shape[-1] + before) % key_bin, 0, -weights.shape[-2] % query_bin
        by_bin = nn.functional.pad(weights, ragged).unflatten(-2, (-1, query_bin)).unflatten(-1, (-1, key_bin))
        top = by_bin.amax((-3, -1))
        at = [
            slice(x.start // size, x.start // size + n)
            for x, size, n in zip((tile.rows, tile.columns), self.bins, top.shape[2:], strict=True)
        ]
        maximum, total = pooled[..., at[0], at[1]]
        torch.maximum(maximum, top, out=maximum)
        total += by_bin.sum((-3, -1))


def own_statistics(call: Call, rows: RowState, request: Request, mass: Tensor) -> dict[str, Tensor]:
    """Return the statistics that the user passed, by name, of a call whose other statistics are known."""
    reducer = StatisticsReducer(call, rows, request, request.own())
    reducer.add_tiles(call)
    values = reducer.finished(mass.double(), mass.dtype)
    return {s.name: values[f"own {s.name}"] for s in request.statistics}


@torch.no_grad()
def weights_matmul(
    call: Call, rows: RowState, x: Float[Tensor, "b #h n m"], *, transposed: bool = False,
    queries: Bool[Tensor, "b nq"] | None = None,
) -> Float[Tensor, "b h n2 m"]:  # fmt: skip
    """Return A x of the weight matrix A: for each query Σ_j A_ij x_j, exactly, for m columns at once. No gradients.

    A is computed a tile at a time, as in `qkv.measure`, so memory is linear in the sequence. For a column of ones, A x
    is the sum of each query's weights; `transposed`, Aᵀx of numbers of each query is then the attention that each key
    receives. `rows` is `qkv.statistics.measure.row_state(call)`, and x is finite. `queries` is True where a query
    counts; the rest (padding) may hold NaN, and their results are 0.

    >>> from qkv.statistics.measure import row_state
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> call = Call.of(q, k, k)  # every query gives each of four keys 1/4
    >>> x = torch.tensor([1.0, 1, 1, 0]).view(1, 1, 4, 1)
    >>> weights_matmul(call, row_state(call), x).flatten().tolist()
    [0.75, 0.75, 0.75, 0.75]
    >>> weights_matmul(call, row_state(call), x, transposed=True).flatten().tolist()
    [0.75, 0.75, 0.75, 0.75]
    """
    (b, h, n_queries, _), n_keys = call.q.shape, call.k.shape[2]
    n = n_queries if transposed else n_keys
    if x.ndim != 4 or x.shape[0] != b or x.shape[1] not in (1, h) or x.shape[2] != n or not x.is_floating_point():
        raise InputError(f"x is {kind_of(x)}, expected floats of shape ({b}, 1 or {h}, {n}, m)")
    call = detached(call)
    if queries is not None:
        check_queries(queries, call.q)
        call = replace(call, q=call.q.masked_fill(~queries[:, None, :, None], 0))
    wide = at_least_float32(call.q.dtype)
    product = Product(x.to(call.q.device, wide).expand(-1, h, -1, -1), transposed=transposed)
    request = Request({}, [0] * b, queries)
    reducer = StatisticsReducer(call, rows, request, {product.name: product})
    reducer.add_tiles(call)
    total = reducer.totals[product.name]
    return (total[..., None] if product.parts == 1 else total.movedim(0, -1)).to(wide)
