"""`HeavyHitters` (H2O): a cache that keeps the last keys and those that received most attention."""

from __future__ import annotations

from torch import Tensor

from qkv.cache.evicting import Evicting
from qkv.errors import at_least_one


class HeavyHitters(Evicting):
    """H2O: keeps the last `recent` keys, and of the older ones the `heavy` keys that received most attention.

    The attention received by a key is the exact sum of its weights over all queries so far, and over the query heads
    that share its key head. (Zhang et al. 2023, arXiv:2306.14048, alg. 1.)

    >>> HeavyHitters(32, 32)
    HeavyHitters(heavy=32, recent=32, seen=0, length=0)
    """

    def __init__(self, heavy: int, recent: int) -> None:
        at_least_one("HeavyHitters", heavy=heavy, recent=recent)
        super().__init__(heavy + recent, recent)
        self.heavy = heavy

    def worth(self, received: Tensor, queries: Tensor) -> Tensor:
        """The attention received."""
        return received

    def checked_worth(self, received: Tensor, queries: Tensor) -> Tensor:
        """`worth`, which needs no copy and no check here: on a GPU the check would wait for the device."""
        return received

    def __repr__(self) -> str:
        return f"HeavyHitters(heavy={self.heavy}, recent={self.recent}, seen={self.seen}, length={self.length})"
