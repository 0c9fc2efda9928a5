"""Counter-based random numbers: one per pair of query and key, independent of the tiling.

Each number is a hash of (seed, batch item, head, query, key), so all kernels draw the same numbers and the backward
recomputes them. The mixing steps are Stafford's and Wellons's 32-bit finalizers ("hash-prospector", 2018).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.masks import Grid, Region

_MASK = 0xFFFFFFFF


def _hash32(x: Tensor) -> Tensor:
    """A 32-bit hash: a bijection in which every input bit affects every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _hash_seed(seed: int) -> int:
    """The hashed seed; without the hash, seed + 1 would give the noise of seed shifted by one query."""
    once = int(_hash32(torch.tensor(seed & _MASK)))
    return int(_hash32(torch.tensor((once + 0x9E3779B9) & _MASK)))


def uniform(seed: int, region: Region, grid: Grid) -> Float[Tensor, "b h q k"]:
    """Uniform numbers in (0, 1), one for each pair of a region; float32 with 24 random bits.

    >>> from qkv.masks import Grid, Region
    >>> whole, row = slice(0, 4), slice(2, 3)
    >>> a, b = (uniform(1, Region(rows, whole), Grid.of(4, 4)) for rows in (whole, row))
    >>> torch.equal(a[:, :, 2:3], b)
    True
    """
    b, h, q, k = region.indices(grid)
    row = _hash32((q - grid.offset + _hash_seed(seed)) & _MASK)
    for index in (h, b):
        row = _hash32((row + (index + 1) * 0x9E3779B9) & _MASK)
    bits = _hash32((row ^ _hash32(k + 0x632BE5AB)) & _MASK)
    return ((bits >> 8).float() + 0.5) * 2**-24


def gumbel(seed: int, region: Region, grid: Grid) -> Float[Tensor, "b h q k"]:
    """Standard Gumbel noise: argmax(scores + noise) is a sample from softmax(scores) (Gumbel 1954)."""
    return -torch.log(-torch.log(uniform(seed, region, grid)))
