"""Selection of keys by a score of their own, as in sparse attention that is trained: `TopKeys`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError, kind_of
from qkv.masks.base import Mask, TensorMask, whole
from qkv.masks.geometry import EMPTY, FULL, PARTIAL, Grid, Region, Tiles

ROWS = 128  # queries whose index scores are in memory at once


class TopKeys(TensorMask):
    """Every query attends to the `k` keys, or blocks of keys, with the largest index scores.

    `index_scores` broadcasts to (batch, heads, queries, keys), or is a function that returns these rows for a slice of
    queries, so that memory stays linear: queries × k. With ``block=m`` it has a column for each m keys, and selects
    whole blocks. Only keys that are visible under `among` are selected (for a block, if its first key is); below k of
    them, all are. Ties are those of `torch.topk`. The selection has no gradient.

    This is the selection of DeepSeek's sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2), of NSA (Yuan et al. 2025,
    arXiv:2502.11089) and of MoBA (Lu et al. 2025, arXiv:2502.13189), which differ in their index scores. The weight
    that full attention gives to keys outside it is 1 − the mass of ``qkv.measure(q, k, mass={"kept": selection})``.

    Args:
        index_scores: the scores by which keys are selected, or a function of a slice of queries.
        k: keys, or blocks, for each query.
        among: the mask of the keys that may be selected, such as `Causal()`; all if None.
        block: keys in a block.
        n_queries: number of queries, if `index_scores` is a function.
        n_keys: number of keys, if it is not block times the columns of `index_scores`.

    >>> from qkv.masks import Causal
    >>> scores = torch.tensor([[0.0, 9.0, 9.0], [0.0, 1.0, 9.0], [3.0, 1.0, 2.0]])
    >>> TopKeys(scores, 1, among=Causal()).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    """

    def __init__(
        self,
        index_scores: Float[Tensor, "..."] | Callable[[slice], Float[Tensor, "..."]],
        k: int,
        *,
        among: Mask | None = None,
        block: int = 1,
        n_queries: int | None = None,
        n_keys: int | None = None,
    ) -> None:
        self.k, self.block = k, block
        whole(self, "k", 1, "keys, or blocks, for each query")
        whole(self, "block", 1, "keys in a block")
        if isinstance(index_scores, Tensor):
            scores, n_queries = index_scores, index_scores.shape[-2] if index_scores.ndim > 1 else None
        elif not callable(index_scores) or n_queries is None:
            raise InputError(
                f"TopKeys: index_scores is {kind_of(index_scores)} and n_queries is {n_queries}, expected a float "
                "tensor, or a function of a slice of queries and n_queries, their number"
            )
        parts = []
        for start in range(0, n_queries or 0, ROWS):
            rows = slice(start, min(start + ROWS, n_queries or 0))
            some = scores[..., rows, :] if isinstance(index_scores, Tensor) else index_scores(rows)
            if not isinstance(some, Tensor) or not some.is_floating_point() or not 2 <= some.ndim <= 4:
                break
            some = some.detach()[(None,) * (4 - some.ndim)]
            n_keys = block * some.shape[3] if n_keys is None else n_keys
            parts.append(self._selected(some, rows, among, n_queries or 0, n_keys))
        if not parts or n_keys is None or sum(x.shape[2] for x in parts) != n_queries:
            got = kind_of(index_scores) if isinstance(index_scores, Tensor) or not parts else "of several sizes"
            raise InputError(
                f"TopKeys: index_scores is {got}, expected floats that broadcast to (batch, heads, queries, keys)"
            )
        self.n_keys = n_keys
        self.selected = torch.cat(parts, 2)
        """The numbers of the selected keys or blocks, ascending, (b, h, queries, k); one past the last where fewer are
        visible."""

    def __repr__(self) -> str:
        blocks = f", block={self.block}" if self.block > 1 else ""
        return f"TopKeys(k={self.k}{blocks})"

    def _selected(self, scores: Tensor, rows: slice, among: Mask | None, n_queries: int, n_keys: int) -> Tensor:
        """Return the selection of some queries."""
        b, h, _, units = scores.shape
        if not (units - 1) * self.block < n_keys <= units * self.block:
            raise InputError(
                f"TopKeys: n_keys is {n_keys} with {units} columns of index_scores and block {self.block}, expected "
                f"{(units - 1) * self.block + 1} to {units * self.block} keys"
            )
        if among is not None:
            grid = Grid.of(n_queries, n_keys, b, h, scores.device)
            among.check(grid)
            at = torch.arange(b, device=scores.device)[:, None, None, None]
            of = torch.arange(h, device=scores.device)[:, None, None]
            q, k = grid.rows(rows.start, rows.stop)[:, None], grid.columns(0, units) * self.block
            scores = scores.masked_fill(~among.is_visible(at, of, q, k, grid), -torch.inf)
        best, found = scores.topk(min(self.k, units), -1)
        return found.masked_fill(best == -torch.inf, units).sort(-1).values

    def check(self, grid: Grid) -> None:
        b, h, n_queries, _ = self.selected.shape
        got, want = (b, h, n_queries, self.n_keys), (grid.batch, grid.heads, grid.n_queries, grid.n_keys)
        if b not in (1, grid.batch) or h not in (1, grid.heads) or got[2:] != want[2:]:
            raise InputError(
                f"TopKeys: index_scores are for (batch, heads, queries, keys) = {got}, which does not "
                f"broadcast to {want}"
            )

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        selected, units = self.selected.to(k.device), k // self.block
        b, h = (x if size > 1 else torch.zeros_like(x) for x, size in zip((b, h), selected.shape, strict=False))
        rows = selected[b, h, q - grid.offset]
        if rows.ndim > 1 and rows.shape[-2] == 1:  # a row of queries for all keys: one search for each pair
            rows, units = rows[..., 0, :], units.expand(*rows.shape[:-2], units.shape[-1]).contiguous()
            place = torch.searchsorted(rows.contiguous(), units).clamp(max=rows.shape[-1] - 1)
            return rows.gather(-1, place) == units
        return (rows == units[..., None]).any(-1)

    def visible(self, region: Region, grid: Grid) -> Tensor:
        cuts = zip((region.batch, region.heads), self.selected.shape, strict=False)
        rows = self.selected[(*(x if n > 1 else slice(None) for x, n in cuts), region.rows)].to(grid.device)
        chosen = torch.zeros(*rows.shape[:3], -(-self.n_keys // self.block) + 1, dtype=torch.bool, device=grid.device)
        chosen.scatter_(-1, rows, True)
        return chosen[..., region.keys // self.block]

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        selected = self.selected.cpu()
        b, h, _, _ = selected.shape
        units = -(-self.n_keys // self.block)
        rows, first, last = len(tiles.q_first), tiles.k_first // self.block, tiles.k_last // self.block
        some = torch.zeros(b, h, rows, units + 1, dtype=torch.int32)
        for i, (start, stop) in enumerate(zip(tiles.q_first.tolist(), tiles.q_last.tolist(), strict=True)):
            of_rows = selected[:, :, start - grid.offset : stop - grid.offset + 1].flatten(2)
            some[:, :, i].scatter_add_(-1, of_rows, torch.ones_like(of_rows, dtype=torch.int32))
        before = torch.nn.functional.pad(some[..., :units].cumsum(-1), (1, 0))
        count = before[..., last + 1] - before[..., first]
        size = (tiles.q_last - tiles.q_first + 1)[:, None] * (last - first + 1)
        return torch.where(count == 0, EMPTY, torch.where(count == size, FULL, PARTIAL)).to(torch.int8)
