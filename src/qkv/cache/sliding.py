"""`Sliding`: a cache that keeps the last keys."""

from __future__ import annotations

from torch import Tensor

from qkv.attention import Attention
from qkv.cache.base import RecentKeysCache, attend_with, check_distance_mask, rotated
from qkv.errors import at_least_one
from qkv.masks import Mask, Window
from qkv.positions import Rotary


class Sliding(RecentKeysCache):
    """Keeps the last `window` keys, including the query's own: exactly attention with ``mask & Window(window)``.

    With a rotary scaling that depends on the length, each key keeps the rotation for the length at which it was added.

    Memory is constant. (Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825.)

    >>> Sliding(64)
    Sliding(window=64, seen=0, length=0)
    """

    def __init__(self, window: int) -> None:
        at_least_one("Sliding", window=window)
        super().__init__(window, window)

    def _check(
        self, attention: Attention, own: Mask, n: int, rotary: Rotary | None, positions: Tensor | None,
        mask: Mask | None,
    ) -> None:  # fmt: skip
        check_distance_mask("Sliding", own, positions, mask)

    def _attend(
        self, attention: Attention, own: Mask, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None,
        positions: Tensor | None, mask: Mask | None,
    ) -> Tensor:  # fmt: skip
        keep = min(self.seen, self.window - 1)
        q, k = rotated(rotary, q, k, self.seen, positions)
        keys, values = self._append(k, v, keep, 0)
        low, high = own.band or (0, 0)
        whole: Mask | None = own
        if k.shape[2] == 1 and low == 0 and high >= keep:  # all keys are visible to a single query
            whole = None
        elif high >= self.window:
            whole = own & Window(self.window)
        return attend_with(attention, whole, q, keys, values)
