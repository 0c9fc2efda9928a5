"""What a survey measures at every query of every head: accumulators that merge exactly, and `Survey`, which holds them.

Sums are integers of any size in units of 2⁻⁴⁰ (fixed point). Adding them never rounds, so merging is exact,
associative and commutative, and many processes get the same result as one. Counts, extremes and histograms are exact,
too. Only the sketches of quantiles (t-digests) are approximations; merged in the same order, they are equal.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._files import opened, write_atomically
from qkv._untrusted import check_version, parse_array, parse_json, read_zip, reading
from qkv.errors import InputError
from qkv.profiler.data.findings import Finding, FindingList
from qkv.profiler.data.frames import percent
from qkv.profiler.data.tables import MIXED, ROLES, SINK_THRESHOLD, readable
from qkv.profiler.data.variables import OF_HEADS, QUERY, VARIABLES, Variable
from qkv.statistics import Statistic

if TYPE_CHECKING:
    import pandas as pd


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
            if x.dtype == object:
                yield f"{name}.high", (x >> LIMB).astype(np.int64)
                yield f"{name}.low", (x & (2**LIMB - 1)).astype(np.int64)
            else:
                yield name, x
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


FORMAT, VERSION = "qkv-survey", 1
QUANTILES = (0.05, 0.5, 0.95)
TYPES = {"previous token": "previous", "self": "self", "first token": "sink_score", "uniform": "entropy_ratio"}
"""Types of heads, in their order, that means tell; and the column of `Survey.heads` that does."""
EXAMPLES = 20
"""Number of texts that were left out whose names are kept."""
_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal surveys give equal files
TOKEN = 40  # bytes of memory for each token of the vocabulary


class Survey:
    """Accumulated attention of a model over a corpus, head by head.

    Args:
        definition: the model, the settings and the quantities; created by `qkv.profiler.survey`. Only surveys with
            equal definitions can be merged.
        groups: the accumulators, one `qkv.profiler.surveys.data.Group` for each kind of attention.
        record: the data: ``documents``, ``sequences`` and ``tokens`` (numbers), ``shards`` (their names), ``skipped``
            (number of texts left out, by reason), ``examples`` (names of some of them), ``names`` (of the tokens that
            received the most weight) and ``sources`` (the source of each module's statistics: see `qkv.profile`).

    >>> import tempfile
    >>> from qkv.profiler import survey
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = survey("qkv-mini", ["import os", "import sys"], out=folder, shards=1)
    >>> found
    Survey('qkv-mini', 2 documents, 6 tokens)
    """

    def __init__(self, definition: dict[str, Any], groups: dict[str, Group], record: dict[str, Any]) -> None:
        self.definition, self.groups, self.record = definition, groups, record

    def __repr__(self) -> str:
        tokens, documents = self.record["tokens"], self.record["documents"]
        return f"Survey({self.definition['model']!r}, {documents:,} documents, {tokens:,} tokens)"

    @property
    def quantities(self) -> Quantities:
        """The quantities measured at every query, by name, in the order of the accumulators' first dimension."""
        return of_description(self.definition["quantities"])

    @property
    def main(self) -> str:
        """The name of the main group: "decoder" if there is one, else the first group."""
        return "decoder" if "decoder" in self.groups else next(iter(self.groups))

    def group(self, name: str | None = None) -> Group:
        """The accumulators of one kind of attention; the main one if None."""
        name = self.main if name is None else name
        if name not in self.groups:
            raise InputError(f"group: got {name!r}; this survey has {', '.join(map(repr, self.groups))}")
        return self.groups[name]

    def heads(self, group: str | None = None) -> pd.DataFrame:
        """One row per layer and head, over all counted queries of the corpus; NaN where a quantity is not defined.

        Weights are shares of the row, as in profiles (docs/quantities.md); ``sink`` and ``previous`` leave out the
        first query of every sequence.

        Columns: layer, head, module, queries; for each of `quantities`, in its unit, the mean
        under its name, and ``_std``, ``_min``, ``_max``, ``_p5``, ``_p50``, ``_p95`` (quantiles over queries, exact to
        a bin of the histogram), ``_text_p5``, ``_text_p50``, ``_text_p95`` (quantiles over the means of sequences, from
        t-digests); special and delimiter (shares of the weight on special tokens and delimiters); sink_score (mean
        sink score of the first key) and sink_texts (share of texts where it is above 0.3, among texts of 64 tokens
        or more).
        """
        import pandas as pd

        frames = []
        for at, layer in sorted(self.group(group).layers.items()):
            columns: dict[str, Any] = {"layer": at, "head": np.arange(layer.heads), "module": layer.module}
            columns["queries"] = layer.added["queries"]
            found = {"": layer.mean(), "_std": layer.deviation()}
            measured = layer.added["count"] > 0
            found["_min"], found["_max"] = (np.where(measured, x, np.nan) for x in (layer.minimum, layer.maximum))
            found |= {f"_p{100 * rank:.0f}": layer.quantile(rank) for rank in QUANTILES}
            found |= {f"_text_p{100 * rank:.0f}": layer.quantile_of_texts(rank) for rank in QUANTILES}
            for q, name in enumerate(self.quantities):
                columns |= {f"{name}{suffix}": x[q] for suffix, x in found.items()}
            _, special, delimiter = number(layer.added["received"]) / np.maximum(layer.added["queries"], 1)
            columns |= {"special": special, "delimiter": delimiter}
            with np.errstate(divide="ignore", invalid="ignore"):
                columns["sink_score"] = number(layer.added["early_sum"])[:, 0] / layer.added["early_count"]
                columns["sink_texts"] = layer.added["early_sinks"][:, 0] / layer.added["early_count"]
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)

    def types(self, group: str | None = None) -> pd.DataFrame:
        """The type of each head by its means: the columns layer, head, type, and the score of each type.

        The type is the first of `TYPES` whose mean reaches the threshold of profiles, else "mixed". Types that need
        synthetic texts or single tokens, such as induction, are told by a profile.
        """
        table, names = self.heads(group), {name: kind for kind, name in TYPES.items()}
        table["sink_score"] = table["sink_score"].fillna(table["sink"])  # no text has 64 tokens
        scores = table[["layer", "head", *names]].rename(columns=names)
        reached = np.stack([scores[kind].to_numpy() >= ROLES[kind].threshold for kind in TYPES])
        kinds = np.array([*TYPES, MIXED], object)
        scores.insert(2, "type", kinds[np.where(reached.any(0), reached.argmax(0), len(TYPES))])
        return scores

    def findings(self, group: str | None = None) -> FindingList:
        """What the means over the corpus say, a number and its meaning each; the first one is the headline."""
        table, types, most = self.heads(group), self.types(group), self.tokens(1, group)
        kinds, caught = types["type"], np.flatnonzero(types["first token"] > SINK_THRESHOLD)
        over = "all queries after the first" if table["sink_score"].isna().all() else f"the first {PREFIX} queries"
        found = [
            Finding(
                f"{len(caught):,} of {len(table):,}",
                f"heads have an attention sink at the first token, on average over {self.record['documents']:,} texts",
                f"Counted are heads whose mean weight on it, over {over}, is above 30 %.",
                heads=tuple(caught.tolist()),
            ),
            Finding(
                f"{(kinds != MIXED).sum():,} of {len(table):,}",
                "heads have one clear type",
                ", ".join(f"{n:,} {kind}" for kind, n in kinds.value_counts().items()) + ".",
            ),
            Finding(
                f"{table['entropy_ratio'].median():.2f}",
                "of the largest possible entropy, in the median head",
                f"From {table['entropy_ratio'].min():.2f} to {table['entropy_ratio'].max():.2f}.",
            ),
        ]
        if len(most) and most["token"].iloc[0]:
            name = readable(most["token"].iloc[0])
            lift = f"{most['lift'].iloc[0]:.1f} × its share of the tokens."
            found.append(Finding(percent(most["share"].iloc[0]), f"of all attention goes to “{name}”", lift))
        return FindingList(found)

    def sinks(self, group: str | None = None) -> pd.DataFrame:
        """One row for each of the first 64 keys of a text.

        Columns: key; score (mean sink score over texts and heads: the weight on the key, averaged over those of the
        text's first 64 queries that may attend to it) and share (share of texts × heads where it is above 0.3:
        Sink_k^ε of Gu et al. 2025, arXiv:2410.10781, section 3). NaN if no text has 64 tokens.
        """
        import pandas as pd

        layers = self.group(group).layers.values()
        pairs = sum(int(x.added["early_count"].sum()) for x in layers)
        total = sum(number(x.added["early_sum"].sum(0)) for x in layers)
        sinks = sum(x.added["early_sinks"].sum(0) for x in layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            return pd.DataFrame({"key": np.arange(PREFIX), "score": total / pairs, "share": sinks / pairs})

    def tokens(self, k: int = 10, group: str | None = None) -> pd.DataFrame:
        """The `k` tokens of the vocabulary that received the most weight.

        Columns: id; token (its name, "" if it is not kept); share (of all weight on keys, averaged over layers and
        heads); lift (share divided by the token's share of the keys); count (number of keys with this token).
        """
        import pandas as pd

        if k < 1:
            raise InputError(f"k: got {k}; expected a positive number of tokens")
        found = self.group(group)
        weight, count = number(found.token_weight), found.token_count
        best = np.argsort(-weight, kind="stable")[:k]
        best = best[count[best] > 0]
        share = weight[best] / weight.sum()
        return pd.DataFrame(
            {
                "id": best,
                "token": [self.record["names"].get(str(i), "") for i in best],
                "share": share,
                "lift": share / (count[best] / count.sum()),
                "count": count[best] // len(found.layers),
            }
        )

    def merge(self, other: Survey) -> Survey:
        """The merged survey; neither is changed. Sums, counts and histograms are exact in any order.

        The definitions must be equal, and no part of a corpus may be in both.
        """
        if (difference := differing(self.definition, other.definition)) is not None:
            name, value, other_value = difference
            raise InputError(
                f"other has another definition, so the surveys cannot be merged: {name} is {value} and {other_value}"
            )
        twice = sorted({*self.record["shards"]} & {*other.record["shards"]})
        if twice:
            raise InputError(f"other contains {twice[0]}, as this survey does; it would count twice")
        cut = {name.rpartition(" ")[2]: name.split()[3] for name in self.record["shards"]}
        for name in other.record["shards"]:
            corpus, number = name.rpartition(" ")[2], name.split()[3]
            if cut.get(corpus, number) != number:
                raise InputError(
                    f"other has the corpus {corpus} in {number} shards, and this survey in {cut[corpus]}, so texts "
                    "could count twice; expected the same number of shards"
                )
        groups = dict(self.groups)
        for name, group in other.groups.items():
            groups[name] = groups[name].merge(group) if name in groups else group
        return Survey(self.definition, groups, _merged(self.record, other.record))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the survey atomically to one file (a zip of JSON and NumPy arrays) and return its path."""
        target = Path(path)
        write_atomically(target, self.packed())
        return target

    def packed(self) -> bytes:
        """The content of the file that `save` writes; equal surveys give equal bytes."""
        layers = {name: {n: x.module for n, x in g.layers.items()} for name, g in self.groups.items()}
        head = {
            "format": FORMAT, "format_version": VERSION, "definition": self.definition, "record": self.record,
            "groups": layers,
        }  # fmt: skip
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            _put(archive, "survey.json", json.dumps(head, indent=1).encode())
            for name, group in self.groups.items():
                present = np.flatnonzero(group.token_count)
                weight = group.token_weight[present]
                tokens = {"id": present, "count": group.token_count[present]}
                tokens |= {"high": (weight >> LIMB).astype(np.int64), "low": (weight & (2**LIMB - 1)).astype(np.int64)}
                for what, x in tokens.items():
                    _put_array(archive, f"{name}/tokens/{what}", x)
                for at, layer in group.layers.items():
                    for what, x in layer.arrays():
                        _put_array(archive, f"{name}/{at}/{what}", x)
        return file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | io.BytesIO) -> Survey:
        """Read a file that `save` wrote, also at an address such as ``s3://…``, or its bytes."""
        source = path if isinstance(path, io.BytesIO) else opened(path, "path")
        with reading("the data" if isinstance(path, io.BytesIO) else path, "a survey"):
            members, budget = read_zip(source, "survey.json")
            head = parse_json(members["survey.json"])
            if head.get("format") != FORMAT:
                raise ValueError(f"its format is {str(head.get('format'))[:80]!r}, expected {FORMAT!r}")
            check_version(head, VERSION)
            definition = head["definition"]
            quantities = of_description(definition["quantities"])
            if [name for name in quantities if name in QUANTITIES] != [*QUANTITIES]:
                raise ValueError("its quantities are not those of this version, in their order")
            for _ in head["groups"]:
                budget.take(definition["vocabulary"] * TOKEN)
            groups = {
                name: _read_group(members, name, layers, definition["vocabulary"], quantities)
                for name, layers in head["groups"].items()
            }
            _check_record(head["record"], definition)
        return cls(head["definition"], groups, head["record"])


def differing(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> tuple[str, Any, Any] | None:
    """The first entry in which two nested mappings differ: its dotted name and both values; None if they are equal."""
    for name in [*a, *(n for n in b if n not in a)]:
        x, y = a.get(name), b.get(name)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            if (found := differing(x, y, f"{where}{name}.")) is not None:
                return found
        elif name not in a or name not in b:
            return (f"{where}{name}", *(("present", "missing") if name in a else ("missing", "present")))
        elif x != y:
            return f"{where}{name}", x, y
    return None


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    skipped = {r: a["skipped"].get(r, 0) + b["skipped"].get(r, 0) for r in sorted({*a["skipped"], *b["skipped"]})}
    return {
        **{name: a[name] + b[name] for name in ("documents", "sequences", "tokens", "shards")},
        "skipped": skipped,
        "examples": (a["examples"] + b["examples"])[:EXAMPLES],
        "names": a["names"] | b["names"],
        "sources": a["sources"] | b["sources"],
    }


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)


def _put_array(archive: zipfile.ZipFile, name: str, x: np.ndarray) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(x), allow_pickle=False)
    _put(archive, f"{name}.npy", file.getvalue())


def _read_group(
    members: Mapping[str, bytes], name: str, layers: dict[str, str], vocabulary: int, quantities: Quantities
) -> Group:
    found: dict[str, dict[str, np.ndarray]] = {}
    for member, data in members.items():
        if member.startswith(f"{name}/"):
            _, part, what = member.removesuffix(".npy").split("/")
            found.setdefault(part, {})[what] = parse_array(data)
    group = Group(vocabulary)
    tokens = found.pop("tokens")
    if tokens["id"].size and not 0 <= tokens["id"].min() <= tokens["id"].max() < vocabulary:
        raise ValueError(f"it has tokens outside the vocabulary of {vocabulary}")
    group.token_weight[tokens["id"]] = joined(tokens["high"], tokens["low"])
    group.token_count[tokens["id"]] = tokens["count"]
    if set(found) != set(layers):
        raise ValueError("its layers are not those that it declares")
    group.layers = {int(n): Layer.of_arrays(module, found[n], quantities) for n, module in layers.items()}
    return group


def _check_record(record: dict[str, Any], definition: dict[str, Any]) -> None:
    """Raise ValueError if an entry of the header is missing or has another type."""
    kinds = {"documents": int, "sequences": int, "tokens": int, "shards": list, "skipped": dict, "examples": list,
             "names": dict, "sources": dict}  # fmt: skip
    wrong = [name for name, kind in kinds.items() if type(record[name]) is not kind]
    if wrong or not isinstance(definition["model"], str):
        raise ValueError(f"its header is wrong: {', '.join(wrong) or 'model'}")
