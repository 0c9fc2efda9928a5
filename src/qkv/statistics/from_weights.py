"""`measure_weights`: the statistics of attention weights that one already has, of any library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.engine.call import Call, RowState, at_least_float32
from qkv.engine.inputs import Form
from qkv.engine.tile_loop import Group, Tile
from qkv.errors import InputError
from qkv.masks import Grid, Mask
from qkv.statistics.base import Statistic
from qkv.statistics.measure import checked, finished
from qkv.statistics.reduce import Request, StatisticsReducer, Totals, add_tiles
from qkv.statistics.result import Statistics

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
    """The statistics of `qkv.measure` for attention weights that one already has, such as `output_attentions`.

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
        `Statistics`, float32 (float64 for float64 weights), on the device of the weights. `lse` and `sink_mass` are
        None, since weights do not determine them.

    Raises:
        InputError: for weights that are negative or not finite, are not 0 where masked, or sum to more than 1.

    >>> import torch, qkv
    >>> w = torch.tensor([[1.0, 0.0], [0.75, 0.25]])
    >>> found = qkv.statistics.measure_weights(w, qkv.masks.Causal())
    >>> found.received.tolist(), found.visible.tolist()
    ([1.75, 0.25], [1.0, 2.0])
    """
    form, weights = _Form.of_weights(w)
    b, h, n_queries, n_keys = weights.shape
    # Only the shapes and the mask of this call matter: scores are never computed.
    zero = weights.new_zeros(1, 1, 1, 1, dtype=at_least_float32(weights.dtype))
    q, k = zero.expand(b, h, n_queries, 1), zero.expand(b, h, n_keys, 1)
    call = Call.of(q, k, k, mask)
    options: dict[str, Any] = {"mass": mass, "first": first, "bins": bins}
    request = checked(call, call.grid, queries=queries, statistics=statistics, **options)
    totals = Totals(call, request)
    add_tiles(call, _WeightsReducer(weights, request, totals))
    measurement = finished(call, RowState(), request, totals)
    assert measurement.row_sum is not None
    _check_row_sums(weights, measurement.row_sum, request.queries, unnormalized=unnormalized)
    back: Statistics = form.all_back(measurement)
    return back


class _Form(Form):
    """The form of weights: three dimensions are (heads, queries, keys)."""

    @staticmethod
    def of_weights(w: Any) -> tuple[_Form, Tensor]:
        tensor = w if isinstance(w, Tensor) else _tensor(w)
        if tensor.ndim not in (2, 3, 4) or 0 in tensor.shape:
            raise InputError(
                f"w has shape {tuple(tensor.shape)}, expected the weights of one layer: (b, h, nq, nk), (h, nq, nk) "
                "or (nq, nk)"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise InputError(f"w is {tensor.dtype}, expected weights in floating point of 16 bits or more")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise InputError(f"w is a tensor of {tensor.layout} on {tensor.device}, expected a dense one with data")
        form = _Form(tensor.ndim, not isinstance(w, Tensor))
        return form, tensor.detach()[(None,) * (4 - tensor.ndim)]

    def back(self, x: Tensor) -> Any:
        x = x[(0,) * (4 - self.ndim)]
        return x.numpy() if self.array else x


def _tensor(w: Any) -> Tensor:
    if isinstance(w, (tuple, list)) and any(getattr(x, "ndim", 0) > 1 for x in w):
        raise InputError(f"w is a {type(w).__name__} of {len(w)} layers, expected the weights of one layer, w[layer]")
    array = np.asarray(w)
    if array.dtype.kind != "f":
        array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array  # NumPy has no bfloat16 itself
        if array.dtype.kind != "f":
            raise InputError(f"w is {array.dtype}, expected weights in floating point")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class _WeightsReducer(StatisticsReducer):
    """Statistics of weights that are given, as a tensor (b, h, nq, nk)."""

    def __init__(self, weights: Tensor, request: Request, totals: Totals) -> None:
        b, h, n_queries, n_keys = weights.shape
        grid = Grid(b, h, n_queries, n_keys, n_keys - n_queries, weights.device)
        super().__init__(RowState(), request, totals, grid)
        self.weights = weights

    def start(self, group: Group) -> None:
        pass

    def tile(self, known: object, tile: Tile) -> None:
        weights = self.weights[*tile.block.at, tile.columns].to(tile.group.tiles.dtype)
        if (masked := tile.masked()) is not None:
            weights = weights.masked_fill(masked, 0)
        if (counted := self.counted(tile)) is not None:
            weights = weights.masked_fill(~counted, 0)
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
