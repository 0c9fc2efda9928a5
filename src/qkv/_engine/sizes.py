"""Sizes of tiles, by device. Results do not depend on them beyond rounding; tests set small ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """How the score matrix is cut.

    >>> sizes(torch.device("cpu")).tile
    256
    """

    tile: int
    """Queries, and keys, of a tile: a power of two, as are the bins of thumbnails, so that each divides the other."""
    heads: int
    """Query heads whose tiles are computed together. On CPU a tile of all of them should stay in cache."""
    pairs: int
    """Numbers that a pairwise score may make of a tile before it sums them up, where the tile can be made smaller."""
    most_pairs: int
    """The same, where the size of the tile is not the score's to choose: it then takes some rows at a time."""
    panel: int
    """Scores of whole rows held at once, where a level is found on all of them together."""
    picture: tuple[int, int]
    """Queries and keys of a tile of one head, in maps."""
    few_scores: int
    """Scores a head so few that forming the weights is the fastest."""
    whole_mask: int
    """Pairs of query and key so few that one mask tensor is cheaper than cutting it into blocks."""
    sparse_tile: int
    """Queries, and keys, of a tile of a mask that shows little of any row."""
    sparse_keys: int
    """With fewer keys such a mask is cut as any other."""


# On CUDA a launch costs more than a small tile: few large ones. (They have not been timed on a card yet.)
BY_DEVICE = {
    "cpu": Sizes(
        tile=256, heads=12, pairs=2**20, most_pairs=2**22, panel=2**20, picture=(128, 1024), few_scores=2**14,
        whole_mask=2**14, sparse_tile=64, sparse_keys=1024,
    ),
    "cuda": Sizes(
        tile=1024, heads=16, pairs=2**24, most_pairs=2**26, panel=2**25, picture=(1024, 4096), few_scores=2**14,
        whole_mask=2**14, sparse_tile=64, sparse_keys=1024,
    ),
}  # fmt: skip


def sizes(device: torch.device) -> Sizes:
    """Those of a device; of CUDA's for any accelerator."""
    return BY_DEVICE.get(device.type, BY_DEVICE["cuda"])
