"""One text that a model reads in one forward or in several: its tokens, the layers that attended to them, its cache.

What a cache holds of a text is told from outside: nothing is stored on a cache, and it stays what the user has made.
Its methods that select batch items are replaced on its class while models are watched, because the keys do not always
tell which items were selected. Everything else is told from the keys: an item that was copied, cropped or pruned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.engine import Call
from qkv.errors import InputError
from qkv.profiler.capture.caches import Stored, located
from qkv.profiler.capture.inputs import Sequences
from qkv.profiler.capture.layer import Layer, Moment
from qkv.profiler.capture.pieces import Part, Selections, cropped
from qkv.profiler.capture.record import Measures, ObservedCall, Record, of_items

OF_TEXT = ("self", "text", "decoder")
"""Groups whose queries and keys are the tokens of the text."""
T = TypeVar("T")
Key = tuple[str, str, int]
"""Group and module of a layer, and the number of the module's call in its forward."""


@dataclass(frozen=True, eq=False)
class Read(Part):
    """Tokens that a forward reads."""

    ids: Int[Tensor, "b n"] | None
    """None if they are not known, as those of an image."""
    real: Bool[Tensor, "b n"] | None = None
    """True at real tokens; None if all are real."""


@dataclass(eq=False)
class Sequence:
    """The layers of one text, and its tokens. A text of an encoder and that of its decoder are one sequence."""

    measures: Measures
    layers: dict[Key, Layer] = field(default_factory=dict)
    heads: dict[tuple[Key, int], Layer] = field(default_factory=dict)
    """The same layers with other weights, of which one head is used: that whose weights an edit has changed."""
    text: list[Read] = field(default_factory=list)
    """What was read, by the decoder if there are two texts."""
    encoded: list[Tensor] = field(default_factory=list)
    """Token ids that an encoder has read."""
    selections: Selections = field(default_factory=Selections)
    two: bool = False
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
    cached: dict[int, Key] = field(default_factory=dict)
    """The keys of the layers by their number in the cache."""

    def fork(self) -> Sequence:
        """A copy that continues in another way."""
        own: dict[str, Any] = {
            name: copy(value) for name, value in vars(self).items() if isinstance(value, list | dict | set)
        }
        for name in ("layers", "heads"):
            own[name] = {key: layer.fork() for key, layer in own[name].items()}
        return replace(self, **own)

    @property
    def tokens(self) -> int:
        """Number of tokens read so far."""
        return self.text[-1].stop if self.text else 0

    @property
    def nameless(self) -> int:
        """The number of tokens whose ids are not known."""
        return sum(x.count for x in self.text if x.ids is None)

    @property
    def sources_read(self) -> int:
        """The number of texts or sounds of the encoder."""
        read = [len(x) for x in self.encoded]
        made = [len(x.final.statistics.entropy) for x in self.layers.values() if x.group == "encoder" and x.final]
        return max(read + made, default=1)

    @property
    def places(self) -> set[Key]:
        """Group, module and number of the layers in which the text attended to itself."""
        return {(x.group, x.module, x.number) for x in self.chosen(None).values() if x.group in OF_TEXT}

    # --- what a forward reads -----------------------------------------------------------------------------------------

    def marks(self, real: Bool[Tensor, "b n"]) -> None:
        """Of the newest tokens, some are padding."""
        if not bool(real.all()):
            self.text[-1] = replace(self.text[-1], real=real)

    def key_of(self, observed: ObservedCall) -> Key:
        """The key of the layer of a call."""
        key = observed.group, observed.module, observed.calls_before
        if key not in self.layers:
            used = {layer.number for layer in self.layers.values() if layer.group == observed.group}
            number = max(used, default=-1) + 1 if observed.layer in used else observed.layer
            self.layers[key] = Layer(observed.module, observed.group, number, observed.source)
        return key

    def add(self, key: Key, observed: ObservedCall, changed: Mapping[int, Call], *where: Any, **how: Any) -> None:
        """Add the queries of a call to its layer, as `Layer.add`; `changed` are the calls of edited heads."""
        for head in changed:
            self.heads.setdefault((key, head), self.layers[key].fork())
        how["selected"] = len(self.selections)
        self.layers[key].add(observed, *where, **how)
        for (of, head), layer in self.heads.items():
            if of == key:
                layer.add(replace(observed, call=changed.get(head, observed.call)), *where, **how)

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

    def select(self, items: Int[Tensor, " b"]) -> None:
        """Select batch items, as beam search does. (All beams of an item share what an encoder has read.)"""
        self.selections.append(items)
        self.kept = {i: at[items.to(at.device)] for i, at in self.kept.items()}
        self.batch = len(items)

    def crop(self, length: int) -> None:
        """Remove the tokens after the first `length`, as assisted generation does with tokens that are rejected.

        Raises:
            InputError: if they are measured together with earlier ones.
        """
        for layer in (*self.layers.values(), *self.heads.values()):
            if layer.group in (*OF_TEXT, "cross"):
                layer.crop(length)
        self.text = cropped(self.text, length)

    def remember(self, stored: dict[int, Stored]) -> None:
        """A forward has ended, and its cache holds these keys.

        Raises:
            InputError: if they do not come from the text.
        """
        if not self._expects(stored):  # some caches are pruned by hooks of the forward
            self._locate(stored)
        self.held = {i: layer.state for i, layer in stored.items()}

    def selects(self, stored: dict[int, Stored], items: Tensor | None) -> None:
        """Its cache has selected batch items, or was cropped if `items` is None.

        Raises:
            InputError: as for `remember`.
        """
        length = max((layer.length for i, layer in stored.items() if i not in self.apart), default=0)
        if items is not None:
            self.select(items)
        elif length < self.tokens and not self.kept:
            self.crop(length)
        self.remember(stored)

    def follow(self, stored: dict[int, Stored], positions: Tensor | None) -> None:
        """Bring the sequence to what its cache, or a copy of it, now holds, before the next forward.

        Args:
            stored: the layers of the cache.
            positions: of the tokens that the forward reads, if it is told.

        Raises:
            InputError: as for `remember`.
        """
        untouched = set(stored) == set(self.held) and all(layer.is_in(self.held[i]) for i, layer in stored.items())
        if not (untouched and self._expects(stored)):
            self._locate(stored, positions)

    def _expects(self, stored: dict[int, Stored]) -> bool:
        """Whether a cache holds as many keys as after the last forward."""

        def holds(i: int, layer: Stored) -> bool:
            n = layer.keys.shape[2]
            return n == self.kept[i].shape[2] if i in self.kept else layer.length == self.tokens and n >= layer.least

        return all(holds(i, layer) for i, layer in stored.items() if i not in self.apart)

    def _locate(self, stored: dict[int, Stored], positions: Tensor | None = None) -> None:
        """Tell from the keys of a cache which items and tokens it holds."""
        if not all(layer.stays for layer in stored.values()):
            raise InputError(
                "the cache holds another number of keys than after the last forward, or was changed since, and may "
                "round or rotate keys, so that it is not known which tokens they belong to; expected one that keeps "
                "keys as the model computes them, such as DynamicCache"
            )
        items, real = None, self.real()
        places: dict[int, Tensor] = {}
        of_text = (set(stored) & set(self.cached)) - self.apart
        for i in sorted(of_text, reverse=True):  # keys of deep layers tell the most
            known, layer = self.layers[self.cached[i]].keys(self.selections), stored[i]
            known = known if items is None else known[items.to(known.device)]
            at = self.kept.get(i)
            at = at if at is None or items is None else at[items.to(at.device)]
            shown = real if real is None or items is None else real[items]
            chosen, places[i] = located(layer.keys, known, at, layer.length - layer.keys.shape[2], shown)
            if items is None:
                items = chosen
            elif not torch.equal(chosen, torch.arange(len(chosen))):
                raise InputError("the layers of the cache hold other batch items each; expected the same in all layers")
        if items is None:
            raise InputError(
                "the cache was filled outside of qkv.watch, or by forwards that were not recorded; expected the model "
                "to read the text from its first token inside qkv.watch"
            )
        length = max(stored[i].length for i in places)

        def newest(i: int, place: Tensor) -> bool:
            at = torch.arange(stored[i].length - place.shape[2], stored[i].length, device=place.device)
            return i not in self.kept and bool((place == at).all())

        whole = all(newest(i, place) for i, place in places.items())
        if len(items) != self.batch or not torch.equal(items, torch.arange(len(items))):
            self.select(items)
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
        real = self.real()
        real = torch.ones(1, self.tokens, dtype=torch.bool) if real is None else real
        first, all_ = positions[:, 0].cpu(), real.sum(1)
        return bool((first == all_).all()) and not bool((first == real[:, :length].sum(1)).all())

    # --- what is in a profile -----------------------------------------------------------------------------------------

    def ids(self, length: int | None = None) -> Int[Tensor, "b n"] | None:
        """The token ids of every batch item, as it is now or as it was after `length` tokens; None if not known."""
        past = [x for x in self.text if length is None or x.stop <= length]
        if length is not None and (not past or past[-1].stop != length):
            return None  # no forward ended there
        selections = self.selections if length is None else Selections(self.selections[: past[-1].selected])
        ids = [x.ids.cpu() for x in selections.present(past) if x.ids is not None]
        return torch.cat(ids, 1) if ids else None

    def real(self) -> Bool[Tensor, "b n"] | None:
        """True at real tokens of every batch item as it is now; None if all are real."""
        if all(x.real is None for x in self.text):
            return None
        parts = [(x.count, x.real) for x in self.selections.present(self.text)]
        whole = torch.ones(max(len(real) for _, real in parts if real is not None), 1, dtype=torch.bool)
        return torch.cat([whole.expand(-1, n) if real is None else real.cpu() for n, real in parts], 1)

    def read(self) -> Sequences:
        """The tokens of the text, or of both texts."""
        ids, encoded = self.ids(), torch.cat([x.cpu() for x in self.encoded], 1) if self.encoded else None
        return Sequences(encoded, ids, two=True) if self.two else Sequences(ids if encoded is None else encoded)

    def as_of(self, length: int, item: int) -> Sequence | None:
        """A copy as it was after `length` tokens, with one of the batch items of that time; None if it is not known."""
        past, ids = self.fork(), self.ids(length)
        try:
            past.crop(length)
        except InputError:
            return None
        if ids is None:
            return None
        batch = len(ids)

        def of_source(x: T, n: int) -> T:  # all beams of an item share what an encoder has read
            return of_items(x, torch.tensor([item * n // batch]))

        for layer in past.layers.values():
            if layer.final is not None and layer.group not in (*OF_TEXT, "cross"):
                layer.final = of_source(layer.final, len(layer.final.statistics.entropy))
        past.encoded = [of_source(x, len(x)) for x in past.encoded]
        del past.selections[past.text[-1].selected :]
        past.select(torch.tensor([item]))
        return past

    def chosen(self, layers: Collection[int] | None) -> dict[Key, Layer]:
        """The layers with these numbers, of all if None, of which something was recorded."""
        recorded = {key: x for key, x in self.layers.items() if x.final is not None or x.pieces or x.measured}
        return {key: x for key, x in recorded.items() if layers is None or x.number in layers}

    def records(self, layers: Collection[int] | None) -> list[Record]:
        """The whole rows of the layers with these numbers, of all if None."""
        now = self._now()
        records = {key: layer.record(now) for key, layer in self.chosen(layers).items()}
        for (key, head), layer in self.heads.items():
            if key in records:
                records[key] = records[key].with_head(head, layer.record(now))
        return [*records.values()]

    def settle(self, layers: Collection[int] | None) -> None:
        """Measure all of the layers with these numbers, because no forward continues the text."""
        chosen = self.chosen(layers).values()
        for layer, record in zip(chosen, self.records(layers), strict=True):
            layer.final, layer.pieces, layer.measured = record, [], []
        self.heads.clear()

    def measure(self) -> None:
        """Measure what would take too much memory to keep."""
        full = [x for x in (*self.layers.values(), *self.heads.values()) if x.final is None and x.full]
        now = self._now() if full else None
        for layer in full:
            assert now is not None
            layer.measure(now)

    def _now(self) -> Moment:
        return Moment(self.measures, self.tokens, self.selections, self.real())

    @property
    def items(self) -> int:
        """The number of texts in a profile."""
        return max(
            [self.batch, *(len(x.final.statistics.entropy) for x in self.layers.values() if x.final is not None)]
        )

    def held_numbers(self) -> int:
        return sum(p.new[0].numel() for x in self.layers.values() for p in x.pieces if p.new)
