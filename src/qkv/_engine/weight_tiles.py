"""The weights of one attention call, tile by tile: final ones, because what a row knows of all its scores is given."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.row_state import RowState
from qkv._engine.tiles import HIDDEN, ScoreTiles


class WeightTiles:
    """The weight matrix of the heads of `tiles`, tile by tile; never the whole.

    Args:
        tiles: scores of some batch items and heads of a call.
        rows: what the rows of the whole call know (`qkv.statistics.measure.row_state`).
        queries: True where a query counts; the weights of others are 0.
    """

    def __init__(self, tiles: ScoreTiles, rows: RowState, queries: Bool[Tensor, "b nq"] | None = None) -> None:
        self.tiles = tiles
        here = (tiles.batch, tiles.heads)
        self.level, self.total, self.chosen = (
            None if x is None else x[here] for x in (rows.level, rows.total, rows.chosen)
        )
        self.uncounted = None if queries is None else ~queries[tiles.batch, None]
        if tiles.call.normalizer.has_lse:
            # exp(score − ∞) = 0: a query that sees nothing, or does not count, weighs nothing. (Finite: 0 · ∞ is NaN.)
            assert self.level is not None
            unseen = self.level == -torch.inf
            unseen = unseen if self.uncounted is None else unseen | self.uncounted
            self.level = self.level.masked_fill(unseen, -HIDDEN)

    def fill(
        self,
        rows: slice,
        columns: slice,
        hidden: Bool[Tensor, "#b #h q k"] | None,
        out: Float[Tensor, "b h q k"],
        scratch: Float[Tensor, "b h q k"],
    ) -> Float[Tensor, "b h q k"] | None:
        """Make the weights of a tile in `out`; `hidden` is what `ScoreTiles.hidden` says, None if all is visible.

        Returns their base-2 logarithms, if they came by: those of a softmax.
        """
        if not self.tiles.call.normalizer.has_lse:
            self._fill_by_definition(rows, columns, hidden, out)
            return None
        tiles = self.tiles
        assert self.level is not None
        log2 = tiles.log2_weights(rows, columns, self.level[:, :, rows], out=scratch)
        if hidden is not None:
            log2.masked_fill_(hidden, HIDDEN)
        if not tiles.linear:
            log2.clamp_(min=HIDDEN)  # a bias may hide pairs with −inf, too
        torch.exp2(log2, out=out)
        return log2

    def _fill_by_definition(self, rows: slice, columns: slice, hidden: Tensor | None, out: Tensor) -> None:
        """The weights of any normalizer."""
        tiles, call = self.tiles, self.tiles.call
        if self.chosen is not None:
            keys = call.grid.columns(columns.start, columns.stop)
            out.copy_(keys == self.chosen[:, :, rows, None])
        else:
            scores = tiles.scores(rows, columns)
            shift, divisor = tiles.of(call.shift), tiles.of(call.divisor)
            if shift is not None:
                scores = scores + (shift[..., rows] if shift.shape[2] > 1 else shift)[..., None]
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)  # what is masked may be NaN
            out.copy_(tiles.weights(scores, None if self.level is None else self.level[:, :, rows]))
            for by in (self.total, divisor):
                if by is not None:
                    out /= by[:, :, rows, None]
        if hidden is not None:
            out.masked_fill_(hidden, 0)
        if self.uncounted is not None:
            out.masked_fill_(self.uncounted[..., rows, None], 0)
