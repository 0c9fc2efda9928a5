"""A `Surveyor` carries out one shard of a survey: it runs texts in batches and adds up the statistics of the calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from qkv.engine import Call, Result
from qkv.errors import InputError
from qkv.models.loading import rendered_chat
from qkv.profiler.capture.inputs import (
    Special,
    batches,
    sequences_of,
    signature_of,
    special_ids,
    token_texts,
    tokens_of,
)
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer, unobserved
from qkv.profiler.capture.record import Measures, ObservedCall, refuse_nan
from qkv.profiler.data.tables import is_delimiter
from qkv.profiler.surveys.accumulators import PREFIX, QUANTITIES, Group, Layer, Quantities, number, of_description
from qkv.profiler.surveys.corpus import Document, Part
from qkv.profiler.surveys.data import EXAMPLES, Survey
from qkv.profiler.surveys.folder import label
from qkv.results import Statistics
from qkv.statistics import Statistic

OnBatch = Callable[[int, int, int], None]
"""Progress callback: numbers of documents, bytes and tokens that were finished since the last call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence for the model. Queries from `start` up to `stop` count; the others are context."""

    ids: Sequence[int]
    start: int
    stop: int
    begins: bool
    """True if it is the beginning of a text."""


def capacity_of(special: Special, length: int, overlap: int | None) -> tuple[int, int]:
    """How many tokens of text a sequence has, and how many of them it repeats from the one before."""
    capacity = length - len(special.before) - len(special.after)
    overlap = min(length // 8, max(capacity - 1, 0)) if overlap is None else overlap
    if capacity < 1:
        raise InputError(f"length is {length}, expected more than the {length - capacity} special tokens")
    if not 0 <= overlap < capacity:
        raise InputError(
            f"overlap is {overlap}, expected 0 to less than {capacity}, the tokens of text in a sequence of {length}"
        )
    return capacity, overlap


def pieces(ids: Sequence[int], special: Special, length: int, overlap: int) -> Iterator[Piece]:
    """Split a text, given without special tokens, into sequences of at most `length` tokens including special tokens.

    Every token of the text and every special token counts once over all pieces. The `overlap` tokens that a piece
    repeats from the previous one, and repeated special tokens, are context only.

    >>> [(p.ids, p.start, p.stop) for p in pieces([1, 2, 3, 4, 5], Special((8,), (9,)), length=5, overlap=1)]
    [([8, 1, 2, 3, 9], 0, 4), ([8, 3, 4, 5, 9], 2, 5)]
    """
    before, after = list(special.before), list(special.after)
    capacity, _ = capacity_of(special, length, overlap)
    for start in range(0, max(len(ids) - overlap, 1), capacity - overlap):
        part, last = ids[start : start + capacity], start + capacity >= len(ids)
        whole = [*before, *part, *after]
        counted_to = len(whole) if last else len(before) + len(part)
        yield Piece(whole, len(before) + overlap if start else 0, counted_to, begins=start == 0)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of similar length, padded on the right."""

    ids: Int[Tensor, "b n"]
    real: Bool[Tensor, "b n"]
    counted: Bool[Tensor, "b n"]
    begins: Bool[Tensor, " b"]

    @classmethod
    def of(cls, some: Sequence[Piece], pad: int) -> Batch:
        ids = pad_sequence([torch.tensor(p.ids) for p in some], batch_first=True, padding_value=pad)
        length, start, stop = torch.tensor([(len(p.ids), p.start, p.stop) for p in some]).T[..., None]
        at = torch.arange(ids.shape[1])
        return cls(ids, at < length, (start <= at) & (at < stop), torch.tensor([p.begins for p in some]))

    def to(self, device: torch.device) -> Batch:
        return Batch(*(x.to(device) for x in (self.ids, self.real, self.counted, self.begins)))


def batches_of(found: Sequence[Piece], tokens: int, *, pad: int | None) -> Iterator[Batch]:
    """Batches of at most `tokens` tokens including padding, the longest sequences first.

    Args:
        found: sequences.
        tokens: largest number of tokens in a batch; a longer sequence is a batch of its own.
        pad: id of padding; None if the model does not accept padding, then a batch has sequences of one length only.
    """
    some: list[Piece] = []
    for piece in sorted(found, key=lambda p: -len(p.ids)):  # a stable sort: reproducible batches
        full = some and (len(some) + 1) * len(some[0].ids) > tokens
        if some and (full or (pad is None and len(some[0].ids) != len(piece.ids))):
            yield Batch.of(some, pad or 0)
            some = []
        some.append(piece)
    if some:
        yield Batch.of(some, pad or 0)


NAMED = 256
"""A shard keeps the names of this many tokens, those that received the most weight."""


class Surveyor:
    """A survey, ready to be carried out: any process that has it can carry out any shard, any number of times.

    A shard depends on nothing but the model, the texts and the settings, so it is the same file whoever computes it.
    `parts` are the texts of each shard, and `settings` all that determines the shards, as in the folder of the survey.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, parts: Sequence[Part], settings: dict[str, Any],
        statistics: Sequence[Statistic] = (),
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.parts, self.settings = model, tokenizer, parts, settings
        self.definition: dict[str, Any] = settings["definition"]
        self.quantities = of_description(self.definition["quantities"])
        self.measures = Measures(self.definition["local_window"], 0, 0, statistics)
        self.chat = bool(self.definition.get("chat"))  # the template has the special tokens
        self.special = Special() if self.chat else Special.of(tokenizer)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.kinds = _kinds(tokenizer, self.definition["vocabulary"], special_ids(model, tokenizer)).to(self.device)
        parameters = signature_of(model).parameters
        masked = "attention_mask" in parameters or type(model).__module__.startswith("transformers.")
        self.pad = (getattr(tokenizer, "pad_token_id", None) or 0) if masked else None
        self.two = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def on(self, device: str) -> Surveyor:
        """The same survey with the model on another device."""
        return Surveyor(self.model.to(device), self.tokenizer, self.parts, self.settings, self.measures.statistics)

    def shard(self, number: int, on_batch: OnBatch) -> bytes:
        """Survey one shard: its file. The documents of a chunk are held and batched together."""
        groups: dict[str, Group] = {}
        shards = [label(self.settings, number)]
        record: dict[str, Any] = {"documents": 0, "sequences": 0, "tokens": 0, "shards": shards}
        skipped: Counter[str] = Counter()
        examples: list[str] = []
        sources: dict[str, str] = {}
        for documents in self.parts[number].chunks():
            found = self._pieces(documents, skipped, examples)
            number_of_documents, size = len(documents), sum(d.size for d in documents)
            total = sum(len(p.ids) for p in found) or 1
            done = 0  # tokens that were run, of `total`
            for batch in batches_of(found, self.settings["batch_tokens"], pad=self.pad):
                sources |= self._add(batch.to(self.device), groups)
                counted, before = int(batch.counted.sum()), done
                done += int(batch.real.sum())
                record["tokens"] += counted
                new_documents, new_size = (n * done // total - n * before // total for n in (number_of_documents, size))
                on_batch(new_documents, new_size, counted)
            if not found:
                on_batch(number_of_documents, size, 0)
            record["documents"] += sum(p.begins for p in found)
            record["sequences"] += len(found)
            for group in groups.values():
                for layer in group.layers.values():
                    layer.seal()
        record |= {
            "skipped": dict(sorted(skipped.items())),
            "examples": examples,
            "names": self._names(groups),
            "sources": sources,
        }
        return Survey(self.definition, groups, record).packed()

    def _pieces(self, documents: Sequence[Document], skipped: Counter[str], examples: list[str]) -> list[Piece]:
        """The sequences of the documents; those that are left out are counted in `skipped`."""
        found: list[Piece] = []
        for document in documents:
            reason = document.reason
            if reason is None:
                text = document.text or ""
                ids = tokens_of(self.tokenizer, rendered_chat(self.tokenizer, text) if self.chat else text)
                cut = list(pieces(ids, self.special, self.definition["length"], self.definition["overlap"]))
                if len(cut) > 1 and self.definition["long"] == "refuse":
                    reason = f"longer than {self.definition['length']} tokens"
                elif not cut[0].ids:
                    reason = "no tokens"
                else:
                    found += cut
            if reason is not None:
                skipped[reason] += 1
                if len(examples) < EXAMPLES:
                    examples.append(f"{document.name}: {reason}")
        return found

    def _add(self, batch: Batch, groups: dict[str, Group]) -> dict[str, str]:
        """Run one batch and add the statistics of its calls; returns the source of each module's statistics."""
        arguments: dict[str, Tensor] = {"input_ids": batch.ids}
        padded = not bool(batch.real.all())
        if padded:
            arguments["attention_mask"] = batch.real.long()
        if self.two:
            arguments |= {"decoder_input_ids": batch.ids}
            arguments |= {"decoder_attention_mask": batch.real.long()} if padded else {}
        (prepared,) = batches(self.model, arguments, None, None)

        def receive(observed: ObservedCall, result: Result | None, changed: Mapping[int, Call]) -> Result:
            if changed:
                raise InputError(f"edits changes weights in {observed.module}, expected no edits in a survey")
            if observed.call.q.shape[2] != batch.ids.shape[1]:
                raise InputError(
                    f"model does not attend from all tokens of a text at once in {observed.module}, so texts cannot be "
                    "surveyed in batches; profile them with `qkv profile`"
                )
            group = groups.setdefault(observed.group, Group(self.definition["vocabulary"]))
            made = self._add_call(group, observed, batch)
            return made if result is None else result

        observer = Observer(self.model, sequences=sequences_of(self.model, prepared), receive=receive)
        with observe(observer):
            self.model(**prepared)
        missing = unobserved(observer)
        if missing or not observer.sources:
            names = ", ".join(missing[:4]) or "all of it"
            raise InputError(f"model {type(self.model).__name__} has attention that qkv cannot observe: {names}")
        return dict(observer.sources)

    def _add_call(self, group: Group, observed: ObservedCall, batch: Batch) -> Result:
        """Compute and measure one call on its device (a model may be on several) and add it to its layer."""
        call = observed.call
        batch, kinds = batch.to(call.q.device), self.kinds.to(call.q.device)
        counts = None if bool(batch.counted.all()) else batch.counted
        result, statistics, _ = self.measures.of(replace(observed, queries=counts))
        assert result is not None
        refuse_nan(observed.module, statistics)
        layer = group.layers.get(observed.layer)
        if layer is None:
            layer = group.layers[observed.layer] = Layer(observed.module, call.q.shape[1], self.quantities)
        layer.add(*_values(self.quantities, statistics, observed, batch.counted))
        assert statistics.prefix_sink_scores is not None
        long = batch.counted[:, :PREFIX].all(1) if batch.counted.shape[1] >= PREFIX else torch.zeros_like(batch.begins)
        layer.add_prefix(statistics.prefix_sink_scores, long & batch.begins)
        layer.add_keys(statistics.received, kinds[:, batch.ids] & batch.real, int(batch.counted.sum()))
        group.add_tokens(batch.ids, statistics.received, batch.real)
        return result

    def _names(self, groups: Mapping[str, Group]) -> dict[str, str]:
        """Names of the tokens that received the most weight."""
        if not hasattr(self.tokenizer, "convert_ids_to_tokens"):
            return {}
        best: set[int] = set()
        for group in groups.values():
            order = (-number(group.token_weight)).argsort(kind="stable")[:NAMED]
            best |= {int(i) for i in order if group.token_count[i]}
        ids = sorted(best)
        return dict(zip(map(str, ids), token_texts(self.tokenizer, ids), strict=True))


def vocabulary(model: nn.Module, tokenizer: Any) -> int:
    """The number of token ids, by the model's configuration or the tokenizer."""
    of_model = getattr(getattr(model, "config", None), "vocab_size", None) or 0
    of_tokenizer = len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", 0)
    if not max(of_model, of_tokenizer):
        raise InputError("tokenizer has no vocabulary size, and neither has the model's configuration; expected one")
    return int(max(of_model, of_tokenizer))


def _values(
    quantities: Quantities, statistics: Statistics, observed: ObservedCall, counted: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "quantity b h n"], Bool[Tensor, "quantity b h n"]]:
    """All quantities of all queries, and True where a value counts."""
    visible = statistics.visible
    base = counted[:, None].expand_as(visible)
    later = base & (torch.arange(visible.shape[2], device=visible.device) > 0)
    none = torch.zeros_like(base)
    values, valid = [], []
    for name, quantity in quantities.items():
        counts = none if quantity.one_text and observed.group == "cross" else later if quantity.from_second else base
        if name == "entropy_ratio":
            x, counts = statistics.entropy / visible.clamp(min=2).log(), counts & (visible >= 2)
        else:
            found = statistics.named(name)
            x, counts = (torch.zeros_like(visible), none) if found is None else (found, counts)
            if name not in QUANTITIES:
                counts = counts & ~x.isnan()  # a custom statistic may be undefined; built-in ones raise on NaN
        values.append(x)
        valid.append(counts)
    return torch.stack(values), torch.stack(valid)


def _kinds(tokenizer: Any, size: int, special: set[int]) -> Bool[Tensor, "kind vocabulary"]:
    """True at special tokens of the vocabulary (row 0), and at delimiters (row 1): punctuation and white space."""
    kinds = torch.zeros(2, size, dtype=torch.bool)
    kinds[0, [i for i in special if 0 <= i < size]] = True
    known = len(tokenizer) if hasattr(tokenizer, "__len__") else size
    names = tokenizer.convert_ids_to_tokens(list(range(min(known, size))))
    kinds[1, : len(names)] = torch.tensor([is_delimiter(str(name)) for name in names])
    kinds[1] &= ~kinds[0]
    return kinds
