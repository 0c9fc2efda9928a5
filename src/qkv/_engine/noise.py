"""Random numbers that belong to a pair of query and key, whatever tile it is computed in.

A hash of (seed, batch item, head, query, key): kernels agree on them, and the backward makes them again instead of
keeping them. The mixing steps are Stafford's and Wellons's 32-bit finalizers ("hash-prospector", 2018).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.masks import Grid, Region

_MASK = 0xFFFFFFFF


def _hash32(x: Tensor) -> Tensor:
    """A 32-bit bijection in which every bit of the input matters to every bit of the output."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _hash_seed(seed: int) -> int:
    """The seed hashed on its own: else the next seed would be this one, moved by a query."""
    once = int(_hash32(torch.tensor(seed & _MASK)))
    return int(_hash32(torch.tensor((once + 0x9E3779B9) & _MASK)))


def uniform(seed: int, region: Region, grid: Grid) -> Float[Tensor, "b h q k"]:
    """Numbers in (0, 1), one for each pair of a region; float32, of 24 bits.

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
    """Standard Gumbel numbers: the argmax of scores + these is a draw from their softmax (Gumbel 1954)."""
    return -torch.log(-torch.log(uniform(seed, region, grid)))
