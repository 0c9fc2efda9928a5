"""Masks: which query may attend to which key.

A mask is **True where a query may attend**. It is a description, not a tensor: it computes the visible pairs of
any tile of the score matrix, and the block status of whole tiles: kernels skip EMPTY tiles, mask PARTIAL tiles and
compute FULL tiles without a mask. Masks compose with ``&``, ``|``, ``~``.

Positions are key indices. Query ``i`` has position ``i + offset``, where ``offset`` is ``n_keys - n_queries``
by default: the last query is aligned with the last key (bottom-right alignment).

It imports contracts and errors alone. Read `geometry.py`, then `base.py`.
"""

from __future__ import annotations

from qkv.masks.base import And, Blockwise, Mask, Not, Or, Predicate, Shifted
from qkv.masks.built_in import (
    Causal,
    Dense,
    Dilated,
    Document,
    Global,
    Padding,
    Prefix,
    RandomKeys,
    Strided,
    Window,
    bigbird,
    longformer,
)
from qkv.masks.convert import from_flex, from_multihead, from_sdpa, mask_mod, to_flex, to_multihead, to_sdpa
from qkv.masks.geometry import EMPTY, FULL, PARTIAL, Grid, Region, Tiles
from qkv.masks.top_keys import TopKeys

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "And",
    "Blockwise",
    "Causal",
    "Dense",
    "Dilated",
    "Document",
    "Global",
    "Grid",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Predicate",
    "Prefix",
    "RandomKeys",
    "Region",
    "Shifted",
    "Strided",
    "Tiles",
    "TopKeys",
    "Window",
    "bigbird",
    "from_flex",
    "from_multihead",
    "from_sdpa",
    "longformer",
    "mask_mod",
    "to_flex",
    "to_multihead",
    "to_sdpa",
]
__dir__ = __all__.copy
