"""Caches that evict keys by their worth: the base class, heavy hitters (H2O), and policies by name."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv._contract import require
from qkv._registry import Registry
from qkv.cache.base import PAST, Cache, Step, check_distance_mask
from qkv.engine import as_biases, at_least_float32
from qkv.errors import InputError, at_least_one, kind_of
from qkv.normalizers import SumToOne


class Evicting(Cache):
    """Base of eviction policies: keeps the last `recent` keys, and of the older ones those of the greatest `worth`.

    A policy defines `worth`. Before a new token attends, the old key of least worth is evicted (on ties the oldest).
    Several tokens passed at once attend to all keys in the cache and to earlier tokens of their chunk, and keys are
    evicted afterwards. Each key head evicts on its own. Keys keep the rotation of their original positions; memory is
    constant.

    Args:
        keys: keys held, at most.
        recent: of these, the last ones, which are never evicted.

    Raises:
        InputError: for sizes that are not whole numbers with 1 ≤ recent < keys, and for a class without `worth`.

    >>> import torch, qkv
    >>> class MeanAttention(Evicting):
    ...     def worth(self, received, queries):
    ...         return received / queries
    >>> cache, causal = MeanAttention(6, recent=2), qkv.Attention(mask=qkv.masks.Causal())
    >>> for q, k, v in torch.randn(20, 3, 1, 2, 1, 8):
    ...     out = cache.attend(causal, q, k, v)
    >>> cache
    MeanAttention(keys=6, recent=2, seen=20, length=6)
    """

    def __init__(self, keys: int, recent: int) -> None:
        require(self, Evicting, "worth", "received, queries", "the worth of each key (b, hkv, slots)")
        name = type(self).__name__
        at_least_one(name, keys=keys, recent=recent)
        if recent >= keys:
            raise InputError(f"{name}: recent is {recent} of {keys} keys, expected fewer, so that a key can be evicted")
        super().__init__(keys)
        self.keys, self.recent = keys, recent

    def worth(
        self, received: Float[Tensor, "b hkv slots"], queries: Int[Tensor, "b hkv slots"]
    ) -> Float[Tensor, "b hkv slots"]:
        """The worth of each key; the least is evicted.

        Args:
            received: attention received by each key: the exact sum of its weights over all queries so far, and over
                the query heads that share its key head.
            queries: how many queries could attend to the key so far, its own token's included.
        """
        raise NotImplementedError

    def _check(self, step: Step) -> None:
        name, attention = type(self).__name__, step.attention
        check_distance_mask(name, step)
        if step.own.band != PAST:
            raise InputError(f"{name}: mask is {step.own!r}, but keys in this cache are unordered; expected Causal()")
        for bias in as_biases(attention.bias):
            if not bias.by_score:
                raise InputError(
                    f"{name}: bias is {type(bias).__name__}, which depends on positions, but keys in this cache "
                    "are unordered; expected no bias, or one that depends on the score alone, such as SoftCap"
                )
        if isinstance(attention.normalizer, SumToOne) and attention.normalizer.sample:
            raise InputError(
                f"{name}: normalizer is {type(attention.normalizer).__name__}(sample=True), whose weights are "
                "random; expected a deterministic normalizer"
            )

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        super()._allocate(k, v)
        shape = (*k.shape[:2], self._most)
        self._buffers["received"] = k.new_zeros(shape, dtype=at_least_float32(k.dtype))
        self._buffers["positions"] = k.new_zeros(shape, dtype=torch.int64)

    def key_positions(self, n_keys: int, n: int) -> Int[Tensor, "b hkv n_keys"]:
        """Each key head holds keys of its own."""
        positions = self._buffers["positions"][:, :, : self._stop]
        if n == 1:  # its position is in the buffer already
            return positions.clone()
        new = torch.arange(self.seen, self.seen + n, device=positions.device)
        return torch.cat([positions, new.expand(*positions.shape[:2], n)], 2)

    def _attend(self, step: Step) -> Tensor:
        q, k = step.rotated(self.seen)
        return self._step(step, q, k) if k.shape[2] == 1 else self._chunk(step, q, k)

    def _step(self, step: Step, q: Tensor, k: Tensor) -> Tensor:
        """Decode one token; the order of keys does not matter for a single query."""
        new = self._new(k, step.v)
        if self._stop < self._most:
            for name, x in new.items():
                self._buffers[name][:, :, self._stop : self._stop + 1] = x
            self._stop += 1
        else:
            slot = self._eviction_slots()
            for name, x in new.items():
                index = slot if x.ndim == 3 else slot[..., None].expand_as(x)
                self._buffers[name].scatter_(2, index, x)
        keys, values, received = (self._buffers[name][:, :, : self._stop] for name in ("keys", "values", "received"))
        out, weights = step.attend(None, q, keys, values, return_weights=True)
        received += _of_key_heads(weights[:, :, 0].to(received), k.shape[1])
        return out

    def _eviction_slots(self) -> Tensor:
        """The slot to evict for each key head, (b, hkv, 1)."""
        received, positions = self._buffers["received"], self._buffers["positions"]
        worth = self.checked_worth(received, self.seen - positions)
        worth = worth.masked_fill(positions > self.seen - self.recent, torch.inf)
        least = worth == worth.amin(-1, keepdim=True)
        return positions.masked_fill(~least, self.seen).argmin(-1, keepdim=True)

    def _chunk(self, step: Step, q: Tensor, k: Tensor) -> Tensor:
        """Process several tokens, in order after all keys in the cache, and then evict."""
        whole = {
            name: torch.cat([self._buffers[name][:, :, : self._stop], x], 2) for name, x in self._new(k, step.v).items()
        }
        keys, values = whole["keys"], whole["values"]
        out: Tensor = step.attend(step.own, q, keys, values)
        whole["received"] += _of_key_heads(step.attention.measure(q, keys).received, k.shape[1])
        if keys.shape[2] > self._most:
            slots = self._kept_slots(whole["received"], whole["positions"], self.seen + k.shape[2])
            whole = {
                name: x.gather(2, slots if x.ndim == 3 else slots[..., None].expand(-1, -1, -1, x.shape[3]))
                for name, x in whole.items()
            }
        self._stop = min(keys.shape[2], self._most)
        for name, x in whole.items():
            self._buffers[name][:, :, : self._stop] = x
        return out

    def _kept_slots(self, received: Tensor, positions: Tensor, seen: int) -> Tensor:
        """The slots to keep for each key head, (b, hkv, keys), after `seen` tokens."""
        by_age = positions.argsort(-1)
        old, recent = by_age[..., : -self.recent], by_age[..., -self.recent :]
        worth = self.checked_worth(received, seen - positions).gather(-1, old)
        by_worth = old.gather(-1, worth.argsort(stable=True, dim=-1))
        return torch.cat([by_worth[..., self.recent - self.keys :], recent], -1)

    def checked_worth(
        self, received: Float[Tensor, "b hkv slots"], queries: Int[Tensor, "b hkv slots"]
    ) -> Float[Tensor, "b hkv slots"]:
        """`worth` of a copy, so that a policy cannot change the sums, as floats."""
        worth = self.worth(received.clone(), queries)
        name, shape = type(self).__name__, tuple(received.shape)
        if not isinstance(worth, Tensor) or worth.shape != received.shape or worth.is_complex():
            raise InputError(f"{name}: worth returned {kind_of(worth)}, expected real numbers {shape}")
        worth = worth if worth.is_floating_point() else worth.double()
        if bool(worth.isnan().any()):
            if bool(received.isnan().any()):
                raise InputError(f"{name}: q or k has NaN, so attention received by a key is NaN; expected numbers")
            raise InputError(f"{name}: worth returned NaN, expected real numbers {shape}")
        return worth

    def _new(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Buffer entries of new tokens."""
        shape = k.shape[:3]
        positions = torch.arange(self.seen, self.seen + shape[2], device=k.device).expand(shape)
        received = self._buffers["received"].new_zeros(shape)
        return {"keys": k, "values": v, "received": received, "positions": positions}


def _of_key_heads(received: Tensor, key_heads: int) -> Tensor:
    """Sum over the query heads of each key head: (b, h, keys) to (b, hkv, keys)."""
    return received.unflatten(1, (key_heads, -1)).sum(2)


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


BUILT_IN = {
    "full": "base.Full",
    "sliding": "base.Sliding",
    "window": "base.Sliding",
    "sinks": "base.Sinks",
    "heavy": "evicting.HeavyHitters",
}


def _problem(cls: Any) -> str | None:
    """Why a class that an installed package registers cannot be used as a policy."""
    if not issubclass(cls, Evicting):
        return "is not a subclass of qkv.cache.Evicting"
    return None if isinstance(getattr(cls, "name", None), str) else "has no class attribute name"


POLICIES = Registry("policy", "qkv.cache", BUILT_IN, "qkv.policies", _problem)
"""Commands find policies of other packages here, in the group of entry points ``qkv.policies``."""
