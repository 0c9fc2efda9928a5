"""Geometry of the score matrix: its sizes (`Grid`), a rectangle of it (`Region`), and its tiles (`Tiles`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2  # block status; with these numbers `&` is min, `|` is max and `~` is 2 - x


@dataclass(frozen=True)
class Grid:
    """Sizes of a score matrix, and the position of query 0 among the keys.

    >>> grid = Grid.of(2, 5)
    >>> grid.offset, grid.rows(0, 2).tolist()
    (3, [3, 4])
    """

    batch: int
    heads: int
    n_queries: int
    n_keys: int
    offset: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of(n_queries: int, n_keys: int, batch: int = 1, heads: int = 1, device: str | torch.device = "cpu") -> Grid:
        """Return the grid with the last query at the last key."""
        return Grid(batch, heads, n_queries, n_keys, n_keys - n_queries, torch.device(device))

    def rows(self, start: int, stop: int) -> Int[Tensor, " q"]:
        """Return positions of queries ``start`` to ``stop`` (exclusive)."""
        return torch.arange(start, stop, device=self.device) + self.offset

    def columns(self, start: int, stop: int) -> Int[Tensor, " k"]:
        """Return positions of keys ``start`` to ``stop`` (exclusive)."""
        return torch.arange(start, stop, device=self.device)


@dataclass(frozen=True)
class Region:
    """A rectangle of the score matrix: slices of queries, keys, batch items and query heads.

    >>> region = Region(slice(0, 2), slice(1, 2), offset=3)
    >>> region.of(torch.arange(6).view(1, 1, 2, 3)).tolist()
    [[[[1], [4]]]]
    >>> region.queries.tolist(), region.keys.tolist()
    ([[3], [4]], [1])
    """

    rows: slice
    columns: slice
    batch: slice = field(default_factory=lambda: slice(None))
    heads: slice = field(default_factory=lambda: slice(None))
    offset: int = 0
    """Position of query 0 among the keys."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def queries(self) -> Int[Tensor, "q 1"]:
        """Positions of the queries among the keys, as a column."""
        return (torch.arange(self.rows.start, self.rows.stop, device=self.device) + self.offset)[:, None]

    @property
    def keys(self) -> Int[Tensor, " k"]:
        """Positions of the keys."""
        return torch.arange(self.columns.start, self.columns.stop, device=self.device)

    def of(self, x: Tensor) -> Tensor:
        """Return the slice of x (b, h, q, k) for this region; dimensions of size 1 broadcast."""
        cuts = (self.batch, self.heads, self.rows, self.columns)
        return x[tuple(cut if size > 1 else slice(None) for cut, size in zip(cuts, x.shape, strict=True))]

    def moved(self, down: int, right: int, offset: int) -> Region:
        """Return the region `down` rows and `right` columns further, in a matrix with query 0 at position `offset`."""
        rows, columns = (slice(x.start + n, x.stop + n) for x, n in ((self.rows, down), (self.columns, right)))
        return replace(self, rows=rows, columns=columns, offset=offset)

    def indices(self, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return batch items, heads, query positions and keys of the region, shaped to broadcast to (b, h, q, k)."""
        b = torch.arange(grid.batch, device=grid.device)[self.batch]
        h = torch.arange(grid.heads, device=grid.device)[self.heads]
        q, k = grid.rows(self.rows.start, self.rows.stop), grid.columns(self.columns.start, self.columns.stop)
        return b[:, None, None, None], h[:, None, None], q[:, None], k


@dataclass(frozen=True)
class Tiles:
    """First and last position (inclusive) of every row tile and every column tile.

    >>> tiles = Tiles.of(Grid.of(4, 4), rows=2, columns=3)
    >>> tiles.q_first.tolist(), tiles.k_last.tolist()
    ([0, 2], [2, 3])
    """

    q_first: Int[Tensor, " rows"]
    q_last: Int[Tensor, " rows"]
    k_first: Int[Tensor, " cols"]
    k_last: Int[Tensor, " cols"]

    @staticmethod
    def of_spans(rows: Sequence[slice], columns: Sequence[slice], grid: Grid) -> Tiles:
        """Return tiles of these queries and these keys."""
        q, k = (torch.tensor([(x.start, x.stop - 1) for x in spans]).T.contiguous() for spans in (rows, columns))
        return Tiles(q[0] + grid.offset, q[1] + grid.offset, k[0], k[1])

    @staticmethod
    def of(grid: Grid, rows: int, columns: int, start: int = 0, stop: int | None = None) -> Tiles:
        """Return tiles of `rows` × `columns` over queries `start` to `stop` and all keys."""
        stop = grid.n_queries if stop is None else stop
        q = torch.arange(start, stop, rows)
        k = torch.arange(0, grid.n_keys, columns)
        return Tiles(
            q + grid.offset, (q + rows).clamp(max=stop) - 1 + grid.offset, k, (k + columns).clamp(max=grid.n_keys) - 1
        )
