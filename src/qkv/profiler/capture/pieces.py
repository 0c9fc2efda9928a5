"""Parts of a text, each read or measured at once, and the calls of a layer as one call over the whole text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self, TypeVar

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
from qkv.profiler.capture.calls import AsGiven, call_of_scores
from qkv.profiler.capture.record import mapped, of_items
from qkv.scores import Score

FEW = 2**20
"""Masks of up to this many pairs are compared pair by pair."""
LOW = -1e30
"""The score of a visible pair whose weight is 0."""


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens that follow each other, and what is known of them. All tensors begin with the batch."""

    start: int
    """Position of the first token."""
    count: int
    selected: int
    """How often batch items of the text had been selected before."""

    @property
    def stop(self) -> int:
        return self.start + self.count

    def of_items(self, items: Int[Tensor, " b"]) -> Self:
        """The part with some batch items."""
        return of_items(self, items)

    def first(self, count: int) -> Self:
        """The part without its last tokens."""
        return mapped(replace(self, count=count), lambda x: x[:, :count])


P = TypeVar("P", bound=Part)


class Selections(list[Tensor]):
    """The batch items that were selected while a text was read, in order."""

    def present(self, parts: list[P]) -> list[P]:
        """The parts in order, each with its batch items as they are now."""
        chosen, items, at = list[P](), None, len(self)
        for part in reversed(parts):
            while at > part.selected:
                at -= 1
                items = self[at] if items is None else self[at].to(items.device)[items]
            chosen.append(part if items is None else part.of_items(items))
        return chosen[::-1]


def cropped(parts: list[P], length: int) -> list[P]:
    """The parts of the first `length` tokens."""
    return [part if part.stop <= length else part.first(length - part.start) for part in parts if part.start < length]


@dataclass(frozen=True, eq=False)
class Piece(Part):
    """The queries of one call, the keys that it adds, and which keys each query sees."""

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
    norms: Float[Tensor, "b h 1 nk"] | None
    """Of the values, beside scores."""
    padding: Bool[Tensor, "b nk"] | None
    """True at real keys, if they are not the tokens of the text that has the queries."""
    items: Int[Tensor, " b"] | None = None
    """The batch items of the call that are kept, in order; all if None."""

    def of_items(self, items: Int[Tensor, " b"]) -> Piece:
        names = ("q", "scores", "norms", "new", "keys_at", "padding", "items")
        chosen = {name: of_items(getattr(self, name), items) for name in names}
        return replace(self, **chosen | ({"items": items} if self.items is None else {}))

    def first(self, count: int) -> Piece:
        """Its first queries; the keys of the others are dropped."""
        gone = self.count - count
        q, scores = (mapped(x, lambda rows: rows[:, :, :count]) for x in (self.q, self.scores))
        new = mapped(self.new, lambda x: x[:, :, : x.shape[2] - gone])
        return replace(self, count=count, q=q, scores=scores, new=new)

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
            pairs = x.new_full((*x.shape[:3], n_keys), empty)
            stop = min(n_keys, self.keys_at + x.shape[3])
            pairs[..., self.keys_at : stop] = x[..., : stop - self.keys_at]
            return pairs
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

    def read_mask(self) -> tuple[tuple[float, float], Tensor | None, bool]:
        """Band and visible keys of its mask, and whether these are the whole mask, aligned with the text."""
        band, keys, others = parts(self.mask, self.grid)
        aligned = isinstance(self.keys_at, int) and self.keys_at + self.grid.n_keys == self.stop
        whole = aligned and not others and self.count == self.grid.n_queries
        return band, None if keys is None else self.chosen(keys), whole


class Joint:
    """Calls of a layer, each with its queries or each with its scores, as one call over the keys of the text.

    Args:
        pieces: the calls, in order.
        n_keys: the number of keys of the text.
        cross: the keys are not the tokens of the text that has the queries.
        bins: the rows begin at a multiple of their bin, if they are pooled to at most so many.
    """

    def __init__(self, pieces: list[Piece], n_keys: int, *, cross: bool, bins: int = 0) -> None:
        self.pieces, self.n_keys, self.cross = pieces, n_keys, cross
        self.start, self.stop = pieces[0].start, pieces[-1].stop
        size = 1
        while bins and self.stop - self.start + self.start % size > bins * size:
            size *= 2
        self.start -= self.start % size
        self.recorded = torch.zeros(self.stop - self.start, dtype=torch.bool)
        """False at queries that are in none of the calls."""
        for p in pieces:
            self.recorded[p.start - self.start : p.stop - self.start] = True
        self.rows: list[int] = (self.start + self.recorded.nonzero()[:, 0]).tolist()
        """Positions of the queries that are in one."""

    def call(self, pieces: list[Piece], masks: dict[tuple[Any, ...], Mask | None]) -> Call:
        """The call.

        Args:
            pieces: all calls of the layer, which have the keys.
            masks: of the joined calls of other layers, most of which are the same.
        """
        first = self.pieces[0]
        alone = (
            len(self.pieces) == 1 and first.items is None and first.keys_at == 0 and first.grid.n_keys == self.n_keys
        )
        alone = alone and self.start == first.start
        key = (self.start, self.stop, self.n_keys, *(p.key for p in self.pieces))
        if not alone and key not in masks:
            masks[key] = self._mask()
        mask = first.mask if alone else masks[key]
        if first.q is not None:
            new = [p.new for p in pieces if p.new is not None]
            keys, values = (torch.cat(x, 2)[:, :, : self.n_keys] for x in zip(*new, strict=True))
            biases = first.biases if alone else self._biases()
            return Call.of(self._stacked(lambda p: p.q), keys, values, mask, biases, first.score, self._normalizer())
        scores = self._stacked(lambda p: p.pairs(p.scores, self.n_keys, LOW), LOW)  # type: ignore[arg-type]
        softmax = isinstance(first.normalizer, SumToOne) and first.normalizer.has_lse
        return call_of_scores(scores, mask, self._normalizer().with_temperature(1.0) if softmax else AsGiven())

    def norms(self) -> Float[Tensor, "b h nk"] | None:
        """The norms of the values of all keys, where there are scores; None if a cache has changed the values, too."""
        known = [p.norms for p in self.pieces if p.norms is not None]
        if len(known) < len(self.pieces):
            return None
        norms = torch.stack(
            [p.pairs(x, self.n_keys, torch.nan)[:, :, 0] for p, x in zip(self.pieces, known, strict=True)]
        )
        least, most = norms.nan_to_num(torch.inf).amin(0), norms.nan_to_num(-torch.inf).amax(0)
        return None if bool((most - least > 1e-5 * most).any()) else most.clamp(min=0)

    def _stacked(self, of: Callable[[Piece], Any], empty: float = 0) -> Tensor:
        """Rows of all calls one after another; their batches and heads of size 1 broadcast."""
        rows: list[Tensor] = [of(p) for p in self.pieces]
        shape = torch.broadcast_shapes(*(x.shape[:2] for x in rows))
        stacked = torch.cat([x.expand(*shape, *x.shape[2:]) for x in rows], 2)
        if bool(self.recorded.all()):
            return stacked
        whole = stacked.new_full((*shape, len(self.recorded), stacked.shape[3]), empty)
        return whole.index_copy_(2, self.recorded.nonzero()[:, 0].to(stacked.device), stacked)

    def _mask(self) -> Mask | None:
        """The mask: in linear memory if those of the calls are causal, with a window and padding or without."""
        largest = max(self.pieces, key=lambda p: p.count)
        device = largest.grid.device
        bands = [m for m in (() if largest.mask is None else largest.mask.factors()) if m.band is not None]
        if largest.count == 1 and not self.cross and not bands:
            bands = [Causal()]
        read = [p.read_mask() for p in self.pieces]
        batch = max([1, *(len(keys) for _, keys, _ in read if keys is not None)])
        real = torch.ones(batch, self.n_keys, dtype=torch.bool, device=device)
        for p, (_, keys, _) in zip(self.pieces, read, strict=True):
            if keys is not None and isinstance(p.keys_at, int):
                part = real[:, p.keys_at : p.keys_at + keys.shape[1]]
                part.copy_(keys[:, : part.shape[1]])
        factors = [*bands, *([] if bool(real.all()) else [Dense(real[:, None, None])])]
        mask = reduce(lambda a, b: a & b, factors) if factors else None
        items = len(next(x for x in (self.pieces[0].q, self.pieces[0].scores) if x is not None))
        start = 0 if self.cross else self.start
        grid = Grid(max(batch, items), 1, len(self.recorded), self.n_keys, start, device)
        band = parts(mask, grid)[0]

        def agrees(p: Piece, read: tuple[tuple[float, float], Tensor | None, bool]) -> bool:
            of_piece, keys, known = read
            if known and p.count * self.n_keys > FEW:
                here = real[:, p.keys_at :][:, : p.grid.n_keys]
                return of_piece == band and bool((here if keys is None else here == keys).all())
            want = torch.ones(1, 1, p.count, self.n_keys, dtype=torch.bool, device=device)
            if mask is not None:
                at = slice(p.start - self.start, p.stop - self.start)
                want = mask.visible(Region(at, slice(0, self.n_keys)), grid)
            return bool((p.visible(self.n_keys) == want).all())

        if all(map(agrees, self.pieces, read)):
            return mask
        return Dense(self._stacked(lambda p: p.visible(self.n_keys), False))

    def _biases(self) -> tuple[Bias, ...]:
        """The biases of the calls: tensors row by row, and others as they are, which know positions."""
        if len({tuple(type(bias) for bias in p.biases) for p in self.pieces}) > 1:
            raise InputError("model adds other biases in some forwards than in others, so that they cannot be joined")

        def rows(i: int, p: Piece) -> Tensor:
            x = p.biases[i].tensor  # type: ignore[attr-defined]
            return p.pairs(p.chosen(x.expand(*x.shape[:2], p.grid.n_queries, p.grid.n_keys)), self.n_keys)

        return tuple(
            TensorBias(self._stacked(lambda p, i=i: rows(i, p))) if isinstance(bias, TensorBias) else bias  # type: ignore[misc]
            for i, bias in enumerate(self.pieces[0].biases)
        )

    def _normalizer(self) -> Normalizer:
        """The normalizer of the calls: sinks of queries row by row."""
        normalizer = self.pieces[0].normalizer
        if not isinstance(normalizer, SumToOne) or not isinstance(normalizer.sink, Tensor) or normalizer.sink.ndim < 3:
            return normalizer

        def rows(p: Piece) -> Tensor:
            sink: Any = getattr(p.normalizer, "sink", None)
            return p.chosen(sink)[..., None].expand(-1, -1, p.count, -1)

        return normalizer.with_sink(self._stacked(rows)[..., 0])


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
