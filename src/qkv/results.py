"""What calls return: `Result`, `Statistics` of weights, and `Thumbnail`, the weights in bins."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
import torch.utils._pytree as pytree
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import TypeVar

A = TypeVar("A", Tensor, np.ndarray, default=Tensor)


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
        """Make a thumbnail from the maxima and sums of all bins."""
        mean = total / (query_bin * key_bin)
        for axis, n, size in ((-2, n_queries, query_bin), (-1, n_keys, key_bin)):
            if n % size:  # the last bin is smaller
                mean.narrow(axis, -1, 1).mul_(size / (n % size))
        return Thumbnail(maximum, mean, query_bin, key_bin)

    @staticmethod
    def of_weights(weights: Float[Tensor, "b h nq nk"], bins: int) -> Thumbnail:
        """Pool all weights of a call, as `measure` does with the option `bins`."""
        n_queries, n_keys = weights.shape[2:]
        size = bin_size(n_queries, bins), bin_size(n_keys, bins)
        if size == (1, 1):
            return Thumbnail(weights, weights, 1, 1)
        mean = nn.functional.avg_pool2d(weights, size, ceil_mode=True, count_include_pad=False)
        if any(padding := (0, -n_keys % size[1], 0, -n_queries % size[0])):
            weights = nn.functional.pad(weights, padding, value=-torch.inf)
        of_queries = weights.unflatten(2, (-1, size[0])).amax(3)
        return Thumbnail(of_queries.unflatten(3, (-1, size[1])).amax(4), mean, *size)


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
    max_logit: Float[Tensor, "b h nq"] | None
    """The largest score of each query, after biases and temperature, without the sink logit or a normalizer's own bias;
    −inf where no key is visible. A pair that a bias of −inf masks is not visible. None for given weights, and for
    pointwise weights that are divided by their sum by way of their logarithms. Its `amax` over batch items and queries
    is that of a head (docs/howto/qk-clip.md)."""
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
    row_sum: Float[Tensor, "b h nq"]
    """M_i = Σ_j A_ij, by which a weight is divided to get its share of the row."""
    prefix_sink_scores: Float[Tensor, "b h prefix"] | None = None
    """Sink scores of the first `length` keys of the text, if `PrefixSinkScores(length)` was passed: the weight on each,
    averaged over those of the first `length` queries that may attend to it. Under a causal mask it equals the score of
    the prefix alone (alpha of Gu et al. 2025, arXiv:2410.10781, section 3)."""
    thumbnail: Thumbnail | None = None
    """The attention map pooled to a few bins, if `bins` was passed."""
    sink_mass: Float[Tensor, "b h nq"] | None = None
    """Weight on the learned sink logit, if the normalizer has one."""
    mass: Mapping[str, Float[Tensor, "b h nq"]] = field(default_factory=dict)
    """Weight inside each mask passed as `mass`, by its name."""
    own: Mapping[str, Float[Tensor, "b h n"]] = field(default_factory=dict)
    """The values of each `Statistic` passed as `statistics`, by its name."""
    min_logit: Float[Tensor, "b h nq"] | None = None
    """The smallest score of each query, if `Extremes()` was passed; inf where no key is visible. None where `max_logit`
    is."""
    argmax: Int[Tensor, "b h nq"] | None = None
    """The key with the largest score, the first one on ties, if `Extremes()` was passed; −1 where no key is visible.
    None where `max_logit` is."""
    first_contribution: Float[Tensor, "b h nq"] | None = None
    """‖A_i1 v_1‖ / Σ_j ‖A_ij v_j‖, the contribution of the first key; a profile measures it, `measure` does
    not."""

    @classmethod
    def _of(cls, numbers: Tensor, places: Mapping[Any, Place]) -> Statistics:
        """Return the statistics in one tensor of numbers; a field becomes a tensor when it is first read."""
        statistics = cls.__new__(cls)
        vars(statistics).update(_numbers=numbers, _places=places, mass={}, own={})
        return statistics

    def _view(self, name: str | int) -> Tensor:
        values: Tensor = vars(self)["_numbers"].as_strided(*vars(self)["_places"][name])
        return values

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            if name not in vars(self).get("_places", ()):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = vars(self)[name] = self._view(name)
            return value

    def with_thumbnail(self, thumbnail: Thumbnail | None) -> Statistics:
        """Return the same statistics with another thumbnail; fields that were not read yet stay so."""
        other = copy.copy(self)
        vars(other)["thumbnail"] = thumbnail
        return other

    def named(self, name: str) -> Float[Tensor, "b h n"] | None:
        """Return a statistic or a mass by its name; None if it was not measured."""
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
    """Return the field of `Statistics` for a name; `self` and `next` get an underscore, since Python uses these words.

    >>> field_of("self"), field_of("entropy")
    ('self_', 'entropy')
    """
    return f"{name}_" if name in ("self", "next") else name


def with_head(statistics: Statistics, other: Statistics, head: int) -> Statistics:
    """Return the statistics of a layer, with those of one head from `other`."""

    def one(mine: Any, its: Any) -> Any:
        if isinstance(mine, Tensor) or isinstance(its, Tensor):
            both = torch.full_like(its, 0) if mine is None else mine.clone()
            both[:, head] = torch.nan if its is None else its[:, head]
            return both
        if isinstance(mine, Mapping):
            return {name: one(x, its[name]) for name, x in mine.items()}
        if mine is None:
            return None
        return replace(mine, maximum=one(mine.maximum, its.maximum), mean=one(mine.mean, its.mean))  # a thumbnail

    joined = {f.name: one(getattr(statistics, f.name), getattr(other, f.name)) for f in fields(Statistics)}
    if other.sink_mass is None and joined["sink_mass"] is not None:
        joined["sink_mass"][:, head] = 0  # no weight on a sink that is not there
    return Statistics(**joined)


def share_of_first(sink: Tensor, contributions: Tensor, norms: Tensor, firsts: Sequence[int]) -> Tensor:
    """Return the first key's part of `contributions`, which are Σ_j A_ij ‖v_j‖; 0 in rows without any."""
    at = torch.tensor(firsts, device=norms.device)[:, None, None].expand(*norms.shape[:2], 1)
    share = sink * norms.gather(2, at).to(sink) / torch.where(contributions > 0, contributions, 1.0)
    return share.clamp(max=1).masked_fill(contributions == 0, 0).to(sink.dtype)  # rounding


def bin_size(length: int, bins: int) -> int:
    """Return the smallest power of two that divides a length into at most `bins` bins."""
    return int(2 ** math.ceil(math.log2(max(1, -(-length // bins)))))


class Result(tuple[Any, ...], Generic[A]):
    """The output of a call and the further results. As a tuple it holds those that are not None, in this order.

    >>> import torch, qkv
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> result = qkv.attend(q, k, v, return_lse=True)
    >>> out, lse = result
    >>> result.lse is lse, result.weights is None
    (True, True)
    """

    out: A
    """The output (b, h, nq, dv)."""
    lse: A | None
    """Log-sum-exp of the scores (b, h, nq), natural."""
    weights: A | None
    """Attention weights (b, h, nq, nk)."""
    statistics: Statistics | None
    """Statistics of the weights, as of `qkv.measure`."""

    def __new__(
        cls, out: A, lse: A | None = None, weights: A | None = None, statistics: Statistics | None = None
    ) -> Result[A]:
        result = super().__new__(cls, [x for x in (out, lse, weights, statistics) if x is not None])
        result.out, result.lse, result.weights, result.statistics = out, lse, weights, statistics
        return result

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.out, self.lse, self.weights, self.statistics

    def __repr__(self) -> str:
        named = zip(RESULTS, self.__getnewargs__(), strict=True)
        return f"Result({', '.join(f'{name}={x!r}' for name, x in named if x is not None)})"


RESULTS = ("out", "lse", "weights", "statistics")
# torch.func.jvp and other transforms find the tensors in a result.
pytree.register_pytree_node(
    Result,
    lambda result: ([*result], [name for name in RESULTS if getattr(result, name) is not None]),
    lambda parts, names: Result(**dict(zip(names, parts, strict=True))),
)
