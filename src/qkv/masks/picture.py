"""Plots of masks, for `Mask.plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from qkv.errors import at_least_one
from qkv.masks.grid import EMPTY, FULL, PARTIAL, Grid, Region, Tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from qkv.masks.base import Mask

PAIRS = 512  # up to this many tokens, one cell per pair
SHADES = {EMPTY: "#ffffff", PARTIAL: "#f0b64d", FULL: "#2f6f9f"}  # distinguishable with any colour vision
INK = "#1f4e79"


def draw(mask: Mask, n_queries: int, n_keys: int, *, ax: Axes | None = None, tile: int | None = None) -> Axes:
    """Draw `mask`; see `Mask.plot`."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    at_least_one("plot", n_queries=n_queries, n_keys=n_keys, tile=1 if tile is None else tile)
    grid = Grid.of(n_queries, n_keys)
    mask.check(grid)
    if ax is None:
        _, ax = plt.subplots(figsize=(4.2, 4.2 * min(2.0, max(0.5, n_queries / n_keys))), layout="constrained")
    extent = (-0.5, n_keys - 0.5, n_queries - 0.5, -0.5)
    if tile is not None:
        status = mask.classify(Tiles.of(grid, tile, tile), grid)[0, 0].numpy()
        shown: np.ndarray = np.repeat(np.repeat(status, tile, 0), tile, 1)[:n_queries, :n_keys]
        ax.imshow(shown, cmap=ListedColormap(list(SHADES.values())), vmin=0, vmax=2, extent=extent, alpha=0.45)
    share = shares(mask, grid)
    fade = LinearSegmentedColormap.from_list("visible", [(1, 1, 1, 0), INK])
    ax.imshow(share, cmap=fade, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    ax.set(xlabel="key", ylabel="query", title=f"{type(mask).__name__}: {1 - share.mean():.0%} masked")
    ax.set_aspect("equal" if 0.5 <= n_queries / n_keys <= 2 else "auto")
    ax.tick_params(length=0)
    return ax


def shares(mask: Mask, grid: Grid) -> np.ndarray:
    """The visible fraction of each cell of the plot (a pair, or a tile of pairs), in linear memory."""
    size = -(-max(grid.n_queries, grid.n_keys) // PAIRS)
    tiles = Tiles.of(grid, size, size)
    out = torch.empty(len(tiles.q_first), len(tiles.k_first))
    ones = torch.ones(size, grid.n_keys)
    area = torch.nn.functional.avg_pool2d
    for row in range(len(out)):
        rows = slice(row * size, min((row + 1) * size, grid.n_queries))
        visible = mask.visible(Region(rows, slice(0, grid.n_keys)), grid)[0, 0].float()
        spare = (0, -grid.n_keys % size, 0, size - len(visible))
        counted = area(torch.nn.functional.pad(visible, spare)[None], size)
        of = area(torch.nn.functional.pad(ones[: len(visible)], spare)[None], size)
        out[row] = (counted / of)[0, 0]
    return out.numpy()
