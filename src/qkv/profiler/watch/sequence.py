"""One sequence of tokens that a model reads in one forward or in several: its attention, joined into whole rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.engine import Call
from qkv.errors import InputError
from qkv.masks import Causal, Dense, Mask, Region
from qkv.profiler.capture.observe import PREFIX, WEIGHTS_ONLY, ObservedCall, Record, masses, weights_of
from qkv.profiler.capture.residual import geometry, value_norms
from qkv.profiler.watch.rows import Places, Rows, by_query, rows_of
from qkv.statistics.measure import in_shares, measured
from qkv.statistics.result import Statistics

TOGETHER, SCORES = 16, 2**18
"""So many steps of generation are measured together, or as many as have this many pairs of a query and a key."""
FEW = 2**21
"""Queries with up to this many scores are measured from their weights, which one row of a long text has."""
PER_QUERY = (
    "lse", "entropy", "sink", "self_", "previous", "next_", "distance", "spread", "effective_keys", "visible",
    "sink_mass", "row_sum", "first_contribution",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Piece:
    """Some queries of a layer: their positions and statistics."""

    start: int
    """Position of the first query."""
    values: dict[str, Float[Tensor, "b h nq"]] | Float[Tensor, "b h nq sums"]
    queries: Bool[Tensor, "b nq"] | None
    weights: Float[Tensor, "b h nq nk"] | None
    keys_at: Int[Tensor, "*b nk"] | None
    names: frozenset[str]
    """What was measured."""

    @property
    def count(self) -> int:
        return (self.values if isinstance(self.values, Tensor) else self.values["entropy"]).shape[2]

    def named(self) -> dict[str, Tensor]:
        return by_query(self.values) if isinstance(self.values, Tensor) else self.values

    def of_rows(self, rows: Int[Tensor, " b"]) -> Piece:
        """The piece of other batch items."""
        values = self.values
        return replace(
            self,
            values=values[rows] if isinstance(values, Tensor) else {name: x[rows] for name, x in values.items()},
            queries=None if self.queries is None else self.queries[rows],
            weights=None if self.weights is None else self.weights[rows],
            keys_at=self.keys_at if self.keys_at is None or self.keys_at.ndim == 1 else self.keys_at[rows],
        )


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the queries so far, of each key by its position."""

    received: Float[Tensor, "b h n"]
    visible_queries: Float[Tensor, "b h n"]
    early: Float[Tensor, "b h prefix"]
    """The weight from the first queries of the text, for the sink scores of the first keys."""
    early_queries: Float[Tensor, "b h prefix"]

    def of_rows(self, rows: Int[Tensor, " b"]) -> Sums:
        return Sums(*(x[rows] for x in (self.received, self.visible_queries, self.early, self.early_queries)))

    def __add__(self, other: Sums) -> Sums:
        n = max(self.received.shape[2], other.received.shape[2])

        def both(a: Tensor, b: Tensor) -> Tensor:
            return _padded(a, n) + _padded(b, n)

        return Sums(
            both(self.received, other.received),
            both(self.visible_queries, other.visible_queries),
            self.early + other.early,
            self.early_queries + other.early_queries,
        )


@dataclass(eq=False)
class Layer:
    """The pieces of one attention layer."""

    module: str
    group: str
    number: int
    map_tokens: int
    local_window: int
    pieces: list[Piece | Tensor] = field(default_factory=list)
    """In order; a tensor of batch items where the batch was reordered."""
    sums: Sums | None = None
    last: tuple[ObservedCall, Places, Sums] | None = None
    """The newest piece, which is the last of `pieces` and not yet in `sums`: the cache may be cropped."""
    causal: bool = True
    keys: Bool[Tensor, "b nk"] | None = None
    waiting: list[Float[Tensor, "b h 1 d"]] = field(default_factory=list)
    """Queries of the newest steps, which are measured together with the keys of the last of them."""
    newest: tuple[ObservedCall, Places] | None = None
    """The last of these steps."""
    whole: bool = True
    """Whether the newest call is of a forward without a cache."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What only a whole forward has: pooled map and vectors."""

    def add(self, observed: ObservedCall, places: Places, *, keeps_keys: bool = False, whole: bool = True) -> None:
        """Add the queries of a call.

        Args:
            observed: the call.
            places: the positions of its queries and keys.
            keeps_keys: the cache keeps all keys as they are, so steps of generation can wait for later ones.
            whole: the forward has no cache, so no further queries will follow.
        """
        self.whole = whole
        self.causal &= observed.causal or observed.call.q.shape[2] == 1
        self.keys = observed.keys
        if keeps_keys and _is_step(observed, places):
            before = self.newest
            if before is not None and not (_alike(before[0], observed) and _follows(before[1], places)):
                self._measure_waiting()
            self.waiting.append(observed.call.given.q)
            self.newest = observed, places
            if len(self.waiting) >= min(TOGETHER, SCORES // observed.call.k.shape[2]):
                self._measure_waiting()
            return
        self._measure_waiting()
        self._add(observed, places)

    @torch.no_grad()
    def _measure_waiting(self) -> None:
        if self.newest is None:
            return
        (observed, places), waiting = self.newest, self.waiting
        self.newest, self.waiting = None, []
        if len(waiting) > 1:
            given = observed.call.given
            mask: Mask = Causal() if observed.keys is None else Causal() & Dense(observed.keys[:, None, None])
            call = Call.of(
                torch.cat(waiting, 2), given.k, given.v, mask, given.biases, given.score, given.normalizer
            )  # fmt: skip
            stop, n_keys = int(places.queries[0]) + 1, given.k.shape[2]
            observed = replace(observed, call=call)
            places = in_order(
                stop - len(waiting), len(waiting), 0, n_keys, places.first, places.local_window, given.k.device
            )
        self._add(observed, places)

    def _add(self, observed: ObservedCall, places: Places) -> None:
        self._commit()
        piece, sums = self._measured(observed, places)
        self.pieces.append(piece)
        self.last = observed, places, sums

    def _commit(self) -> None:
        if self.last is not None:
            self.sums = self.last[2] if self.sums is None else self.sums + self.last[2]
            self.last = None

    def reorder(self, rows: Int[Tensor, " b"]) -> None:
        """Select batch items."""
        self._measure_waiting()
        self._commit()
        self.extras = {}
        self.pieces.append(rows)
        if self.sums is not None:
            self.sums = self.sums.of_rows(rows.to(self.sums.received.device))

    def crop(self, tokens: int) -> None:
        """Remove the newest queries and their keys."""
        self._measure_waiting()
        if self.last is None:
            raise InputError(
                f"the cache was cropped by {tokens} tokens, more than the last forward added; expected a cache that is "
                "cropped as in assisted generation"
            )
        observed, places, _ = self.last
        kept = observed.call.q.shape[2] - tokens
        self.pieces.pop()
        self.last = None
        if kept < 0:
            raise InputError(
                f"the cache was cropped by {tokens} tokens, more than the {observed.call.q.shape[2]} of the last "
                "forward; expected a cache that is cropped as in assisted generation"
            )
        if kept:
            self._add(*_without_last(observed, places, tokens))

    def _measured(self, observed: ObservedCall, places: Places) -> tuple[Piece, Sums]:
        call = observed.call
        b, h, n_queries, _ = call.q.shape
        n_keys = call.k.shape[2]
        from_start = places.keys.ndim == 1 and int(places.keys[0]) == 0 if n_queries > 1 else False
        if n_queries == 1 or (not from_start and b * h * n_queries * n_keys <= FEW):
            return self._from_weights(observed, places)
        if not from_start:
            raise InputError(
                f"model reads {n_queries} tokens at once in {self.module} after its cache evicted keys; expected one "
                "token at a time, or a shorter text"
            )
        self.extras = {}
        options: dict[str, Any] = {
            "mass": masses(self.local_window, observed.first, n_keys),
            "first": observed.first,
            "queries": observed.queries,
            "prefix_keys": PREFIX,
        }
        _, _, statistics = measured(call, **options, bins=64 if self.whole else None, value_norms=_norms(observed))
        statistics = in_shares(call, statistics, **options)
        if not self.pieces and self.whole:
            vectors = {} if observed.source in WEIGHTS_ONLY else geometry(
                call, observed.first, observed.queries, observed.keys
            )  # fmt: skip
            self.extras = {"thumbnail": statistics.thumbnail, "geometry": vectors}
        found = {name: getattr(statistics, name) for name in PER_QUERY}
        values = {name: x for name, x in found.items() if x is not None} | dict(statistics.mass)
        weights = weights_of(call) if n_keys <= self.map_tokens else None
        assert statistics.prefix_sink_scores is not None
        number = _early_queries(call, places, observed.queries)
        scores = statistics.prefix_sink_scores
        sums = Sums(statistics.received, statistics.visible_queries, scores * number, number)
        piece = Piece(int(places.queries[0]), values, observed.queries, weights, places.keys, frozenset(values))
        return piece, sums

    def _from_weights(self, observed: ObservedCall, places: Places) -> tuple[Piece, Sums]:
        self.extras = {}
        rows = rows_of(observed.call, places, _norms(observed))
        h = rows.weights.shape[1]
        n = int(places.keys.max()) + 1
        at = places.of_heads(h).expand(len(rows.weights), h, -1)
        early, early_queries = _early(rows, places, observed.queries)
        received, number = rows.received, rows.visible_queries.expand_as(rows.received)
        if places.keys.ndim > 1 or int(places.keys[0]) or n != rows.weights.shape[3]:
            received, number = (x.new_zeros(*x.shape[:2], n).scatter_add_(2, at, x) for x in (received, number))
        else:
            number = number.contiguous()
        weights = rows.weights if n <= self.map_tokens else None
        piece = Piece(
            int(places.queries[0]),
            rows.sums,
            observed.queries,
            weights,
            places.keys,
            frozenset(PER_QUERY) - rows.missing,
        )
        return piece, Sums(received, number, early, early_queries)

    @property
    def total(self) -> int:
        """The number of queries up to the last recorded one."""
        self._measure_waiting()
        return max(p.start + p.count for p in self.pieces if isinstance(p, Piece))

    @torch.no_grad()
    def record(self, total: int, items: int | None = None) -> Record:
        """The whole rows of the layer; queries that were not recorded are NaN.

        Args:
            total: number of tokens of the sequence that the queries belong to.
            items: number of batch items, each repeated as often as there are beams; as they are if None.
        """
        self._measure_waiting()
        self._commit()
        assert self.sums is not None
        batch = len(self.sums.received)
        if items is not None and items != batch:
            self.reorder(torch.arange(batch).repeat_interleave(items // batch))
            if self.keys is not None:
                self.keys = self.keys.repeat_interleave(items // batch, 0)
        pieces = _in_order(self.pieces)
        batch, heads = self.sums.received.shape[:2]
        device = self.sums.received.device
        # Keys of self-attention are the tokens themselves, so there is one for each.
        n_keys = max(total, self.sums.received.shape[2]) if self.group != "cross" else self.sums.received.shape[2]
        where = torch.cat([torch.arange(p.start, p.start + p.count, device=device) for p in pieces])
        rows = [p.named() for p in pieces]
        names = frozenset.intersection(*(p.names for p in pieces))

        def joined(name: str) -> Tensor:
            found = torch.cat([values[name].float() for values in rows], 2)
            if len(where) == total:
                return found
            return found.new_full((batch, heads, total), torch.nan).index_copy_(2, where, found)

        queries = None
        if any(p.queries is not None for p in pieces):
            parts = [torch.ones(batch, p.count, dtype=torch.bool, device=device) if p.queries is None else p.queries
                     for p in pieces]  # fmt: skip
            queries = torch.ones(batch, total, dtype=torch.bool, device=device)
            queries.index_copy_(1, where, torch.cat(parts, 1))
        whole = len(pieces) == 1 and len(where) == total
        by_name: dict[str, Any] = {name: joined(name) for name in PER_QUERY if name in names}
        statistics = Statistics(
            **{"lse": None} | by_name,
            received=_padded(self.sums.received, n_keys),
            visible_queries=_padded(self.sums.visible_queries, n_keys),
            prefix_sink_scores=self.sums.early / self.sums.early_queries.clamp(min=1),
            thumbnail=self.extras.get("thumbnail") if whole else None,
            mass={name: joined(name) for name in ("local", "streaming_mass")},
        )
        weights = self._weights(pieces, total, n_keys) if max(total, n_keys) <= self.map_tokens else None
        vectors = self.extras.get("geometry", {}) if whole else {}
        keys = self.keys
        if keys is not None and keys.shape[1] < n_keys:
            keys = torch.nn.functional.pad(keys, (0, n_keys - keys.shape[1]), value=True)
        return Record(
            self.module, self.group, self.number, statistics, vectors, weights, queries, keys,
            self.causal and self.group != "cross",
        )  # fmt: skip

    def _weights(self, pieces: list[Piece], total: int, n_keys: int) -> Tensor | None:
        if sum(p.count for p in pieces) != total or any(p.weights is None for p in pieces):
            return None
        rows = []
        for p in pieces:
            assert p.weights is not None
            assert p.keys_at is not None
            keys_at = p.keys_at if p.keys_at.ndim == 1 else p.keys_at.repeat_interleave(
                p.weights.shape[1] // p.keys_at.shape[1], 1
            )[:, :, None]  # fmt: skip
            empty = p.weights.new_zeros(*p.weights.shape[:3], n_keys)
            rows.append(empty.scatter_(3, keys_at.expand(p.weights.shape), p.weights))
        return torch.cat(rows, 2)


@dataclass(eq=False)
class Sequence:
    """The layers of one sequence, and its tokens."""

    map_tokens: int
    local_window: int
    layers: dict[tuple[str, str, int], Layer] = field(default_factory=dict)
    """By group, module, and the number of the module's call in its forward."""
    source: list[Tensor] = field(default_factory=list)
    """Token ids; a tensor of one dimension where the batch was reordered."""
    target: list[Tensor] = field(default_factory=list)
    two: bool = False
    tokens: int = 0
    """Number of tokens read so far, by the decoder if there are two sequences."""
    forwards: int = 0
    """Number of forwards that were recorded, of `reads` in all."""
    reads: int = 0
    groups: dict[str, str] = field(default_factory=dict)
    """The group of each module, by its first call: a single query says less than a whole text."""
    evicted: bool = False
    first: dict[str, int | Tensor] = field(default_factory=dict)
    """Position of the first key of the text, by group; a tensor if padding is on the left."""
    sources: dict[str, str] = field(default_factory=dict)
    checks: list[Any] = field(default_factory=list)

    def layer(self, observed: ObservedCall, of_forward: int) -> Layer:
        key = observed.group, observed.module, of_forward
        if key not in self.layers:
            number = sum(group == observed.group for group, _, _ in self.layers)
            self.layers[key] = Layer(observed.module, observed.group, number, self.map_tokens, self.local_window)
        return self.layers[key]

    def reorder(self, rows: Int[Tensor, " b"]) -> None:
        """Select batch items, as beam search does."""
        for layer in self.layers.values():
            if layer.group != "encoder":  # which all beams of an item share
                layer.reorder(rows)
        for group, first in self.first.items():
            if isinstance(first, Tensor) and group != "encoder":
                self.first[group] = first[rows.to(first.device)]
        for ids in (self.target,) if self.two else (self.source,):
            if ids:
                ids.append(rows)

    def crop(self, tokens: int) -> None:
        """Remove the newest tokens, as assisted generation does with tokens that the model rejects."""
        if not tokens:
            return
        for layer in self.layers.values():
            if layer.group != "encoder":
                layer.crop(tokens)
        ids = self.target if self.two else self.source
        if ids:
            ids[-1] = ids[-1][:, :-tokens]
        self.tokens -= tokens

    def ids(self, parts: list[Tensor]) -> Int[Tensor, "b n"] | None:
        """The token ids of every batch item as it is now."""
        found = _in_order(parts, is_order=lambda x: x.ndim == 1)
        return torch.cat([x.cpu() for x in found], 1) if found else None


@lru_cache(maxsize=4)
def in_order(
    start: int, n: int, first_key: int, n_keys: int, first: int | Tensor, local_window: int, device: torch.device
) -> Places:
    """Positions of n queries and of keys that follow each other; the layers of a forward share the result."""
    queries, keys = (torch.arange(a, a + m, device=device) for a, m in ((start, n), (first_key, n_keys)))
    return Places(queries, keys, first, local_window)


def _norms(observed: ObservedCall) -> Float[Tensor, "b h nk"] | None:
    """The norms of the values, if the call has them."""
    if observed.source in WEIGHTS_ONLY or observed.call.values is not None:
        return None
    return value_norms(observed.call, observed.keys)


def _is_step(observed: ObservedCall, places: Places) -> bool:
    """Whether a call is a step of generation over all keys of the text, so that it equals a row of causal attention."""
    call = observed.call
    if call.q.shape[2] != 1 or observed.group == "cross" or places.keys.ndim > 1 or observed.queries is not None:
        return False
    of_padding = observed.keys is not None and isinstance(call.mask, Dense) and call.mask.tensor.shape[1:3] == (1, 1)
    from_start = int(places.queries[0]) + 1 == call.k.shape[2]
    return from_start and (call.mask is None or of_padding) and all(bias.by_score for bias in call.given.biases)


def _alike(a: ObservedCall, b: ObservedCall) -> bool:
    """Whether two calls differ in their queries, keys and values only."""
    one, other = a.call.given, b.call.given
    same = type(one.normalizer) is type(other.normalizer) and type(one.score) is type(other.score)
    return same and one.q.shape == other.q.shape and (a.keys is None) == (b.keys is None)


def _follows(before: Places, places: Places) -> bool:
    return int(places.queries[0]) == int(before.queries[0]) + 1


def _in_order(parts: list[Any], is_order: Callable[[Any], bool] = lambda x: isinstance(x, Tensor)) -> list[Any]:
    """The parts, each with its batch items in the order that later reorderings gave them."""
    found, order = [], None
    for part in reversed(parts):
        if is_order(part):
            order = part if order is None else part.to(order.device)[order]
        elif order is None:
            found.append(part)
        elif isinstance(part, Tensor):
            found.append(part[order.to(part.device)])
        else:
            values = part.values if isinstance(part.values, Tensor) else part.values["entropy"]
            found.append(part.of_rows(order.to(values.device)))
    return found[::-1]


def _padded(x: Tensor, n: int) -> Tensor:
    return x if x.shape[2] >= n else torch.nn.functional.pad(x, (0, n - x.shape[2]))


def _early(rows: Rows, places: Places, queries: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights of the first queries of the text on its first keys, and the number of these queries that see them."""
    b, h, n_queries, n_keys = rows.weights.shape
    zeros = rows.weights.new_zeros(b, h, PREFIX)
    of_text = places.queries - places.first_of[:, 0]  # (b or 1, nq)
    among = (of_text >= 0) & (of_text < PREFIX)
    if queries is not None:
        among = among & queries
    if not bool(among.any()):
        return zeros, zeros
    at = places.of_heads(h) - places.first_of
    inside = ((at >= 0) & (at < PREFIX)).expand(b, h, n_keys)
    slots = at.expand(b, h, n_keys).clamp(0, PREFIX - 1)
    chosen = among[:, None, :, None].to(rows.weights)
    weight = (rows.shares * chosen).sum(2) * inside
    seen = chosen.expand(b, 1, n_queries, 1) if rows.visible is None else rows.visible.to(chosen) * chosen
    number = seen.sum(2).expand(b, h, n_keys) * inside
    return zeros.scatter_add(2, slots, weight), zeros.scatter_add(2, slots, number)


def _early_queries(call: Call, places: Places, queries: Tensor | None) -> Tensor:
    """How many of the first queries of the text see each of its first keys: (b, h, prefix)."""
    b, h, n_queries, _ = call.q.shape
    n_keys, start = call.k.shape[2], int(places.queries[0])
    last = PREFIX + int(places.first_of.max())
    rows, columns = slice(0, max(0, min(n_queries, last - start))), slice(0, min(n_keys, last))
    if rows.stop == 0:
        return call.q.new_zeros(b, h, PREFIX, dtype=torch.float32)
    shape = (b, h, rows.stop, columns.stop)
    device = call.q.device
    visible = torch.ones(shape, dtype=torch.bool, device=device)
    if call.mask is not None:
        visible = call.mask.visible(Region(rows, columns), call.grid).expand(shape)
    of_text = places.queries[rows] - places.first_of[:, 0]
    among = (of_text >= 0) & (of_text < PREFIX)
    if queries is not None:
        among = among & queries[:, rows]
    number = (visible & among[:, None, :, None]).sum(2).float()
    at = places.keys[columns] - places.first_of  # (b, 1, nk)
    inside = ((at >= 0) & (at < PREFIX)).expand_as(number)
    return number.new_zeros(b, h, PREFIX).scatter_add(2, at.expand_as(number).clamp(0, PREFIX - 1), number * inside)


def _without_last(observed: ObservedCall, places: Places, tokens: int) -> tuple[ObservedCall, Places]:
    """The call without its last queries, and without their keys if it is self-attention."""
    n_queries = observed.call.q.shape[2] - tokens
    n_keys = observed.call.k.shape[2] - (0 if observed.group == "cross" else tokens)
    kept = replace(places, queries=places.queries[:n_queries], keys=places.keys[..., :n_keys])
    return cut(observed, n_queries, n_keys), kept


def without_unused(observed: ObservedCall, n_keys: int) -> ObservedCall:
    """The call without the keys after `n_keys`, the unused slots of a static cache."""
    call = observed.call
    n_queries, held = call.q.shape[2], call.k.shape[2]
    unused = Region(slice(0, n_queries), slice(n_keys, held))
    if call.mask is None or bool(call.mask.visible(unused, call.grid).any()):
        raise InputError(
            f"model attends to {held} keys in {observed.module} after {n_keys} tokens; expected the model to read the "
            "text from its first token inside qkv.watch"
        )
    return cut(observed, n_queries, n_keys)


def cut(observed: ObservedCall, n_queries: int, n_keys: int) -> ObservedCall:
    """The first queries of a call over its first keys."""
    given = observed.call.given
    if any(bias.tensors() for bias in given.biases):
        raise InputError(
            f"model adds a bias that depends on positions in {observed.module}, so its call cannot be cut to the keys "
            "in use; expected a cache that grows, such as DynamicCache, and no assisted generation"
        )
    mask: Mask | None = None
    if observed.call.mask is not None:
        visible = observed.call.mask.visible(Region(slice(0, n_queries), slice(0, n_keys)), observed.call.grid)
        mask = None if bool(visible.all()) else Dense(visible)
    call = Call.of(
        given.q[:, :, :n_queries], given.k[:, :, :n_keys], given.v[:, :, :n_keys], mask, given.biases, given.score,
        given.normalizer,
    )  # fmt: skip
    queries = None if observed.queries is None else observed.queries[:, :n_queries]
    keys = None if observed.keys is None else observed.keys[:, :n_keys]
    return replace(observed, call=call, queries=queries, keys=keys)
