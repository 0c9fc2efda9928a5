"""What tiles as far from the diagonal have in common: distances, and the insides of bands."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv._engine.sweep import Tile
from qkv.masks import Mask


class Patterns:
    """Tensors of a tile that its place relative to the diagonal decides, made once for all tiles with that place."""

    def __init__(self) -> None:
        self._distances: dict[tuple[int, ...], Tensor] = {}
        self._inside: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def distances(self, start: int, tile: Tile) -> Tensor:
        """How far the keys of a tile are from its queries, the first of which stands at `start`: (q, k)."""
        key = _place(start, tile)
        if key not in self._distances:
            like = tile.group.tiles.q
            queries = torch.arange(start, start + tile.shape[2], device=like.device)
            keys = torch.arange(tile.columns.start, tile.columns.stop, device=like.device)
            self._distances[key] = (queries[:, None] - keys).abs().to(like.dtype)
        return self._distances[key]

    def inside(self, name: str, mask: Mask, start: int, tile: Tile) -> Tensor:
        """1 at the pairs of a tile that are inside the mask of this name, 0 elsewhere; kept if the mask is a band."""
        key = (name, _place(start, tile))
        if key in self._inside:
            return self._inside[key]
        tiles = tile.group.tiles
        made = mask.visible(tile.region, tiles.call.grid).to(tiles.dtype)
        if mask.band is not None:
            self._inside[key] = made
        return made


def _place(start: int, tile: Tile) -> tuple[int, ...]:
    return (start - tile.columns.start, *tile.shape[2:])
