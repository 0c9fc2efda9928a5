"""Which text a forward reads, and where its tokens are in it: told from its arguments and its cache."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv.cache.base import attending
from qkv.edits import Placed
from qkv.engine import Call, under_vmap
from qkv.errors import InputError
from qkv.profiler.capture.caches import NAMES, is_known, keeps, keeps_all, listening, located, stored
from qkv.profiler.capture.inputs import Sequences, sequences_of
from qkv.profiler.capture.intercept import unwatched
from qkv.profiler.capture.record import Measures, ObservedCall
from qkv.profiler.capture.sequence import OF_TEXT, Read, Sequence

HELD_AFTER = 2**25
"""So many numbers of texts whose cache is gone are held at most, in case that a copy of the cache continues them."""


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
    of_encoder: bool
    read: Sequences
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

    def keys_at(self, observed: ObservedCall, start: int, module: nn.Module | None) -> tuple[int | Tensor, bool]:
        """Positions of the keys of a call of self-attention, and whether the cache keeps them as they are."""
        sequence, n_keys = self.sequence, observed.call.k.shape[2]
        if (cache := attending()) is not None:
            at = cache.key_positions(n_keys, observed.call.q.shape[2])
            follow = at.ndim == 1 and int(at[-1] - at[0]) == len(at) - 1
            return int(at[0]) if follow else at if at.ndim > 1 else at[None, None], keeps(cache)
        index = getattr(module, "layer_idx", None)
        if self.cache is not None and not is_known(self.cache) and start:
            old = observed.call.user.k[:, :, : n_keys - self.tokens]
            keys = sequence.layers[sequence.key_of(observed)].keys(sequence.selections)
            first = start - old.shape[2]
            _, at = located(old, keys, None, first, sequence.real())
            if bool((at == torch.arange(first, start, device=at.device)).all()):
                return first, True
            new = torch.arange(start, start + self.tokens, device=at.device).expand(*at.shape[:2], self.tokens)
            return torch.cat([at, new], 2), True
        return sequence.keys_at(n_keys, start, self.tokens, index), self.cache is None or keeps_all(self.cache, index)

    def place(self, observed: ObservedCall, module: nn.Module | None) -> Placed:
        """Where the queries and keys of a call are in the text, for an edit."""
        n_queries, n_keys = observed.call.q.shape[2], observed.call.k.shape[2]
        if observed.group == "cross":
            return Placed(None, 0, observed.queries, observed.first)
        if n_queries != self.tokens:
            return Placed(n_keys - n_queries, 0, observed.queries, observed.first)
        if self.lost is not None:
            raise self.lost
        self.sees(observed)
        at, _ = self.keys_at(observed, self.before, module)
        real = self.sequence.real()
        if real is None:
            return Placed(self.before, at, None, 0)
        real = real.to(observed.call.q.device)
        return Placed(self.before, at, real[:, self.before :], real.to(torch.int8).argmax(1))

    def add(
        self, observed: ObservedCall, module: nn.Module | None, changed: Mapping[int, Call],
        layers: Collection[int] | None, measures: Measures | None,
    ) -> None:  # fmt: skip
        """A call of this forward becomes part of the text.

        Args:
            observed: the call.
            module: the module that attends.
            changed: the calls of heads whose weights an edit changed.
            layers: which layers are recorded; all if None.
            measures: what is measured; if None, the keys alone are kept, which tell where those of a cache are.
        """
        sequence, n, n_queries = self.sequence, self.tokens, observed.call.q.shape[2]
        cross = observed.group == "cross"
        stepwise = cross and n_queries == 1 and n != 1  # one query at a time over the same keys
        key = sequence.key_of(replace(observed, calls_before=0) if stepwise else observed)
        layer = sequence.layers[key]
        if layers is not None and layer.number not in layers:
            return
        of_text = (n_queries == n and observed.group in OF_TEXT) or (cross and n_queries in (1, n))
        if of_text and not cross:
            self.sees(observed)
        if self.of_encoder or not of_text or not (self.may_cache or stepwise):  # no other forward continues it
            if layer.pieces or layer.final is not None:
                raise InputError(
                    f"model attends in {observed.module} to what is no token of the text in several forwards; the "
                    "first is recorded"
                )
            if measures is not None:
                _, layer.final = measures.record(replace(observed, layer=layer.number), None, changed)
            return
        layer.own_keys = cross
        step = self.steps.get(observed.module, 0)
        self.steps[observed.module] = step + 1
        start, stays = self.before + step * stepwise, True
        keys_at: int | Tensor = 0
        if not cross:
            keys_at, stays = self.keys_at(observed, start, module)
            index = self.cache_index(module)
            if index is not None:
                sequence.cached[index] = key
                if index in sequence.kept and isinstance(keys_at, Tensor):
                    sequence.kept[index] = keys_at
            sequence.evicted |= isinstance(keys_at, Tensor) or keys_at > 0
            sequence.evicted |= (cache := attending()) is not None and cache.length < cache.seen
        elif layer.known not in (0, observed.call.k.shape[2]):
            raise InputError(f"model attends to other keys than before in {observed.module}")
        limit = None if cross else start + n
        sequence.add(key, observed, changed, start, keys_at, limit, stays=stays, queries=measures is not None)

    def cache_index(self, module: nn.Module | None) -> int | None:
        """The number of the layer in the cache, in which a module attends."""
        if (cache := attending()) is not None:
            return next((i for i, layer in enumerate(self.cache.caches) if layer is cache), None)
        return getattr(module, "layer_idx", None)


class Texts:
    """The texts that a model reads, and the caches by which forwards continue them.

    Args:
        measures: what is measured of them; if None, they are followed only.
        every: record every so many forwards, as `qkv.watch`.
        layers: which layers to record; all if None.
    """

    def __init__(self, measures: Measures | None = None, every: int = 1, layers: Collection[int] | None = None) -> None:
        self.measures, self.every, self.layers = measures, every, layers
        self.sequences: list[Sequence] = []
        """In the order in which the model began to read them."""
        self.seconds = 0.0
        """Time spent on measuring."""
        self.unrecorded: dict[str, str] = {}
        """What could not be recorded, and why."""
        self._reads = 0  # forwards that begin a text
        self._encoded: list[Sequence] = []  # texts that an encoder has read, before the decoder begins
        self._followed: dict[int, tuple[weakref.ref[Any], Sequence | InputError]] = {}
        """The texts of caches, by their id, or why they are not known."""

    def begin(self, owner: Any, name: str, batch: Mapping[str, Any], model: nn.Module) -> Forward:
        """A forward begins: find the text that it continues, and decide whether to record it."""
        cache = next((batch[name] for name in NAMES if batch.get(name) is not None), None)
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        of_encoder = isinstance(owner, nn.Module) and name.rpartition(".")[2] == "encoder"
        read = sequences_of(owner, tensors) if isinstance(owner, nn.Module) else _read(batch["tokens"], cache)
        known, lost = None, None
        try:
            known = self._continued(cache, tensors.get("position_ids"))
        except InputError as error:
            lost = error
            self._follow(cache, error)
            self._note(f"forwards with {type(cache).__name__}", error)
        sequence = known or (self._encoded.pop() if self._encoded and not of_encoder else None)
        sequence = sequence or Sequence(self.measures or Measures())
        sequence.two |= read.two or bool(sequence.layers and known is None and not of_encoder)
        ids = read.target if read.two else read.source
        encoded = ids if of_encoder else read.source if read.two and not sequence.encoded else None
        if encoded is not None:
            sequence.encoded.append(encoded.detach())
        if known is None:
            finished = [s for s in self.finished if s.held_numbers()]
            while sum(s.held_numbers() for s in finished) > HELD_AFTER:
                self._release(finished.pop(0))
        n, items = _length(tensors, ids)
        uses = batch.get("use_cache")
        if uses is None:
            config: Any = getattr(model, "config", None)
            inside = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))  # such as the text's
            uses = any(getattr(part, "use_cache", False) for part in (config, *inside))
        due = of_encoder or (self._reads if known is None else sequence.reads) % self.every == 0
        forward = Forward(
            owner, sequence, sequence.tokens, n, cache, cache is not None or bool(uses), of_encoder, read, lost,
            recorded=lost is None and due,
        )  # fmt: skip
        self._reads += known is None and not of_encoder
        sequence.forwards += forward.recorded
        sequence.reads += 1
        if not of_encoder:
            real = _real(read.real_target, sequence.tokens, n)
            named = None if ids is None else ids.detach()
            sequence.text.append(Read(sequence.tokens, n, len(sequence.selections), named))
            sequence.batch = items
            if real is not None:
                forward.knows_padding = True
                sequence.marks(real)
        if known is None and cache is not None and lost is None:
            self._follow(cache, sequence)
        return forward

    def add(
        self, forward: Forward, module: nn.Module | None, observed: ObservedCall, changed: Mapping[int, Call]
    ) -> None:
        """A module attends."""
        if self.measures is None and (forward.lost is not None or not forward.may_cache):
            return
        group = forward.sequence.groups.setdefault(observed.module, observed.group)
        forward.sequence.sources[observed.module] = observed.source
        try:
            if under_vmap(observed.call):
                raise InputError(
                    "torch.func.vmap maps the forward, which has no tensors of its own then; expected a batch"
                )
            with self.measuring():
                forward.add(replace(observed, group=group), module, changed, self.layers, self.measures)
        except InputError as error:
            self._note(observed.module, error)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        started = time.perf_counter()
        with torch.no_grad(), unwatched():
            yield
        self.seconds += time.perf_counter() - started

    def _note(self, where: str, error: InputError) -> None:
        self.unrecorded.setdefault(where, str(error))

    def _continued(self, cache: Any, positions: Tensor | None) -> Sequence | None:
        """The text that a forward with this cache continues; None if it begins one."""
        if cache is None:
            return None
        layers, known, reason = stored(cache), self._text_of(cache), None
        if isinstance(known, InputError):
            raise known
        if known is not None:
            holds = getattr(cache, "get_seq_length", None)  # of transformers
            if not layers and (known.held or (holds is not None and not holds())):
                del self._followed[id(cache)]  # it was reset, or the model does not use it
                return None
            known.follow(layers, positions)
            return known
        if not layers:
            return None
        for sequence in reversed(self.sequences):  # a copy of a cache continues its text in another way
            copy = sequence.fork()
            try:
                copy.follow(layers, positions)
            except InputError as error:
                reason = reason or error
                continue
            self.sequences.append(copy)
            self._follow(cache, copy)
            return copy
        raise InputError(
            f"model reads with a cache of {max(x.length for x in layers.values())} tokens filled outside of the "
            "context, or by several batches; expected it to read the text from its first token inside, as one batch"
        ) from reason

    def _text_of(self, cache: Any) -> Sequence | InputError | None:
        """The text of a cache, or why it is not known; None if the cache is new."""
        of, text = self._followed.get(id(cache), (None, None))
        return text if of is not None and of() is cache else None

    def _follow(self, cache: Any, text: Sequence | InputError) -> None:
        with suppress(TypeError):  # tuples of tensors, which nothing can refer to; each forward is then a text
            self._followed[id(cache)] = weakref.ref(cache), text
            listening.to(type(cache))

    def selected(self, cache: Any, items: Tensor | None) -> None:
        """A cache has selected batch items, or was cropped if `items` is None."""
        if isinstance(sequence := self._text_of(cache), Sequence):
            try:
                sequence.selects(stored(cache), items)
            except InputError as error:
                self._follow(cache, error)

    def end(self, forward: Forward, output: Any) -> None:
        """A forward has ended."""
        try:
            if not self._ended(forward, output):
                self._release(forward.sequence)
            elif self.measures is not None:
                with self.measuring():
                    forward.sequence.measure()
        except InputError as error:
            self._note(f"forwards with {type(forward.cache).__name__}", error)

    def _release(self, sequence: Sequence) -> None:
        """A text is not continued any more, or takes too much memory to be kept for a copy of its cache."""
        if self.measures is None:
            self.sequences = [text for text in self.sequences if text is not sequence]
            return
        with self.measuring():
            sequence.settle(self.layers)

    def _ended(self, forward: Forward, output: Any) -> bool:
        """Whether another forward may continue a text that has ended: not if its cache holds something else."""
        sequence, returned = forward.sequence, (getattr(output, name, None) for name in NAMES)
        cache = next((x for x in returned if x is not None), forward.cache)
        if forward.of_encoder:
            self._encoded.append(sequence)
            return True
        if sequence.layers and not any(s is sequence for s in self.sequences):
            self.sequences.append(sequence)
        if cache is None or forward.lost is not None:
            return False
        if self._text_of(cache) is None:
            self._follow(cache, sequence)
        try:
            sequence.remember(stored(cache))
        except InputError as error:  # for a forward that continues it
            self._follow(cache, error)
            return False
        return True

    @property
    def finished(self) -> list[Sequence]:
        """The texts whose cache is gone."""
        alive = [text for of, text in self._followed.values() if of() is not None]
        return [s for s in self.sequences if not any(s is text for text in alive)]


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


def _read(tokens: Tensor, state: Any) -> Sequences:
    """What a method of one of qkv's models reads, after the tokens of its state."""
    padding = getattr(state, "padding", None)
    if padding is None:
        return Sequences(tokens)
    n = state.seen + tokens.shape[1]
    real = {n: torch.arange(n, device=padding.device) >= padding[:, None]}
    return Sequences(tokens, real_source=real, real_target=real)
