"""Tensors that all tiles at the same offset from the diagonal share: distances, and the insides of band masks."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv._engine.sweep import Tile
from qkv.masks import Mask


class Patterns:
    """Tensors that depend only on a tile's offset from the diagonal and its shape, computed once for each offset."""

    def __init__(self) -> None:
        self._distances: dict[tuple[int, ...], Tensor] = {}
        self._inside: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def distances(self, start: int, tile: Tile) -> Tensor:
        """Distances between the queries and keys of a tile, (q, k); `start` is the position of its first query."""
        key = _place(start, tile)
        if key not in self._distances:
            like = tile.group.tiles.q
            queries = torch.arange(start, start + tile.shape[2], device=like.device)
            keys = torch.arange(tile.columns.start, tile.columns.stop, device=like.device)
            self._distances[key] = (queries[:, None] - keys).abs().to(like.dtype)
        return self._distances[key]

    def inside(self, name: str, mask: Mask, start: int, tile: Tile) -> Tensor:
        """1 at the pairs of a tile inside `mask`, 0 elsewhere; stored under `name` for reuse if the mask is a band."""
        key = (name, _place(start, tile))
        if key in self._inside:
            return self._inside[key]
        tiles = tile.group.tiles
        inside = mask.visible(tile.region, tiles.call.grid).to(tiles.dtype)
        if mask.band is not None:
            self._inside[key] = inside
        return inside


def _place(start: int, tile: Tile) -> tuple[int, ...]:
    return (start - tile.columns.start, *tile.shape[2:])
