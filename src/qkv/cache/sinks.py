"""`Sinks` (StreamingLLM): a cache that keeps the first keys and the last keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from qkv._engine.call import as_biases
from qkv.attention import Attention
from qkv.cache.base import PAST, RecentKeysCache, attend_with, check_distance_mask, rotated
from qkv.errors import InputError, at_least_one
from qkv.masks import Mask, Window
from qkv.normalizers import SumToOne
from qkv.partial import Partial, merge
from qkv.positions import Rotary


class Sinks(RecentKeysCache):
    """StreamingLLM: keeps the first `sinks` keys and the last `window` keys, with positions by cache slot.

    Models put unused attention on the first tokens (attention sinks), and fail once a sliding window evicts them. This
    cache keeps them and assigns positions by slot: of w + s slots, the newest key is in slot s + w − 1 and sink j in
    slot j, for any distance between them in the text. Masks, biases and rotation use slots. (Xiao et al. 2024,
    arXiv:2309.17453, §3.2.) Memory is constant.

    Several tokens passed at once give the same results as one by one. A rotary scaling that depends on the length uses
    the number of slots in use.

    >>> Sinks(4, 60)
    Sinks(sinks=4, window=60, seen=0, length=0)
    """

    # Two facts make it cheap. Products of rotated queries and keys depend on the distance alone, so recent keys keep
    # the rotation of their position in the text, and only the sinks are rotated again for each query. And the rows
    # before the window in the buffer belong to evicted keys: with the sinks written there, all keys are one view.

    def __init__(self, sinks: int, window: int) -> None:
        at_least_one("Sinks", sinks=sinks, window=window)
        self.sinks = sinks
        super().__init__(sinks + window, window)

    def _check(
        self, attention: Attention, own: Mask, n: int, rotary: Rotary | None, positions: Tensor | None,
        mask: Mask | None,
    ) -> None:  # fmt: skip
        check_distance_mask("Sinks", own, positions, mask)
        if positions is not None and positions.tolist() != list(range(self.seen, self.seen + n)):
            raise InputError(
                f"Sinks: positions is {positions.tolist()}, but this cache uses the positions of its slots; "
                f"expected None or {self.seen} … {self.seen + n - 1}"
            )
        if rotary is None:
            return
        if attention.score is not None and not attention.score.keeps_rotation:
            raise InputError(
                f"Sinks: score is {type(attention.score).__name__} with rotary, but it depends on more than the "
                "distance; expected Dot or Cosine"
            )
        for bias in as_biases(attention.bias):
            if bias.by_query:
                raise InputError(
                    f"Sinks: bias is {type(bias).__name__} with rotary, which would rotate the queries that the bias "
                    "uses; expected only one of them"
                )
        if _has_key(attention) and not _parts_merge(attention, own):
            raise InputError(
                f"Sinks: normalizer is {type(attention.normalizer).__name__}(key=…) with rotary and with a bias or a "
                "mask by distance; expected at most two of the three"
            )

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        super()._allocate(k, v)
        for name, x in (("sink keys", k), ("sink values", v)):  # keys before rotation
            self._buffers[name] = x.new_empty(x.shape[0], x.shape[1], self.sinks, x.shape[3])

    def key_positions(self, n_keys: int, n: int) -> Int[Tensor, " n_keys"]:
        """The sinks, and the last keys."""
        if self.seen + n <= self._most:
            return super().key_positions(n_keys, n)
        if n > 1:
            raise InputError(
                f"Sinks: {n} tokens after {self.seen} attend in several parts, which cannot be watched; expected one "
                f"token at a time after the first {self._most}"
            )
        recent = super().key_positions(self.window, n)
        return torch.cat([torch.arange(self.sinks, device=recent.device), recent])

    def _attend(
        self, attention: Attention, own: Mask, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None,
        positions: Tensor | None, mask: Mask | None,
    ) -> Tensor:  # fmt: skip
        n, seen = k.shape[2], self.seen
        if seen < self.sinks:
            for name, x in (("sink keys", k), ("sink values", v)):
                self._buffers[name][:, :, seen : seen + n] = x[:, :, : self.sinks - seen]
        fill = min(n, max(0, self._most - seen))
        outs = []
        if fill:  # nothing evicted yet: slots equal positions
            first = q[:, :, :fill], k[:, :, :fill], v[:, :, :fill]
            outs.append(self._fill(attention, own, first, rotary))
        together = _parts_merge(attention, own) and (n - fill > 1 or (rotary is not None and _has_key(attention)))
        for at in range(fill, n, n if together else 1):
            part = slice(at, n if together else at + 1)
            new = q[:, :, part], k[:, :, part], v[:, :, part]
            attend = self._chunk if together else self._step
            outs.append(attend(attention, own, new, rotary, seen + at))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _fill(self, attention: Attention, own: Mask, new: tuple[Tensor, ...], rotary: Rotary | None) -> Tensor:
        q, k, v = new
        q, k = rotated(rotary, q, k, self.seen)
        keys, values = self._append(k, v, self.seen, 0)
        alone = q.shape[2] == 1 and own.band == PAST
        return attend_with(attention, None if alone else own, q, keys, values)

    def _step(self, attention: Attention, own: Mask, new: tuple[Tensor, ...], rotary: Rotary | None, at: int) -> Tensor:
        """Decode one token, at position `at`, with all slots in use."""
        q, k, v = new
        q, k = rotated(rotary, q, k, at, length=self._most)
        self._append(k, v, self.window - 1, self.sinks)
        first, start = self._stop - self._most, self._stop - self.window
        keys, values = self._buffers["keys"], self._buffers["values"]
        keys[:, :, first:start] = self._sink_keys(rotary, at - (self._most - 1))
        values[:, :, first:start] = self._buffers["sink values"]
        whole = None if own.band == PAST else own
        return attend_with(attention, whole, q, keys[:, :, first : self._stop], values[:, :, first : self._stop])

    def _chunk(
        self, attention: Attention, own: Mask, new: tuple[Tensor, ...], rotary: Rotary | None, at: int
    ) -> Tensor:
        """Process tokens from position `at` on, with all slots in use: merges attention to sinks and to recent keys."""
        q, k, v = new
        near, k = rotated(rotary, q, k, at, length=self._most)
        if rotary is not None:
            # Rotate by slots: every query is in the last slot, the sinks in the first ones. This part also includes
            # the sink or learned key of the softmax, exactly once.
            slot = torch.full((q.shape[2],), self._most - 1, device=q.device)
            q = rotary(q, slot, self._most)
        keys, values = self._append(k, v, self.window - 1, self.sinks)
        far = Partial(
            *attend_with(attention, None, q, self._sink_keys(rotary, 0), self._buffers["sink values"], return_lse=True)
        )
        plain = attention.normalizer
        if isinstance(plain, SumToOne):
            plain = plain.with_sink()
        attention = replace(attention, normalizer=plain)
        recent = Partial(*attend_with(attention, Window(self.window), near, keys, values, return_lse=True))
        return merge(far, recent).out

    def _sink_keys(self, rotary: Rotary | None, first: int) -> Tensor:
        """Keys of the sinks, rotated by positions first, first + 1, …"""
        keys = self._buffers["sink keys"]
        return keys if rotary is None else rotary.span(keys, first, self._most)


def _parts_merge(attention: Attention, own: Mask) -> bool:
    """Whether partial results merge, and neither mask nor biases depend on the distance."""
    return (
        (attention.normalizer is None or attention.normalizer.has_lse)
        and own.band == PAST
        and all(bias.by_score for bias in as_biases(attention.bias))
    )


def _has_key(attention: Attention) -> bool:
    return isinstance(attention.normalizer, SumToOne) and attention.normalizer.key is not None
