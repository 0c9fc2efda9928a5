"""`measure_weights`: the statistics of `measure` for weights that one already has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.compat import Form
from qkv.engine.call import Call, RowState, at_least_float32, tensor_of
from qkv.engine.tiles import Tile
from qkv.errors import InputError
from qkv.masks import Mask
from qkv.results import Statistics
from qkv.statistics.base import Statistic
from qkv.statistics.measure import checked, finished
from qkv.statistics.reduce import StatisticsReducer

ROWS = 64  # rows of each head that are converted at a time


@torch.no_grad()
def measure_weights(
    w: Any,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    *,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
    bins: int | None = None,
    statistics: Sequence[Statistic] = (),
    unnormalized: bool = False,
) -> Statistics:
    """Return the statistics of `qkv.measure` for attention weights that one already has, such as `output_attentions`.

    They equal those of `qkv.measure` for the q and k that gave the weights. Beyond the weights, memory is linear in the
    sequence length.

    Args:
        w: the weights of one layer, (b, h, nq, nk), (h, nq, nk) or (nq, nk), each row a query; a tensor, or anything
            that `np.asarray` accepts. The results lack the same dimensions.
        mask: True where a query may attend. It is needed for `visible`, `visible_queries` and `prefix_sink_scores`
            only: by default every key counts as visible. Weights of masked pairs must be 0.
        mass: as in `measure`.
        first: as in `measure`.
        queries: as in `measure`; weights of rows that do not count may be NaN.
        bins: as in `measure`.
        statistics: as in `measure`.
        unnormalized: whether rows may sum to more than 1, as those of sigmoid attention. By default such rows are
            refused, since they are probably scores. Sums below 1 (a sink) are always accepted.

    Returns:
        `Statistics`, float32 (float64 for float64 weights), on the device of the weights. `lse`,
        `max_logit`, `min_logit` and `sink_mass` are None, since weights do not determine them.

    Raises:
        InputError: for weights that are negative or not finite, are not 0 where masked, or sum to more than 1.

    >>> import torch, qkv
    >>> w = torch.tensor([[1.0, 0.0], [0.75, 0.25]])
    >>> found = qkv.statistics.measure_weights(w, qkv.masks.Causal())
    >>> found.received.tolist(), found.visible.tolist()
    ([1.75, 0.25], [1.0, 2.0])
    """
    form, weights = _of_weights(w)
    b, h, n_queries, n_keys = weights.shape
    # Only the shapes and the mask of this call matter: scores are never computed.
    zero = weights.new_zeros(1, 1, 1, 1, dtype=at_least_float32(weights.dtype))
    q, k = zero.expand(b, h, n_queries, 1), zero.expand(b, h, n_keys, 1)
    call = Call.of(q, k, k, mask)
    options: dict[str, Any] = {"mass": mass, "first": first, "bins": bins}
    request = checked(call, call.grid, queries=queries, statistics=statistics, **options)
    if request.extremes:
        raise InputError("statistics hold Extremes, which are of scores; expected statistics of weights")
    reducer = _WeightsReducer(call, RowState(), request)
    reducer.matrix, reducer.extremes = weights, None
    reducer.add_tiles(call)
    measurement = finished(call, reducer)
    _check_row_sums(weights, measurement.row_sum, request.queries, unnormalized=unnormalized)
    back: Statistics = form.all_back(measurement)
    return back


def _of_weights(w: Any) -> tuple[Form, Tensor]:
    """Return the form of weights, and them as a tensor (b, h, nq, nk); three dimensions are (h, nq, nk)."""
    if isinstance(w, (tuple, list)) and any(getattr(x, "ndim", 0) > 1 for x in w):
        raise InputError(f"w is a {type(w).__name__} of {len(w)} layers, expected the weights of one layer, w[layer]")
    tensor = w
    if not isinstance(w, Tensor):
        array = np.asarray(w)
        if array.dtype.name == "bfloat16":  # NumPy has no bfloat16 itself
            array = array.astype(np.float32)
        if array.dtype.kind != "f":
            raise InputError(f"w is {array.dtype}, expected weights in floating point")
        tensor = tensor_of("w", array)
    if tensor.ndim not in (2, 3, 4) or 0 in tensor.shape:
        raise InputError(
            f"w has shape {tuple(tensor.shape)}, expected the weights of one layer: (b, h, nq, nk), (h, nq, nk) or "
            "(nq, nk)"
        )
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise InputError(f"w is {tensor.dtype}, expected weights in floating point of 16 bits or more")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"w is a tensor of {tensor.layout} on {tensor.device}, expected a dense one with data")
    missing = 4 - tensor.ndim
    return Form((0,) * missing, not isinstance(w, Tensor)), tensor.detach()[(None,) * missing]


class _WeightsReducer(StatisticsReducer):
    """Statistics of weights that are given, as a tensor (b, h, nq, nk)."""

    matrix: Tensor

    def tile(self, tile: Tile) -> None:
        weights = self.matrix[*tile.at, tile.columns].to(tile.dtype)
        if (masked := tile.masked_for(self.request.queries)) is not None:
            weights = weights.masked_fill(masked, 0)
        lowest, highest = (float(x) for x in weights.aminmax())  # NaN if any weight is
        if not (lowest >= 0 and highest < float("inf")):
            raise InputError(
                f"w holds {lowest:.3g} to {highest:.3g} among queries {tile.rows.start} to {tile.rows.stop - 1}, "
                "expected weights of 0 or more; pass queries= to leave out rows without weights"
            )
        self.add(tile, weights, None)


def _check_row_sums(weights: Tensor, row_sum: Tensor, queries: Tensor | None, *, unnormalized: bool) -> None:
    """Refuse rows with weight on masked pairs, and rows that sum to more than 1, by more than rounding."""
    rounding = 1e-4 + 4 * torch.finfo(weights.dtype).eps
    # A sum of float64 converts its input first, so it takes few rows at a time.
    whole = torch.cat([rows.sum(-1, dtype=torch.float64) for rows in weights.split(ROWS, dim=2)], dim=2)
    if queries is not None:
        whole = whole.masked_fill(~queries[:, None], 0)
    hidden = ~((whole - row_sum).abs() <= rounding * whole.abs().clamp(min=1))
    if bool(hidden.any()):
        item, head, query = hidden.nonzero()[0].tolist()
        raise InputError(
            f"w has weights on masked pairs (item {item}, head {head}, query {query}), expected 0 there; pass the mask "
            "of the attention that gave the weights"
        )
    most = float(row_sum.max())
    if not unnormalized and most > 1 + rounding:
        raise InputError(
            f"w has a row that sums to {most:.4g}, expected at most 1; pass unnormalized=True if the weights are not "
            "normalized, as those of sigmoid attention"
        )
