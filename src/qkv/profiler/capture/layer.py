"""One attention layer over a text that a model reads in one forward or in several: its calls, joined into whole rows.

A position is that of a token in the text as the model reads it, padding included. As long as a cache keeps its keys as
they are, the queries and the new keys of every call are kept, and are measured together as one call over the whole
text. Otherwise each call gives its scores, which are measured with those of the calls beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.engine import Call
from qkv.errors import InputError
from qkv.masks import Region
from qkv.profiler.capture.pieces import Joined, Piece, joined_call, joined_norms, scores_of
from qkv.profiler.capture.record import PREFIX, Measures, ObservedCall, Record, of_items
from qkv.profiler.data.variables import UNFUSED
from qkv.statistics.result import Statistics

HELD = 2**22
"""So many numbers of queries of a layer are held at most; then they are measured, and only their keys are kept."""
SCORES = 2**22
"""So many scores are held at most where a cache does not keep its keys."""


@dataclass(eq=False)
class Layer:
    """The calls of one attention layer, in order."""

    module: str
    group: str
    number: int
    source: str
    own_keys: bool = False
    """The keys are not the tokens of the text that has the queries, as in cross-attention."""
    pieces: list[Piece | Tensor] = field(default_factory=list)
    """A tensor of batch items where the batch was reordered."""
    measured: list[Part | Tensor] = field(default_factory=list)
    """The queries that are measured; a tensor of batch items as in `pieces`."""
    waiting: tuple[int, int] = (0, 0)
    """How many numbers of queries, and of scores, are held that are not measured."""
    known: int = 0
    """Number of keys of the text so far."""
    causal: bool = True
    made: Record | None = None
    """Of a whole forward, which is measured at once."""
    padding: Bool[Tensor, "b nk"] | None = None
    """True at real keys, where they are not tokens of the text that has the queries."""

    heads: dict[int, Layer] = field(default_factory=dict)
    """The same layer with other weights, of which single heads are used: those whose weights an edit has changed."""

    def fork(self) -> Layer:
        heads = {head: layer.fork() for head, layer in self.heads.items()}
        return replace(self, pieces=list(self.pieces), measured=list(self.measured), heads=heads)

    def add(
        self, observed: ObservedCall, start: int, keys_at: int | Tensor, limit: int | None, *, stays: bool,
        changed: Mapping[int, Call] | None = None, queries: bool = True,
    ) -> None:  # fmt: skip
        """Add the queries of a call.

        Args:
            observed: the call.
            start: position of its first query.
            keys_at: positions of its keys, or of the first if they follow each other.
            limit: number of tokens of the text so far; later keys are unused rows of a static cache. None if the keys
                are not the tokens of the text.
            stays: the keys and values of earlier calls are still what they were.
            changed: the calls of heads whose weights an edit changed.
            queries: keep the queries, and not the keys alone.

        Raises:
            InputError: if queries see keys that are no tokens of the text.
        """
        changed = changed or {}
        for head in changed:
            self.heads.setdefault(head, self.fork())
        for head, layer in self.heads.items():
            layer.heads.clear()
            layer.add(replace(observed, call=changed.get(head, observed.call)), start, keys_at, limit, stays=stays)
        call, given = observed.call, observed.call.user
        n_keys = given.k.shape[2]
        if limit is not None and isinstance(keys_at, int) and keys_at + n_keys > limit:
            unused = Region(slice(0, call.q.shape[2]), slice(limit - keys_at, n_keys))
            if call.mask is None or bool(call.mask.visible(unused, call.grid).any()):
                raise InputError(
                    f"model attends to {n_keys} keys in {self.module} after {limit} tokens; expected the model to read "
                    "the text from its first token inside qkv.watch"
                )
            n_keys = limit - keys_at
            given = replace(given, k=given.k[:, :, :n_keys], v=given.v[:, :, :n_keys])
        stop = keys_at + n_keys if isinstance(keys_at, int) else int(keys_at.max()) + 1
        new, scores, norms = None, None, None
        if stays:
            fresh = min(stop - self.known, n_keys)
            skipped = stop - self.known - fresh  # keys of forwards that were not recorded, and that are gone
            values = given.v if queries else given.v[..., :0]
            new = _after(given.k, n_keys - fresh, skipped), _after(values, n_keys - fresh, skipped)
        elif queries:
            scores = scores_of(call)[..., :n_keys]
            norms = None if observed.norms is None else observed.norms[:, :, None, :n_keys]
        held, others = self.waiting
        self.waiting = held + stays * queries * given.q.numel(), others + (0 if scores is None else scores.numel())
        self.known = max(self.known, stop)
        self.causal &= observed.causal or call.q.shape[2] == 1
        if observed.keys is not None:
            self.padding = observed.keys
        self.pieces.append(
            Piece(
                start,
                call.q.shape[2],
                given.q.detach() if stays and queries else None,
                scores,
                new,
                keys_at,
                call.mask,
                call.grid,
                given.biases,
                given.score,
                given.normalizer,
                norms,
            )
        )

    @property
    def full(self) -> bool:
        """Whether the newest calls must be measured, to save memory or because the cache has begun to change keys."""
        return self.waiting[0] > HELD or self.waiting[1] > SCORES or min(self.waiting) > 0

    def reorder(self, items: Int[Tensor, " b"]) -> None:
        """Select batch items."""
        for layer in self.heads.values():
            layer.reorder(items)
        self.pieces.append(items)
        self.measured.append(items)
        if self.padding is not None:
            self.padding = self.padding[items.to(self.padding.device)]

    def crop(self, length: int) -> None:
        """Remove the tokens after the first `length`.

        Raises:
            InputError: if their queries are measured together with earlier ones.
        """
        for layer in self.heads.values():
            layer.crop(length)
        kept: list[Piece | Tensor] = []
        for piece in self.pieces:
            if isinstance(piece, Tensor) or piece.start + piece.count <= length:
                kept.append(piece)
            elif piece.start < length:
                kept.append(piece.first(length - piece.start))
        for part in self.measured:
            if not isinstance(part, Tensor) and part[0][-1] >= length:
                raise InputError(
                    f"the cache was cropped to {length} tokens, before token {part[0][-1]}, which was measured with "
                    "earlier ones; expected a crop of newer tokens"
                )
        self.pieces, self.known = kept, self.known if self.own_keys else length

    def keys(self) -> Float[Tensor, "b hkv n d"]:
        """The keys of the text so far, in the present order of the batch."""
        found = [p.new[0] for p in in_order(self.pieces, Piece.of_items) if p.new is not None]
        if not found:
            raise InputError(f"the keys of {self.module} were not recorded; expected a cache that is not changed")
        return torch.cat(found, 2)

    @torch.no_grad()
    def measure(self, measures: Measures, real: Tensor | None, joined: Joined) -> Record | None:
        """Measure the calls that are not measured yet; returns a record if these are all queries.

        Args:
            measures: what is measured.
            real: True at real tokens of the text, (b, n); None if all are real.
            joined: masks of joined calls that other layers have.
        """
        for layer in self.heads.values():
            layer.measure(measures, real, joined)
        pieces = in_order(self.pieces, Piece.of_items)
        waiting = [p for p in pieces if p.q is not None or p.scores is not None]
        if not waiting:
            return None
        if len(kinds := {p.q is None for p in waiting}) > 1:  # the first calls, and those after the cache changed keys
            for kind in sorted(kinds):
                self._measure([p for p in waiting if (p.q is None) == kind], pieces, measures, real, joined)
            record = None
        else:
            record = self._measure(waiting, pieces, measures, real, joined)
        self.pieces = [p if isinstance(p, Tensor) else replace(p, q=None, scores=None) for p in self.pieces]
        self.waiting = 0, 0
        return record

    def _measure(
        self, waiting: list[Piece], pieces: list[Piece], measures: Measures, real: Tensor | None, joined: Joined
    ) -> Record | None:
        observed, counted = self._observed(waiting, pieces, real, joined)
        whole = waiting[0].start == 0 and counted is None
        norms = observed.norms if waiting[0].q is not None else joined_norms(waiting, observed.call.k.shape[2])
        _, statistics, weights = measures.of(observed, norms=norms, whole=whole)
        start, n = waiting[0].start, observed.call.q.shape[2]
        rows = torch.arange(n) if counted is None else counted.nonzero()[:, 0].cpu()
        if whole:
            vectors = {} if waiting[0].q is None else observed.vectors
            record = Record(
                self.module, self.group, self.number, statistics, vectors, weights, observed.queries, observed.keys,
                self.causal and self.group != "cross",
            )  # fmt: skip
        first = int(torch.as_tensor(observed.first).max())
        if start + n < PREFIX + first:
            statistics = replace(statistics, prefix_sink_scores=None)
        elif start >= PREFIX + first:
            statistics = replace(statistics, prefix_sink_scores=torch.zeros_like(statistics.prefix_sink_scores))  # type: ignore[arg-type]
        self.measured.append(([start + int(row) for row in rows], start, statistics, weights))
        return record if whole else None

    def joined(self, real: Mapping[int, Tensor]) -> ObservedCall:
        """All steps as one call, of a module that attends step by step; `real` is True at real queries, by number."""
        pieces = in_order(self.pieces, Piece.of_items)
        observed, _ = self._observed(pieces, pieces, real.get(len(pieces)), {})
        return replace(observed, causal=self.group != "cross")

    def _observed(
        self, waiting: list[Piece], pieces: list[Piece], real: Tensor | None, joined: Joined
    ) -> tuple[ObservedCall, Tensor | None]:
        """The calls as one, and which of its queries were recorded; None if all were."""
        start, stop = waiting[0].start, waiting[-1].start + waiting[-1].count
        n_keys = self.known if self.own_keys else stop
        call, counted = joined_call(waiting, pieces, n_keys, joined, cross=self.own_keys)
        queries = None if real is None else real[:, start:stop]
        keys = self.padding if self.own_keys else None if real is None else real[:, :n_keys]
        first = 0 if keys is None else keys.to(torch.int8).argmax(1)
        if counted is not None:
            recorded = counted.to(call.q.device).expand(len(call.q), -1)
            queries = recorded if queries is None else recorded & queries
        observed = ObservedCall(
            self.module, self.group, self.number, call, None, queries, keys, first, self.causal, self.source
        )
        return observed, counted

    @torch.no_grad()
    def record(self, measures: Measures, real: Tensor | None, total: int, joined: Joined) -> Record:
        """The whole rows of the layer; queries that were not recorded are NaN.

        Args:
            measures: what is measured.
            real: True at real tokens of the text that has the queries, (b, n); None if all are real.
            total: number of these tokens.
            joined: masks of joined calls that other layers have.
        """
        if self.made is not None:
            return self.made
        if self.heads:
            record = replace(self, heads={}).record(measures, real, total, joined)
            for head, layer in self.heads.items():
                record = record.with_head(head, layer.record(measures, real, total, joined))
            return record
        copy = self.fork()  # so that more calls can follow
        nothing_before = not any(isinstance(x, tuple) for x in self.measured)
        made = copy.measure(measures, real, joined)
        if made is not None and nothing_before and made.statistics.entropy.shape[2] == total:
            return made
        found = in_order(copy.measured, of_items)
        statistics, weights = joined_statistics(found, total, copy.known if self.own_keys else total, measures)
        keys = self.padding if self.own_keys else real
        small = weights is not None and max(weights.shape[2:]) <= measures.map_tokens
        return Record(
            self.module, self.group, self.number, statistics, {}, weights if small else None, real, keys,
            self.causal and self.group != "cross",
        )  # fmt: skip


def in_order(parts: list[Any], of_items: Callable[[Any, Tensor], Any]) -> list[Any]:
    """The parts, each with its batch items in the order that later reorderings gave them."""
    found: list[Any] = []
    order: Tensor | None = None
    for part in reversed(parts):
        if isinstance(part, Tensor) and part.ndim == 1:
            order = part if order is None else part.to(order.device)[order]
        else:
            found.append(part if order is None else of_items(part, order))
    return found[::-1]


PER_KEY = ("received", "visible_queries")
Part = tuple[list[int], int, Statistics, Tensor | None]
"""The positions of the queries that were recorded, that of the first query, and statistics and weights of all."""


def joined_statistics(
    found: list[Part], total: int, n_keys: int, measures: Measures
) -> tuple[Statistics, Tensor | None]:
    """The statistics and weights of all queries, NaN for those that no part has."""
    one = found[0][2]
    batch, heads = one.entropy.shape[:2]
    where = torch.tensor([row for rows, *_ in found for row in rows], device=one.entropy.device)
    over_keys = {s.name for s in (*UNFUSED, *measures.statistics) if s.over == "key"}

    def rows_of(part: Part, x: Tensor) -> Tensor:
        return x[:, :, torch.tensor(part[0], device=x.device) - part[1]]

    def by_query(values: list[Any]) -> Tensor | None:
        if any(x is None for x in values):
            return None
        rows = torch.cat([rows_of(part, x).float() for part, x in zip(found, values, strict=True)], 2)
        return rows.new_full((batch, heads, total), torch.nan).index_copy_(2, where, rows)

    def by_key(values: list[Any]) -> Tensor | None:
        return None if any(x is None for x in values) else sum(_padded(x, n_keys) for x in values)  # type: ignore[return-value]

    def joined(name: str) -> Any:
        values = [getattr(part[2], name) for part in found]
        if name == "thumbnail":
            return None
        if name in ("mass", "own"):
            return {key: (by_key if key in over_keys else by_query)([v[key] for v in values]) for key in values[0]}
        if name == "prefix_sink_scores":
            return None if any(x is None for x in values) else sum(values)
        return (by_key if name in PER_KEY else by_query)(values)

    statistics = Statistics(**{f.name: joined(f.name) for f in fields(Statistics)})
    weights = [None if part[3] is None else _padded(rows_of(part, part[3]), n_keys, 3) for part in found]
    if len(where) != total or any(x is None for x in weights):
        return statistics, None
    return statistics, torch.cat([x for x in weights if x is not None], 2)


def _padded(x: Tensor, n: int, dim: int = 2) -> Tensor:
    short = n - x.shape[dim]
    return x if short <= 0 else torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, short))


def _after(x: Tensor, n: int, skipped: int) -> Tensor:
    """The rows of x from n on, after some rows that are missing and count as 0."""
    new = x.detach()[:, :, n:].clone()
    return new if not skipped else torch.cat([new.new_zeros(*new.shape[:2], skipped, new.shape[3]), new], 2)
