"""Caches that keep all keys, or the last ones."""

from __future__ import annotations

from torch import Tensor

from qkv.attention import Attention
from qkv.cache.base import PAST, Cache, RecentKeysCache, attend_with, check_distance_mask, rotated
from qkv.errors import InputError, at_least_one
from qkv.masks import Mask, Window
from qkv.positions import Rotary


class Full(Cache):
    """Keeps the keys and values of up to `capacity` tokens; exactly the attention of the whole sequence.

    Supports any mask without future keys; the last query is aligned with the last key. For texts of different lengths,
    pad on the left, and pass `positions` (b, n) and a `mask` for the padding. With a rotary scaling that depends on the
    length, each key keeps the rotation for the length at which it was added.

    >>> import torch, qkv
    >>> cache, causal = Full(512), qkv.Attention(mask=qkv.masks.Causal())
    >>> q = k = v = torch.randn(1, 4, 10, 16)
    >>> cache.attend(causal, q, k, v).shape, cache
    (torch.Size([1, 4, 10, 16]), Full(capacity=512, seen=10, length=10))
    """

    def __init__(self, capacity: int) -> None:
        at_least_one("Full", capacity=capacity)
        super().__init__(capacity)
        self.capacity = capacity

    def _check(
        self, attention: Attention, own: Mask, n: int, rotary: Rotary | None, positions: Tensor | None,
        mask: Mask | None,
    ) -> None:  # fmt: skip
        if self.seen + n > self.capacity:
            raise InputError(
                f"Full: capacity is {self.capacity}, but {n} tokens were added to {self.seen}; expected a larger "
                "capacity, or a cache that evicts keys: Sliding, Sinks, HeavyHitters"
            )

    def _attend(
        self, attention: Attention, own: Mask, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None,
        positions: Tensor | None, mask: Mask | None,
    ) -> Tensor:  # fmt: skip
        keys, values = self._buffers["keys"], self._buffers["values"]
        self._stop = stop = self.seen + k.shape[2]
        q, k = rotated(rotary, q, k, self.seen, positions)
        keys.narrow(2, self.seen, k.shape[2]).copy_(k)
        values.narrow(2, self.seen, k.shape[2]).copy_(v)
        whole: Mask | None = own
        if k.shape[2] == 1 and own.band == PAST:  # all keys are visible to a single query
            whole = mask
        elif mask is not None:
            whole = own & mask
        return attend_with(attention, whole, q, keys.narrow(2, 0, stop), values.narrow(2, 0, stop))


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
