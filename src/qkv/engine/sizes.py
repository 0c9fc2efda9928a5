"""Sizes of tiles by device, and the CUDA card."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Sizes that control how the score matrix is tiled.

    >>> sizes(torch.device("cpu")).tile
    256
    """

    tile: int
    """Queries and keys per tile: a power of two, like the bins of thumbnails, so that one divides the other."""
    heads: int
    """Query heads per tile. On CPU, a tile of all these heads should fit in cache."""
    pairs: int
    """Largest intermediate of a pairwise score, in elements."""
    panel: int
    """Scores of a block of whole rows."""
    picture: tuple[int, int]
    """Queries and keys per tile of one head, for attention maps."""
    few_scores: int = 2**14
    """Scores per head up to which forming the weights (the eager kernel) is fastest."""


# On CUDA a kernel launch costs more than a small tile, so tiles are large. (These sizes have not been tuned on a GPU.)
BY_DEVICE = {
    "cpu": Sizes(tile=256, heads=12, pairs=2**22, panel=2**22, picture=(128, 1024)),
    "cuda": Sizes(tile=1024, heads=16, pairs=2**26, panel=2**25, picture=(1024, 4096)),
}


def sizes(device: torch.device) -> Sizes:
    """Return the sizes for a device; all accelerators use those of CUDA."""
    return BY_DEVICE.get(device.type, BY_DEVICE["cuda"])


HOSTS = ("cpu",)
"""Types of the devices whose numbers are there at once; tests leave them out, so that a CPU stands for a card."""


def on_card(x: Tensor) -> bool:
    """Return whether a tensor is on a card, where reading a number waits for everything launched before."""
    return x.device.type not in HOSTS


GPUS = ("cuda",)
"""Types of the devices that torch's fused kernels, FlexAttention and Triton's kernels are for."""
LARGEST_HEAD = 256
"""Largest head dimension of torch's fused kernels and of the Triton kernels."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs its kernels on CPU tensors, as in the tests; it reads this variable when it is imported."""


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
