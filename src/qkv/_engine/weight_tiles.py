"""`WeightTiles`: computes any tile of the final attention weights of a call, given the row state."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.row_state import RowState
from qkv._engine.tiles import MASKED_SCORE, ScoreTiles


class WeightTiles:
    """Tiles of the weight matrix of the heads of `tiles`; the whole matrix is never formed.

    Args:
        tiles: score tiles of some batch items and heads of a call.
        rows: row state of the whole call.
        queries: True for the queries to include; the weights of other queries are 0.
    """

    def __init__(self, tiles: ScoreTiles, rows: RowState, queries: Bool[Tensor, "b nq"] | None = None) -> None:
        self.tiles = tiles
        here = (tiles.batch, tiles.heads)
        self.level, self.total, self.chosen = (
            None if x is None else x[here] for x in (rows.level, rows.total, rows.chosen)
        )
        self.uncounted = None if queries is None else ~queries[tiles.batch, None]
        if tiles.call.normalizer.has_lse:
            # exp(score − ∞) = 0 gives fully masked and excluded queries zero weights. (Finite, because 0 · ∞ is NaN.)
            assert self.level is not None
            empty = self.level == -torch.inf
            empty = empty if self.uncounted is None else empty | self.uncounted
            self.level = self.level.masked_fill(empty, -MASKED_SCORE)

    def fill(
        self,
        rows: slice,
        columns: slice,
        masked: Bool[Tensor, "#b #h q k"] | None,
        out: Float[Tensor, "b h q k"],
        scratch: Float[Tensor, "b h q k"],
    ) -> Float[Tensor, "b h q k"] | None:
        """Write the weights of a tile to `out`; `masked` are its masked pairs, None if all are visible.

        Returns log2 of the weights for softmax (a view of `scratch` if possible), else None.
        """
        if not self.tiles.call.normalizer.has_lse:
            self._fill_by_definition(rows, columns, masked, out)
            return None
        tiles = self.tiles
        assert self.level is not None
        log2 = tiles.log2_weights(rows, columns, self.level[:, :, rows], out=scratch)
        if masked is not None:
            tiles.mask_(log2, masked, rows, columns, MASKED_SCORE)
        if not tiles.linear:
            log2.clamp_(min=MASKED_SCORE)  # a bias may also mask pairs, with −inf
        torch.exp2(log2, out=out)
        return log2

    def _fill_by_definition(self, rows: slice, columns: slice, masked: Tensor | None, out: Tensor) -> None:
        """The weights of any normalizer, computed by its definition."""
        tiles, call = self.tiles, self.tiles.call
        if self.chosen is not None:
            keys = call.grid.columns(columns.start, columns.stop)
            out.copy_(keys == self.chosen[:, :, rows, None])
        else:
            scores = tiles.scores(rows, columns)
            shift, divisor = tiles.of(call.shift), tiles.of(call.divisor)
            if shift is not None:
                scores = scores + (shift[..., rows] if shift.shape[2] > 1 else shift)[..., None]
            if masked is not None:
                scores = scores.masked_fill(masked, -torch.inf)  # masked scores may be NaN
            out.copy_(tiles.weights(scores, None if self.level is None else self.level[:, :, rows]))
            for by in (self.total, divisor):
                if by is not None:
                    out /= by[:, :, rows, None]
        if masked is not None:
            out.masked_fill_(masked, 0)
        if self.uncounted is not None:
            out.masked_fill_(self.uncounted[..., rows, None], 0)
