"""`qkv.watch`: record what a model attends to while it runs, with or without a cache."""

from __future__ import annotations

import datetime
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from qkv.cache.base import attending
from qkv.errors import InputError
from qkv.models.loading import name_of_model
from qkv.native.binding import description
from qkv.profiler.capture.datasets import datasets
from qkv.profiler.capture.inputs import Sequences, arguments_of, real_tokens, sequences_of
from qkv.profiler.capture.observe import ObservedCall, Observer, observe
from qkv.profiler.profiles import Profile
from qkv.profiler.run import versions
from qkv.profiler.watch.rows import Places
from qkv.profiler.watch.sequence import Sequence, in_order, without_unused

SELECT = ("reorder_cache", "reorder", "batch_select_indices")
REPEAT, CROP = "batch_repeat_interleave", "crop"


class Followed:
    """Reports every change of one cache object until it is released; the cache itself works as before.

    Args:
        cache: a cache of transformers, or the state of one of qkv's models.
        on_reorder: callback with the batch items in their new order.
        on_crop: callback with the number of newest tokens that are removed.
    """

    def __init__(self, cache: Any, on_reorder: Callable[[Tensor], None], on_crop: Callable[[int], None]) -> None:
        self.cache = weakref.ref(cache)
        self.batch = 0
        """Number of batch items, which `batch_repeat_interleave` needs."""
        self._replaced: list[str] = []
        self._inside = False
        self._on_reorder, self._on_crop = on_reorder, on_crop
        for name in SELECT:
            self._replace(cache, name, lambda rows: on_reorder(rows.detach()))
        self._replace(cache, REPEAT, self._repeated)
        self._replace(cache, CROP, lambda tokens: on_crop(abs(int(tokens))))

    def _repeated(self, repeats: int) -> None:
        self._on_reorder(torch.arange(self.batch).repeat_interleave(repeats))

    def _replace(self, cache: Any, name: str, report: Callable[[Any], None]) -> None:
        own = getattr(cache, name, None)
        if own is None or name in vars(cache):
            return

        def method(*args: Any, **named: Any) -> Any:
            if not self._inside:  # one such method may call another
                report(next(iter((*args, *named.values()))))
            self._inside, before = True, self._inside
            try:
                return own(*args, **named)
            finally:
                self._inside = before

        vars(cache)[name] = method
        self._replaced.append(name)

    def release(self) -> None:
        cache = self.cache()
        for name in self._replaced if cache is not None else ():
            vars(cache).pop(name, None)
        self._replaced.clear()


KEEP_KEYS = ("DynamicCache", "StaticCache", "EncoderDecoderCache", "Full")
"""Caches of transformers and of qkv whose keys stay what they were when they were added; others evict or round them."""


class Watched:
    """What was recorded inside `watch`.

    >>> import torch, qkv
    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4))
    >>> with qkv.watch(model) as watched, torch.no_grad():
    ...     _ = model(torch.tensor([[5, 6, 7]]))
    >>> watched
    Watched(1 sequences, 1 forwards)
    """

    def __init__(
        self, model: nn.Module, every: int, layers: Collection[int] | None, tokenizer: Any, local_window: int,
        map_tokens: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.every, self.layers, self.tokenizer = every, layers, tokenizer
        self.local_window, self.map_tokens = local_window, map_tokens
        self.sequences: list[Sequence] = []
        """In the order in which the model began to read them."""
        self.seconds = 0.0
        """Time spent on measuring."""
        self._encoded: list[Sequence] = []  # texts that an encoder has read, before the decoder begins
        self._followed: list[tuple[Followed, Sequence]] = []
        self._forward: Any = None  # what began the forward that runs: a module, or a method
        self._sequence: Sequence | None = None  # None while a forward is not recorded
        self._calls: dict[tuple[str, str], int] = {}
        self._cache: Any = None
        self._keeps_keys = False  # whether the cache of the forward that runs neither evicts nor rounds keys
        self._new: tuple[Sequence, int, int] | None = None  # sequence, tokens before this forward, and its tokens
        self._reads = 0  # forwards without a cache

    def __repr__(self) -> str:
        forwards = sum(s.forwards for s in self.sequences)
        return f"Watched({len(self.sequences)} sequences, {forwards} forwards)"

    def profile(self, sequence: int | slice | None = None) -> Profile:
        """The profile of what was recorded.

        The rows of a sequence that was read in several forwards, such as a prompt and the tokens generated after it,
        are joined: they equal those of one forward over all its tokens, except where the cache had evicted keys. The
        last generated token was not read, so it has no row. Batch items and beams are texts; a beam has the rows of the
        tokens that it ended with. Forwards that `every` left out are rows of NaN.

        Args:
            sequence: which sequences, by index or slice of `sequences`; all if None.

        Raises:
            InputError: if nothing was recorded.
        """
        chosen = self.sequences if sequence is None else self.sequences[sequence]
        chosen = chosen if isinstance(chosen, list) else [chosen]
        chosen = [s for s in chosen if s.layers]
        if not chosen:
            raise InputError("watched has no attention, expected the model to run inside the context of qkv.watch")
        observers = [self._as_observed(s) for s in chosen]
        groups = datasets(observers, self.tokenizer, self.local_window)
        attrs = {
            "model": name_of_model(self.model),
            "dtype": str(next((p.dtype for p in self.model.parameters()), "unknown")).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "versions": versions(),
            "native_library": description(),
            "command": "",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 3),
            "text_preview": self._preview(chosen[0]),
            "unobserved": [],
            "sources": chosen[0].sources,
            "checks": [checked.attrs() for checked in chosen[0].checks],
            "probes": "not run: the model was watched",
            "forwards": [s.forwards for s in chosen],
            "evicted": any(s.evicted for s in chosen),
        }
        return Profile(groups, attrs, {})

    def _as_observed(self, sequence: Sequence) -> Observer:
        source, target = sequence.ids(sequence.source), sequence.ids(sequence.target)
        if sequence.two and source is not None and target is not None and len(target) != len(source):
            source = source.repeat_interleave(len(target) // len(source), 0)  # beams read the same text
        observer = Observer(self.model, sequences=Sequences(source, target, two=sequence.two))
        for layer in sequence.layers.values():
            if self.layers is None or layer.number in self.layers:
                rows = layer.total if layer.group == "encoder" or not sequence.tokens else sequence.tokens
                observer.records.append(layer.record(rows, None if target is None else len(target)))
        return observer

    def _preview(self, sequence: Sequence) -> str:
        ids = sequence.ids(sequence.source or sequence.target)
        if ids is None:
            return "no token ids"
        if not hasattr(self.tokenizer, "decode"):
            return f"{ids.shape[1]:,} token ids"
        return " ".join(str(self.tokenizer.decode(ids[0, :64], skip_special_tokens=True)).split())[:200]

    # --- what the model does ------------------------------------------------------------------------------------------

    def begins(self, observer: Observer, owner: Any, batch: Mapping[str, Any], cache: Any) -> None:
        """A forward begins: find the sequence that it continues, and decide whether to record it."""
        if self._forward is not None:
            return
        if torch._C._current_graph_task_id() >= 0:  # gradient checkpointing computes a layer again in the backward
            observer.restart(paused=True)
            return
        self._forward, self._calls = owner, {}
        known = next((s for f, s in self._followed if f.cache() is cache), None) if cache is not None else None
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        of_encoder = isinstance(owner, nn.Module) and observer.names.get(id(owner), "").rpartition(".")[2] == "encoder"
        sequence = known or (self._encoded.pop() if self._encoded and not of_encoder else None)
        sequence = sequence or Sequence(self.map_tokens, self.local_window)
        read = sequences_of(owner, tensors) if isinstance(owner, nn.Module) else Sequences(batch["tokens"])
        masks = real_tokens(owner, tensors, read) if isinstance(owner, nn.Module) else _padding(batch, cache)
        observer.key_masks, observer.query_masks, observer.sequences = *masks, read
        sequence.two |= read.two or bool(sequence.layers and known is None and not of_encoder)
        recorded = of_encoder or (self._reads if known is None else sequence.reads) % self.every == 0
        ids = read.target if read.two else read.source
        if sequence.two and not read.two and not of_encoder and ids is not None:
            sequence.target.append(ids.detach())
        elif ids is not None:
            (sequence.target if read.two else sequence.source).append(ids.detach())
            if read.two and read.source is not None and not sequence.source:
                sequence.source.append(read.source.detach())
        n = _length(tensors, ids)
        self._new = sequence, sequence.tokens, n
        if not of_encoder:
            sequence.tokens += n
            self._reads += known is None
        self._sequence = sequence if recorded else None
        sequence.forwards += recorded
        sequence.reads += 1
        observer.restart(paused=not recorded)
        self._cache = cache
        self._keeps_keys = type(getattr(cache, "caches", [cache])[0]).__name__ in KEEP_KEYS
        if known is None and cache is not None:
            self._follow(cache, sequence)

    def ends(self, observer: Observer, owner: Any, output: Any) -> None:
        """A forward has ended."""
        if self._forward is not owner or self._new is None:
            return
        sequence = self._new[0]
        of_encoder = isinstance(owner, nn.Module) and observer.names.get(id(owner), "").rpartition(".")[2] == "encoder"
        cache = getattr(output, "past_key_values", None)
        if cache is not None and not any(f.cache() is cache for f, _ in self._followed):
            self._follow(cache, sequence)
        if of_encoder:
            self._encoded.append(sequence)
        elif sequence.layers and not any(s is sequence for s in self.sequences):
            self.sequences.append(sequence)
        sequence.sources |= observer.sources
        sequence.checks = sequence.checks or list(observer.checks)
        self._forward = self._sequence = self._new = self._cache = None

    def _follow(self, cache: Any, sequence: Sequence) -> None:
        try:
            self._followed.append((Followed(cache, sequence.reorder, sequence.crop), sequence))
        except TypeError:  # tuples of tensors, which nothing can refer to; each forward is then a sequence
            return

    def add(self, observed: ObservedCall) -> None:
        """A call of attention in the forward that runs."""
        if self._sequence is None or self._new is None:
            return
        started = time.perf_counter()
        sequence, before, n = self._new
        given = observed.call.given
        given = replace(given, q=given.q.detach(), k=given.k.detach(), v=given.v.detach())  # without the graph
        group = sequence.groups.setdefault(observed.module, observed.group)
        observed = replace(observed, group=group, call=replace(observed.call, given=given))
        key = observed.group, observed.module
        n_queries = observed.call.q.shape[2]
        stepwise = n_queries == 1 and n != 1 and observed.group == "cross"  # one query at a time over the same keys
        step = self._calls.get(key, 0)
        self._calls[key] = step + 1
        layer = sequence.layer(observed, 0 if stepwise else step)
        if self.layers is None or layer.number in self.layers:
            start = before + step if stepwise else before if observed.group != "encoder" else 0
            read = start + n_queries
            if observed.group not in ("cross", "encoder") and attending() is None and read < observed.call.k.shape[2]:
                observed = without_unused(observed, read)
            with torch.no_grad():
                places = self._at(observed, sequence, start)
                layer.add(observed, places, keeps_keys=self._keeps_keys, whole=self._cache is None)
            for followed, of in self._followed:
                if of is sequence:
                    followed.batch = len(observed.call.q)
        self.seconds += time.perf_counter() - started

    def _at(self, observed: ObservedCall, sequence: Sequence, start: int) -> Places:
        """The positions of the queries and keys of a call."""
        n_queries, n_keys, device = observed.call.q.shape[2], observed.call.k.shape[2], observed.call.q.device
        first = sequence.first.setdefault(observed.group, observed.first)
        if (cache := attending()) is not None:
            keys = cache.key_positions(n_keys, n_queries)
            sequence.evicted |= cache.length < cache.seen
            return Places(torch.arange(start, start + n_queries, device=device), keys, first, self.local_window)
        first_key = 0 if observed.group in ("cross", "encoder") else start + n_queries - n_keys
        sequence.evicted |= first_key > 0
        return in_order(start, n_queries, first_key, n_keys, first, self.local_window, device)

    def release(self) -> None:
        for followed, _ in self._followed:
            followed.release()


def _length(tensors: Mapping[str, Tensor], ids: Tensor | None) -> int:
    """The number of tokens that a forward reads."""
    if ids is not None:
        return ids.shape[1]
    for name in ("decoder_inputs_embeds", "inputs_embeds"):
        if name in tensors:
            return tensors[name].shape[1]
    return 0


def _padding(batch: Mapping[str, Any], state: Any) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Masks of the real tokens of a state of qkv, by length."""
    padding = getattr(state, "padding", None)
    if padding is None:
        return {}, {}
    n = state.seen + batch["tokens"].shape[1]
    real = torch.arange(n, device=padding.device) >= padding[:, None]
    return {n: real}, {n: real}


_WATCHED: WeakSet[nn.Module] = WeakSet()


@contextmanager
def watch(
    model: nn.Module,
    *,
    every: int = 1,
    layers: Collection[int] | None = None,
    tokenizer: Any = None,
    local_window: int = 8,
    map_tokens: int = 384,
    heads: Mapping[str, int] | None = None,
) -> Iterator[Watched]:
    """Record the attention of everything that a model does inside, as exact statistics in linear memory.

    The model computes by its own functions, so its outputs, gradients, random numbers and generated tokens do not
    change. Forwards that share a cache are one sequence: `generate` (greedy, sampled, beam search, assisted), a loop of
    your own, streaming with qkv's caches. Any other forward, such as a step of training, is a sequence of its own.
    Dropout of the weights is left out of the statistics.

    Args:
        model: as in `qkv.profile`.
        every: record the first forward of a sequence and then every so many steps of generation; of forwards without a
            cache, every so many.
        layers: which layers to record, counted from 0 in each group; all if None.
        tokenizer: gives the names of tokens in the profile.
        local_window: `local` is the weight on keys at most this many tokens away.
        map_tokens: whole weight matrices are kept for sequences up to this long.
        heads: as in `qkv.profile`.

    Yields:
        `Watched`, whose method `profile` gives a `Profile`.

    Raises:
        InputError: if the model is watched already, attends by a function that qkv cannot recompute, or passes
            arguments to its attention that qkv does not know.

    >>> import torch, qkv
    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)).eval()
    >>> with qkv.watch(model) as watched:
    ...     state = model.start()
    ...     for token in torch.tensor([[5, 6, 7], [8, 9, 1]]).split(1, 1):
    ...         _ = model.step(token.reshape(1, -1)[:, :1], state)
    >>> watched.profile().data.sizes["query"]
    3
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model).__name__}, expected a torch module; qkv.load gives one by its name")
    if every < 1:
        raise InputError(f"every is {every}, expected at least 1")
    model = getattr(model, "_orig_mod", model)
    if model in _WATCHED:
        raise InputError(
            f"model {type(model).__name__} is watched already; expected one qkv.watch at a time, which records "
            "everything that the model does inside"
        )
    watched = Watched(model, every, layers, tokenizer, local_window, map_tokens)
    observer = Observer(model, local_window=local_window, collect=watched.add, beside=True, heads=heads or {})
    observer.on_begin = lambda module, args, named: _begun(watched, observer, module, args, named)
    observer.on_end = lambda module, output: watched.ends(observer, module, output)
    try:
        with observe(observer), _methods(model, observer, watched):
            _WATCHED.add(model)
            yield watched
    finally:
        _WATCHED.discard(model)
        watched.release()


def _begun(watched: Watched, observer: Observer, module: nn.Module, args: tuple[Any, ...], named: Any) -> None:
    batch = arguments_of(module, args, named)
    watched.begins(observer, module, batch, batch.get("past_key_values"))


@contextmanager
def _methods(model: nn.Module, observer: Observer, watched: Watched) -> Iterator[None]:
    """Inside, methods of qkv's models that read tokens without `forward` count as forwards: a step of generation, and
    the hidden states of which a loss is computed."""
    names = [name for name in ("step", "hidden") if hasattr(model, name) and hasattr(model, "start")]
    for name in names:
        vars(model)[name] = _counted(getattr(model, name), observer, watched)
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)


def _counted(own: Callable[..., Any], observer: Observer, watched: Watched) -> Callable[..., Any]:
    """A method that reads tokens, and counts as a forward."""

    def method(tokens: Tensor, *state: Any, **named: Any) -> Any:
        cache = next(iter((*state, *named.values())), None)
        watched.begins(observer, method, {"tokens": tokens}, cache)
        try:
            return own(tokens, *state, **named)
        finally:
            watched.ends(observer, method, None)

    return method
