"""`qkv.watch`: record what a model attends to while it runs, with or without a cache."""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Int
from torch import Tensor, nn

from qkv.cache.base import attending
from qkv.engine import Call, Result
from qkv.errors import InputError
from qkv.models.loading import name_of_model
from qkv.native.binding import description
from qkv.profiler.capture.caches import is_known, keeps, listening, located
from qkv.profiler.capture.datasets import Recorded, datasets
from qkv.profiler.capture.inputs import Sequences, arguments_of
from qkv.profiler.capture.intercept import unwatched
from qkv.profiler.capture.layer import of_items
from qkv.profiler.capture.observe import methods, observe
from qkv.profiler.capture.observer import Observer
from qkv.profiler.capture.record import Measures, ObservedCall
from qkv.profiler.capture.sequence import OF_TEXT, Sequence
from qkv.profiler.capture.texts import Forward, Texts
from qkv.profiler.profiles import Profile
from qkv.profiler.run import versions

HELD_AFTER = 2**25
"""So many numbers of texts whose cache is gone are held at most, in case that a copy of the cache continues them."""


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
        self, model: nn.Module, every: int, layers: Collection[int] | None, tokenizer: Any, measures: Measures
    ) -> None:
        self.model, self.every, self.layers, self.tokenizer, self.measures = model, every, layers, tokenizer, measures
        self.texts = Texts(measures)
        self.seconds = 0.0
        """Time spent on measuring."""
        self.unrecorded: dict[str, str] = {}
        """What could not be recorded, and why."""
        self.returned: list[tuple[Sequence, int]] = []
        """The texts that `generate` returned, in order: sequence and batch item."""
        self._reads = 0  # forwards that begin a text

    @property
    def sequences(self) -> list[Sequence]:
        """In the order in which the model began to read them."""
        return self.texts.sequences

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
            missing = "; ".join(f"{where}: {reason}" for where, reason in self.unrecorded.items())
            raise InputError(
                "watched has no attention, expected the model to run inside the context of qkv.watch"
                + (f"; not recorded: {missing}" if missing else "")
            )
        started = time.perf_counter()
        with torch.no_grad():
            groups = datasets([self._recorded(s) for s in chosen], self.tokenizer, self.measures.local_window)
        self.seconds += time.perf_counter() - started
        if self.unrecorded:
            missing = "; ".join(f"{where}: {reason}" for where, reason in self.unrecorded.items())
            warnings.warn(f"not recorded: {missing}", stacklevel=2)
        before = [sum(s.items for s in chosen[:i]) for i in range(len(chosen))]
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
            "unobserved": sorted(self.unrecorded),
            "sources": chosen[0].sources,
            "checks": [checked.attrs() for checked in chosen[0].checks],
            "probes": "not run: the model was watched",
            "forwards": [s.forwards for s in chosen],
            "evicted": any(s.evicted for s in chosen),
            "returned": [before[i] + item for s, item in self.returned for i, one in enumerate(chosen) if one is s],
        }
        return Profile(groups, attrs, {})

    def _recorded(self, sequence: Sequence) -> Recorded:
        source, target = sequence.ids(sequence.source), sequence.ids(sequence.target)
        if sequence.two and source is not None and target is not None and len(target) != len(source):
            source = source.repeat_interleave(len(target) // len(source), 0)  # beams read the same text
        records = []
        for record in sequence.records(self.layers):
            items = len(record.statistics.entropy)
            repeats = len(target) // items if record.group == "encoder" and target is not None else 1
            repeated = torch.arange(items).repeat_interleave(repeats)
            records.append(record if repeats == 1 else of_items(record, repeated))
        real = sequence.ids(sequence.real)
        if real is not None and not bool(real.any(1).all()):
            kept = real.any(1).nonzero()[:, 0]
            self.unrecorded["texts of padding only"] = f"{len(real) - len(kept)} have no token"
            records = [of_items(x, kept) if len(x.statistics.entropy) == len(real) else x for x in records]
            source, target = (x[kept] if x is not None and len(x) == len(real) else x for x in (source, target))
        return Recorded(records, Sequences(source, target, two=sequence.two), self.measures.statistics)

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
        run = observer.run
        if run.forward is not None:
            return
        if torch._C._current_graph_task_id() >= 0:  # a part of a forward that is computed again for the gradients
            observer.restart(paused=True)
            return
        forward = self.texts.begin(owner, observer.names.get(id(owner), ""), batch, cache, self.model)
        sequence = forward.sequence
        run.forward, run.key_masks, run.query_masks = forward, forward.key_masks, forward.query_masks
        run.sequences = forward.read
        if forward.begins:
            finished = self.texts.finished
            while sum(s.held_numbers() for s in finished) > HELD_AFTER:
                self._settle(finished.pop(0))
        if forward.lost is not None:
            self._note(f"forwards with {type(cache).__name__}", forward.lost)
        recorded = forward.of_encoder or (self._reads if forward.begins else sequence.reads) % self.every == 0
        self._reads += forward.begins and not forward.of_encoder
        forward.recorded = recorded and forward.lost is None
        sequence.forwards += forward.recorded
        sequence.reads += 1
        observer.restart(paused=not forward.recorded)

    def ends(self, observer: Observer, owner: Any, output: Any) -> None:
        """A forward has ended."""
        forward = observer.run.forward
        if forward is None or forward.owner is not owner:
            return
        observer.run.forward, sequence = None, forward.sequence
        sequence.sources |= observer.sources
        sequence.checks = sequence.checks or list(observer.checks)
        try:
            may_continue = self.texts.end(forward, output)
        except InputError as error:
            self._note(f"forwards with {type(forward.cache).__name__}", error)
            may_continue = True
        if not may_continue:
            self._settle(sequence)
        else:
            started = time.perf_counter()
            with torch.no_grad(), unwatched():
                sequence.measure()
            self.seconds += time.perf_counter() - started

    def _settle(self, sequence: Sequence) -> None:
        """Measure a text that no forward continues, to save memory."""
        started = time.perf_counter()
        with torch.no_grad(), unwatched():
            sequence.settle(self.layers)
        self.seconds += time.perf_counter() - started

    def add(
        self, observer: Observer, observed: ObservedCall, result: Result | None, changed: Mapping[int, Call]
    ) -> Result:
        """A call of attention in the forward that runs."""
        forward = observer.run.forward
        assert result is not None
        if forward is None or not forward.recorded:
            return result
        started = time.perf_counter()
        group = forward.sequence.groups.setdefault(observed.module, observed.group)
        try:
            with torch.no_grad():
                self._add(observer, replace(observed, group=group), changed, forward)
        except InputError as error:
            self._note(observed.module, error)
        self.seconds += time.perf_counter() - started
        return result

    def _add(self, observer: Observer, observed: ObservedCall, changed: Mapping[int, Call], forward: Forward) -> None:
        sequence, n, n_queries = forward.sequence, forward.tokens, observed.call.q.shape[2]
        cross = observed.group == "cross"
        stepwise = cross and n_queries == 1 and n != 1  # one query at a time over the same keys
        of_text = n_queries == n and observed.group in OF_TEXT and not forward.of_encoder
        layer = sequence.layer(observed, 0 if stepwise else observed.own)
        if self.layers is not None and layer.number not in self.layers:
            return
        if not (of_text or (cross and n_queries in (1, n) and not forward.of_encoder)):
            if layer.pieces or layer.made is not None:
                raise InputError(
                    f"model attends in {observed.module} to what is no token of the text in several forwards; the "
                    "first is recorded"
                )
            _, layer.made = self.measures.record(replace(observed, layer=layer.number), None, changed)
            return
        layer.own_keys = cross
        if not cross:
            forward.sees(observed)
        step = forward.steps.get(observed.module, 0)
        forward.steps[observed.module] = step + 1
        start, stays, index = forward.before + step * stepwise, True, None
        keys_at: int | Tensor = 0
        if (cache := attending()) is not None:
            at = cache.key_positions(observed.call.k.shape[2], n_queries)
            keys_at, stays = _first_of(at), keeps(cache)
            sequence.evicted |= cache.length < cache.seen
            index = next((i for i, one in enumerate(forward.cache.caches) if one is cache), None)
        elif not cross:
            index = getattr(observer.modules.get(observed.module), "layer_idx", None)
            keys_at = sequence.keys_at(observed, start, n, index)
            if forward.cache is not None and not is_known(forward.cache) and start:
                old = observed.call.given.k[:, :, : observed.call.k.shape[2] - n]
                _, at = located(old, layer.keys(), None, start - old.shape[2], sequence.ids(sequence.real))
                keys_at = torch.cat([at, torch.arange(start, start + n, device=at.device).expand(*at.shape[:2], n)], 2)
            elif forward.cache is not None:
                stays = _keeps(forward.cache, index)
            sequence.evicted |= isinstance(keys_at, Tensor) or keys_at > 0
        if cross and (layer.known not in (0, observed.call.k.shape[2])):
            raise InputError(f"model attends to other keys than before in {observed.module}")
        if index is not None and not cross:
            sequence.cached[index] = layer
        if layer.made is not None:
            raise InputError(f"model attends in {observed.module} after its text was measured as a whole")
        layer.add(observed, start, keys_at, None if cross else start + n, stays=stays, changed=changed)
        if not forward.may_cache and not stepwise:
            layer.made = layer.record(self.measures, sequence.ids(sequence.real), start + n, {})
            layer.pieces.clear()

    def returns(self, ids: Tensor, sequences: list[Sequence], pad: set[int]) -> None:
        """`generate` has returned token ids: find the texts in which they were read, all but the last token of each.

        Args:
            ids: (b, n), padded at the end.
            sequences: what was read meanwhile.
            pad: ids of tokens that may be padding.
        """
        for sequence in sequences[-1:]:
            if not any(part.ndim == 1 for part in sequence.read):
                self.returned += [(sequence, i) for i in range(min(len(ids), sequence.items))]
                continue
            found: dict[tuple[int, int], Sequence] = {}
            for row in ids.cpu():
                n = len(row)
                while n > 1 and int(row[n - 1]) in pad and int(row[n - 2]) in pad:
                    n -= 1
                for length in range(len(row) - 1, max(0, n - 3), -1):  # the last token is not read
                    read = sequence.at(length)
                    same = [] if read is None or read.shape[1] != length else (read == row[:length]).all(1).nonzero()
                    if len(same):
                        item = int(same[0])
                        if length == sequence.tokens:
                            now = sequence.ids(sequence.read)
                            final = [] if now is None else (now == row[:length]).all(1).nonzero().tolist()
                            if final:
                                self.returned.append((sequence, final[0][0]))
                                break
                        if (length, item) not in found and (copy := sequence.as_of(length, item)) is not None:
                            found[length, item] = copy
                            self.sequences.append(copy)
                        if (length, item) in found:
                            self.returned.append((found[length, item], 0))
                        break

    def _note(self, where: str, error: InputError) -> None:
        self.unrecorded.setdefault(where, str(error))


def _first_of(at: Int[Tensor, "..."]) -> int | Tensor:
    """The first of positions that follow each other; else all of them, (b, hkv, nk)."""
    if at.ndim > 1:
        return at
    first = int(at[0])
    return first if int(at[-1]) - first == len(at) - 1 else at[None, None]


def _keeps(cache: Any, index: int | None) -> bool:
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if not isinstance(layers, list):
        return False
    return all(keeps(layer) for layer in (layers if index is None else layers[index : index + 1]))


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
) -> Iterator[Watched]:
    """Record the attention of everything that a model does inside, as exact statistics in linear memory.

    The model computes by its own functions, so its outputs, gradients, random numbers and generated tokens do not
    change. Forwards that share a cache are one sequence: `generate` (greedy, sampled, beam search, assisted), a loop of
    your own, streaming with qkv's caches. Any other forward, such as a step of training, is a sequence of its own.
    A copy of a cache continues its text as a sequence of its own. Dropout of the weights is left out of the statistics.

    Args:
        model: as in `qkv.profile`.
        every: record the first forward of a sequence and then every so many steps of generation; of forwards without a
            cache, every so many.
        layers: which layers to record, counted from 0 in each group; all if None.
        tokenizer: gives the names of tokens in the profile.
        local_window: `local` is the weight on keys at most this many tokens away.
        map_tokens: whole weight matrices are kept for sequences up to this long.

    Yields:
        `Watched`, whose method `profile` gives a `Profile`.

    Raises:
        InputError: if the model is watched already. A run is not stopped: what cannot be recorded is said in a warning
            by `Watched.profile`, and named in ``attrs["unobserved"]``.

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
    measures = Measures(local_window, map_tokens, 64)
    watched = Watched(model, every, layers, tokenizer, measures)
    observer = Observer(model, measures=measures, beside=True, partial=True)
    observer.unreadable = watched.unrecorded
    observer.receive = lambda observed, result, changed: watched.add(observer, observed, result, changed)
    observer.on_begin = lambda module, args, named: _begun(watched, observer, module, args, named)
    observer.on_end = lambda module, output: watched.ends(observer, module, output)
    try:
        with (
            observe(observer),
            methods(model, observer),
            _generating(model, watched),
            listening(watched.texts.selected),
        ):
            _WATCHED.add(model)
            yield watched
    finally:
        _WATCHED.discard(model)


def _begun(watched: Watched, observer: Observer, module: nn.Module, args: tuple[Any, ...], named: Any) -> None:
    batch = arguments_of(module, args, named)
    watched.begins(observer, module, batch, batch.get("past_key_values"))


@contextmanager
def _generating(model: nn.Module, watched: Watched) -> Iterator[None]:
    """Inside, the texts that a model of transformers returns from `generate` are noted."""
    own = getattr(model, "generate", None)
    if own is None or not hasattr(model, "generation_config"):
        yield
        return

    def generate(*args: Any, **named: Any) -> Any:
        before = len(watched.sequences)
        made = own(*args, **named)
        ids = getattr(made, "sequences", made)
        if isinstance(ids, Tensor) and ids.ndim == 2:
            config: Any = model.generation_config
            ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
            watched.returns(ids, watched.sequences[before:], {x for x in (config.pad_token_id, *ends) if x is not None})
        return made

    had = vars(model).get("generate")
    vars(model)["generate"] = generate
    try:
        yield
    finally:
        vars(model).pop("generate")
        if had is not None:
            vars(model)["generate"] = had
