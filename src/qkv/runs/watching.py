"""`qkv.watch`: record what a model attends to while it runs, with or without a cache."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models.loading import name_of_model, unwrapped
from qkv.profiler.capture.caches import overridden
from qkv.profiler.capture.datasets import Recorded, datasets
from qkv.profiler.capture.inputs import Sequences
from qkv.profiler.capture.observe import OBSERVERS, following
from qkv.profiler.capture.observer import Observer
from qkv.profiler.capture.record import Measures, of_items
from qkv.profiler.capture.sequence import Sequence
from qkv.profiler.capture.texts import Texts
from qkv.runs.profiles import Profile
from qkv.runs.run import attributes, preview


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

    def __init__(self, model: nn.Module, tokenizer: Any, texts: Texts, observer: Observer) -> None:
        self._model, self._tokenizer, self._texts, self._observer = model, tokenizer, texts, observer
        self._measures = texts.measures or Measures()
        self._returned: list[tuple[Sequence, int]] = []  # what `generate` returned, in order: sequence and batch item

    @property
    def sequences(self) -> list[Sequence]:
        """In the order in which the model began to read them."""
        return self._texts.sequences

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
        """
        unrecorded = self._texts.unrecorded
        chosen = self.sequences if sequence is None else self.sequences[sequence]
        chosen = chosen if isinstance(chosen, list) else [chosen]
        every = {s: s.places for s in chosen if s.layers}
        whole = set().union(*every.values())
        of = {s: {group for group, _, _ in own} for s, own in every.items()}
        ended = {s: {x for x in whole - own if x[0] in of[s]} for s, own in every.items()}
        chosen = [s for s, missing in ended.items() if not missing]
        left_out = {
            f"sequence {self.sequences.index(s)}": f"it did not reach {min(missing)[1]}, and profile(…) has it alone"
            for s, missing in ended.items() if missing
        }  # fmt: skip
        with self._texts.measuring():
            records = [self._recorded(s) for s in chosen]
            groups = datasets(records, self._tokenizer, self._measures.local_window) if records else {}
        if not groups:
            missing = "; ".join(f"{where}: {reason}" for where, reason in unrecorded.items())
            raise InputError(
                "watched has no attention, expected the model to run inside the context of qkv.watch"
                + (f"; not recorded: {missing}" if missing else "")
            )
        returned = [
            item + sum(one.items for one in chosen[: chosen.index(s)] if of[one] & of[s])
            for s, item in self._returned
            if s in chosen
        ]
        if returned:
            texts = max(data.sizes["text"] for data in groups.values())
            groups = {n: _labelled(x, returned) if x.sizes["text"] == texts else x for n, x in groups.items()}
        if found := unrecorded | left_out:
            missing = "; ".join(f"{where}: {reason}" for where, reason in found.items())
            warnings.warn(f"not recorded: {missing}", stacklevel=2)
        read = chosen[0].read()
        ids = read.target if read.source is None else read.source
        attrs = attributes(self._model, name_of_model(self._model), self._texts.seconds) | {
            "text_preview": "no token ids" if ids is None else preview(ids, self._tokenizer),
            "unobserved": sorted(unrecorded),
            "sources": chosen[0].sources,
            "checks": [asdict(checked) for checked in self._observer.checks],
            "probes": "not run: the model was watched",
            "forwards": [s.forwards for s in chosen],
            "evicted": any(s.evicted for s in chosen),
            "returned": returned,
        }
        attrs |= self._observer.numbers.attributes(groups, all_layers=self._texts.layers is None)
        return Profile(groups, attrs, {})

    def _recorded(self, sequence: Sequence) -> Recorded:
        read = sequence.read()
        source, target = read.source, read.target
        if source is not None and target is not None and len(target) != len(source):
            source = source.repeat_interleave(len(target) // len(source), 0)  # beams read the same text
        records = []
        for record in sequence.records(self._texts.layers):
            items = len(record.statistics.entropy)
            repeats = len(target) // items if record.group == "encoder" and target is not None else 1
            repeated = torch.arange(items).repeat_interleave(repeats)
            records.append(record if repeats == 1 else of_items(record, repeated))
        real = sequence.real()
        if real is not None and not bool(real.any(1).all()):
            kept = real.any(1).nonzero()[:, 0]
            self._texts.unrecorded["texts of padding only"] = f"{len(real) - len(kept)} have no token"
            records = [of_items(x, kept) if len(x.statistics.entropy) == len(real) else x for x in records]
            source, target = (x[kept] if x is not None and len(x) == len(real) else x for x in (source, target))
        return Recorded(records, Sequences(source, target, two=sequence.two), self._measures.statistics)


def _labelled(data: xr.Dataset, returned: list[int]) -> xr.Dataset:
    """The data set with names of its texts: ``data.sel(text="returned 0")`` is the first that `generate` returned.

    A text that it returned several times, with another last token, which was not read, has the first number.
    """
    names = [f"not returned {i}" for i in range(data.sizes["text"])]
    for number, text in reversed([*enumerate(returned)]):
        names[text] = f"returned {number}"
    return data.assign_coords(text=np.array(names, object))


Returned = list[tuple[Sequence, int]]


def _returned(ids: Tensor, texts: Texts, sequences: list[Sequence], pad: set[int], *, beams: bool) -> Returned:
    """`generate` has returned token ids: find the texts in which they were read, all but the last token of each.

    Args:
        ids: (b, n), padded at the end.
        texts: gets a copy of a text as it was, where the model has read on.
        sequences: what was read meanwhile, also by other threads and by functions that call the model besides.
        pad: ids of tokens that may be padding.
        beams: whether the batch items may be in another order than what was returned.
    """
    ids = ids.cpu()
    found, copies = _found(ids, sequences, pad)
    read = sequences[0].ids() if len(sequences) == 1 and not found else None
    if read is not None:  # it may leave out the first tokens, as Whisper's does
        items = torch.arange(len(ids)) * len(read) // len(ids)
        for n in range(read.shape[1] - ids.shape[1] + 1, 0, -1):
            begun = torch.cat([read[items, :n].to(ids), ids], 1)
            again = _found(begun, sequences, pad)
            if len(again[0]) == len(ids):
                found, copies = again
                break
    texts.sequences.extend(copies)
    if not found and len(sequences) == 1:  # it has returned other ids than were read
        if beams:
            texts.unrecorded["order of the returned texts"] = "which beams they are cannot be told from their tokens"
        else:
            found = [(sequences[0], i) for i in range(min(len(ids), sequences[0].items))]
    return found


def _found(ids: Tensor, sequences: list[Sequence], pad: set[int]) -> tuple[Returned, list[Sequence]]:
    """The texts in which rows of ids were read, and those of them that are copies as of an earlier time."""
    copies, found = dict[tuple[int, int, int], Sequence](), Returned()
    for number, row in enumerate(ids):
        n = len(row)
        while n > 1 and int(row[n - 1]) in pad and int(row[n - 2]) in pad:
            n -= 1
        lengths = range(len(row) - 1, max(0, n - 3), -1)  # the last token is not read
        for length, sequence in itertools.product(lengths, reversed(sequences)):
            place, row_read = length + sequence.nameless, row[:length]
            item = _item(sequence, sequence.ids(place), row_read, number, len(ids))
            if item is None:
                continue
            now = _item(sequence, sequence.ids(), row_read, number, len(ids))
            if now is not None:
                found.append((sequence, now))
                break
            key = id(sequence), length, item
            if key not in copies and (copy := sequence.as_of(place, item)) is not None:
                copies[key] = copy
            if key in copies:
                found.append((copies[key], 0))
            break
    return found, [*copies.values()]


def _item(sequence: Sequence, read: Tensor | None, row: Tensor, number: int, rows: int) -> int | None:
    """The batch item whose tokens were those of a row, if one was; that with the row's number if several were."""
    if read is None or read.shape[1] != len(row):
        return None
    sources = sequence.sources_read  # those of a decoder may begin alike, and its beams stay with their source
    mine = torch.arange(len(read)) * sources // len(read) == number * sources // rows
    same = ((read == row).all(1) & mine).nonzero()[:, 0].tolist()
    return number if number in same else next(iter(same), None)


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
    if every < 1:
        raise InputError(f"every is {every}, expected at least 1")
    model = unwrapped(model)
    if any((other := o.running.texts) is not None and other.measures is not None for o in OBSERVERS.get(model, ())):
        raise InputError(
            f"model {type(model).__name__} is watched already; expected one qkv.watch at a time, which records "
            "everything that the model does inside"
        )
    texts = Texts(Measures(local_window, map_tokens, 64), every, layers)
    observer = Observer(model, texts=texts, partial=True, unreadable=texts.unrecorded)
    watched = Watched(model, tokenizer, texts, observer)
    with following(observer), _generating(model, texts, watched._returned):
        yield watched


def _generating(model: nn.Module, texts: Texts, returned: list[tuple[Sequence, int]]) -> AbstractContextManager[None]:
    """Inside, the texts that a model of transformers returns from `generate` are noted."""
    own = getattr(model, "generate", None)
    if own is None or not hasattr(model, "generation_config"):
        return nullcontext()

    def generate(*args: Any, **named: Any) -> Any:
        before = {id(s): s.reads for s in texts.sequences}
        made = own(*args, **named)
        ids = getattr(made, "sequences", made)
        if isinstance(ids, Tensor) and ids.ndim == 2:
            config: Any = named.get("generation_config") or model.generation_config
            pad, ends = (named.get(name, getattr(config, name)) for name in ("pad_token_id", "eos_token_id"))
            padding = {x for x in (pad, *(ends if isinstance(ends, list) else [ends])) if x is not None}
            read = [s for s in texts.sequences if s.reads != before.get(id(s))]
            beams = (named.get("num_beams") or config.num_beams or 1) > 1
            returned.extend(_returned(ids, texts, read, padding, beams=beams))
        return made

    return overridden(model, {"generate": generate})
