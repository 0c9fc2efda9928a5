"""A cache that keeps every key."""

from __future__ import annotations

from torch import Tensor

from qkv.attention import Attention
from qkv.cache.base import PAST, Cache, at_least_one, attend_with, rotated
from qkv.errors import InputError
from qkv.masks import Mask
from qkv.positions import Rotary


class Full(Cache):
    """Keys and values of up to `capacity` tokens; exactly the attention of the whole sequence.

    Any mask that hides the future serves: the last query stands at the last key held. For texts of different lengths
    pad on the left, and give `positions` (b, n) and a `mask` that hides the padding. With a rotary scaling that depends
    on the length, keys keep the turn of the length at which they came.

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
                f"cache holds {self.seen} tokens and {n} more came, but its capacity is {self.capacity}; "
                "expected a larger capacity, or a cache that lets go: Sliding, Sinks, HeavyHitters"
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
        if k.shape[2] == 1 and own.band == PAST:  # one query sees all there is
            whole = mask
        elif mask is not None:
            whole = own & mask
        return attend_with(attention, whole, q, keys.narrow(2, 0, stop), values.narrow(2, 0, stop))
