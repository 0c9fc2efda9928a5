"""One text that a model reads in one forward or in several: its tokens, the layers that attended to them, its cache.

What a cache holds of a text is told from outside: nothing is stored on a cache, and it stays what the user has made.
Its methods that select batch items are replaced on its class while models are watched, because the keys do not always
tell which items were selected. Everything else is told from the keys: an item that was copied, cropped or pruned.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError
from qkv.profiler.capture.caches import Stored, located
from qkv.profiler.capture.layer import Layer, in_order
from qkv.profiler.capture.pieces import Piece
from qkv.profiler.capture.record import Measures, ObservedCall, Record, of_items

OF_TEXT = ("self", "text", "decoder")
"""Groups whose queries and keys are the tokens of the text."""


@dataclass(eq=False)
class Sequence:
    """The layers of one text, and its tokens. A text of an encoder and that of its decoder are one sequence."""

    measures: Measures
    layers: dict[tuple[str, str, int], Layer] = field(default_factory=dict)
    """By group, module, and the number of the module's call in its forward."""
    source: list[Tensor] = field(default_factory=list)
    """Token ids; a tensor of one dimension where the batch was reordered."""
    target: list[Tensor] = field(default_factory=list)
    real: list[Tensor] = field(default_factory=list)
    """True at real tokens, of the decoder if there are two texts; empty while all are real."""
    two: bool = False
    tokens: int = 0
    """Number of tokens read so far, by the decoder if there are two texts."""
    batch: int = 0
    forwards: int = 0
    """Number of forwards that were recorded, of `reads` in all."""
    reads: int = 0
    groups: dict[str, str] = field(default_factory=dict)
    """The group of each module, by its first call: a single query says less than a whole text."""
    evicted: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    held: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """State of each layer of the cache after the last forward."""
    kept: dict[int, Int[Tensor, "b hkv m"]] = field(default_factory=dict)
    """Positions of the keys in each layer of the cache that was pruned."""
    apart: set[int] = field(default_factory=set)
    """Layers of the cache that hold no tokens of the text, such as those of an image."""
    cached: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    """The keys of the layers by their number in the cache."""

    def fork(self) -> Sequence:
        """A copy that continues in another way."""
        own: dict[str, Any] = {
            name: copy(value) for name, value in vars(self).items() if isinstance(value, list | dict | set)
        }
        own["layers"] = {key: layer.fork() for key, layer in self.layers.items()}
        return replace(self, **own)

    @property
    def read(self) -> list[Tensor]:
        """The tokens of the text that grows."""
        return self.target if self.two else self.source

    @property
    def sources_read(self) -> int:
        """The number of texts or sounds of the encoder."""
        read = [len(x) for x in self.source] if self.two else []
        made = [len(x.made.statistics.entropy) for x in self.layers.values() if x.group == "encoder" and x.made]
        return max(read + made, default=1)

    @property
    def places(self) -> set[tuple[str, str, int]]:
        """Group, module and number of the layers in which the text attended to itself."""
        return {(x.group, x.module, x.number) for x in self._chosen(None) if x.group in OF_TEXT}

    # --- what a forward reads -----------------------------------------------------------------------------------------

    def reads_tokens(self, n: int, batch: int) -> None:
        if self.real:
            self.real.append(torch.ones(batch, n, dtype=torch.bool, device=self.real[0].device))
        self.tokens, self.batch = self.tokens + n, batch

    def marks(self, real: Bool[Tensor, "b n"]) -> None:
        """Of the newest tokens, some are padding."""
        if self.real:
            self.real.pop()
        elif bool(real.all()):
            return
        elif (before := self.tokens - real.shape[1]) > 0:
            self.real.append(torch.ones(len(real), before, dtype=torch.bool, device=real.device))
        self.real.append(real)

    def layer(self, observed: ObservedCall) -> Layer:
        key = observed.group, observed.module, observed.own
        if key not in self.layers:
            number = sum(group == observed.group for group, _, _ in self.layers)
            self.layers[key] = Layer(observed.module, observed.group, number, observed.source)
        return self.layers[key]

    def keys_at(self, n_keys: int, before: int, n: int, index: int | None) -> int | Tensor:
        """Positions of the keys of a call with all new tokens; the position of the first if they follow each other.

        Args:
            n_keys: the number of keys, without the unused rows of a static cache.
            before: the number of tokens that were read before this forward.
            n: the number that it reads.
            index: the number of the layer in the cache.

        Raises:
            InputError: if they are not known.
        """
        kept = None if index is None else self.kept.get(index)
        if kept is None:
            return max(0, before + n - n_keys)
        if int(kept.max()) < before:
            kept = torch.cat([kept, torch.arange(before, before + n, device=kept.device).expand(*kept.shape[:2], n)], 2)
        if kept.shape[2] < n_keys:
            raise InputError("the cache was pruned, and has keys of which it is not known where they are in the text")
        return kept[:, :, -n_keys:]

    # --- what becomes of the cache ------------------------------------------------------------------------------------

    def reorder(self, items: Int[Tensor, " b"]) -> None:
        """Select batch items, as beam search does."""
        for layer in self.layers.values():
            if layer.group in (*OF_TEXT, "cross"):  # all beams of an item share the rest
                layer.reorder(items)
        for parts in (self.read, self.real):
            if parts:
                parts.append(items)
        self.kept = {i: at[items.to(at.device)] for i, at in self.kept.items()}
        self.batch = len(items)

    def crop(self, length: int) -> None:
        """Remove the tokens after the first `length`, as assisted generation does with tokens that are rejected."""
        for layer in self.layers.values():
            if layer.group in (*OF_TEXT, "cross"):
                layer.crop(length)
        for parts in (self.read, self.real):
            _cut(parts, length)
        self.tokens = length

    def remember(self, found: dict[int, Stored]) -> None:
        """A forward has ended, and its cache holds these keys.

        Raises:
            InputError: if they do not come from the text.
        """
        if not self._expects(found):  # some caches are pruned by hooks of the forward
            self._locate(found)
        self.held = {i: one.state for i, one in found.items()}

    def selects(self, found: dict[int, Stored], items: Tensor | None) -> None:
        """Its cache has selected batch items, or was cropped if `items` is None.

        Raises:
            InputError: as for `remember`.
        """
        length = max((one.length for i, one in found.items() if i not in self.apart), default=0)
        if items is not None:
            self.reorder(items)
        elif length < self.tokens and not self.kept:
            self.crop(length)
        self.remember(found)

    def follow(self, found: dict[int, Stored], positions: Tensor | None) -> None:
        """Bring the sequence to what its cache, or a copy of it, now holds, before the next forward.

        Args:
            found: the layers of the cache.
            positions: of the tokens that the forward reads, if it is told.

        Raises:
            InputError: as for `remember`.
        """
        untouched = set(found) == set(self.held) and all(one.is_in(self.held[i]) for i, one in found.items())
        if not (untouched and self._expects(found)):
            self._locate(found, positions)

    def _expects(self, found: dict[int, Stored]) -> bool:
        """Whether a cache holds as many keys as after the last forward."""

        def holds(i: int, one: Stored) -> bool:
            n = one.keys.shape[2]
            return n == self.kept[i].shape[2] if i in self.kept else one.length == self.tokens and n >= one.least

        return all(holds(i, one) for i, one in found.items() if i not in self.apart)

    def _locate(self, found: dict[int, Stored], positions: Tensor | None = None) -> None:
        """Tell from the keys of a cache which items and tokens it holds."""
        if not all(one.stays for one in found.values()):
            raise InputError(
                "the cache holds another number of keys than after the last forward, or was changed since, and may "
                "round or rotate keys, so that it is not known which tokens they belong to; expected one that keeps "
                "keys as the model computes them, such as DynamicCache"
            )
        items, real = None, self.ids(self.real)
        places: dict[int, Tensor] = {}
        of_text = (set(found) & set(self.cached)) - self.apart
        for i in sorted(of_text, reverse=True):  # keys of deep layers tell the most
            known, one = self.layers[self.cached[i]].keys(), found[i]
            known = known if items is None else known[items.to(known.device)]
            at = self.kept.get(i)
            at = at if at is None or items is None else at[items.to(at.device)]
            shown = real if real is None or items is None else real[items]
            chosen, places[i] = located(one.keys, known, at, one.length - one.keys.shape[2], shown)
            if items is None:
                items = chosen
            elif not torch.equal(chosen, torch.arange(len(chosen))):
                raise InputError("the layers of the cache hold other batch items each; expected the same in all layers")
        if items is None:
            raise InputError(
                "the cache was filled outside of qkv.watch, or by forwards that were not recorded; expected the model "
                "to read the text from its first token inside qkv.watch"
            )
        length = max(found[i].length for i in places)

        def newest(i: int, place: Tensor) -> bool:
            at = torch.arange(found[i].length - place.shape[2], found[i].length, device=place.device)
            return i not in self.kept and bool((place == at).all())

        whole = all(newest(i, place) for i, place in places.items())
        if len(items) != self.batch or not torch.equal(items, torch.arange(len(items))):
            self.reorder(items)
        if whole and length < self.tokens and not self._is_next(positions, length):
            self.crop(length)
        elif not whole or length < self.tokens:
            self.kept |= places
            self.evicted = True

    def _is_next(self, positions: Tensor | None, length: int) -> bool:
        """Whether positions follow those of all tokens read, and not those of the first `length`: the cache was pruned
        to its first keys, and not cropped."""
        if positions is None or positions.ndim != 2:
            return False
        real = self.ids(self.real)
        real = torch.ones(1, self.tokens, dtype=torch.bool) if real is None else real
        first, all_ = positions[:, 0].cpu(), real.sum(1)
        return bool((first == all_).all()) and not bool((first == real[:, :length].sum(1)).all())

    def at(self, length: int) -> Int[Tensor, "b n"] | None:
        """The tokens of all batch items as they were after `length` tokens."""
        return self.ids(_until(self.read, length))

    def as_of(self, length: int, item: int) -> Sequence | None:
        """A copy as it was after `length` tokens, with one of the batch items of that time; None if it is not known."""
        past, ids = self.fork(), self.at(length)
        if ids is None or ids.shape[1] != length:
            return None
        for layer in past.layers.values():
            if layer.group in (*OF_TEXT, "cross"):
                for one in (layer, *layer.heads.values()):
                    one.pieces, one.measured = _until(one.pieces, length), _until(one.measured, length)
                if any(not isinstance(part, Tensor) and part[0][-1] >= length for part in layer.measured):
                    return None
            elif layer.made is not None:  # all beams of an item share what an encoder has read
                items = len(layer.made.statistics.entropy)
                layer.made = of_items(layer.made, torch.tensor([item * items // len(ids)]))
        if past.two:
            past.target = _until(past.target, length)
            past.source = [x[item * len(x) // len(ids)][None] for x in past.source]
        else:
            past.source = _until(past.source, length)
        past.real, past.tokens = _until(past.real, length), length
        past.reorder(torch.tensor([item]))
        return past

    # --- what is in a profile -----------------------------------------------------------------------------------------

    def ids(self, parts: list[Tensor]) -> Int[Tensor, "b n"] | None:
        """The token ids of every batch item as it is now."""
        found = in_order(parts, of_items)
        return torch.cat([x.cpu() for x in found], 1) if found else None

    def records(self, layers: Any) -> list[Record]:
        """The whole rows of the layers, of all if None."""
        real, joined = self.ids(self.real), dict[Any, Any]()
        return [layer.record(self.measures, real, self.tokens, joined) for layer in self._chosen(layers)]

    def _chosen(self, layers: Any) -> list[Layer]:
        found = [x for x in self.layers.values() if x.made is not None or x.pieces or x.measured]
        return [x for x in found if layers is None or x.number in layers]

    @property
    def items(self) -> int:
        """The number of texts in a profile."""
        return max([self.batch, *(len(x.made.statistics.entropy) for x in self.layers.values() if x.made is not None)])

    def held_numbers(self) -> int:
        return sum(p.new[0].numel() for x in self.layers.values() for p in x.pieces if isinstance(p, Piece) and p.new)

    def settle(self, layers: Any) -> None:
        """Measure everything: no forward continues the text."""
        for layer, record in zip(self._chosen(layers), self.records(layers), strict=True):
            layer.made = record
            layer.pieces, layer.measured = [], []

    def measure(self) -> None:
        """Measure what would take too much memory to keep."""
        full = [layer for layer in self.layers.values() if layer.made is None and layer.full]
        real, joined = self.ids(self.real) if full else None, dict[Any, Any]()
        for layer in full:
            layer.measure(self.measures, real, joined)


def _until(parts: list[Any], length: int) -> list[Any]:
    """The parts up to the one with which there are `length` tokens."""
    count = 0
    for i, part in enumerate(parts):
        if isinstance(part, Tensor) and part.ndim == 1:
            continue
        if isinstance(part, Tensor):
            count += part.shape[1]
        else:
            count = part.start + part.count if isinstance(part, Piece) else part[0][-1] + 1
        if count >= length:
            return parts[: i + 1]
    return list(parts)


def _cut(parts: list[Tensor], length: int) -> None:
    """Remove what is after the first tokens."""
    kept, count = [], 0
    for part in parts:
        some = part[:, : max(0, length - count)] if part.ndim == 2 else part
        count += some.shape[1] if part.ndim == 2 else 0
        kept.append(some)
    parts[:] = kept
