"""Which text a forward reads, and where its tokens are in it: told from its arguments and its cache."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qkv.cache.base import attending
from qkv.edits import Placed
from qkv.errors import InputError
from qkv.profiler.capture.caches import listening, stored
from qkv.profiler.capture.inputs import Sequences, real_tokens, sequences_of
from qkv.profiler.capture.record import Measures, ObservedCall
from qkv.profiler.capture.sequence import Sequence


@dataclass(eq=False)
class Forward:
    """A forward that runs, and where its tokens are in the text."""

    owner: Any
    """What began it: a module, or a method."""
    sequence: Sequence
    before: int
    """Number of tokens that were read before."""
    tokens: int
    """Number of tokens that it reads."""
    cache: Any
    may_cache: bool
    """Whether another forward may continue the text."""
    begins: bool
    """Whether it begins a text."""
    of_encoder: bool
    read: Sequences
    key_masks: Mapping[int, Tensor]
    query_masks: Mapping[int, Tensor]
    lost: InputError | None = None
    """Why its text is not known."""
    recorded: bool = True
    knows_padding: bool = False
    """Whether its arguments say which tokens are real; otherwise the first mask that tells does."""
    steps: dict[str, int] = field(default_factory=dict)

    def attends(self, module: nn.Module | None, group: str) -> None:
        """A module attends; some caches also have the keys of an image, to which the text attends."""
        two = getattr(getattr(self.owner, "config", None), "is_encoder_decoder", False)
        index = getattr(module, "layer_idx", None)
        if group == "cross" and not two and isinstance(index, int):
            self.sequence.apart.add(index)

    def sees(self, observed: ObservedCall) -> None:
        """A call attends from all new tokens; its mask may tell which are padding."""
        if not self.knows_padding and observed.keys is not None and self.tokens <= observed.keys.shape[1]:
            self.knows_padding = True
            self.sequence.marks(observed.keys[:, -self.tokens :])

    def place(self, observed: ObservedCall) -> Placed:
        """Where the queries and keys of a call are in the text, for an edit."""
        n_queries, n_keys = observed.call.q.shape[2], observed.call.k.shape[2]
        if observed.group == "cross":
            return Placed(None, 0, observed.queries, observed.first)
        if n_queries != self.tokens:
            return Placed(n_keys - n_queries, 0, observed.queries, observed.first)
        if self.lost is not None:
            raise self.lost
        self.sees(observed)
        keys_at = self.before + n_queries - n_keys
        if (cache := attending()) is not None:
            at = cache.key_positions(n_keys, n_queries)
            if at.ndim > 1 or int(at[-1] - at[0]) != n_keys - 1:
                raise InputError(
                    f"edits has {observed.module}, whose cache keeps keys that do not follow each other; expected a "
                    "cache that keeps all keys, or the last ones"
                )
            keys_at = int(at[0])
        real = self.sequence.ids(self.sequence.real)
        if real is None:
            return Placed(self.before, max(0, keys_at), None, 0)
        real = real.to(observed.call.q.device)
        return Placed(self.before, max(0, keys_at), real[:, self.before :], real.to(torch.int8).argmax(1))


@dataclass(eq=False)
class Texts:
    """The texts that a model reads, and the caches by which forwards continue them."""

    measures: Measures = field(default_factory=Measures)
    sequences: list[Sequence] = field(default_factory=list)
    """In the order in which the model began to read them."""
    records: bool = True
    """Whether the keys of the texts are recorded, which tell what was copied or pruned."""
    _encoded: list[Sequence] = field(default_factory=list)
    """Texts that an encoder has read, before the decoder begins."""
    _followed: dict[int, tuple[weakref.ref[Any], Sequence]] = field(default_factory=dict)
    """By the id of their cache."""
    _lost: dict[int, tuple[weakref.ref[Any], InputError]] = field(default_factory=dict)
    """Caches whose text is not known, and why."""

    def begin(self, owner: Any, name: str, batch: Mapping[str, Any], cache: Any, model: nn.Module) -> Forward:
        """A forward begins: find the text that it continues."""
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        of_encoder = isinstance(owner, nn.Module) and name.rpartition(".")[2] == "encoder"
        read = sequences_of(owner, tensors) if isinstance(owner, nn.Module) else Sequences(batch["tokens"])
        masks = real_tokens(owner, tensors, read) if isinstance(owner, nn.Module) else _padding(batch, cache)
        known, lost = None, None
        try:
            known = self._continued(cache)
        except InputError as error:
            lost = error
            self._lose(cache, error)
        sequence = known or (self._encoded.pop() if self._encoded and not of_encoder else None)
        sequence = sequence or Sequence(self.measures)
        sequence.two |= read.two or bool(sequence.layers and known is None and not of_encoder)
        ids = read.target if read.two else read.source
        if sequence.two and not read.two and not of_encoder and ids is not None:
            sequence.target.append(ids.detach())
        elif ids is not None:
            (sequence.target if read.two else sequence.source).append(ids.detach())
            if read.two and read.source is not None and not sequence.source:
                sequence.source.append(read.source.detach())
        n, items = _length(tensors, ids)
        uses = batch.get("use_cache")
        uses = getattr(getattr(model, "config", None), "use_cache", False) if uses is None else uses
        forward = Forward(
            owner, sequence, sequence.tokens, n, cache, cache is not None or bool(uses), known is None, of_encoder,
            read, *masks, lost,
        )  # fmt: skip
        if not of_encoder:
            real = _real(masks[1], sequence.tokens, n)
            sequence.reads_tokens(n, items)
            if real is not None:
                forward.knows_padding = True
                sequence.marks(real)
        if known is None and cache is not None and lost is None:
            self._follow(cache, sequence)
        return forward

    def _continued(self, cache: Any) -> Sequence | None:
        """The text that a forward with this cache continues; None if it begins one."""
        if cache is None:
            return None
        of, reason = self._lost.get(id(cache), (None, None))
        if of is not None and of() is cache and reason is not None:
            raise reason
        found, known = stored(cache), self.sequence_of(cache)
        if known is not None:
            if known.held and not found:
                del self._followed[id(cache)]  # it was reset
                return None
            known.follow(found, records=self.records)
            return known
        if not found:
            return None
        for sequence in reversed(self.sequences):  # a copy of a cache continues its text in another way
            copy = sequence.fork()
            try:
                copy.follow(found, records=self.records)
            except InputError as error:
                reason = reason or error
                continue
            self.sequences.append(copy)
            self._follow(cache, copy)
            return copy
        raise InputError(
            f"model reads with a cache of {max(x.length for x in found.values())} tokens filled outside of the "
            "context; expected the model to read the text from its first token inside"
        ) from reason

    def sequence_of(self, cache: Any) -> Sequence | None:
        of, sequence = self._followed.get(id(cache), (None, None))
        return sequence if of is not None and of() is cache else None

    def _follow(self, cache: Any, sequence: Sequence) -> None:
        try:
            self._followed[id(cache)] = weakref.ref(cache), sequence
        except TypeError:  # tuples of tensors, which nothing can refer to; each forward is then a text
            return
        listening.to(type(cache))

    def _lose(self, cache: Any, reason: InputError) -> None:
        """The text of a cache is not known any more."""
        self._followed.pop(id(cache), None)
        with suppress(TypeError):
            self._lost[id(cache)] = weakref.ref(cache), reason

    def selected(self, cache: Any, items: Tensor | None) -> None:
        """A cache has selected batch items, or was cropped if `items` is None."""
        if (sequence := self.sequence_of(cache)) is not None:
            try:
                sequence.selects(stored(cache), items, records=self.records)
            except InputError as error:
                self._lose(cache, error)

    def end(self, forward: Forward, output: Any) -> bool:
        """A forward has ended; returns whether another one may continue its text.

        Raises:
            InputError: if its cache holds something else than its text.
        """
        sequence, cache = forward.sequence, getattr(output, "past_key_values", None)
        cache = forward.cache if cache is None else cache
        if forward.of_encoder:
            self._encoded.append(sequence)
            return True
        if not any(s is sequence for s in self.sequences) and (sequence.layers or not self.records):
            self.sequences.append(sequence)
        if cache is None or forward.lost is not None:
            return False
        if self.sequence_of(cache) is None:
            self._follow(cache, sequence)
        try:
            sequence.remember(stored(cache), records=self.records)
        except InputError as error:
            self._lose(cache, error)
            raise
        return True

    @property
    def finished(self) -> list[Sequence]:
        """The texts whose cache is gone."""
        alive = [s for of, s in self._followed.values() if of() is not None]
        return [s for s in self.sequences if not any(s is one for one in alive)]


def _length(tensors: Mapping[str, Tensor], ids: Tensor | None) -> tuple[int, int]:
    """The number of tokens that a forward reads, and of batch items."""
    for x in (ids, tensors.get("decoder_inputs_embeds"), tensors.get("inputs_embeds")):
        if x is not None:
            return x.shape[1], x.shape[0]
    return 0, 1


def _real(masks: Mapping[int, Tensor], before: int, n: int) -> Tensor | None:
    """True at the real ones of n new tokens, from a mask of the whole text or of the new tokens."""
    for length, mask in sorted(masks.items(), reverse=True):
        if length >= before + n:
            return mask[:, before : before + n]
        if length == n:
            return mask
    return None


def _padding(batch: Mapping[str, Any], state: Any) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Masks of the real tokens of a state of qkv, by length."""
    padding = getattr(state, "padding", None)
    if padding is None:
        return {}, {}
    n = state.seen + batch["tokens"].shape[1]
    real = torch.arange(n, device=padding.device) >= padding[:, None]
    return {n: real}, {n: real}
