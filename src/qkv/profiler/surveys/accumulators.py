"""What a survey measures at every query of every head: accumulators that merge exactly.

Sums are integers of any size in units of 2⁻⁴⁰ (fixed point). Adding them never rounds, so merging is exact,
associative and commutative, and many processes get the same result as one. Counts, extremes and histograms are exact,
too. Only the sketches of quantiles (t-digests) are approximations; merged in the same order, they are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.errors import InputError
from qkv.profiler.data.tables import SINK_THRESHOLD
from qkv.profiler.data.variables import OF_HEADS, QUERY, VARIABLES, Variable
from qkv.statistics import Statistic

BINS = 128
"""Number of bins of a histogram."""
LOG_SCALE = "log2(1 + x)"


Quantities = Mapping[str, Variable]
"""The numbers that are measured at every query of every head, by name."""

_LEFT_OUT = ("spread",)  # not in the files of older surveys, which must merge with new ones
QUANTITIES: Quantities = {name: VARIABLES[name] for name in OF_HEADS if name not in _LEFT_OUT} | {
    "entropy_ratio": Variable(
        QUERY, "1", "entropy / ln(visible keys), for queries with two or more visible keys; 1 is uniform",
        label="Entropy ratio",
    ),
    "sink_mass": VARIABLES["sink_mass"],
}  # fmt: skip


def edges(quantity: str | Variable) -> Float[np.ndarray, " edges"]:
    """The edges of the bins of a quantity's histogram, in its unit.

    >>> edges("sink")[:3]
    array([0.       , 0.0078125, 0.015625 ])
    """
    q = QUANTITIES[quantity] if isinstance(quantity, str) else quantity
    at = np.linspace(0, q.highest, BINS + 1)
    return np.exp2(at) - 1 if q.logarithmic else at


def described(statistics: Iterable[Statistic] = ()) -> dict[str, Any]:
    """The description of all quantities for the header of a file; custom statistics are sorted by name."""

    def entry(q: Variable) -> dict[str, Any]:
        scale = LOG_SCALE if q.logarithmic else "x"
        return {"unit": q.units, "definition": q.definition, "bins": BINS, "high": q.highest, "scale": scale}

    found = {name: entry(q) for name, q in QUANTITIES.items()}
    for statistic in sorted(statistics, key=lambda s: s.name):
        q = Variable.of(statistic)
        own = {"label": q.label, "share": q.share, "one_text": q.one_text, "later": q.from_second}
        found[statistic.name] = entry(q) | {"own": own | {"parameters": _parameters(statistic)}}
    return found


def of_description(description: Mapping[str, Any]) -> Quantities:
    """The quantities of a survey, from the description in the header of its file."""

    def custom(unit: str, definition: str, high: float, scale: Any, own: Mapping[str, Any], **_: Any) -> Variable:
        known = {name: own[name] for name in ("label", "share", "one_text")}
        logarithmic, later = scale == LOG_SCALE, own["later"]
        return Variable(QUERY, unit, definition, highest=high, logarithmic=logarithmic, from_second=later, **known)

    return {name: QUANTITIES[name] if name in QUANTITIES else custom(**entry) for name, entry in description.items()}


def _parameters(statistic: Statistic) -> dict[str, str]:
    """The settings of a statistic's object as text; settings without a reproducible text are left out."""
    texts = {n: repr(x) for n, x in sorted(vars(statistic).items()) if n not in ("name", "label", "definition")}
    return {name: x for name, x in texts.items() if not re.search(r" at 0x[0-9a-f]+", x)}


DIGITS = 40
"""Binary digits after the point of a sum."""
PREFIX = 64
"""T of the sink score of Gu et al. 2025 (arXiv:2410.10781, section 3); ε is `SINK_THRESHOLD`."""
ROUNDING = 1e-6
"""Negative values above −ROUNDING count as 0."""
CENTROIDS = 100
"""Size of a t-digest: at most about 2.5 KB; ranks are accurate to about 0.01."""
LIMB = 62  # integers are stored in two limbs; bits of the low one


def exact(x: Float[np.ndarray, "..."]) -> np.ndarray:
    """Convert to fixed point: an array of Python integers in units of 2⁻⁴⁰.

    >>> exact(np.array([0.5, 3.0])) / 2**DIGITS
    array([0.5, 3.0], dtype=object)
    """
    return np.asarray(_whole(np.rint(np.ldexp(np.asarray(x, np.float64), DIGITS))), object)


def number(x: np.ndarray) -> np.ndarray:
    """The inverse of `exact`, rounded to float64."""
    return np.asarray(x / 2**DIGITS, np.float64)


_whole = np.frompyfunc(int, 1, 1)


class Layer:
    """Accumulators of one attention layer. Unless noted, the first dimensions of arrays are (quantity, head)."""

    def __init__(self, module: str, heads: int, quantities: Quantities = QUANTITIES) -> None:
        shape = (len(quantities), heads)
        self.module, self.heads, self.quantities = module, heads, quantities
        self.added: dict[str, np.ndarray] = {
            "count": np.zeros(shape, np.int64),
            "sum": exact(np.zeros(shape)),
            "squares": exact(np.zeros(shape)),
            "histogram": np.zeros((*shape, BINS), np.int64),
            "early_count": np.zeros(heads, np.int64),  # (head): number of texts of `PREFIX` tokens or more
            "early_sum": exact(np.zeros((heads, PREFIX))),  # (head, key): the sum of sink scores over these texts
            "early_sinks": np.zeros((heads, PREFIX), np.int64),  # (head, key): number of these texts with a sink
            "received": exact(np.zeros((3, heads))),  # (all, special, delimiter; head): weight on these keys
            "queries": np.zeros(heads, np.int64),  # (head)
        }
        self.minimum, self.maximum = np.full(shape, np.inf), np.full(shape, -np.inf)
        self.sketches: Any = np.empty(shape, object)  # t-digests of the means of sequences, or None
        self._means: list[np.ndarray] = []

    def add(self, values: Float[Tensor, "quantity b h n"], valid: Bool[Tensor, "quantity b h n"]) -> None:
        """Add a batch: the quantities of every query, in their order, and True where a value counts."""
        excluded = ~valid
        x = values.double().masked_fill(excluded, 0)
        n, sums = valid.sum(-1), x.sum(-1)
        finite = sums.isfinite().all(-1).all(-1)
        for name, good in zip(self.quantities, finite.tolist(), strict=True):
            if not good and name in QUANTITIES:
                raise InputError(f"model has NaN in {name!r} of {self.module}: its parameters or inputs contain NaN")
            if not good:
                raise InputError(f"statistics: {name!r} is infinite or NaN in {self.module}, expected finite numbers")
        least = x.amin((1, 2, 3))
        for name, value in zip(self.quantities, least.tolist(), strict=True):
            if value < -ROUNDING:
                raise InputError(
                    f"statistics: {name!r} is {value:.6g} in {self.module}, but histograms of a survey begin at 0; "
                    "expected 0 or more"
                )
        self.added["count"] += n.sum(1).cpu().numpy()
        self.added["sum"] += exact(sums.sum(1).cpu().numpy())
        self.added["squares"] += exact(x.square().sum((1, 3)).cpu().numpy())
        low, high = values.masked_fill(excluded, torch.inf), values.masked_fill(excluded, -torch.inf)
        self.minimum = np.minimum(self.minimum, low.amin((1, 3)).double().cpu().numpy())
        self.maximum = np.maximum(self.maximum, high.amax((1, 3)).double().cpu().numpy())
        self.added["histogram"] += _histogram(x, valid, self.quantities)
        self._means.append(torch.where(n > 0, sums / n, torch.nan).cpu().numpy())

    def add_prefix(self, score: Float[Tensor, "b h prefix"], which: Bool[Tensor, " b"]) -> None:
        """Add the sink scores of the first `PREFIX` keys of the texts selected by `which`."""
        score = score[which].double().cpu()
        self.added["early_count"] += len(score)
        self.added["early_sum"] += exact(score.sum(0).numpy())
        self.added["early_sinks"] += (score > SINK_THRESHOLD).sum(0).numpy()

    def add_keys(self, received: Float[Tensor, "b h nk"], kinds: Bool[Tensor, "kind b nk"], queries: int) -> None:
        """Add the weight that keys received from `queries` queries: on all keys, and on the keys of each kind."""
        received = received.double()
        all_kinds = torch.cat([torch.ones_like(kinds[:1]), kinds]).double()
        self.added["received"] += exact(torch.einsum("bhk,cbk->ch", received, all_kinds).cpu().numpy())
        self.added["queries"] += queries

    def seal(self) -> Layer:
        """Add the means of the sequences to the sketches; called after the last batch of each chunk of texts."""
        if self._means:
            means = np.concatenate(self._means, 1)
            for q, h in np.ndindex(self.sketches.shape):
                found = means[q, :, h]
                found = found[~np.isnan(found)]
                if len(found):
                    if self.sketches[q, h] is None:
                        self.sketches[q, h] = _tdigest()(CENTROIDS)
                    self.sketches[q, h].update(found)
            self._means.clear()
        return self

    def merge(self, other: Layer) -> Layer:
        """The sum of both; neither is changed."""
        if (self.module, self.heads) != (other.module, other.heads):
            raise InputError(
                f"other: the layer {other.module!r} of {other.heads} heads cannot be merged with {self.module!r} of "
                f"{self.heads}; expected the same model"
            )
        both = Layer(self.module, self.heads, self.quantities)
        both.added = {name: self.added[name] + other.added[name] for name in self.added}
        both.minimum = np.minimum(self.minimum, other.minimum)
        both.maximum = np.maximum(self.maximum, other.maximum)
        for at in np.ndindex(both.sketches.shape):
            parts = [x.sketches[at] for x in (self, other) if x.sketches[at] is not None]
            if parts:
                both.sketches[at] = _tdigest()(CENTROIDS)
                for part in parts:
                    both.sketches[at].merge(part)
        return both

    def mean(self) -> Float[np.ndarray, "quantity head"]:
        """Means over all queries; NaN if there are none."""
        return _divided(number(self.added["sum"]), self.added["count"])

    def deviation(self) -> Float[np.ndarray, "quantity head"]:
        """Standard deviations over all queries."""
        n = self.added["count"].astype(object)  # n Σx² − (Σx)² in integers, because floats would cancel
        scaled = n * self.added["squares"] * 2**DIGITS - self.added["sum"] ** 2
        variance = _divided(np.asarray(scaled / 4**DIGITS, np.float64), self.added["count"].astype(np.float64) ** 2)
        return np.sqrt(np.maximum(variance, 0))

    def quantile(self, rank: float) -> Float[np.ndarray, "quantity head"]:
        """Quantiles over all queries from the histograms: exact to the width of a bin, clipped to the extremes."""
        out = np.full(self.minimum.shape, np.nan)
        for q, quantity in enumerate(self.quantities.values()):
            borders = edges(quantity)
            for h in np.flatnonzero(self.added["count"][q]):
                below = np.concatenate([[0], np.cumsum(self.added["histogram"][q, h])])
                value = np.interp(rank * below[-1], below, borders)
                out[q, h] = np.clip(value, self.minimum[q, h], self.maximum[q, h])
        return out

    def quantile_of_texts(self, rank: float) -> Float[np.ndarray, "quantity head"]:
        """Quantiles over the means of the sequences, from the sketches."""
        out = np.full(self.minimum.shape, np.nan)
        for at in np.ndindex(out.shape):
            if self.sketches[at] is not None:
                out[at] = self.sketches[at].get_quantile(rank)
        return out

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All accumulators as numeric arrays, by name, for a file."""
        for name, x in self.added.items():
            parts = {f"{name}.{part}": limb for part, limb in limbs(x).items()} if x.dtype == object else {name: x}
            yield from parts.items()
        yield "minimum", self.minimum
        yield "maximum", self.maximum
        packed = [b"" if s is None else s.serialize() for s in self.sketches.ravel()]
        yield "sketch_bytes", np.frombuffer(b"".join(packed), np.uint8)
        yield "sketch_lengths", np.array([len(p) for p in packed], np.int64)

    @classmethod
    def of_arrays(cls, module: str, found: dict[str, np.ndarray], quantities: Quantities) -> Layer:
        """The inverse of `arrays`; ValueError if an array has another shape or dtype than such a survey writes."""
        size = (len(quantities), heads := len(found["queries"]))
        if found["histogram"].shape != (*size, BINS) or len(found["sketch_lengths"]) != math.prod(size):
            raise ValueError(f"the arrays of {module!r} do not have {size[0]} quantities of {heads} heads")
        layer = cls(module, heads, quantities)
        for name, x in layer.arrays():
            if name not in ("sketch_bytes", "sketch_lengths") and (
                (found[name].shape, found[name].dtype) != (x.shape, x.dtype)
            ):
                raise ValueError(f"{name!r} of {module!r} has shape {found[name].shape}, expected {x.shape}")
        for name, x in layer.added.items():
            limbs = x.dtype == object
            layer.added[name] = joined(found[f"{name}.high"], found[f"{name}.low"]) if limbs else found[name]
        layer.minimum, layer.maximum = found["minimum"], found["maximum"]
        ends = np.cumsum(found["sketch_lengths"])
        packed = found["sketch_bytes"].tobytes()
        if (found["sketch_lengths"] < 0).any() or ends[-1] != len(packed):
            raise ValueError(f"the sketches of {module!r} do not have their lengths")
        for at, end, size in zip(np.ndindex(layer.sketches.shape), ends, found["sketch_lengths"], strict=True):
            layer.sketches[at] = _tdigest().deserialize(packed[end - size : end]) if size else None
        return layer


@dataclass
class Group:
    """Accumulators of one kind of attention: its layers, and the weight that each token of the vocabulary received."""

    vocabulary: int
    layers: dict[int, Layer] = field(default_factory=dict)
    token_weight: np.ndarray = field(init=False)
    """(vocabulary): weight on keys with this token, averaged over heads and added over layers."""
    token_count: np.ndarray = field(init=False)
    """(vocabulary): number of keys with this token, added over layers."""

    def __post_init__(self) -> None:
        self.token_weight = exact(np.zeros(self.vocabulary))
        self.token_count = np.zeros(self.vocabulary, np.int64)

    def add_tokens(
        self, ids: Int[Tensor, "b nk"], received: Float[Tensor, "b h nk"], real: Bool[Tensor, "b nk"]
    ) -> None:
        """Add the weight that the keys of one layer received."""
        at = ids[real]
        weight = torch.zeros(self.vocabulary, dtype=torch.float64, device=ids.device)
        weight.index_add_(0, at, received.double().mean(1)[real])
        present, count = torch.unique(at, return_counts=True)
        where = present.cpu().numpy()
        self.token_weight[where] += exact(weight[present].cpu().numpy())
        self.token_count[where] += count.cpu().numpy()

    def merge(self, other: Group) -> Group:
        """The sum of both; neither is changed."""
        both = Group(self.vocabulary)
        both.token_weight = self.token_weight + other.token_weight
        both.token_count = self.token_count + other.token_count
        for number_ in sorted({*self.layers, *other.layers}):
            found = [g.layers[number_] for g in (self, other) if number_ in g.layers]
            both.layers[number_] = found[0] if len(found) == 1 else found[0].merge(found[1])
        return both


def limbs(x: np.ndarray) -> dict[str, Int[np.ndarray, "..."]]:
    """The two limbs of integers of any size."""
    return {"high": (x >> LIMB).astype(np.int64), "low": (x & (2**LIMB - 1)).astype(np.int64)}


def joined(high: Int[np.ndarray, "..."], low: Int[np.ndarray, "..."]) -> np.ndarray:
    """Integers of any size from their two limbs."""
    return np.asarray((high.astype(object) << LIMB) + low.astype(object), object)


def _histogram(
    x: Float[Tensor, "quantity b h n"], valid: Bool[Tensor, "quantity b h n"], quantities: Quantities
) -> np.ndarray:
    number, _, heads, _ = x.shape
    scales = quantities.values()
    scale = torch.tensor([BINS / q.highest for q in scales], dtype=x.dtype, device=x.device)
    at = torch.stack([torch.log2(1 + one) if q.logarithmic else one for one, q in zip(x, scales, strict=True)])
    bins = at.mul_(scale[:, None, None, None]).long().clamp_(0, BINS - 1)
    head = torch.arange(number * heads, device=x.device).view(number, 1, heads, 1)
    all_bins = number * heads * BINS
    bins = torch.where(valid, bins.add_(BINS * head), all_bins)  # an additional bin for values that do not count
    counts = torch.bincount(bins.view(-1), minlength=all_bins + 1)[:-1]
    return counts.view(number, heads, BINS).cpu().numpy()


def _divided(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)


def _tdigest() -> Any:
    from datasketches import tdigest_double

    return tdigest_double
