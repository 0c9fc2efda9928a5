"""One shard of a survey: its texts as batches through the observed model, what every call says added up."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.profiler.capture.inputs import batches, sequences_of
from qkv.profiler.capture.observe import Observer, Seen, observe, unobserved
from qkv.profiler.capture.special import Special, tokens_of
from qkv.profiler.capture.tokens import as_read, special_ids
from qkv.profiler.data.delimiters import is_delimiter
from qkv.profiler.data.variables import UNFUSED
from qkv.profiler.surveys.accumulators import PREFIX, Group, Layer, number
from qkv.profiler.surveys.corpus import Document
from qkv.profiler.surveys.data import EXAMPLES, Survey
from qkv.profiler.surveys.pieces import Batch, Piece, batches_of, pieces
from qkv.profiler.surveys.quantities import Quantities, of_description
from qkv.statistics import Local, Statistic
from qkv.statistics.measure import row_state, sweep
from qkv.statistics.sums import Statistics

NAMED = 256
"""Of so many tokens, those that received most, a shard keeps the names."""


class Reader:
    """A model with all it takes to survey texts."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        definition: dict[str, Any],
        batch_tokens: int,
        statistics: Sequence[Statistic] = (),
    ) -> None:
        self.model, self.tokenizer, self.definition, self.batch_tokens = model, tokenizer, definition, batch_tokens
        self.statistics, self.quantities = statistics, of_description(definition["quantities"])
        self.special = Special.of(tokenizer)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.kinds = _kinds(tokenizer, definition["vocabulary"], special_ids(model, tokenizer)).to(self.device)
        parameters = inspect.signature(model.forward).parameters
        masked = "attention_mask" in parameters or type(model).__module__.startswith("transformers.")
        self.pad = (getattr(tokenizer, "pad_token_id", None) or 0) if masked else None
        self.two = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def survey(self, documents: Sequence[Document], label: str, on_batch: Callable[[int, int, int], None]) -> Survey:
        """The documents as a survey of their own, whose only shard is `label`."""
        found: list[Piece] = []
        skipped: Counter[str] = Counter()
        examples: list[str] = []
        for document in documents:
            reason = document.reason
            if reason is None:
                ids = tokens_of(self.tokenizer, document.read())
                cut = list(pieces(ids, self.special, self.definition["length"], self.definition["overlap"]))
                if len(cut) > 1 and self.definition["long"] == "refuse":
                    reason = f"longer than {self.definition['length']} tokens"
                elif not cut[0].ids:
                    reason = "no tokens"
                else:
                    found += cut
            if reason is not None:
                skipped[reason] += 1
                examples.append(f"{document.name}: {reason}")
        groups: dict[str, Group] = {}
        sources: dict[str, str] = {}
        tokens = 0
        read, size = len(documents), sum(d.size for d in documents)
        whole = sum(len(p.ids) for p in found) or 1
        through = 0
        for batch in batches_of(found, self.batch_tokens, pad=self.pad):
            sources |= self._add(batch.to(self.device), groups)
            counted, before = int(batch.counted.sum()), through
            through += int(batch.real.sum())
            tokens += counted
            done, done_size = (n * through // whole - n * before // whole for n in (read, size))
            on_batch(done, done_size, counted)
        if not found:
            on_batch(read, size, 0)
        for group in groups.values():
            for layer in group.layers.values():
                layer.seal()
        record = {
            "documents": sum(p.begins for p in found),
            "sequences": len(found),
            "tokens": tokens,
            "shards": [label],
            "skipped": dict(sorted(skipped.items())),
            "examples": examples[:EXAMPLES],
            "names": self._names(groups),
            "sources": sources,
        }
        return Survey(self.definition, groups, record)

    def _add(self, batch: Batch, groups: dict[str, Group]) -> dict[str, str]:
        """Run one batch, and add what its calls say; returns where each module's numbers come from."""
        given: dict[str, Tensor] = {"input_ids": batch.ids}
        padded = not bool(batch.real.all())
        if padded:
            given["attention_mask"] = batch.real.long()
        if self.two:
            given |= {"decoder_input_ids": batch.ids}
            given |= {"decoder_attention_mask": batch.real.long()} if padded else {}
        (ready,) = batches(self.model, given, None, None)
        real = {batch.ids.shape[1]: batch.real} if padded else {}

        def take(seen: Seen) -> None:
            if seen.call.q.shape[2] != batch.ids.shape[1]:
                raise InputError(
                    f"{seen.module} does not attend from all tokens of a text at once, so texts cannot be surveyed in "
                    "batches; profile them with `qkv profile`"
                )
            group = groups.setdefault(seen.group, Group(self.definition["vocabulary"]))
            with torch._C.DisableTorchFunction():  # nobody needs to watch our own operations, and it takes its time
                self._add_call(group, seen, batch)

        observer = Observer(
            self.model, query_masks=real, key_masks=real, sequences=sequences_of(self.model, ready), take=take
        )
        with observe(observer):
            self.model(**ready)
        missing = unobserved(observer)
        if missing or not observer.fired:
            what = ", ".join(missing[:4]) or "all of it"
            raise InputError(f"{type(self.model).__name__} has attention that qkv cannot observe: {what}")
        return dict(observer.sources)

    def _add_call(self, group: Group, seen: Seen, batch: Batch) -> None:
        """Measure one call and add it to its layer, on the device where it is: a model may lie on several."""
        device = seen.call.q.device
        batch, kinds = batch.to(device), self.kinds.to(device)
        rows = row_state(seen.call, seen.lse)
        if rows.level is not None and rows.level.isnan().any():
            raise InputError(
                f"{seen.module} computes scores that are NaN: the model's weights or its inputs contain NaN"
            )
        counts = None if bool(batch.counted.all()) else batch.counted
        local = Local(self.definition["local_window"])
        statistics = sweep(
            seen.call,
            rows,
            mass={local.name: local.mask},
            first=seen.first,
            queries=counts,
            prefix_keys=PREFIX,
            statistics=(*(s for s in UNFUSED if s.name in self.quantities), *self.statistics),
        )
        layer = group.layers.get(seen.layer)
        if layer is None:
            layer = group.layers[seen.layer] = Layer(seen.module, seen.call.q.shape[1], self.quantities)
        layer.add(*_values(self.quantities, statistics, seen, batch.counted))
        assert statistics.prefix_sink_scores is not None
        long = batch.counted[:, :PREFIX].all(1) if batch.counted.shape[1] >= PREFIX else torch.zeros_like(batch.begins)
        layer.add_prefix(statistics.prefix_sink_scores, long & batch.begins)
        layer.add_keys(statistics.received, kinds[:, batch.ids] & batch.real, int(batch.counted.sum()))
        group.add_tokens(batch.ids, statistics.received, batch.real)

    def _names(self, groups: Mapping[str, Group]) -> dict[str, str]:
        """Names of the tokens that received most."""
        if not hasattr(self.tokenizer, "convert_ids_to_tokens"):
            return {}
        best: set[int] = set()
        for group in groups.values():
            order = (-number(group.token_weight)).argsort(kind="stable")[:NAMED]
            best |= {int(i) for i in order if group.token_count[i]}
        ids = sorted(best)
        pieces = self.tokenizer.convert_ids_to_tokens(ids)
        return {str(i): as_read(self.tokenizer, i, str(piece)) for i, piece in zip(ids, pieces, strict=True)}


def vocabulary(model: nn.Module, tokenizer: Any) -> int:
    """How many token ids there may be."""
    said = getattr(getattr(model, "config", None), "vocab_size", None) or 0
    own = len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", 0)
    if not max(said, own):
        raise InputError("neither the model's configuration nor its tokenizer says how many tokens there are")
    return int(max(said, own))


def _values(
    quantities: Quantities, statistics: Statistics, seen: Seen, counted: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "quantity b h n"], Bool[Tensor, "quantity b h n"]]:
    """All quantities of all queries, and which of them there are."""
    visible = statistics.visible
    base = counted[:, None].expand_as(visible)
    later = base & (torch.arange(visible.shape[2], device=visible.device) > 0) if seen.causal else base
    none = torch.zeros_like(base)
    values, valid = [], []
    for name, quantity in quantities.items():
        there = none if quantity.one_text and seen.group == "cross" else later if quantity.later else base
        if name == "entropy_ratio":
            x, there = statistics.entropy / visible.clamp(min=2).log(), there & (visible >= 2)
        else:
            found = statistics.named(name)
            x, there = (torch.zeros_like(visible), none) if found is None else (found, there)
            if quantity.parameters is not None:
                there = there & ~x.isnan()  # undefined for this query; NaN of built-in statistics is refused
        values.append(x)
        valid.append(there)
    return torch.stack(values), torch.stack(valid)


def _kinds(tokenizer: Any, size: int, special: set[int]) -> Bool[Tensor, "kind vocabulary"]:
    """Which ids of the vocabulary are special tokens, and which delimiters: punctuation and line ends, nothing else."""
    kinds = torch.zeros(2, size, dtype=torch.bool)
    kinds[0, [i for i in special if 0 <= i < size]] = True
    known = len(tokenizer) if hasattr(tokenizer, "__len__") else size
    names = tokenizer.convert_ids_to_tokens(list(range(min(known, size))))
    kinds[1, : len(names)] = torch.tensor([is_delimiter(str(name)) for name in names])
    kinds[1] &= ~kinds[0]
    return kinds
