"""Exact statistics of one attention call, in memory linear in the sequence.

One pass of a kernel gives the log-sum-exp of every query. One sweep over the tiles of scores then has each tile of
*final* weights in hand, exp(score − lse), and every statistic is a reduction of it; the tile is all that is ever in
memory. (The identities that give some of the statistics by other means are tests: see tests/test_measure.py.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv.biases import Bias
from qkv.call import Call, as_biases, as_mask, at_least_float32, detached
from qkv.errors import InputError
from qkv.kernels import KERNELS, pick, tiled
from qkv.masks import EMPTY, FULL, PARTIAL, Mask
from qkv.normalizers import Normalizer, Softmax
from qkv.parallel import each
from qkv.scores import Score
from qkv.tiles import HIDDEN, ScoreTiles, spans
from qkv.weights import Rows, weigh

TILE = 256  # a power of two, as are the bins of thumbnails, so that each divides the other
HEADS = 8  # heads swept together: a tile of all of them should stay in cache


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """The weights of a call pooled over bins of `query_bin` queries × `key_bin` keys; the last bins may be smaller."""

    maximum: Float[Tensor, "b h qb kb"]
    """The largest weight in the bin."""
    mean: Float[Tensor, "b h qb kb"]
    """The average over all pairs of the bin; those the mask hides have weight 0."""
    query_bin: int
    key_bin: int


@dataclass(frozen=True, eq=False)
class Statistics:
    """Exact statistics of the weights A of one call, a number for each query or key of each head.

    Query i stands at position p_i = i + n_keys − n_queries. M_i = Σ_j A_ij is the mass on keys: 1, or less with a sink
    logit, or whatever weights add up to that nothing divides (sigmoid), or 0 where nothing is visible. `entropy`,
    `distance`, `spread` and `participation` describe the shape of a row and use a_ij = A_ij / M_i; all other weights
    are absolute. Empty rows give 0 (and lse −inf).
    """

    lse: Float[Tensor, "b h nq"] | None
    """Log-sum-exp of the scores, a sink logit included; None where the normalizer has none."""
    entropy: Float[Tensor, "b h nq"]
    """−Σ a ln a, in nats."""
    sink: Float[Tensor, "b h nq"]
    """Weight on the first key (of the text: see `first` of `measure`)."""
    self_: Float[Tensor, "b h nq"]
    """Weight on the key at the query's own position."""
    previous: Float[Tensor, "b h nq"]
    """Weight on the key one position before."""
    next_: Float[Tensor, "b h nq"]
    """Weight on the key one position after."""
    distance: Float[Tensor, "b h nq"]
    """Σ a |p − j|, in tokens."""
    spread: Float[Tensor, "b h nq"]
    """Standard deviation of j under a, in tokens; float32 inputs resolve its square to 0.002."""
    participation: Float[Tensor, "b h nq"]
    """1 / Σ a²: how many keys share the weight (Rényi-2 perplexity)."""
    received: Float[Tensor, "b h nk"]
    """Σ_i A_ij: what each key gets from all queries."""
    visible: Float[Tensor, "b h nq"]
    """How many keys each query may attend to."""
    audience: Float[Tensor, "b h nk"]
    """How many queries may attend to each key: `received` / `audience` is what one that sees the key gives it."""
    early: Float[Tensor, "b h early"] | None = None
    """Sink score of the first keys of the text: the weight on each, averaged over those of as many first queries of the
    text that see it. For causal masks it is what the first tokens alone would have (α_k of Gu et al. 2025,
    arXiv:2410.10781, section 3)."""
    thumbnail: Thumbnail | None = None
    """The whole map, small."""
    sink_mass: Float[Tensor, "b h nq"] | None = None
    """Weight on the learned sink logit, where the normalizer has one."""
    mass: Mapping[str, Float[Tensor, "b h nq"]] = field(default_factory=dict)
    """Weight inside each sub-mask asked for."""

    def __repr__(self) -> str:
        b, h, n_queries = self.entropy.shape
        return f"Statistics(batch={b}, heads={h}, queries={n_queries}, keys={self.received.shape[2]})"


@torch.no_grad()
def measure(
    q: Float[Tensor, "b h nq dq"],
    k: Float[Tensor, "b hkv nk dk"],
    v: Float[Tensor, "b hkv nk dv"] | None = None,
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
) -> Statistics:
    """Exact statistics of where `qkv.attend` with the same arguments attends. Linear memory; no gradients.

    Args:
        q: queries. Entropy and the like are for each of them.
        k: keys; ``h`` must be a multiple of ``hkv`` (grouped heads are contiguous).
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
    call = Call.of(q, k, k if v is None else v, as_mask(mask), as_biases(bias), score, normalizer)
    return sweep(call, settled(call), mass=mass, first=first, queries=queries, early=early, bins=bins)


def settled(call: Call, lse: Float[Tensor, "b h nq"] | None = None) -> Rows:
    """What the rows of `call` have to know for `sweep`; `lse`, if some kernel has found it already."""
    if not isinstance(call.normalizer, Softmax):
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
) -> Statistics:
    """The statistics of `measure` when the log-sum-exp of the call, or what stands for it, is already known."""
    call, mass = detached(call), dict(mass or {})
    rows = rows if isinstance(rows, Rows) else Rows(rows)
    b, h, n_queries, _ = call.q.shape
    for name, part in mass.items():
        if not isinstance(part, Mask):
            raise InputError(f"mass[{name!r}] is {type(part).__name__}, expected a mask from qkv.masks")
        part.check(call.grid)
    if queries is not None:
        if queries.dtype != torch.bool or queries.shape != (b, n_queries):
            raise InputError(
                f"queries is {queries.dtype} of shape {tuple(queries.shape)}, expected bool of shape {(b, n_queries)}"
            )
        if isinstance(call.normalizer, Softmax):
            assert rows.level is not None
            rows = Rows(rows.level.masked_fill(~queries[:, None], -torch.inf))
        call = replace(call, q=call.q.masked_fill(~queries[:, None, :, None], 0))  # padding may hold NaN
    for name, number in (("early", early), ("bins", bins)):
        if number is not None and number < 1:
            raise InputError(f"{name} is {number}, expected at least 1, or None")
    sums = _Sums(call, mass, early, bins)
    firsts = [first] * b if isinstance(first, int) else first.tolist()
    if len(firsts) != b or not all(0 <= f < call.k.shape[2] for f in firsts):
        raise InputError(
            f"first is {first}, expected a key from 0 to {call.k.shape[2] - 1}, or one for each of {b} batch items"
        )
    key_heads = call.k.shape[1]
    together = max(1, HEADS // (h // key_heads))
    for item in range(b):
        for heads in spans(key_heads, together):
            tiles = ScoreTiles(call, slice(item, item + 1), heads)
            _sweep_heads(_Part(tiles, rows, mass, firsts[item], early or 0, queries), sums)
    if queries is not None:
        sums.visible.masked_fill_(~queries[:, None], 0)
    return sums.statistics(call, rows)


class _Sums:
    """What the sweep has added up so far, float64 so that ten thousand tiles add up without loss."""

    def __init__(self, call: Call, mass: Mapping[str, Mask], early: int | None, bins: int | None) -> None:
        b, h, n_queries, _ = call.q.shape
        n_keys = call.k.shape[2]
        zeros = call.q.new_zeros(b, h, n_queries, dtype=torch.float64)
        self.total, self.bits, self.squares = (torch.zeros_like(zeros) for _ in range(3))
        self.offset, self.offset2, self.distance = (torch.zeros_like(zeros) for _ in range(3))
        self.sink, self.self_, self.previous, self.next_ = (torch.zeros_like(zeros) for _ in range(4))
        self.mass = {name: torch.zeros_like(zeros) for name in mass}
        self.visible = torch.zeros_like(zeros)
        self.received, self.audience = (zeros.new_zeros(b, h, n_keys) for _ in range(2))
        self.early = None if early is None else zeros.new_zeros(2, b, h, early)  # weights, and how many
        self.bins = None if bins is None else (_bin(n_queries, bins), _bin(n_keys, bins))
        self.pooled: Tensor | None = None  # maxima and sums
        if self.bins is not None:
            sides = [-(-n // size) for n, size in zip((n_queries, n_keys), self.bins, strict=True)]
            self.pooled = call.q.new_zeros(2, b, h, *sides, dtype=at_least_float32(call.q.dtype))

    def thumbnail(self, n_queries: int, n_keys: int) -> Thumbnail | None:
        if self.bins is None or self.pooled is None:
            return None
        sizes = [
            torch.full((-(-n // size),), size, dtype=self.pooled.dtype, device=self.pooled.device)
            for n, size in zip((n_queries, n_keys), self.bins, strict=True)
        ]
        for x, n in zip(sizes, (n_queries, n_keys), strict=True):
            x[-1] -= len(x) * x[0].item() - n if len(x) > 1 else x[0].item() - n
        return Thumbnail(self.pooled[0], self.pooled[1] / (sizes[0][:, None] * sizes[1]), *self.bins)

    def statistics(self, call: Call, rows: Rows) -> Statistics:
        lse = rows.level if isinstance(call.normalizer, Softmax) else None
        seen = self.total != 0
        total = torch.where(seen, self.total, 1.0)
        mean = self.offset / total
        sink_mass = None
        if call.sink is not None:
            assert lse is not None
            sink_mass = torch.where(lse == -torch.inf, 0.0, torch.exp(call.sink - lse))
        entropy = torch.where(seen, torch.log(total) + math.log(2) * self.bits / total, 0.0).clamp(min=0)
        squares = torch.where(seen, self.squares, 1.0)
        dtype = at_least_float32(call.q.dtype)
        return Statistics(
            lse=lse,
            entropy=entropy.to(dtype),
            sink=self.sink.to(dtype),
            self_=self.self_.to(dtype),
            previous=self.previous.to(dtype),
            next_=self.next_.to(dtype),
            distance=(self.distance / total).to(dtype),
            spread=(self.offset2 / total - mean * mean).clamp(min=0).sqrt().to(dtype),
            participation=torch.where(seen, total * total / squares, 0.0).to(dtype),
            received=self.received.to(dtype),
            visible=self.visible.to(dtype),
            audience=self.audience.to(dtype),
            early=None if self.early is None else (self.early[0] / self.early[1].clamp(min=1)).to(dtype),
            thumbnail=self.thumbnail(call.q.shape[2], call.k.shape[2]),
            sink_mass=sink_mass,
            mass={name: value.to(dtype) for name, value in self.mass.items()},
        )


class _RowSums:
    """Sums over keys for one block of queries.

    Each tile leaves a few float32 numbers a query; every `ROOM` tiles they are added up in float64 together, because
    many small additions would take as long as the products.
    """

    ROOM = 64

    def __init__(self, weights: Tensor) -> None:
        b, h, rows, _ = weights.shape
        self.pieces = weights.new_empty(self.ROOM, 5, b, h, rows)
        self.places: list[tuple[int, int]] = []  # of each tile: its middle, and the sign of j − p in it (0: mixed)
        self.sums = weights.new_zeros(7, b, h, rows, dtype=torch.float64)

    def add(self, weights: Tensor, log2: Tensor, scratch: Tensor, middle: int, sign: int) -> Tensor:
        """Add a tile, whose middle is `middle` keys from the first query of the block; returns its row totals.

        Moments are taken about the middle: float32 products then lose nothing to large positions.
        """
        total, one, two, norm, minus_bits = self.pieces[len(self.places)]
        size = weights.shape[-1]
        place = torch.arange(size, dtype=weights.dtype, device=weights.device) - size // 2
        torch.sum(weights, -1, out=total)
        flat = weights.view(-1, size)
        torch.mv(flat, place, out=one.view(-1))
        torch.mv(flat, place.square(), out=two.view(-1))
        torch.linalg.vector_norm(weights, dim=-1, out=norm)
        torch.sum(torch.mul(weights, log2, out=scratch), -1, out=minus_bits)
        self.places.append((middle, sign))
        if len(self.places) == self.ROOM:
            total = total.clone()
            self.flush()
        return total

    def flush(self) -> None:
        """Add what the tiles left to the sums."""
        if not self.places:
            return
        total, one, two, norm, minus_bits = self.pieces[: len(self.places)].double().unbind(1)
        places = torch.tensor(self.places, dtype=torch.float64, device=total.device)
        middle, sign = (x[:, None, None, None] for x in places.unbind(1))
        offset = one + middle * total
        offset2 = two + middle * (one + offset)
        parts = (total, offset, offset2, norm.square(), minus_bits, sign * total, sign * offset)
        self.sums += torch.stack([x.sum(0) for x in parts])
        self.places.clear()

    def put(self, sums: _Sums, at: tuple[slice, ...]) -> None:
        """Write to `sums`; offsets so far are from the block's first query, now from each query itself."""
        self.flush()
        total, offset, offset2, squares, minus_bits, signed, signed_offset = self.sums
        row = torch.arange(total.shape[-1], dtype=torch.float64, device=total.device)
        sums.total[at], sums.squares[at], sums.bits[at] = total, squares, -minus_bits
        sums.offset[at] = offset - row * total
        sums.offset2[at] = offset2 - row * (2 * offset - row * total)
        sums.distance[at] += signed_offset - row * signed


class _Part:
    """One batch item and some heads of it: their score tiles, and what to ask of them."""

    def __init__(
        self, tiles: ScoreTiles, rows: Rows, mass: Mapping[str, Mask], first: int, early: int, queries: Tensor | None
    ) -> None:
        mask, grid = tiles.call.mask, tiles.call.grid
        self.tiles, self.mass, self.first = tiles, mass, first
        self.early_keys = slice(first, min(first + early, grid.n_keys))
        self.early_rows = slice(max(0, first - grid.offset), max(0, first + early - grid.offset))
        self.here = (tiles.batch, tiles.heads)
        self.level, self.total, self.chosen = (
            None if x is None else x[self.here] for x in (rows.level, rows.total, rows.chosen)
        )
        self.uncounted = None if queries is None else ~queries[tiles.batch, None]
        if isinstance(tiles.call.normalizer, Softmax):
            # exp(score − ∞) = 0: a query that sees nothing, or does not count, weighs nothing. (Finite: 0 · ∞ is NaN.)
            assert self.level is not None
            self.level = self.level.masked_fill(self.level == -torch.inf, -HIDDEN)
        self.kinds = tiles.classes(mask, TILE)
        self.mass_kinds = {name: tiles.classes(part, TILE) for name, part in mass.items()}
        self.backward = mask is not None and mask.band is not None and mask.band[0] >= 0
        self.rows, self.columns = list(spans(grid.n_queries, TILE)), list(spans(grid.n_keys, TILE))


class _Share:
    """What one thread has added up of what all queries add to."""

    def __init__(self, part: _Part, sums: _Sums) -> None:
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

    def add_to(self, sums: _Sums, of: tuple[slice, ...]) -> None:
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

    def __init__(self, part: _Part, sums: _Sums, shares: list[_Share]) -> None:
        tiles = part.tiles
        self.buffers = tiles.k.new_empty(2, len(tiles.k) * tiles.group * TILE * TILE)
        self.share = _Share(part, sums)
        shares.append(self.share)


def _sweep_heads(part: _Part, sums: _Sums) -> None:
    """Add one part to the sums, blocks of rows in parallel."""
    shares: list[_Share] = []
    desk = _Desk(part, sums, shares)
    longest_first = range(len(part.rows) - 1, -1, -1)  # of a causal mask: the threads then end together
    each(lambda row: _sweep_rows(part, row, sums, desk), longest_first, part.tiles.k.device)
    for share in shares:
        share.add_to(sums, part.here)


def _bin(length: int, bins: int) -> int:
    """The least power of two that cuts a length into no more than so many pieces."""
    return int(2 ** math.ceil(math.log2(max(1, -(-length // bins)))))


def _sweep_rows(part: _Part, r: int, sums: _Sums, desk: _Desk) -> None:
    """Add one block of queries to the sums."""
    tiles, rows, first, share = part.tiles, part.rows[r], part.first, desk.share
    call, grid, at = tiles.call, tiles.call.grid, (*part.here, part.rows[r])
    start, stop = rows.start + grid.offset, rows.stop + grid.offset  # positions of these queries
    sums_here = _RowSums(tiles.k.new_empty(*tiles.shape, rows.stop - rows.start, 0))
    kinds = part.kinds[r]
    full = sum(cols.stop - cols.start for cols, kind in zip(part.columns, kinds, strict=True) if kind == FULL)
    sums.visible[at] = full
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
        make = _softmax if isinstance(call.normalizer, Softmax) else _other_weights
        log2 = make(part, rows, cols, hidden, weights, scratch)
        share.received[:, :, cols] += share.pool(weights, rows, cols)
        share.greet(part, weights, hidden, rows, cols)
        sign = -1 if part.backward or start >= cols.stop - 1 else 1 if stop - 1 <= cols.start else 0
        middle = cols.start + (cols.stop - cols.start) // 2 - start
        total = sums_here.add(weights, log2, scratch, middle, sign)
        if sign == 0:
            steps = grid.rows(rows.start, rows.stop)[:, None] - grid.columns(cols.start, cols.stop)
            sums.distance[at] += (weights * steps.abs()).sum(-1)
        if cols.start <= first < cols.stop:
            sums.sink[at] = weights[..., first - cols.start]
        for near, shift in ((sums.self_, 0), (sums.previous, -1), (sums.next_, 1)):
            _add_diagonal(near[part.here], weights, rows, start + shift - cols.start)
        for name, inner in part.mass.items():
            kind = part.mass_kinds[name][r][c]
            if kind == FULL:
                sums.mass[name][at] += total
            elif kind == PARTIAL:
                inside = inner.allowed(tiles.region(rows, cols), grid)
                sums.mass[name][at] += torch.mul(weights, inside, out=scratch).sum(-1)
    sums_here.put(sums, at)


def _softmax(part: _Part, rows: slice, cols: slice, hidden: Tensor | None, weights: Tensor, scratch: Tensor) -> Tensor:
    """Make the weights of a tile in `weights`; returns their log2."""
    tiles = part.tiles
    assert part.level is not None
    log2 = tiles.log2_weights(rows, cols, part.level[:, :, rows], out=scratch)
    if hidden is not None:
        log2.masked_fill_(hidden, HIDDEN)
    if tiles.call.biases or tiles.vector is not None:
        log2.clamp_(min=HIDDEN)  # a bias may hide pairs with −inf, too
    torch.exp2(log2, out=weights)
    return log2


def _other_weights(
    part: _Part, rows: slice, cols: slice, hidden: Tensor | None, weights: Tensor, scratch: Tensor
) -> Tensor:
    """`_softmax` for any normalizer, from the definition of its weights."""
    tiles, call = part.tiles, part.tiles.call
    if part.chosen is not None:
        keys = call.grid.columns(cols.start, cols.stop)
        weights.copy_(keys == part.chosen[:, :, rows, None])
    else:
        scores = tiles.scores(rows, cols)
        shift, divisor = tiles.of(call.shift), tiles.of(call.divisor)
        if shift is not None:
            scores = scores + (shift[..., rows] if shift.shape[2] > 1 else shift)[..., None]
        weights.copy_(weigh(call.normalizer, scores, None if part.level is None else part.level[:, :, rows]))
        for by in (part.total, divisor):
            if by is not None:
                weights /= by[:, :, rows, None]
    if hidden is not None:
        weights.masked_fill_(hidden, 0)
    if part.uncounted is not None:
        weights.masked_fill_(part.uncounted[..., rows, None], 0)
    if weights.min() < 0:
        raise InputError(
            f"measure: {type(call.normalizer).__name__} gives negative weights here, which have no entropy; "
            "it measures normalizers and scores whose weights are 0 or more"
        )
    return torch.where(weights > 0, torch.log2(weights), HIDDEN)


def _add_diagonal(near: Tensor, weights: Tensor, rows: slice, offset: int) -> None:
    """Add the weights at column = row + offset of the tile to the queries they belong to."""
    if -weights.shape[2] < offset < weights.shape[3]:
        diagonal = torch.diagonal(weights, offset, -2, -1)
        start = rows.start + max(0, -offset)
        near[:, :, start : start + diagonal.shape[-1]] += diagonal
