"""Products with the weight matrix A of an attention call from either side, in memory linear in the sequence.

A is computed a tile at a time, as in `qkv.measure`, and each tile is multiplied before the next is computed. Aᵀw sums
over queries: the attention each key receives, with queries weighted by w. A x sums over keys, as attention does with
values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.engine.call import Call, RowState, at_least_float32, detached
from qkv.errors import InputError
from qkv.statistics.base import Statistic
from qkv.statistics.reduce import Product, Request, StatisticsReducer, Totals, TransposedProduct, add_tiles


@torch.no_grad()
def weights_transposed_matmul(
    call: Call, rows: RowState, w: Float[Tensor, "b #h nq m"], *, queries: Bool[Tensor, "b nq"] | None = None
) -> Float[Tensor, "b h nk m"]:
    """Aᵀw: for each key Σ_i A_ij w_i, exactly, for m columns at once. No gradients.

    For a column of ones, that is the attention each key receives.

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
    return _added(call, rows, TransposedProduct(w), queries, w.dtype)


@torch.no_grad()
def weights_matmul(
    call: Call, rows: RowState, x: Float[Tensor, "b #h nk m"], *, queries: Bool[Tensor, "b nq"] | None = None
) -> Float[Tensor, "b h nq m"]:
    """A x: for each query Σ_j A_ij x_j, exactly, for m columns at once. No gradients.

    For a column of ones, that is the sum of each query's weights.

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
    return _added(call, rows, Product(x), queries, x.dtype)


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
    return call, x.to(call.q.device, at_least_float32(call.q.dtype)).expand(-1, h, -1, -1)


def _added(call: Call, rows: RowState, product: Statistic, queries: Tensor | None, wide: torch.dtype) -> Tensor:
    """The sum of a product over all tiles, (b, h, n, m)."""
    request = Request({}, [0] * len(call.q), queries)
    totals = Totals(call, request, {product.name: product})
    add_tiles(call, StatisticsReducer(rows, request, totals, call.grid))
    total = totals.of[product.name]
    return (total[..., None] if product.parts == 1 else total.movedim(0, -1)).to(wide)
