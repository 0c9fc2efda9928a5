"""`Statistics`, the result of `measure`, and the sums over tiles of weights from which it is computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._engine.call import Call, RowState, at_least_float32
from qkv.masks import Mask
from qkv.normalizers import SumToOne
from qkv.statistics.base import Statistic


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """The weights of a call pooled over bins of `query_bin` queries × `key_bin` keys; the last bins may be smaller.

    >>> from qkv import measure
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> measure(x, x, bins=2).thumbnail.mean[0, 0].tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """

    maximum: Float[Tensor, "b h qb kb"]
    """The largest weight in the bin."""
    mean: Float[Tensor, "b h qb kb"]
    """The average over all pairs of the bin; masked pairs have weight 0."""
    query_bin: int
    key_bin: int

    @staticmethod
    def of(maximum: Tensor, total: Tensor, n_queries: int, n_keys: int, query_bin: int, key_bin: int) -> Thumbnail:
        """From the maxima and sums of all bins."""
        pairs = _pairs_of_bins(n_queries, n_keys, query_bin, key_bin, total.dtype, total.device)
        return Thumbnail(maximum, total / pairs, query_bin, key_bin)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # cached tensors must serve training too
def _pairs_of_bins(
    n_queries: int, n_keys: int, query_bin: int, key_bin: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The number of pairs in each bin (qb, kb); the last bins may be smaller."""
    queries, keys = (
        torch.tensor([min(size, n - start) for start in range(0, n, size)], dtype=torch.float64)
        for n, size in ((n_queries, query_bin), (n_keys, key_bin))
    )
    return (queries[:, None] * keys).to(device, dtype)


Place = tuple[tuple[int, ...], tuple[int, ...], int]  # the sizes, the strides and the start of a field in numbers


@dataclass(frozen=True, eq=False)
class Statistics:
    """Exact statistics of the attention weights A of one call: one number for each query or key of each head.

    Query i has position p_i = i + n_keys − n_queries. M_i = Σ_j A_ij is the mass on keys: 1 for softmax, less with a
    sink logit, any sum for weights that are not normalized (sigmoid), and 0 where no key is visible. `entropy`,
    `distance`, `spread` and `effective_keys` describe the shape of a row and use a_ij = A_ij / M_i; all other weights
    are absolute (`qkv.profile` divides them, too). Fully masked rows give 0 (and lse −inf), and so do rows whose
    weights underflow float32 (below 1e-38; for float64 inputs, 1e-150).
    If q had fewer than four dimensions, or was a NumPy array, the fields have the same dimensions and type.

    >>> from qkv import measure
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> result = measure(x, x)
    >>> result.entropy[0, 0, 0].item() == torch.log(torch.tensor(4.0)).item(), result.received[0, 0].tolist()
    (True, [1.0, 1.0, 1.0, 1.0])
    """

    lse: Float[Tensor, "b h nq"] | None
    """Log-sum-exp of the scores, including a sink logit; None if the normalizer has no log-sum-exp."""
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
    """Σ a · distance, the distance of a pair being `|p − j|` tokens."""
    spread: Float[Tensor, "b h nq"]
    """Standard deviation of j under a, in tokens; float32 inputs resolve its square to 0.002."""
    effective_keys: Float[Tensor, "b h nq"]
    """1 / Σ a²: the effective number of keys (Rényi-2 perplexity, participation ratio)."""
    received: Float[Tensor, "b h nk"]
    """Σ_i A_ij: the attention that each key receives from all queries."""
    visible: Float[Tensor, "b h nq"]
    """How many keys each query may attend to."""
    visible_queries: Float[Tensor, "b h nk"]
    """How many queries may attend to each key; `received` divided by it is the mean weight they put on the key."""
    prefix_sink_scores: Float[Tensor, "b h prefix"] | None = None
    """Sink scores of the first `prefix_keys` keys of the text: the weight on each, averaged over those of the first
    `prefix_keys` queries that may attend to it. Under a causal mask it equals the score of the prefix alone (α_k of Gu
    et al. 2025, arXiv:2410.10781, section 3)."""
    thumbnail: Thumbnail | None = None
    """The attention map pooled to a few bins, if `bins` was passed."""
    sink_mass: Float[Tensor, "b h nq"] | None = None
    """Weight on the learned sink logit, if the normalizer has one."""
    mass: Mapping[str, Float[Tensor, "b h nq"]] = field(default_factory=dict)
    """Weight inside each mask passed as `mass`, by its name."""
    own: Mapping[str, Float[Tensor, "b h n"]] = field(default_factory=dict)
    """The values of each `Statistic` passed as `statistics`, by its name."""
    row_sum: Float[Tensor, "b h nq"] | None = None
    """M_i = Σ_j A_ij, by which a weight is divided to get its share of the row. `measure` always gives it."""
    first_contribution: Float[Tensor, "b h nq"] | None = None
    """‖A_i1 v_1‖ / Σ_j ‖A_ij v_j‖, the first key's part of what the values add; a profile measures it, `measure` does
    not."""

    @classmethod
    def _of(cls, numbers: Tensor, places: Mapping[Any, Place]) -> Statistics:
        """The statistics in one tensor of numbers; a field becomes a tensor when it is first read."""
        made = cls.__new__(cls)
        vars(made).update(_numbers=numbers, _places=places, mass={}, own={})
        vars(made)["row_sum"] = made._view("row_sum")  # `__getattr__` is not asked for fields with a default
        return made

    def _view(self, name: str | int) -> Tensor:
        found: Tensor = vars(self)["_numbers"].as_strided(*vars(self)["_places"][name])
        return found

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            if name not in vars(self).get("_places", ()):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            found = vars(self)[name] = self._view(name)
            return found

    def named(self, name: str) -> Float[Tensor, "b h n"] | None:
        """A statistic or a mass by its name; None if it was not measured."""
        for values in (self.own, self.mass):
            if name in values:
                return values[name]
        value: Tensor | None = getattr(self, field_of(name), None)
        return value

    def __repr__(self) -> str:
        sizes = ("batch=", "heads=", "queries=")[-self.entropy.ndim :]
        shape = ", ".join(f"{name}{n}" for name, n in zip(sizes, self.entropy.shape, strict=True))
        return f"Statistics({shape}, keys={self.received.shape[-1]})"


def field_of(name: str) -> str:
    """The field of `Statistics` for a name; `self` and `next` get an underscore, since Python uses these words.

    >>> field_of("self"), field_of("entropy")
    ('self_', 'entropy')
    """
    return f"{name}_" if name in ("self", "next") else name


class Sums:
    """Running sums of the sweep over all tiles; float64, so that ten thousand tiles add up without loss."""

    OF_SHAPE = ("total", "bits", "squares", "offset", "offset2", "distance")  # those that `RowSums` adds up
    OF_QUERIES = ("sink", "self_", "previous", "next_", "visible")

    def __init__(
        self, call: Call, mass: Mapping[str, Mask], prefix_keys: int | None, bins: int | None,
        statistics: Sequence[Statistic] = (),
    ) -> None:  # fmt: skip
        b, h, n_queries, _ = call.q.shape
        n_keys = call.k.shape[2]
        zeros = call.q.new_zeros(b, h, n_queries, dtype=torch.float64)
        self._name(zeros.new_zeros(len(self.OF_SHAPE) + len(self.OF_QUERIES), *zeros.shape))
        self.mass = {name: torch.zeros_like(zeros) for name in mass}
        self.contributions: Tensor | None = None  # Σ_j A_ij ‖v_j‖, if the norms of the values were passed
        # With so few queries, the sum of each key is one term, and float32 loses nothing.
        of_keys = at_least_float32(call.q.dtype) if n_queries <= FEW_QUERIES else torch.float64
        self.received, self.visible_queries = (zeros.new_zeros(b, h, n_keys, dtype=of_keys) for _ in range(2))
        self.prefix_sink_scores = (
            None if prefix_keys is None else zeros.new_zeros(2, b, h, prefix_keys)
        )  # sums of weights, and numbers of visible queries
        self.user_statistics = {
            s: zeros.new_full((*s.lead, b, h, n_queries if s.over == "query" else n_keys), s.zero) for s in statistics
        }
        self.bins = None if bins is None else (bin_size(n_queries, bins), bin_size(n_keys, bins))
        self.pooled: Tensor | None = None  # maxima and sums
        if self.bins is not None:
            sides = [-(-n // size) for n, size in zip((n_queries, n_keys), self.bins, strict=True)]
            self.pooled = call.q.new_zeros(2, b, h, *sides, dtype=at_least_float32(call.q.dtype))

    def _name(self, by_query: Tensor) -> None:
        """Set the sums of each query: ten thousand queries or one, they are rows of one tensor."""
        self.by_query = by_query
        shape = by_query[: len(self.OF_SHAPE)]
        self.total, self.bits, self.squares, self.offset, self.offset2, self.distance = shape.unbind()
        self.sink, self.self_, self.previous, self.next_, self.visible = by_query[len(self.OF_SHAPE) :].unbind()

    def of(self, queries: slice, keys: slice, received: Tensor, visible_queries: Tensor) -> Sums:
        """The sums of some queries and keys as views; `received` and `visible_queries` replace the key sums."""
        part = copy(self)
        part._name(self.by_query[..., queries])
        part.mass = {name: x[:, :, queries] for name, x in self.mass.items()}
        part.received, part.visible_queries = received[:, :, keys], visible_queries[:, :, keys]
        return part

    def of_heads(self, statistic: Statistic, at: tuple[slice, ...]) -> Tensor:
        """The sums of a statistic for some batch items and heads, as a view."""
        total, (batch, heads) = self.user_statistics[statistic], at
        return total[batch, heads] if statistic.parts == 1 else total[:, batch, heads]

    def thumbnail(self, n_queries: int, n_keys: int) -> Thumbnail | None:
        if self.bins is None or self.pooled is None:
            return None
        return Thumbnail.of(self.pooled[0], self.pooled[1], n_queries, n_keys, *self.bins)

    def statistics(self, call: Call, rows: RowState) -> Statistics:
        lse = rows.level if call.given.normalizer.has_lse else None
        nonempty = ~(self.total.abs() <= SMALLEST)  # the squares of smaller weights underflow; NaN passes
        total = torch.where(nonempty, self.total, 1.0)
        mean = self.offset / total
        sink_mass = None if call.sink is None else _sink_mass(call, rows)
        entropy = torch.where(nonempty, torch.log(total) + math.log(2) * self.bits / total, 0.0).clamp(min=0)
        squares = torch.where(nonempty, self.squares, 1.0)
        prefix = self.prefix_sink_scores
        if prefix is not None:
            prefix = (prefix[0] / prefix[1].clamp(min=1)).to(at_least_float32(call.q.dtype))
        dtype = at_least_float32(call.q.dtype)
        sink, self_, previous, next_, visible = self.by_query[len(self.OF_SHAPE) :].to(dtype).unbind()
        spread = (self.offset2 / total - mean * mean).clamp(min=0).sqrt()
        return Statistics(
            lse, entropy.to(dtype), sink, self_, previous, next_, (self.distance / total).clamp(min=0).to(dtype),
            spread.to(dtype), torch.where(nonempty, total * total / squares, 0.0).to(dtype), self.received.to(dtype),
            visible, self.visible_queries.to(dtype), prefix, self.thumbnail(call.q.shape[2], call.k.shape[2]),
            sink_mass, {name: value.to(dtype) for name, value in self.mass.items()},
            {s.name: s.finish(x, self.total).to(dtype) for s, x in self.user_statistics.items()}, self.total.to(dtype),
        )  # fmt: skip


def _sink_mass(call: Call, rows: RowState) -> Tensor:
    """The weight of the sink, 0 in rows that do not count."""
    assert call.sink is not None
    assert rows.level is not None
    normalizer = call.normalizer
    assert isinstance(normalizer, SumToOne)
    out = rows.level == -torch.inf
    level = rows.level.masked_fill(out, 0)
    weight = normalizer.weight(call.sink.expand_as(level)[..., None], level[..., None])[..., 0]
    return weight.masked_fill(out | (call.sink == -torch.inf), 0)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # cached tensors must serve training too
def _powers(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones, offsets of a cell's columns from its middle, their squares, and zeros: products with four rows are fast."""
    place = torch.arange(size, dtype=dtype, device=device) - size // 2
    return torch.stack([torch.ones_like(place), place, place.square(), torch.zeros_like(place)])


def _cells(x: Tensor) -> list[Tensor]:
    """A tile as one or two views (b, h, rows, cells, columns): cells of `CELL` columns, and a smaller last one."""
    width = x.shape[-1]
    whole = width // CELL * CELL
    if whole in (0, width):
        return [x.unflatten(-1, (-1, min(CELL, width)))]
    return [x[..., :whole].unflatten(-1, (-1, CELL)), x[..., None, whole:]]


FEW_QUERIES = 8  # while decoding, the statistics of the keys take most of the memory and time
SMALLEST = 1e-150  # a row with less mass counts as empty
TINY = 1e-15  # below this norm, the squares may underflow float32
CELL = 128  # most columns of a cell: the squares of larger offsets from its middle would lose digits of the spread


class RowSums:
    """Sums over keys for one block of queries.

    Each cell, a part of a tile that is not wider than `CELL`, yields a few float32 numbers for each query. They are
    stored, and added up in float64 when there are `BATCH` cells, because many small additions would take as long as
    the products.
    """

    BATCH = 64

    def __init__(self, shape: tuple[int, int, int], like: Tensor) -> None:
        self.shape = shape
        self.places: list[tuple[int, int]] = []  # for each cell: its middle, and the sign of j − p in it (0: mixed)
        self.moments: list[Tensor] = []  # of the tiles, (3, b, h, rows, cells): Σ a, Σ a place, Σ a place²
        self.norms: list[Tensor] = []  # (b, h, rows, cells), like the next
        self.minus_bits: list[Tensor] = []
        self.sums = like.new_zeros(7, *shape, dtype=torch.float64)

    def add(self, weights: Tensor, log2: Tensor, scratch: Tensor, start: int, sign: int) -> Tensor:
        """Add a tile that starts `start` keys after the first query of the block; returns its row totals.

        Moments are taken about the middle of a cell: float32 products then lose nothing to large positions.
        """
        if len(self.places) >= self.BATCH:
            self.flush()
        moments, norms, minus_bits = [], [], []
        for w, x, out in zip(_cells(weights), _cells(log2), _cells(scratch), strict=True):
            number, size = w.shape[-2:]
            moments.append((_powers(size, w.dtype, w.device) @ w.reshape(-1, size).T).view(-1, *self.shape, number)[:3])
            norms.append(torch.linalg.vector_norm(w, dim=-1))
            if bool(((norms[-1] < TINY) & (moments[-1][0] > 0)).any()):  # the squares underflow float32
                norms[-1] = torch.linalg.vector_norm(w, dim=-1, dtype=torch.float64)
            minus_bits.append(torch.mul(w, x, out=out).sum(-1))
            self.places += [(start + i * size + size // 2, sign) for i in range(number)]
            start += number * size
        self.moments += moments
        self.norms += norms
        self.minus_bits += minus_bits
        return torch.stack([x[0].sum(-1) for x in moments]).sum(0)

    def flush(self) -> None:
        """Add the stored numbers of the last tiles to the sums."""
        if not self.places:
            return
        total, one, two = torch.cat(self.moments, -1).double()
        norm, minus_bits = (torch.cat([x.double() for x in of], -1) for of in (self.norms, self.minus_bits))
        middle, sign = torch.tensor(self.places, dtype=torch.float64, device=total.device).unbind(1)
        offset = one + middle * total
        offset2 = two + middle * (one + offset)
        parts = (total, offset, offset2, norm.square(), minus_bits, sign * total, sign * offset)
        self.sums += torch.stack([x.sum(-1) for x in parts])
        for stored in (self.places, self.moments, self.norms, self.minus_bits):
            stored.clear()

    def put(self, sums: Sums, at: tuple[slice, ...]) -> None:
        """Add to `sums`, converting offsets from the block's first query to offsets from each query."""
        self.flush()
        total, offset, offset2, squares, minus_bits, signed, signed_offset = self.sums
        row = torch.arange(total.shape[-1], dtype=torch.float64, device=total.device)
        moved = row * total
        sums.by_query[: len(sums.OF_SHAPE), *at] += torch.stack(
            (
                total,
                -minus_bits,
                squares,
                offset - moved,
                offset2 - row * (2 * offset - moved),
                signed_offset - row * signed,
            )
        )


def share_of_first(sink: Tensor, contributions: Tensor, norms: Tensor, firsts: Sequence[int]) -> Tensor:
    """The first key's part of `contributions`, which are Σ_j A_ij ‖v_j‖; 0 in rows without any."""
    at = torch.tensor(firsts, device=norms.device)[:, None, None].expand(*norms.shape[:2], 1)
    share = sink * norms.gather(2, at).to(sink) / torch.where(contributions > 0, contributions, 1.0)
    return share.clamp(max=1).masked_fill(contributions == 0, 0).to(sink.dtype)  # rounding


def bin_size(length: int, bins: int) -> int:
    """The smallest power of two that divides a length into at most `bins` bins."""
    return int(2 ** math.ceil(math.log2(max(1, -(-length // bins)))))
