"""One attention layer over a text that a model reads in one forward or in several: its calls, joined into whole rows.

A position is that of a token in the text as the model reads it, padding included. As long as a cache keeps its keys as
they are, the queries and the new keys of every call are kept, and are measured together as one call over the whole
text. Otherwise each call gives its scores, which are measured with those of the calls beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.errors import InputError
from qkv.masks import Mask, Region
from qkv.profiler.capture.inputs import first_real
from qkv.profiler.capture.pieces import Joint, Part, Piece, Selections, cropped, scores_of
from qkv.profiler.capture.record import PREFIX, Measures, ObservedCall, Record, refuse_nan
from qkv.profiler.data.variables import UNFUSED
from qkv.results import Statistics, Thumbnail, bin_size

HELD = 2**22
"""So many numbers of queries of a layer are held at most; then they are measured, and only their keys are kept."""
SCORES = 2**22
"""So many scores are held at most where a cache does not keep its keys."""


@dataclass(frozen=True, eq=False)
class Measured(Part):
    """Queries that were measured together."""

    rows: list[int]
    """Positions of those that were recorded."""
    record: Record

    def first(self, count: int) -> Measured:
        raise InputError(
            f"the cache was cropped to {self.start + count} tokens, before token {self.rows[-1]}, which was measured "
            "with earlier ones; expected a crop of newer tokens"
        )


@dataclass(frozen=True, eq=False)
class Moment:
    """A text at the time at which its layers are measured."""

    measures: Measures
    tokens: int
    """Number of tokens read so far."""
    selections: Selections = field(default_factory=Selections)
    real: Bool[Tensor, "b n"] | None = None
    """True at real tokens; None if all are real."""
    masks: dict[tuple[Any, ...], Mask | None] = field(default_factory=dict)
    """The masks of joined calls, which most layers of a model share."""


@dataclass(eq=False)
class Layer:
    """The calls of one attention layer, in order."""

    module: str
    group: str
    number: int
    source: str
    own_keys: bool = False
    """The keys are not the tokens of the text that has the queries, as in cross-attention."""
    pieces: list[Piece] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    waiting: tuple[int, int] = (0, 0)
    """How many numbers of queries, and of scores, are held that are not measured."""
    known: int = 0
    """Number of keys of the text so far."""
    causal: bool = True
    final: Record | None = None
    """Of a text that is not continued."""

    def fork(self) -> Layer:
        return replace(self, pieces=list(self.pieces), measured=list(self.measured))

    def add(
        self, observed: ObservedCall, start: int, keys_at: int | Tensor, limit: int | None, *, selected: int = 0,
        stays: bool = True, queries: bool = True,
    ) -> None:  # fmt: skip
        """Add the queries of a call.

        Args:
            observed: the call.
            start: position of its first query.
            keys_at: positions of its keys, or of the first if they follow each other.
            limit: number of tokens of the text so far; later keys are unused rows of a static cache. None if the keys
                are not the tokens of the text.
            selected: how often batch items of the text had been selected before.
            stays: the keys and values of earlier calls are still what they were.
            queries: keep the queries, and not the keys alone.

        Raises:
            InputError: if queries see keys that are no tokens of the text.
        """
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
        self.pieces.append(
            Piece(
                start, call.q.shape[2], selected, given.q.detach() if stays and queries else None, scores, new, keys_at,
                call.mask, call.grid, given.biases, given.score, given.normalizer, norms,
                observed.keys if self.own_keys else None,
            )
        )  # fmt: skip

    @property
    def full(self) -> bool:
        """Whether the newest calls must be measured, to save memory or because the cache has begun to change keys."""
        return self.waiting[0] > HELD or self.waiting[1] > SCORES or min(self.waiting) > 0

    def crop(self, length: int) -> None:
        """Remove the tokens after the first `length`.

        Raises:
            InputError: if their queries are measured together with earlier ones.
        """
        self.pieces, self.measured = cropped(self.pieces, length), cropped(self.measured, length)
        self.known = self.known if self.own_keys else length

    def keys(self, selections: Selections) -> Float[Tensor, "b hkv n d"]:
        """The keys of the text so far, in the present order of the batch."""
        keys = [p.new[0] for p in selections.present(self.pieces) if p.new is not None]
        if not keys:
            raise InputError(f"the keys of {self.module} were not recorded; expected a cache that is not changed")
        return torch.cat(keys, 2)

    @torch.no_grad()
    def measure(self, now: Moment) -> None:
        """Measure the calls that are not measured yet: the first ones, and those after the cache has changed keys."""
        pieces = now.selections.present(self.pieces)
        for waiting in ([p for p in pieces if p.q is not None], [p for p in pieces if p.scores is not None]):
            if waiting:
                self.measured.append(self._measured(waiting, pieces, now))
        self.pieces = [replace(p, q=None, scores=None) for p in self.pieces]
        self.waiting = 0, 0

    def _measured(self, waiting: list[Piece], pieces: list[Piece], now: Moment) -> Measured:
        joint = Joint(
            waiting, self.known if self.own_keys else waiting[-1].stop, cross=self.own_keys,
            bins=now.measures.map_bins,
        )  # fmt: skip
        observed = self._observed(joint, pieces, now)
        by_scores = waiting[0].q is None
        whole = joint.start == 0 and len(joint.rows) == joint.stop
        _, statistics, weights = now.measures.of(observed, norms=joint.norms() if by_scores else observed.norms)
        refuse_nan(self.module, statistics)
        vectors = observed.vectors() if whole and not by_scores else {}
        record = self._record(statistics, vectors, weights, observed.queries, observed.keys)
        return Measured(joint.start, joint.stop - joint.start, len(now.selections), joint.rows, record)

    def joined(self, real: Mapping[int, Tensor]) -> ObservedCall:
        """All steps as one call, of a module that attends step by step; `real` is True at real queries, by number."""
        now = Moment(Measures(), len(self.pieces), real=real.get(len(self.pieces)))
        observed = self._observed(Joint(self.pieces, self.known, cross=True), self.pieces, now)
        return replace(observed, causal=self.group != "cross")

    def _observed(self, joint: Joint, pieces: list[Piece], now: Moment) -> ObservedCall:
        """Calls as one."""
        call = joint.call(pieces, now.masks)
        queries = None if now.real is None else now.real[:, joint.start : joint.stop]
        keys = _padding(pieces) if self.own_keys else None if now.real is None else now.real[:, : joint.n_keys]
        if not bool(joint.recorded.all()):
            recorded = joint.recorded.to(call.q.device).expand(len(call.q), -1)
            queries = recorded if queries is None else recorded & queries
        first = 0 if keys is None else first_real(keys)
        return ObservedCall(
            self.module, self.group, self.number, call, None, queries, keys, first, self.causal, self.source
        )

    def _record(
        self, statistics: Statistics, vectors: dict[str, Tensor], weights: Tensor | None, queries: Tensor | None,
        keys: Tensor | None,
    ) -> Record:  # fmt: skip
        causal = self.causal and self.group != "cross"
        return Record(self.module, self.group, self.number, statistics, vectors, weights, queries, keys, causal)

    @torch.no_grad()
    def record(self, now: Moment) -> Record:
        """The whole rows of the layer; queries that were not recorded are NaN."""
        if self.final is not None:
            return self.final
        copy = self.fork()  # so that more calls can follow
        copy.measure(now)
        parts = now.selections.present(copy.measured)
        if self.own_keys and not now.tokens:  # a model that reads no ids, such as one of images
            now = replace(now, tokens=parts[-1].stop)
        if len(parts) == 1 and len(parts[0].rows) == now.tokens:
            return parts[0].record
        keys = _padding(now.selections.present(self.pieces)) if self.own_keys else now.real
        statistics, weights = joined(parts, now, copy.known if self.own_keys else now.tokens, keys)
        return self._record(statistics, {}, weights, now.real, keys)


def _padding(pieces: list[Piece]) -> Tensor | None:
    """True at real keys, where they are not the tokens of the text that has the queries."""
    return next((p.padding for p in reversed(pieces) if p.padding is not None), None)


PER_KEY = ("received", "visible_queries")


def joined(parts: list[Measured], now: Moment, n_keys: int, keys: Tensor | None) -> tuple[Statistics, Tensor | None]:
    """The statistics of all queries, and their weights if the text is short; NaN for those that no part has.

    Args:
        parts: those of the text.
        now: the text.
        n_keys: the number of its keys.
        keys: True at real keys; None if all are real.
    """
    first, measures = parts[0].record.statistics, now.measures
    where = torch.tensor([row for part in parts for row in part.rows], device=first.entropy.device)
    complete = len(where) == now.tokens
    over_keys = {s.name for s in (*UNFUSED, *measures.statistics) if s.over == "key"}

    def by_query(values: list[Any]) -> Tensor | None:
        if any(x is None for x in values):
            return None
        rows = [x[:, :, torch.tensor(p.rows, device=x.device) - p.start] for p, x in zip(parts, values, strict=True)]
        both = torch.cat([x.float() for x in rows], 2)
        return both.new_full((*both.shape[:2], now.tokens, *both.shape[3:]), torch.nan).index_copy_(2, where, both)

    def by_key(values: list[Any]) -> Tensor | None:
        return None if any(x is None for x in values) else sum(_padded(x, n_keys) for x in values)  # type: ignore[return-value]

    def value(name: str) -> Any:
        values = [getattr(part.record.statistics, name) for part in parts]
        if name == "thumbnail":
            return _whole_map(parts, values, now.tokens, n_keys, measures.map_bins) if complete else None
        if name in ("mass", "own"):
            return {key: (by_key if key in over_keys else by_query)([v[key] for v in values]) for key in values[0]}
        if name == "prefix_sink_scores":  # of the first queries, which one part must have
            prefix = PREFIX + (0 if keys is None else int(keys.to(torch.int8).argmax(1).max()))
            early = [(part, x) for part, x in zip(parts, values, strict=True) if part.rows[0] < prefix]
            return early[0][1] if len(early) == 1 and early[0][0].stop >= prefix else None
        return (by_key if name in PER_KEY else by_query)(values)

    statistics = Statistics(**{f.name: value(f.name) for f in fields(Statistics)})
    if not complete or not measures.keeps_weights(now.tokens, n_keys):
        return statistics, None
    weights = [part.record.weights for part in parts]
    return statistics, by_query([None if x is None else _padded(x, n_keys, 3) for x in weights])


def _whole_map(
    parts: list[Measured], maps: list[Thumbnail | None], n_queries: int, n_keys: int, bins: int
) -> Thumbnail | None:
    """The small map of all queries from those of parts, whose bins are parts of its bins."""
    sizes = bin_size(n_queries, max(1, bins)), bin_size(n_keys, max(1, bins))
    entropy = parts[0].record.statistics.entropy
    shape = *entropy.shape[:2], -(-n_queries // sizes[0]), -(-n_keys // sizes[1])
    maximum, total = entropy.new_zeros(shape), entropy.new_zeros(shape)
    for part, small in zip(parts, maps, strict=True):
        if small is None:
            return None
        n = part.count, part.record.statistics.received.shape[2]
        pairs = [
            (torch.arange(0, length, size) + size).clamp(max=length) - torch.arange(0, length, size)
            for length, size in zip(n, (small.query_bin, small.key_bin), strict=True)
        ]
        sums = small.mean * (pairs[0][:, None] * pairs[1]).to(small.mean)
        rows = (part.start + torch.arange(0, n[0], small.query_bin)) // sizes[0]
        columns = torch.arange(0, n[1], small.key_bin) // sizes[1]
        at = (rows[:, None] * shape[3] + columns).flatten().to(sums.device)
        at = at.expand(*shape[:2], -1)
        maximum.view(*shape[:2], -1).scatter_reduce_(2, at, small.maximum.flatten(2), "amax")
        total.view(*shape[:2], -1).scatter_add_(2, at, sums.flatten(2))
    return Thumbnail.of(maximum, total, n_queries, n_keys, *sizes)


def _padded(x: Tensor, n: int, dim: int = 2) -> Tensor:
    short = n - x.shape[dim]
    return x if short <= 0 else torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, short))


def _after(x: Tensor, n: int, skipped: int) -> Tensor:
    """The rows of x from n on, after some rows that are missing and count as 0."""
    new = x.detach()[:, :, n:].clone()
    return new if not skipped else torch.cat([new.new_zeros(*new.shape[:2], skipped, new.shape[3]), new], 2)
