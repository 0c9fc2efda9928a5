"""One attention layer over a text that a model reads in one forward or in several: its calls, joined into whole rows.

A position is that of a token in the text as the model reads it, padding included. As long as a cache keeps its keys as
they are, the queries and the new keys of every call are kept, and are measured together as one call over the whole
text. Otherwise each call gives its scores, which are measured with those of the calls beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.biases import Bias, TensorBias
from qkv.engine import Call
from qkv.errors import InputError
from qkv.kernels import eager
from qkv.masks import Causal, Dense, Grid, Mask, Region
from qkv.masks.convert import parts
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.profiler.capture.intercept import AsGiven, of_pairs
from qkv.profiler.capture.record import PREFIX, Measures, ObservedCall, Record, mapped
from qkv.profiler.data.variables import UNFUSED
from qkv.scores import Score
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
T = TypeVar("T")


def of_items(value: T, items: Int[Tensor, " b"]) -> T:
    """The value with some batch items of all its tensors."""
    return mapped(value, lambda x: x[items.to(x.device)])


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


# --- the calls of a layer as one call over the whole text: queries, keys, masks, biases and sinks ---------------------

FEW = 2**20
"""Masks of up to this many pairs are compared pair by pair."""
LOW = -1e30
"""The score of a visible pair whose weight is 0."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The queries of one call, the keys that it adds, and which keys each query sees."""

    start: int
    """Position of the first query."""
    count: int
    q: Float[Tensor, "b h nq d"] | None
    """None once they are measured."""
    scores: Float[Tensor, "b h nq nk"] | None
    """In place of queries, where the cache changes its keys."""
    new: tuple[Float[Tensor, "b hkv new d"], Float[Tensor, "b hkv new dv"]] | None
    """The keys that are new, and their values."""
    keys_at: int | Int[Tensor, "b hkv nk"]
    """Positions of the keys of the call: the first of them, if they follow each other."""
    mask: Mask | None
    grid: Grid
    biases: tuple[Bias, ...]
    score: Score
    normalizer: Normalizer
    norms: Float[Tensor, "b h 1 nk"] | None = None
    """Of the values, beside scores."""
    items: Int[Tensor, " b"] | None = None
    """The batch items of the call that are kept, in order; all if None."""

    def of_items(self, items: Int[Tensor, " b"]) -> Piece:
        chosen = {name: of_items(getattr(self, name), items) for name in ("q", "scores", "norms", "new", "keys_at")}
        return replace(self, **chosen, items=items if self.items is None else of_items(self.items, items))

    def first(self, count: int) -> Piece:
        """Its first queries; the keys of the others are dropped."""
        gone = self.count - count
        q, scores = (mapped(x, lambda rows: rows[:, :, :count]) for x in (self.q, self.scores))
        return replace(
            self, count=count, q=q, scores=scores, new=mapped(self.new, lambda x: x[:, :, : x.shape[2] - gone])
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for pieces of other layers whose queries see the same keys."""
        mask = self.mask if self.mask is None or self.mask.cacheable else id(self.mask)
        at = self.keys_at if isinstance(self.keys_at, int) else id(self.keys_at)
        items = None if self.items is None else tuple(self.items.tolist())
        return self.start, self.count, mask, at, self.grid.n_keys, items

    def pairs(self, x: Tensor, n_keys: int, empty: float = 0) -> Tensor:
        """Numbers of the pairs of the call, as numbers of the pairs of its queries with all keys of the text."""
        x = x[:, :, : self.count]
        if isinstance(self.keys_at, int):
            found = x.new_full((*x.shape[:3], n_keys), empty)
            stop = min(n_keys, self.keys_at + x.shape[3])
            found[..., self.keys_at : stop] = x[..., : stop - self.keys_at]
            return found
        b, hkv, n = self.keys_at.shape
        heads = self.grid.heads
        at = self.keys_at.repeat_interleave(heads // hkv, 1)[:, :, None].expand(-1, -1, x.shape[2], -1)
        return x.new_full((b, heads, x.shape[2], n_keys), empty).scatter_(3, at, x.expand(b, heads, -1, n))

    def visible(self, n_keys: int) -> Bool[Tensor, "b h nq nk"]:
        grid = self.grid
        shown = torch.ones(1, 1, grid.n_queries, grid.n_keys, dtype=torch.bool, device=grid.device)
        if self.mask is not None:
            shown = self.mask.visible(Region(slice(0, grid.n_queries), slice(0, grid.n_keys)), grid)
        return self.pairs(self.chosen(shown), n_keys, False)

    def chosen(self, x: Tensor) -> Tensor:
        """The batch items that are kept."""
        return x if self.items is None or x.shape[0] == 1 else x[self.items.to(x.device)]


Joined = dict[tuple[Any, ...], Mask | None]
"""The masks of joined calls, which most layers of a model share."""


def joined_call(
    waiting: list[Piece], pieces: list[Piece], n_keys: int, joined: Joined, *, cross: bool
) -> tuple[Call, Tensor | None]:
    """Several calls as one over the keys of the text, and which of its queries were recorded; None if all were.

    Args:
        waiting: the calls, each with its queries, or each with its scores.
        pieces: all calls of the layer, which have the keys.
        n_keys: the number of keys of the text.
        joined: masks of joined calls that other layers have.
        cross: the keys are not the tokens of the text that has the queries.
    """
    one, start, stop = waiting[0], waiting[0].start, waiting[-1].start + waiting[-1].count
    counted: Tensor | None = None
    if sum(p.count for p in waiting) < stop - start:
        counted = torch.zeros(stop - start, dtype=torch.bool)
        for p in waiting:
            counted[p.start - start : p.start - start + p.count] = True

    def rows(of: Callable[[Piece], Tensor], empty: float = 0) -> Tensor:
        found = _stacked([of(p) for p in waiting])
        if counted is None:
            return found
        whole = found.new_full((*found.shape[:2], stop - start, found.shape[3]), empty)
        return whole.index_copy_(2, counted.nonzero()[:, 0].to(found.device), found)

    alone = len(waiting) == 1 and one.items is None and one.keys_at == 0 and one.grid.n_keys == n_keys
    key = (start, stop, n_keys, *(p.key for p in waiting))
    if not alone and key not in joined:
        joined[key] = joined_mask(waiting, start, stop, n_keys, cross=cross, rows=rows)
    mask = one.mask if alone else joined[key]
    if one.q is not None:
        keys, values = (torch.cat([p.new[i] for p in pieces if p.new is not None], 2)[:, :, :n_keys] for i in (0, 1))
        biases = one.biases if alone else _joined_biases(waiting, n_keys, rows)
        queries, normalizer = rows(lambda p: p.q), _joined_normalizer(waiting, rows)  # type: ignore[arg-type, return-value]
        return Call.of(queries, keys, values, mask, biases, one.score, normalizer), counted
    scores = rows(lambda p: p.pairs(p.scores, n_keys, LOW), LOW)  # type: ignore[arg-type]
    softmax = isinstance(one.normalizer, SumToOne) and one.normalizer.has_lse
    normalizer = _joined_normalizer(waiting, rows).with_temperature(1.0) if softmax else AsGiven()
    return of_pairs(scores, mask, normalizer), counted


def scores_of(call: Call) -> Float[Tensor, "b h nq nk"]:
    """What gives the weights of a small call again: its scores, or the weights themselves if they have no softmax."""
    if call.q.dtype.itemsize < 4:
        call = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    with torch.no_grad():
        made = eager.forward(call)
    assert made.weights is not None
    if isinstance(call.user.normalizer, Pointwise) or made.lse is None:
        return made.weights
    return (made.weights.log() + made.lse[..., None]).nan_to_num(LOW, LOW, LOW)


def joined_norms(pieces: list[Piece], n_keys: int) -> Float[Tensor, "b h nk"] | None:
    """The norms of the values of all keys; None if a cache has changed the values, too."""
    found: Tensor | None = None
    for p in pieces:
        if p.norms is None:
            return None
        known = p.pairs(p.norms, n_keys, torch.nan)[:, :, 0]
        if found is not None and not bool(
            ((found - known).abs() <= 1e-5 * known).logical_or((found - known).isnan()).all()
        ):
            return None
        found = known if found is None else torch.where(known.isnan(), found, known)
    return None if found is None else found.nan_to_num(0)


def _stacked(rows: list[Tensor]) -> Tensor:
    """Rows one after another; their dimensions of size 1 broadcast."""
    shape = torch.broadcast_shapes(*(x.shape[:2] for x in rows))
    return torch.cat([x.expand(*shape, *x.shape[2:]) for x in rows], 2)


def joined_mask(
    pieces: list[Piece], start: int, stop: int, n_keys: int, *, cross: bool, rows: Callable[..., Tensor]
) -> Mask | None:
    """The mask of several calls as one: in linear memory if they are causal, with a window and padding or without."""
    largest = max(pieces, key=lambda p: p.count)
    device = largest.grid.device
    bands = [m for m in (() if largest.mask is None else largest.mask.factors()) if m.band is not None]
    if largest.count == 1 and not cross and not bands:
        bands = [Causal()]
    read = [_read(p) for p in pieces]
    batch = max([1, *(len(keys) for _, keys, _ in read if keys is not None)])
    real = torch.ones(batch, n_keys, dtype=torch.bool, device=device)
    for p, (_, keys, _) in zip(pieces, read, strict=True):
        if keys is not None and isinstance(p.keys_at, int):
            part = real[:, p.keys_at : p.keys_at + keys.shape[1]]
            part.copy_(keys[:, : part.shape[1]])
    factors = [*bands, *([] if bool(real.all()) else [Dense(real[:, None, None])])]
    mask = reduce(lambda a, b: a & b, factors) if factors else None
    items = len(pieces[0].q if pieces[0].q is not None else pieces[0].scores)  # type: ignore[arg-type]
    grid = Grid(max(batch, items), 1, stop - start, n_keys, 0 if cross else start, device)
    band = parts(mask, grid)[0]
    for p, (of_piece, keys, known) in zip(pieces, read, strict=True):
        if known and p.count * n_keys > FEW:
            whole = torch.ones_like(real[:, : p.grid.n_keys]) if keys is None else keys
            if of_piece != band or not bool((whole == real[:, p.keys_at :][:, : p.grid.n_keys]).all()):
                break
            continue
        at = slice(p.start - start, p.start - start + p.count)
        want = torch.ones(1, 1, p.count, n_keys, dtype=torch.bool, device=device)
        if mask is not None:
            want = mask.visible(Region(at, slice(0, n_keys)), grid)
        if not bool((p.visible(n_keys) == want).all()):
            break
    else:
        return mask
    return Dense(rows(lambda p: p.visible(n_keys), False))


def _read(piece: Piece) -> tuple[tuple[float, float], Tensor | None, bool]:
    """Band and visible keys of the mask of a piece, and whether these are the whole mask, aligned with the text."""
    band, keys, others = parts(piece.mask, piece.grid)
    keys = None if keys is None else piece.chosen(keys)
    aligned = isinstance(piece.keys_at, int) and piece.keys_at + piece.grid.n_keys == piece.start + piece.count
    return band, keys, aligned and not others and piece.count == piece.grid.n_queries


def _joined_biases(pieces: list[Piece], n_keys: int, rows: Callable[..., Tensor]) -> tuple[Bias, ...]:
    """The biases of several calls as one: tensors row by row, and others as they are, which know positions."""
    kinds = {tuple(type(bias) for bias in p.biases) for p in pieces}
    found: list[Bias] = []
    for i, bias in enumerate(pieces[0].biases):
        if len(kinds) > 1:
            raise InputError("model adds other biases in some forwards than in others, so that they cannot be joined")
        if not isinstance(bias, TensorBias):
            found.append(bias)
            continue
        found.append(TensorBias(rows(lambda p, i=i: p.pairs(p.chosen(_whole(p.biases[i].tensor, p.grid)), n_keys))))
    return tuple(found)


def _joined_normalizer(pieces: list[Piece], rows: Callable[..., Tensor]) -> Normalizer:
    """The normalizer of several calls as one: sinks of queries row by row."""
    one = pieces[0].normalizer
    if not isinstance(one, SumToOne) or not isinstance(one.sink, Tensor) or one.sink.ndim < 3:
        return one

    def sinks(p: Piece) -> Tensor:
        assert isinstance(p.normalizer, SumToOne)
        assert isinstance(p.normalizer.sink, Tensor)
        return p.chosen(p.normalizer.sink)[..., None].expand(-1, -1, p.count, -1)

    return one.with_sink(rows(sinks)[..., 0])


def _whole(x: Tensor, grid: Grid) -> Tensor:
    return x.expand(*x.shape[:2], grid.n_queries, grid.n_keys)
