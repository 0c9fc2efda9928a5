"""Tensors that all tiles at the same offset from the diagonal share: distances, and pairs inside of band masks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qkv._engine.sweep import Tile
from qkv.masks import Mask

KEPT_PAIRS = 2**23  # most pairs of masks that are kept


class Patterns:
    """Tensors that depend only on a tile's offset from the diagonal and its shape, computed once for each offset."""

    def __init__(self) -> None:
        self._distances: dict[tuple[int, ...], Tensor] = {}
        self._inside: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._by_head: set[str] = set()  # masks that differ by head or batch item
        self._pairs = 0
        self._visible: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def distances(self, start: int, tile: Tile) -> Tensor:
        """Distances between the queries and keys of a tile, (q, k); `start` is the position of its first query."""
        key = _place(start, tile)
        if key not in self._distances:
            like = tile.group.tiles.q
            queries = torch.arange(start, start + tile.shape[2], device=like.device)
            keys = torch.arange(tile.columns.start, tile.columns.stop, device=like.device)
            self._distances[key] = (queries[:, None] - keys).abs().to(like.dtype)
        return self._distances[key]

    def inside(self, name: str, mask: Mask, tile: Tile, columns: slice) -> Tensor:
        """1 at the pairs of some columns of a tile inside `mask`, 0 elsewhere; `name` is that of the mask.

        Reused if the mask is a band, or is the same for all heads and batch items and not too large.
        """
        rows, tiles = tile.rows, tile.group.tiles
        lengths = (rows.stop - rows.start, columns.stop - columns.start)
        place = (rows.start - columns.start,) if mask.band is not None else (rows.start, columns.start)
        key = (name, (*place, *lengths))
        if key in self._inside:
            return self._inside[key]
        region, grid = tiles.region(rows, columns), tiles.call.grid
        if name in self._by_head or self._pairs + math.prod(lengths) > KEPT_PAIRS:
            return mask.visible(region, grid).to(tiles.dtype)
        inside = mask.visible(replace(region, batch=slice(None), heads=slice(None)), grid).to(tiles.dtype)
        if inside.shape[:2] != (1, 1):
            self._by_head.add(name)
            batch, heads = (
                slice(None) if n == 1 else x for n, x in zip(inside.shape, (tiles.batch, tiles.heads), strict=False)
            )
            return inside[batch, heads]
        self._inside[key] = inside
        self._pairs += inside.numel()
        return inside

    def visible(self, start: int, tile: Tile, masked: Tensor) -> tuple[Tensor, Tensor]:
        """The number of pairs of a tile that are not masked: of each query, and of each key."""
        key = _place(start, tile)
        if key in self._visible:
            return self._visible[key]
        visible = ~masked
        counts = visible.sum(-1), visible.sum(-2)
        mask = tile.group.tiles.call.mask
        if mask is not None and mask.band is not None:
            self._visible[key] = counts
        return counts


def _place(start: int, tile: Tile) -> tuple[int, ...]:
    return (start - tile.columns.start, *tile.shape[2:])
