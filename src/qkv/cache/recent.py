"""Caches that hold the last keys in order: `Sliding` these alone, `Sinks` the first ones, too."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from qkv._contract import overrides
from qkv.attention import Attention
from qkv.cache.base import PAST, Cache, Step, check_distance_mask, rows_like
from qkv.engine import as_biases
from qkv.errors import InputError, at_least_one
from qkv.masks import Mask, Window
from qkv.normalizers import SumToOne
from qkv.partial import Partial, merge
from qkv.positions import Rotary
from qkv.scores import Score


class RecentKeysCache(Cache):
    """Base of the caches that hold the last keys contiguously and in order, in a linear buffer with spare rows.

    New rows are appended; when the buffer is full, the rows still needed are moved to the front. With spare rows for
    an eighth of the window, this costs eight row copies per token, which is little since every token reads the window.
    """

    def __init__(self, most: int, window: int) -> None:
        super().__init__(most)
        self.window = window

    def _allocate(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        size = self._most + max(16, self.window // 8)
        self._buffers = {"keys": rows_like(k, size), "values": rows_like(v, size)}

    def _append(self, k: Tensor, v: Tensor, keep: int, front: int) -> tuple[Tensor, Tensor]:
        """Append new rows; returns keys and values of the last `keep` rows before them and the new rows.

        If rows must move, they move to row `front`. The results are views of the buffers, unless the chunk is longer
        than these.
        """
        keys, values = self._buffers["keys"], self._buffers["values"]
        n = k.shape[2]
        if self._stop + n > keys.shape[2]:
            old = slice(self._stop - keep, self._stop)
            if front + keep + n > keys.shape[2]:
                whole = [torch.cat([x[:, :, old], new], 2) for x, new in ((keys, k), (values, v))]
                self._stop = front + self.window
                for x, all_ in zip((keys, values), whole, strict=True):
                    x[:, :, front : self._stop] = all_[:, :, -self.window :]
                return whole[0], whole[1]
            for x in (keys, values):
                x[:, :, front : front + keep] = x[:, :, old].clone()  # the two may overlap
            self._stop = front + keep
        start, self._stop = self._stop, self._stop + n
        keys[:, :, start : self._stop] = k
        values[:, :, start : self._stop] = v
        first = start - keep
        return keys[:, :, first : self._stop], values[:, :, first : self._stop]


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

    def _check(self, step: Step) -> None:
        check_distance_mask("Sliding", step)

    def _attend(self, step: Step) -> Tensor:
        keep = min(self.seen, self.window - 1)
        q, k = step.rotated(self.seen)
        keys, values = self._append(k, step.v, keep, 0)
        low, high = step.own.band or (0, 0)
        whole: Mask | None = step.own
        if k.shape[2] == 1 and low == 0 and high >= keep:  # all keys are visible to a single query
            whole = None
        elif high >= self.window:
            whole = step.own & Window(self.window)
        return step.attend(whole, q, keys, values)


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

    def _check(self, step: Step) -> None:
        check_distance_mask("Sinks", step)
        attention, positions, stop = step.attention, step.positions, self.seen + step.k.shape[2]
        if positions is not None and positions.tolist() != list(range(self.seen, stop)):
            raise InputError(
                f"Sinks: positions is {positions.tolist()}, but this cache uses the positions of its slots; "
                f"expected None or {self.seen} … {stop - 1}"
            )
        if step.rotary is None:
            return
        if attention.score is not None and not attention.score.rotation_invariant:
            raise InputError(
                f"Sinks: score is {type(attention.score).__name__} with rotary, but it depends on more than the "
                "distance; expected Dot or Cosine"
            )
        for bias in as_biases(attention.bias):
            if bias.depends_on_query:
                raise InputError(
                    f"Sinks: bias is {type(bias).__name__} with rotary, which would rotate the queries that the bias "
                    "uses; expected only one of them"
                )
        if _has_key(attention) and not _parts_merge(step):
            raise InputError(
                f"Sinks: normalizer is {type(attention.normalizer).__name__}(key=…) with rotary and with a bias or a "
                "mask by distance; expected at most two of the three"
            )

    def _allocate(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super()._allocate(q, k, v)
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

    def _attend(self, step: Step) -> Tensor:
        n, seen = step.k.shape[2], self.seen
        if seen < self.sinks:
            for name, x in (("sink keys", step.k), ("sink values", step.v)):
                self._buffers[name][:, :, seen : seen + n] = x[:, :, : self.sinks - seen]
        step = replace(step, positions=None)  # they are those of the text, as was checked

        def part(at: int, stop: int) -> Step:
            new = slice(at, stop)
            return replace(step, q=step.q[:, :, new], k=step.k[:, :, new], v=step.v[:, :, new])

        fill = min(n, max(0, self._most - seen))
        outs = []
        if fill:  # nothing evicted yet: slots equal positions
            new = part(0, fill)
            q, k = new.rotated(seen)
            alone = fill == 1 and new.own.band == PAST
            outs.append(new.attend(None if alone else new.own, q, *self._append(k, new.v, seen, 0)))
        if _parts_merge(step) and (n - fill > 1 or (n > fill and step.rotary is not None and _has_key(step.attention))):
            outs.append(self._chunk(part(fill, n), seen + fill))
        else:
            outs += [self._step(part(at, at + 1), seen + at) for at in range(fill, n)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _step(self, new: Step, at: int) -> Tensor:
        """Decode one token, at position `at`, with all slots in use."""
        q, k = new.rotated(at, self._most)
        self._append(k, new.v, self.window - 1, self.sinks)
        first, start = self._stop - self._most, self._stop - self.window
        keys, values = self._buffers["keys"], self._buffers["values"]
        keys[:, :, first:start] = self._sink_keys(new.rotary, at - (self._most - 1))
        values[:, :, first:start] = self._buffers["sink values"]
        whole = None if new.own.band == PAST else new.own
        return new.attend(whole, q, keys[:, :, first : self._stop], values[:, :, first : self._stop])

    def _chunk(self, new: Step, at: int) -> Tensor:
        """Process tokens from position `at` on, with all slots in use: merges attention to sinks and to recent keys."""
        q, (near, k) = new.q, new.rotated(at, self._most)
        if new.rotary is not None:
            # Rotate by slots: every query is in the last slot, the sinks in the first ones. This part also includes
            # the sink or learned key of the softmax, exactly once.
            slot = torch.full((q.shape[2],), self._most - 1, device=q.device)
            q = new.rotary(q, slot, self._most)
        keys, values = self._append(k, new.v, self.window - 1, self.sinks)
        sinks = self._sink_keys(new.rotary, 0), self._buffers["sink values"]
        far = Partial(*new.attend(None, q, *sinks, return_lse=True))
        plain = new.attention.normalizer
        if isinstance(plain, SumToOne):
            plain = plain.with_sink()
        new.attention = replace(new.attention, normalizer=plain)
        recent = Partial(*new.attend(Window(self.window), near, keys, values, return_lse=True))
        return merge(far, recent).out

    def _sink_keys(self, rotary: Rotary | None, first: int) -> Tensor:
        """Keys of the sinks, rotated by positions first, first + 1, …"""
        keys = self._buffers["sink keys"]
        return keys if rotary is None else rotary.span(keys, first, self._most)


def _parts_merge(step: Step) -> bool:
    """Whether partial results merge, and neither mask nor biases depend on the distance."""
    return (
        (step.attention.normalizer is None or step.attention.normalizer.has_lse)
        and (step.attention.score is None or not overrides(step.attention.score, Score, "row_factor"))
        and step.own.band == PAST
        and all(bias.position_free for bias in as_biases(step.attention.bias))
    )


def _has_key(attention: Attention) -> bool:
    return isinstance(attention.normalizer, SumToOne) and attention.normalizer.key is not None
