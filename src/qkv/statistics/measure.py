"""Exact statistics of one attention call, in memory linear in the sequence.

One pass of a kernel gives the log-sum-exp of every query. One sweep over the tiles of scores then has each tile of
*final* weights in hand, exp(score − lse), and every statistic is a reduction of it; the tile is all that is ever in
memory. (The identities that give some of the statistics by other means are tests: see tests/test_measure.py.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv._engine.call import Call, as_biases, as_mask, detached
from qkv._engine.inputs import Form, autocast_dtype, refuse_unknown
from qkv._engine.row_state import Rows
from qkv._engine.threads import each
from qkv._engine.tiles import HIDDEN, ScoreTiles, heads_together, spans
from qkv._engine.weight_tiles import WeightTiles
from qkv.biases import Bias
from qkv.errors import InputError
from qkv.kernels import KERNELS, pick, ring, serve_shared, tiled, watching
from qkv.masks import EMPTY, FULL, PARTIAL, Mask
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.ring import Shared
from qkv.scores import Score
from qkv.statistics.sums import RowSums, Statistics, Sums

TILE = 256  # a power of two, as are the bins of thumbnails, so that each divides the other
BLOCKS = 32  # of queries, of several parts if they are short, that threads share out among them at a time
ARGUMENTS = ("mask", "bias", "score", "normalizer", "mass", "first", "queries", "early", "bins", "group")
HEADS = 12  # heads swept together: a tile of all of them should stay in cache


@torch.no_grad()
def measure(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
    early: int | None = None,
    bins: int | None = None,
    group: dist.ProcessGroup | None = None,
    **unknown: object,
) -> Statistics:
    """Exact statistics of where `qkv.attend` with the same arguments attends. Linear memory; no gradients.

    Args:
        q: queries, (b, h, nq, dq), (b, nq, dq) or (nq, dq), tensors or arrays as in `attend`; entropy and the like are
            for each of them, and come without the dimensions that q came without.
        k: keys, (b, hkv, nk, dk); ``h`` must be a multiple of ``hkv`` (grouped heads are contiguous).
        v: not needed: no statistic depends on values.
        mask: True where a query may attend.
        bias: as in `attend`.
        score: as in `attend`.
        normalizer: as in `attend`.
        mass: named masks; the weight of every query inside each is returned under its name. Pairs outside `mask` have
            weight 0. For chosen tokens use ``Dense(chosen[None, :])``.
        first: which key counts as the first of the text in `sink`; one for each batch item if padding is on the left.
        queries: True where a query counts; others (padding) give zeros and add nothing to `received`.
        early: how many of the text's first keys get a sink score; none if None.
        bins: at most so many bins a side has the `thumbnail`; the least power of two keys, or queries, that does it
            makes a bin. None: no thumbnail.
        group: processes that share the sequence, as in `attend`: q, k and `queries` are this one's shard, and so is
            what is returned; `mask`, `bias`, `mass` and `first` are of the whole. `early` is of the whole on every
            process. No `bins`.
        **unknown: refused, as in `attend`.

    Returns:
        `Statistics`, float32 (float64 for float64 inputs), on the device of the inputs.

    Raises:
        InputError: for arguments that do not fit together.

    >>> import torch, qkv
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> s = qkv.measure(q, k, mask=qkv.masks.Causal(), mass={"last two": qkv.masks.Window(2)})
    >>> [round(x, 4) for x in s.received[0, 0].tolist()]
    [2.0833, 1.0833, 0.5833, 0.25]
    >>> [round(x, 4) for x in s.mass["last two"][0, 0].tolist()]
    [1.0, 1.0, 0.6667, 0.5]
    """
    if unknown:
        refuse_unknown("measure", unknown, ARGUMENTS)
    asked: dict[str, Any] = {"mass": mass, "first": first, "queries": queries, "early": early, "bins": bins}
    if group is not None:
        # No statistic depends on values: one column of the keys stands for them, which costs little to pass on.
        shared = Shared.of(group, q, k, k[..., :1], as_mask(mask), as_biases(bias), score, normalizer)
        with watching(None):
            level = serve_shared(shared).lse
        return sweep(shared.call, Rows(level), shared=shared, **asked)
    form, (q, k, v) = Form.of(q, k, k if v is None else v)
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with torch.autocast(q.device.type, enabled=False) if dtype is not None else nullcontext():
        call = Call.of(q, k, v, as_mask(mask), as_biases(bias), score, normalizer)
        return form.all_back(sweep(call, settled(call), **asked))


def settled(call: Call, lse: Float[Tensor, "b h nq"] | None = None) -> Rows:
    """What the rows of `call` have to know for `sweep`; `lse`, if some kernel has found it already."""
    if isinstance(call.normalizer, Pointwise) and call.normalizer.divide != "sum":
        return Rows()  # each weight stands alone
    if not call.normalizer.has_lse:
        return tiled.settle(call)
    return Rows(KERNELS[pick(call, "auto")].run(call).lse if lse is None else lse)


@torch.no_grad()
def sweep(
    call: Call,
    rows: Rows | Float[Tensor, "b h nq"],
    *,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
    early: int | None = None,
    bins: int | None = None,
    shared: Shared | None = None,
) -> Statistics:
    """The statistics of `measure` when the log-sum-exp of the call, or what stands for it, is already known.

    `shared`, if `call` is this process's part of a call that many make together.
    """
    call, mass = detached(call), dict(mass or {})
    grid = call.grid if shared is None else shared.grid
    rows = rows if isinstance(rows, Rows) else Rows(rows)
    b, _, n_queries, _ = call.q.shape
    for name, part in mass.items():
        if not isinstance(part, Mask):
            raise InputError(f"mass[{name!r}] is {type(part).__name__}, expected a mask from qkv.masks")
        part.check(grid)
    if queries is not None:
        if queries.dtype != torch.bool or queries.shape != (b, n_queries):
            raise InputError(
                f"queries is {queries.dtype} of shape {tuple(queries.shape)}, expected bool of shape {(b, n_queries)}"
            )
        if queries.all():
            queries = None
    if queries is not None:
        if isinstance(call.normalizer, SumToOne):
            assert rows.level is not None
            rows = replace(rows, level=rows.level.masked_fill(~queries[:, None], -torch.inf))
        call = replace(call, q=call.q.masked_fill(~queries[:, None, :, None], 0))  # padding may hold NaN
    for name, number in (("early", early), ("bins", bins)):
        if number is not None and number < 1:
            raise InputError(f"{name} is {number}, expected at least 1, or None")
    if bins is not None and shared is not None:
        raise InputError(f"bins is {bins} with a group, expected None: bins of a thumbnail lie across processes")
    sums = Sums(call, mass, early, bins)
    firsts = [first] * b if isinstance(first, int) else first.tolist()
    if len(firsts) != b or not all(0 <= f < grid.n_keys for f in firsts):
        raise InputError(
            f"first is {first}, expected a key from 0 to {grid.n_keys - 1}, or one for each of {b} batch items"
        )
    asked = _Asked(mass, firsts, early or 0, queries, grid.offset)
    if shared is None:
        _add(call, rows, asked, sums)
    else:
        _add_shared(shared, call, rows, asked, sums)
    if queries is not None:
        sums.visible.masked_fill_(~queries[:, None], 0)
    return sums.statistics(call, rows)


@dataclass(frozen=True, eq=False)
class _Asked:
    """What to ask of the weights of a call, in its own rows and keys."""

    mass: Mapping[str, Mask]
    firsts: Sequence[int]
    """Key of each batch item with which its text begins; it need not be one of the call's own."""
    early: int
    queries: Tensor | None
    offset: int
    """How many positions the first query stands after the first key."""
    patterns: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    """What is the same for all tiles as far from the diagonal: distances, and the insides of bands."""


def _add(call: Call, rows: Rows, asked: _Asked, sums: Sums) -> None:
    """Add what the rows give the keys of a call to the sums."""
    key_heads = call.k.shape[1]
    together = heads_together(call, HEADS)
    parts: list[_Part] = []
    for item in range(len(call.q)):
        for heads in spans(key_heads, together):
            parts.append(_Part(ScoreTiles(call, slice(item, item + 1), heads), rows, asked, item))
            if sum(len(part.rows) for part in parts) >= BLOCKS:
                _sweep_parts(parts, sums)
                parts = []
    if parts:
        _sweep_parts(parts, sums)


def _add_shared(shared: Shared, call: Call, rows: Rows, asked: _Asked, sums: Sums) -> None:
    """Add what this process's rows give the keys of all, as they pass; what keys receive travels with them."""
    assert rows.level is not None
    carried = ring.Carried(shared)
    for source, (k,) in ring.blocks(shared, call.k):
        received, audience = torch.zeros_like(sums.received), torch.zeros_like(sums.audience)
        for piece in shared.pieces(source):
            here, first_key = piece.rows, piece.region.columns.start
            _add(
                piece.of(call, k, k),
                Rows(rows.level[:, :, here]),
                _Asked(
                    {name: piece.see(mask) for name, mask in asked.mass.items()},
                    [first - first_key for first in asked.firsts],
                    asked.early,
                    None if asked.queries is None else asked.queries[:, here],
                    piece.ahead,
                ),
                sums.of(here, piece.keys, received, audience),
            )
        carried.add(received, audience)
    sums.received, sums.audience = carried.home()
    if sums.early is not None:
        dist.all_reduce(sums.early, group=shared.group)


class _Part:
    """One batch item and some heads of it: their score tiles, and what to ask of them."""

    def __init__(self, tiles: ScoreTiles, rows: Rows, asked: _Asked, item: int) -> None:
        mask, grid, first, early = tiles.call.mask, tiles.call.grid, asked.firsts[item], asked.early
        self.tiles, self.mass, self.first, self.offset = tiles, asked.mass, first, asked.offset
        self.early_keys = slice(max(0, first), min(first + early, grid.n_keys))
        self.early_rows = slice(max(0, first - asked.offset), max(0, first + early - asked.offset))
        self.here = (tiles.batch, tiles.heads)
        self.weights = WeightTiles(tiles, rows, asked.queries)
        self.uncounted = self.weights.uncounted
        self.kinds = tiles.classes(mask, TILE)
        self.mass_kinds = {name: tiles.classes(part, TILE) for name, part in asked.mass.items()}
        self.backward = mask is not None and mask.band is not None and mask.band[0] >= 0
        self.patterns = asked.patterns
        self.rows, self.columns = list(spans(grid.n_queries, TILE)), list(spans(grid.n_keys, TILE))

    def pattern(self, name: object, start: int, rows: slice, cols: slice, make: Callable[[], Tensor]) -> Tensor:
        """What depends on nothing but how far the tile, whose first query stands at `start`, is from the diagonal."""
        key = (name, start - cols.start, rows.stop - rows.start, cols.stop - cols.start)
        if key not in self.patterns:
            self.patterns[key] = make()
        return self.patterns[key]


class _Share:
    """What one thread has added up of what all queries add to."""

    def __init__(self, part: _Part, sums: Sums) -> None:
        of = part.here
        self.received, self.audience = torch.zeros_like(sums.received[of]), torch.zeros_like(sums.audience[of])
        self.early = None if sums.early is None else torch.zeros_like(sums.early[:, *of])
        self.pooled = None if sums.pooled is None else torch.zeros_like(sums.pooled[:, *of])
        self.bins = sums.bins

    def pool(self, weights: Tensor, rows: slice, cols: slice) -> Tensor:
        """Add a tile to the thumbnail; returns the sums of its columns."""
        if self.bins is None or self.pooled is None:
            return weights.sum(-2)
        query_bin, key_bin = (min(size, TILE) for size in self.bins)
        ragged = -weights.shape[-1] % key_bin, -weights.shape[-2] % query_bin
        whole = nn.functional.pad(weights, (0, ragged[0], 0, ragged[1])) if any(ragged) else weights
        by_rows = whole.unflatten(-2, (-1, query_bin))
        sums = by_rows.sum(-2)
        top = by_rows.amax(-2).unflatten(-1, (-1, key_bin)).amax(-1)
        at = [
            slice(x.start // size, x.start // size + n)
            for x, size, n in zip((rows, cols), self.bins, top.shape[2:], strict=True)
        ]
        maximum, total = self.pooled[:, :, :, at[0], at[1]]
        torch.maximum(maximum, top, out=maximum)
        total += sums.unflatten(-1, (-1, key_bin)).sum(-1)
        return sums.sum(-2)[..., : weights.shape[-1]]

    def greet(self, part: _Part, weights: Tensor, hidden: Tensor | None, rows: slice, cols: slice) -> None:
        """Add a tile to the sink scores, if it has any of the text's first queries and keys."""
        rs, cs = (
            slice(max(of.start, x.start), min(of.stop, x.stop))
            for of, x in ((part.early_rows, rows), (part.early_keys, cols))
        )
        if self.early is None or rs.start >= rs.stop or cs.start >= cs.stop:
            return
        inside = slice(rs.start - rows.start, rs.stop - rows.start), slice(cs.start - cols.start, cs.stop - cols.start)
        seen = torch.ones_like(weights[..., *inside], dtype=torch.bool) if hidden is None else ~hidden[..., *inside]
        if part.uncounted is not None:
            seen = seen & ~part.uncounted[..., rs, None]
        given, audience = self.early[..., cs.start - part.first : cs.stop - part.first]
        given += weights[..., *inside].sum(-2)
        audience += seen.sum(-2)

    def add_to(self, sums: Sums, of: tuple[slice, ...]) -> None:
        sums.received[of] += self.received
        sums.audience[of] += self.audience
        if sums.early is not None and self.early is not None:
            sums.early[:, *of] += self.early
        if sums.pooled is not None and self.pooled is not None:
            maximum, total = sums.pooled[:, *of]
            torch.maximum(maximum, self.pooled[0], out=maximum)
            total += self.pooled[1]


class _Desk(threading.local):
    """What one thread works with: buffers, for fresh memory for each tile would cost as much as its arithmetic, and
    its own share."""

    def __init__(self, parts: list[_Part], sums: Sums, shares: list[tuple[_Part, _Share]]) -> None:
        heads = max(len(part.tiles.k) * part.tiles.group for part in parts)
        self.buffers = parts[0].tiles.k.new_empty(2, heads * TILE * TILE)
        self.sums, self.shares = sums, shares
        self.own: dict[int, _Share] = {}

    def share(self, part: _Part) -> _Share:
        """This thread's share of a part."""
        if id(part) not in self.own:
            self.own[id(part)] = _Share(part, self.sums)
            self.shares.append((part, self.own[id(part)]))
        return self.own[id(part)]


def _sweep_parts(parts: list[_Part], sums: Sums) -> None:
    """Add some parts to the sums, their blocks of rows in parallel."""
    shares: list[tuple[_Part, _Share]] = []
    desk = _Desk(parts, sums, shares)
    longest_first = [(part, row) for part in parts for row in range(len(part.rows) - 1, -1, -1)]  # of a causal mask
    each(lambda block: _sweep_rows(*block, sums, desk), longest_first, parts[0].tiles.k.device)
    for part, share in shares:
        share.add_to(sums, part.here)


def _sweep_rows(part: _Part, r: int, sums: Sums, desk: _Desk) -> None:
    """Add one block of queries to the sums."""
    tiles, rows, first, share = part.tiles, part.rows[r], part.first, desk.share(part)
    call, at = tiles.call, (*part.here, part.rows[r])
    start, stop = rows.start + part.offset, rows.stop + part.offset  # positions of these queries, from the first key
    sums_here = RowSums(tiles.k.new_empty(*tiles.shape, rows.stop - rows.start, 0))
    kinds = part.kinds[r]
    full = sum(cols.stop - cols.start for cols, kind in zip(part.columns, kinds, strict=True) if kind == FULL)
    sums.visible[at] += full
    counted = None if part.uncounted is None else ~part.uncounted[..., rows, None]
    asking = rows.stop - rows.start if counted is None else int(counted.sum())
    for c, cols in enumerate(part.columns):
        if kinds[c] == EMPTY:
            continue
        shape = (*tiles.shape, rows.stop - rows.start, cols.stop - cols.start)
        weights, scratch = (x[: math.prod(shape)].view(shape) for x in desk.buffers)
        hidden = tiles.hidden(rows, cols) if kinds[c] == PARTIAL else None
        if hidden is not None:
            seen = ~hidden
            sums.visible[at] += seen.sum(-1)
            share.audience[:, :, cols] += (seen if counted is None else seen & counted).sum(-2)
        else:
            share.audience[:, :, cols] += asking
        log2 = part.weights.fill(rows, cols, hidden, weights, scratch)
        log2 = _log2(weights, call) if log2 is None else log2
        share.received[:, :, cols] += share.pool(weights, rows, cols)
        share.greet(part, weights, hidden, rows, cols)
        sign = -1 if part.backward or start >= cols.stop - 1 else 1 if stop - 1 <= cols.start else 0
        middle = cols.start + (cols.stop - cols.start) // 2 - start
        total = sums_here.add(weights, log2, scratch, middle, sign)
        if sign == 0:
            steps = part.pattern("steps", start, rows, cols, partial(_steps, start, rows, cols, weights))
            sums.distance[at] += torch.mul(weights, steps, out=scratch).sum(-1)
        if cols.start <= first < cols.stop:
            sums.sink[at] += weights[..., first - cols.start]
        for near, shift in ((sums.self_, 0), (sums.previous, -1), (sums.next_, 1)):
            _add_diagonal(near[part.here], weights, rows, start + shift - cols.start)
        for name, inner in part.mass.items():
            kind = part.mass_kinds[name][r][c]
            if kind == FULL:
                sums.mass[name][at] += total
            elif kind == PARTIAL:
                make = partial(_inside, inner, tiles, rows, cols)
                inside = make() if inner.band is None else part.pattern(name, start, rows, cols, make)
                sums.mass[name][at] += torch.mul(weights, inside, out=scratch).sum(-1)
    sums_here.put(sums, at)


def _steps(start: int, rows: slice, cols: slice, like: Tensor) -> Tensor:
    """How far the keys of a tile are from its queries, the first of which stands at `start`."""
    places = torch.arange(start, start + rows.stop - rows.start, device=like.device)
    keys = torch.arange(cols.start, cols.stop, device=like.device)
    return (places[:, None] - keys).abs().to(like.dtype)


def _inside(mask: Mask, tiles: ScoreTiles, rows: slice, cols: slice) -> Tensor:
    """1 at the pairs of a tile that are inside a mask, 0 elsewhere."""
    return mask.allowed(tiles.region(rows, cols), tiles.call.grid).to(tiles.dtype)


def _log2(weights: Tensor, call: Call) -> Tensor:
    """Base-2 logarithms of weights that no softmax made."""
    if weights.min() < 0:
        raise InputError(
            f"measure: {type(call.given.normalizer).__name__} gives negative weights here, which have no entropy; "
            "it measures normalizers and scores whose weights are 0 or more"
        )
    return torch.where(weights > 0, torch.log2(weights), HIDDEN)


def _add_diagonal(near: Tensor, weights: Tensor, rows: slice, offset: int) -> None:
    """Add the weights at column = row + offset of the tile to the queries they belong to."""
    if -weights.shape[2] < offset < weights.shape[3]:
        diagonal = torch.diagonal(weights, offset, -2, -1)
        start = rows.start + max(0, -offset)
        near[:, :, start : start + diagonal.shape[-1]] += diagonal
