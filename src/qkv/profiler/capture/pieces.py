"""The calls of a layer as one call over the whole text: queries, keys, masks, biases and sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

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
from qkv.profiler.capture.record import mapped, of_items
from qkv.scores import Score

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
