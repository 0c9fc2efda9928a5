"""What is recorded of an attention call: `ObservedCall`, the call itself as it is read, or `Record`, its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from qkv import ring
from qkv.engine import Call, Result, RowState, Shared, at_least_float32, detached, on_card
from qkv.errors import InputError
from qkv.kernels import eager, serve, serving
from qkv.masks import Mask
from qkv.masks.convert import is_causal
from qkv.native.library import leading_shares
from qkv.normalizers import SumToOne
from qkv.profiler.capture.hidden import HiddenMap
from qkv.profiler.capture.inputs import nan_error
from qkv.profiler.capture.patches import Patches
from qkv.profiler.data.tables import SINK_THRESHOLD
from qkv.profiler.data.variables import UNFUSED
from qkv.results import Statistics, with_head
from qkv.statistics import Local, PrefixSinkScores, Statistic, Streaming
from qkv.statistics.measure import in_shares, measured, row_state, rows_in_shares, sweep
from qkv.statistics.native import thumbnail

PREFIX = 64  # number of first tokens that have sink scores (Gu et al. 2025, arXiv:2410.10781, section 3)
WEIGHTS_ONLY = ("softmax", "outputs", "returned", "differential", "hidden")  # sources of weights, without vectors


@dataclass(frozen=True)
class Record:
    """The statistics of one attention call of the model."""

    module: str
    group: str
    layer: int
    statistics: Statistics
    geometry: dict[str, Tensor]
    weights: Tensor | None
    queries: Tensor | None  # (batch, nq), True at real tokens, or None if all are real
    keys: Tensor | None
    causal: bool
    edited: tuple[int, ...] = ()
    """Heads whose weights an edit changed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch items, query heads, queries, keys."""
        return *self.statistics.entropy.shape, self.statistics.received.shape[2]

    def with_head(self, head: int, other: Record) -> Record:
        """The record with the numbers of one head from another."""
        weights = self.weights
        if weights is not None and other.weights is not None:
            weights = weights.clone()
            weights[:, head] = other.weights[:, head]
        statistics = with_head(self.statistics, other.statistics, head)
        of_images = {name: x.clone() for name, x in self.geometry.items() if name in OF_IMAGES}
        for name, x in of_images.items():
            x[:, head] = other.geometry[name][:, head]
        geometry = self.geometry | of_images if of_images else self.geometry  # which is filled later
        return replace(self, statistics=statistics, weights=weights, edited=(*self.edited, head), geometry=geometry)


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """One attention call of the model, with the module that made it."""

    module: str
    group: str
    layer: int
    call: Call
    lse: Tensor | None
    queries: Tensor | None  # (batch, nq), True at real tokens, or None if all are real
    keys: Tensor | None
    first: int | Tensor  # position of the first key of the text, as `capture.inputs.first_real` gives it
    causal: bool
    source: str  # as in `attrs["sources"]` of `qkv.profile`; a source in `WEIGHTS_ONLY` has no vectors that count
    calls_before: int = 0
    """How many calls the module has made in this forward before."""
    step: int | None = None
    """The number of its only query, if the module attends step by step to the same keys."""

    @property
    def norms(self) -> Tensor | None:
        """The norms of the values, (b, h, nk), if the call has them."""
        if self.source in WEIGHTS_ONLY or self.call.values is not None:
            return None
        return value_norms(self.call, self.keys)

    def vectors(self, of: Callable[..., dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """Lengths and directions of queries, keys and values, if the call has them.

        Args:
            of: `geometry`, or the `add` of `Together`, with which all but ``value_norm`` is there later.
        """
        if self.source in WEIGHTS_ONLY:
            return {}
        call, (b, h, _, d) = detached(self.call), self.call.q.shape
        learned = call.normalizer.key if isinstance(call.normalizer, SumToOne) else None
        learned = None if learned is None or learned.shape[-1] != d else learned.detach().expand(b, h, d)
        first = self.first if isinstance(self.first, int) else on_device(self.first, call.k.device)
        vectors = (of or geometry)(call.q, call.k, first, self.queries, self.keys, learned)
        vectors = with_directions(vectors) if of is None else vectors
        vectors["value_norm"] = value_norms(call, self.keys)
        return vectors


@dataclass(frozen=True)
class Measures:
    """What is measured of a call."""

    local_window: int = 8
    map_tokens: int = 384
    map_bins: int = 64
    statistics: Sequence[Statistic] = ()
    patches: Mapping[str, Patches] = field(default_factory=dict)
    """The patches of images among the keys, by kind of attention."""

    def __post_init__(self) -> None:
        for name, least in (("local_window", 1), ("map_tokens", 0), ("map_bins", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}, expected a whole number of at least {least}")

    def keeps_weights(self, n_queries: int, n_keys: int) -> bool:
        """Whether all weights are kept: if there are as many as `map_tokens` tokens have of each other at most."""
        return n_queries * n_keys <= self.map_tokens**2

    def masses(self, first: int | Tensor, n_keys: int, device: torch.device) -> dict[str, Mask]:
        """The masks inside which the attention mass is measured, by statistic."""
        return {s.name: s.mask for s in (Local(self.local_window), _streaming(first, n_keys, device))}

    def of(
        self, observed: ObservedCall, result: Result | None = None, norms: Tensor | None = None, *, output: bool = True
    ) -> tuple[Result | None, Statistics, Tensor | None]:
        """Result, statistics, and the weights of a short call; see `refuse_nan`.

        Args:
            observed: the call.
            result: its result, if it has been computed.
            norms: the norms of its values, without which there is no ``first_contribution``.
            output: whether the result is wanted, if it has not been computed; without it the values are not read.
        """
        call = detached(observed.call)
        options: dict[str, Any] = {
            "mass": self.masses(observed.first, call.k.shape[2], call.k.device),
            "first": observed.first,
            "queries": observed.queries,
        }
        of_prefix = PrefixSinkScores(PREFIX)
        longest = max(call.q.shape[2], call.k.shape[2])
        short, pooled = self.keeps_weights(call.q.shape[2], call.k.shape[2]), self.map_bins > 0
        further: dict[str, Any] = {
            "bins": longest if short else self.map_bins if pooled else None,  # a bin of one pair has its weight
            "statistics": (*UNFUSED, *self.statistics, of_prefix),
            "value_norms": norms,
        }
        if result is None:
            result, rows, statistics = measured(call, output=output, **options, **further)
        else:
            rows = row_state(call, None if result.lse is None else result.lse.detach())
            statistics = sweep(call, rows, **options, **further)
        statistics = in_shares(call, statistics, statistics=[of_prefix], **options)
        if not short:
            return result, statistics, None
        assert statistics.thumbnail is not None
        weights = statistics.thumbnail.mean
        small = thumbnail(weights, self.map_bins) if pooled else None
        return result, statistics.with_thumbnail(small), weights

    def record(
        self,
        observed: ObservedCall,
        result: Result | None = None,
        changed: Mapping[int, Call] | None = None,
        vectors: Callable[..., dict[str, Tensor]] | None = None,
    ) -> tuple[Result, Record]:
        """Measure a call of a whole text.

        Args:
            observed: the call.
            result: its result, if it has been computed.
            changed: the calls of single heads whose weights an edit changed.
            vectors: as in `ObservedCall.vectors`.
        """
        about = observed.vectors(vectors)
        norms = about.get("value_norm") if observed.call.values is None else None
        result, statistics, weights = self.of(observed, result, norms)
        assert result is not None
        patches = self.patches.get(observed.group)
        if patches is not None and patches.place.shape[1] == observed.call.q.shape[2] == observed.call.k.shape[2]:
            most = self.map_tokens**2 if weights is None else 0
            about |= image_shares(observed, statistics, patches, most)
        if isinstance(observed.call.pairwise, HiddenMap):
            about |= observed.call.pairwise.signed(self.map_bins, whole=weights is not None)
        record = Record(
            observed.module, observed.group, observed.layer, statistics, about, weights, observed.queries,
            observed.keys, observed.causal,
        )  # fmt: skip
        others: dict[int, Record] = {}  # several heads may share a call
        for head, call in (changed or {}).items():
            if id(call) not in others:
                _, others[id(call)] = self.record(replace(observed, call=detached(call)))
            record = record.with_head(head, others[id(call)])
        return result, record


Receive = Callable[[ObservedCall, Result | None, Mapping[int, Call]], Result]
"""Receives an observed call, its result after the edits, and the calls of single heads whose weights an edit changed;
returns the result. If the result is None, the receiver computes it."""


class Recorder:
    """Receives the calls of one forward, and measures them together with their results."""

    def __init__(self, measures: Measures | None = None) -> None:
        self.measures, self.records = measures or Measures(), list[Record]()
        self.vectors, self.held = Together(geometry), 0
        self.group: ProcessGroup | None = None
        """The processes that share the sequence, if there are several."""

    def __call__(self, observed: ObservedCall, result: Result | None, changed: Mapping[int, Call]) -> Result:
        result, record = self.measures.record(observed, result, changed, self.vectors.add)
        self.records.append(record)
        if not on_card(record.statistics.received):
            refuse_nan(record.module, record.statistics, record.edited)
            return result
        self.held += sum(x.nbytes for x in tensors_of((record.statistics, record.weights)))
        if self.held > ON_CARD:
            self._fetch()
        return result

    def finish(self) -> None:
        """Measure what waits for more calls of the same sizes, and copy what is on a card."""
        self.vectors.finish()
        self._fetch()

    def _fetch(self) -> None:
        """Copy the numbers of all layers that are on a card to the CPU together, and refuse NaN there."""
        waiting = [
            i
            for i, record in enumerate(self.records)
            if any(map(on_card, (record.statistics.received, *record.geometry.values())))
        ]
        records = [self.records[i] for i in waiting]
        copies = copied_to_cpu(tuple((r.statistics, r.weights, r.geometry) for r in records))
        for i, record, (statistics, weights, of_call) in zip(waiting, records, copies, strict=True):
            record.geometry.update(of_call)
            with_directions(record.geometry)
            self.records[i] = replace(record, statistics=statistics, weights=weights)
            refuse_nan(record.module, statistics, record.edited)
        self.held = 0

    def shared(self, name: str, group: str, layer: int, shared: Shared, result: Result) -> None:
        """Measure a call that several processes make together: each records the statistics of the whole sequence."""
        if names := [s.name for s in self.measures.statistics]:
            raise InputError(
                f"statistics has {', '.join(names)}, but {name} shares its sequence with other processes, where custom "
                "statistics are not supported; expected none"
            )
        self.group, call = shared.group, detached(shared.call)
        mass, of_prefix = self.measures.masses(0, shared.grid.n_keys, call.k.device), [PrefixSinkScores(PREFIX)]
        statistics = sweep(call, RowState(result.lse), mass=mass, statistics=of_prefix, shared=shared)
        whole = mapped(replace(statistics, prefix_sink_scores=None), lambda x: ring.unshard(x, shared.group))
        whole = replace(whole, prefix_sink_scores=statistics.prefix_sink_scores)  # every process has all of them
        self.records.append(Record(name, group, layer, whole, {}, None, None, None, is_causal(call.mask)))


def refuse_nan(module: str, statistics: Statistics, edited: Sequence[int] = ()) -> None:
    """Raise `InputError` if some are NaN. This waits for a card; a `Recorder` copies those of all layers first.

    Heads that are `edited` may have a normalizer without a log-sum-exp.
    """
    for what, x in (("scores", statistics.lse), ("weights", statistics.received)):
        lost = None if x is None else x.isnan()
        if lost is not None and what == "scores":
            lost[:, list(edited)] = False
        if lost is not None and bool(lost.any()):
            raise nan_error(module, what)


@lru_cache(maxsize=8)
def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor that is the same in all layers, moved once: each copy to a card waits for what the card computes."""
    return x.to(device)


@lru_cache(maxsize=8)
def _streaming(first: int | Tensor, n_keys: int, device: torch.device) -> Streaming:
    return Streaming(first if isinstance(first, int) else on_device(first, device), n_keys)


def served(call: Call) -> Result:
    """The result of a call that the observer itself records."""
    with serving(None):
        return serve(call)


OF_IMAGES = ("image", "image_sink", "image_rows")
ROWS = 64  # of which the weights are formed at a time


def shares_of(call: Call, rows: slice) -> Iterator[tuple[int, Float[Tensor, "b h rows nk"]]]:
    """The weights of some rows of a call as shares of the row, `ROWS` at a time, with the number of the first row."""
    call = replace(call, values=None)
    for start in range(rows.start, rows.stop, ROWS):
        some = call.part(slice(start, min(start + ROWS, rows.stop)), slice(0, call.k.shape[2]))
        yield start, rows_in_shares(weights_of(some), call.normalizer)


def image_shares(observed: ObservedCall, statistics: Statistics, patches: Patches, most: int) -> dict[str, Tensor]:
    """What tokens of text attend to in images: the shares of patches, and of those that are sinks of the head.

    Rows are those of tokens after the first patch that belong to no image, or all rows if there are none, as in an
    encoder of images. A patch is a sink if its mean share, over the rows that may attend to it, is above the threshold.

    Args:
        observed: the call.
        statistics: its statistics, as shares of the row.
        patches: the patches among its keys.
        most: the largest number of weights of text on patches that are kept of each head, those of the last rows.
    """
    call, device = observed.call, observed.call.q.device
    is_patch = torch.from_numpy(~np.isnan(patches.place[..., 0])).to(device)
    b, n = is_patch.shape
    of_image = torch.tensor([[i in names for i in range(n)] for names in patches.names], device=device)
    rows = ~of_image & (is_patch.cumsum(1) > 0) & (True if observed.queries is None else observed.queries.bool())
    rows = torch.where(rows.any(1, keepdim=True), rows, True)
    visible = statistics.visible_queries
    enough = visible >= visible.amax(-1, keepdim=True).clamp(max=max(8, n / 8))  # as in `tables.sink_scores`
    sinks = enough & (statistics.received > SINK_THRESHOLD * visible) & is_patch[:, None]
    of_rows = torch.full((2, *call.q.shape[:3]), torch.nan, device=device)
    kept, counts, per_row = list[Tensor](), rows.sum(1), int(is_patch.sum(1).max())
    keep = min(most // max(per_row, 1), int(counts.min())) if b == 1 else 0
    last = int(rows[0].nonzero()[-keep]) if keep else n
    for start, weights in shares_of(call, slice(int(rows.any(0).to(torch.int8).argmax()), n)):
        some = slice(start, start + weights.shape[2])
        sums = torch.stack([(weights * part[:, :, None]).sum(-1) for part in (is_patch[:, None] & ~sinks, sinks)])
        of_rows[..., some] = torch.where(rows[:, None, some], sums.float(), torch.nan)
        chosen = rows[0, some] & (torch.arange(some.start, some.stop, device=device) >= last)
        kept.append(weights[:, :, chosen][..., is_patch[0]] if keep else weights[:, :, :0])
    shares = dict(zip(OF_IMAGES, (*of_rows, torch.cat(kept, 2)), strict=True))
    return shares if keep else {name: shares[name] for name in OF_IMAGES[:2]}


def weights_of(call: Call) -> Tensor:
    """The weights of a short call, in float32 or a wider dtype."""
    q, k, v = (x.to(at_least_float32(x.dtype)) for x in (call.q, call.k, call.v))
    weights = eager.forward(replace(call, q=q, k=k, v=v)).weights
    assert weights is not None
    return weights


T = TypeVar("T")


def mapped(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """The value with every tensor in tuples, mappings and dataclasses changed by a function."""
    result: Any = value
    if isinstance(value, Tensor):
        result = function(value)
    elif isinstance(value, tuple):
        result = tuple(mapped(x, function) for x in value)
    elif isinstance(value, Mapping):
        result = {name: mapped(x, function) for name, x in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        result = replace(value, **{f.name: mapped(getattr(value, f.name), function) for f in fields(value)})
    return result


def of_items(value: T, items: Int[Tensor, " b"]) -> T:
    """The value with some batch items of all its tensors."""
    return mapped(value, lambda x: x[items.to(x.device)])


def tensors_of(values: object) -> list[Tensor]:
    """All tensors in tuples, mappings and dataclasses."""
    tensors: list[Tensor] = []
    mapped(values, lambda x: tensors.append(x) or x)  # type: ignore[func-returns-value]
    return tensors


def copied_to_cpu(values: T) -> T:
    """The values with copies of all tensors that are on a card, made by one transfer from each card."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for x in filter(on_card, tensors_of(values)):
        by_device.setdefault(x.device, []).append(x)
    copies: dict[int, Tensor] = {}
    for tensors in by_device.values():
        tensors.sort(key=lambda x: -x.itemsize)  # so that each is aligned
        flat = (x.contiguous().as_strided((x.numel(),), (1,)) for x in tensors)
        together = torch.cat([x.view(torch.uint8) for x in flat]).cpu()
        parts = together.split([x.nbytes for x in tensors])
        copies |= {id(x): part.view(x.dtype).view(x.shape) for x, part in zip(tensors, parts, strict=True)}
    return mapped(values, lambda x: copies.get(id(x), x))


ON_CARD = 2**28  # bytes of the statistics that stay on a card until they are copied together
TOGETHER, TOGETHER_ON_CARD = 2**23, 2**27
"""Bytes of the tensors that are summarised together: on a CPU they stay in its cache, on a card they save launches."""


class Together:
    """Summarises tensors of equal sizes together: on a short text an operation costs more than its numbers.

    Args:
        summarise: gives tensors by name; the first dimension of its tensors and its results is the batch. Its other
            arguments are equal for all that are summarised together.
    """

    def __init__(self, summarise: Callable[..., dict[str, Tensor]]) -> None:
        self.summarise = summarise
        self.waiting: dict[Any, list[tuple[list[Any], dict[str, Tensor]]]] = {}

    def add(self, *arguments: Tensor | int | None) -> dict[str, Tensor]:
        """A mapping that has the summary of these tensors at the latest after `finish`.

        The tensors are copied, because the model may change them in place; large ones are summarised at once.
        """
        summary = dict[str, Tensor]()
        size, kind = 0, list[Any]()
        for x in arguments:
            size += x.nbytes if isinstance(x, Tensor) else 0
            kind.append((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x)
        most = TOGETHER_ON_CARD if any(on_card(x) for x in arguments if isinstance(x, Tensor)) else TOGETHER
        with torch.inference_mode(False), torch.no_grad():
            if 2 * size > most:
                summary.update(self.summarise(*arguments))
                return summary
            copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        waiting = self.waiting.setdefault(tuple(kind), [])
        waiting.append((copies, summary))
        if (len(waiting) + 1) * size > most:
            self._summarise(tuple(kind))
        return summary

    def finish(self) -> None:
        """Summarise all that waits."""
        for kind in list(self.waiting):
            self._summarise(kind)

    def _summarise(self, kind: Any) -> None:
        arguments, results = zip(*self.waiting.pop(kind), strict=True)
        with torch.inference_mode(False), torch.no_grad():
            columns = zip(*arguments, strict=True)
            together = self.summarise(*(torch.cat(x) if isinstance(x[0], Tensor) else x[0] for x in columns))
            for name, values in together.items():
                for summary, value in zip(results, values.chunk(len(results)), strict=True):
                    summary[name] = value


# --- lengths and directions: the key of a sink is short but has the direction of all queries, and its value is small --

DIRECTIONS = 3  # number of principal directions of the keys whose share of the variance is reported


def geometry(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    first: int | Int[Tensor, " b"],
    queries: Bool[Tensor, "b nq"] | None = None,
    keys: Bool[Tensor, "b nk"] | None = None,
    learned: Float[Tensor, "b h d"] | None = None,
) -> dict[str, Tensor]:
    """Lengths and directions of the queries and keys of a call, after projection and rotary positions.

    Args:
        q: queries.
        k: keys.
        first: position of the first key of the text.
        queries: True at real queries; all if None.
        keys: True at real keys; all if None.
        learned: the learned key of the normalizer, if it has one.

    Returns:
        ``query_norm`` (b, h, nq), ``key_norm`` (b, h, nk); (b, h): ``cosine_first``, mean cosine
        of the queries to the first key, ``cosine_others``, to all other keys, ``first_key_angle``, degrees between the
        first key and the mean of the others, ``key_bias_cosine``, mean cosine of the queries to the learned key;
        and ``key_directions`` (b, h, 3), shares of the variance of the keys along their first principal directions. On
        a card ``key_scatter`` (b, hkv, m, m), products of the centred keys, of which `with_directions` makes them.
    """
    wide = at_least_float32(q.dtype)
    group = q.shape[1] // k.shape[1]
    real_q, real_k = _real(queries, q), _real(keys, k)  # padding may hold NaN
    q, k = (
        x.to(wide) if real is None else x.to(wide).masked_fill(~real[:, None, :, None], 0)
        for x, real in ((q, queries), (k, keys))
    )
    query_norm, key_norm = (torch.linalg.vector_norm(x, dim=-1) for x in (q, k))
    at = first if isinstance(first, int) else first[:, None, None]
    other = (real_k & (torch.arange(k.shape[2], device=k.device) != at)).to(wide)

    query = _mean(q, real_q.to(wide), query_norm)
    first_key = k[:, :, at] if isinstance(at, int) else k.take_along_dim(at[..., None], 2)[:, :, 0]
    rest = _mean(k, other)
    summary = {
        "query_norm": query_norm,
        "key_norm": _of_query_heads(key_norm, group),
        "cosine_first": (query * _of_query_heads(_unit(first_key), group)).sum(-1),
        "cosine_others": (query * _of_query_heads(_mean(k, other, key_norm), group)).sum(-1),
        "first_key_angle": _of_query_heads(_angle(first_key, rest), group),
        "key_scatter": _scatter(k, keys),
    }
    single = other.sum(2) == 0  # a text of one token has no other keys
    for name in ("cosine_others", "first_key_angle"):
        summary[name] = summary[name].masked_fill(single, torch.nan)
    if learned is not None:
        summary["key_bias_cosine"] = (query * _unit(learned.to(query))).sum(-1)
    return summary if on_card(k) else with_directions(summary)


def with_directions(summary: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `geometry` gives, with the directions of the keys in place of their scatter; a card is waited for."""
    if (scatter := summary.pop("key_scatter", None)) is not None:
        shares = leading_shares(scatter, DIRECTIONS)
        summary["key_directions"] = _of_query_heads(shares, summary["key_norm"].shape[1] // scatter.shape[1])
    return summary


def value_norms(call: Call, keys: Bool[Tensor, "b nk"] | None) -> Float[Tensor, "b h nk"]:
    """Euclidean norms of the values, 0 at padding; `keys` is True at real keys."""
    norms = torch.linalg.vector_norm(call.v.detach(), dim=-1, dtype=at_least_float32(call.v.dtype))
    norms = norms if keys is None else torch.where(keys[:, None], norms, 0)  # padding may hold NaN
    return _of_query_heads(norms, call.q.shape[1] // call.v.shape[1])


def _real(mask: Tensor | None, x: Tensor) -> Bool[Tensor, "b 1 n"]:
    if mask is None:
        return torch.ones(len(x), 1, x.shape[2], dtype=torch.bool, device=x.device)
    return mask[:, None]


def _mean(
    x: Float[Tensor, "b h n d"], weights: Float[Tensor, "b 1 n"], norm: Float[Tensor, "b h n"] | None = None
) -> Float[Tensor, "b h d"]:
    """The mean of the vectors whose weight is 1, or of their directions if `norm` has their lengths."""
    count = weights.sum(2).clamp(min=1)
    by = weights if norm is None else weights / norm.clamp(min=torch.finfo(x.dtype).tiny)
    return (by.expand(x.shape[:3])[:, :, None] @ x)[:, :, 0] / count[..., None]


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _of_query_heads(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, 1)


def _angle(a: Float[Tensor, "b h d"], b: Float[Tensor, "b h d"]) -> Float[Tensor, "b h"]:
    """Angle in degrees, as 2·atan2 of the norms of difference and sum: the arc cosine is inexact at small angles."""
    a, b = _unit(a), _unit(b)
    return torch.rad2deg(2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)))


def _scatter(k: Float[Tensor, "b h n d"], keys: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b h m m"]:
    """Sums of products of the centred keys, over keys or over dimensions, whichever are fewer in the result."""
    centred = k - _mean(k, _real(keys, k).to(k.dtype))[:, :, None]
    if keys is not None:
        centred = centred * keys[:, None, :, None]
    few = k.shape[2] < k.shape[3]  # then the smaller matrix of products of keys has the same eigenvalues
    return centred @ centred.mT if few else centred.mT @ centred
