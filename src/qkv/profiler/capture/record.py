"""What is recorded of an attention call: `ObservedCall`, the call itself as it is read, or `Record`, its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from qkv import ring
from qkv.engine import Call, Result, RowState, Shared, at_least_float32, detached
from qkv.errors import InputError
from qkv.huggingface.attention import is_causal
from qkv.kernels import eager, serve, serving
from qkv.masks import Mask
from qkv.native.binding import leading_shares, thumbnail
from qkv.normalizers import SumToOne
from qkv.profiler.capture.inputs import nan_error
from qkv.profiler.data.variables import UNFUSED
from qkv.statistics import Local, PrefixSinkScores, Statistic, Streaming
from qkv.statistics.measure import in_shares, measured, row_state, sweep
from qkv.statistics.result import Statistics, with_head

PREFIX = 64  # number of first tokens that have sink scores (Gu et al. 2025, arXiv:2410.10781, section 3)
WEIGHTS_ONLY = ("softmax", "outputs", "returned")  # sources that give weights, but no queries, keys and values


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
        return replace(self, statistics=with_head(self.statistics, other.statistics, head), weights=weights)


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
    first: int | Tensor  # position of the first key of the text, by batch item if there is padding on the left
    causal: bool
    source: str  # as in `attrs["sources"]` of `qkv.profile`; a source in `WEIGHTS_ONLY` has no vectors (v is NaN)
    own: int = 0
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
        first = torch.as_tensor(self.first, device=call.k.device).expand(b)
        found = (of or geometry)(call.q, call.k, first, self.queries, self.keys, learned)
        found["value_norm"] = value_norms(call, self.keys)
        return found


@dataclass(frozen=True)
class Measures:
    """What is measured of a call."""

    local_window: int = 8
    map_tokens: int = 384
    map_bins: int = 64
    statistics: Sequence[Statistic] = ()

    def masses(self, first: int | Tensor, n_keys: int) -> dict[str, Mask]:
        """The masks inside which the attention mass is measured, by statistic."""
        return {s.name: s.mask for s in (Local(self.local_window), Streaming(first, n_keys))}

    def of(
        self, observed: ObservedCall, result: Result | None = None, norms: Tensor | None = None
    ) -> tuple[Result, Statistics, Tensor | None]:
        """Result, statistics, and the weights of a short call.

        Args:
            observed: the call.
            result: its result, if it has been computed.
            norms: the norms of its values, without which there is no ``first_contribution``.
        """
        call = detached(observed.call)
        options: dict[str, Any] = {
            "mass": self.masses(observed.first, call.k.shape[2]),
            "first": observed.first,
            "queries": observed.queries,
        }
        of_prefix = PrefixSinkScores(PREFIX)
        longest = max(call.q.shape[2], call.k.shape[2])
        short, pooled = longest <= self.map_tokens, self.map_bins > 0
        further: dict[str, Any] = {
            "bins": longest if short else self.map_bins if pooled else None,  # a bin of one pair has its weight
            "statistics": (*UNFUSED, *self.statistics, of_prefix),
            "value_norms": norms,
        }
        if result is None:
            result, rows, statistics = measured(call, output=True, **options, **further)
            assert result is not None
        else:
            rows = row_state(call, None if result.lse is None else result.lse.detach())
            statistics = sweep(call, rows, **options, **further)
        statistics = in_shares(call, statistics, statistics=[of_prefix], **options)
        nan = statistics.received.isnan().any()
        nan = nan if result.lse is None else nan | result.lse.isnan().any()
        if nan:  # one synchronization with a GPU a layer
            what = "scores" if result.lse is not None and result.lse.isnan().any() else "weights"
            raise nan_error(observed.module, what)
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
        if statistics.entropy.device.type != "cpu":  # those of all layers could fill a card
            statistics, copies, weights = copied_to_cpu((statistics, about, weights))
            about.update(copies)
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
        self.vectors = Together(geometry)
        self.group: ProcessGroup | None = None
        """The processes that share the sequence, if there are several."""

    def __call__(self, observed: ObservedCall, result: Result | None, changed: Mapping[int, Call]) -> Result:
        result, record = self.measures.record(observed, result, changed, self.vectors.add)
        self.records.append(record)
        return result

    def finish(self) -> None:
        """Measure what waits for more calls of the same sizes."""
        self.vectors.finish()
        for record in self.records:
            if on_card := {name: x for name, x in record.geometry.items() if x.device.type != "cpu"}:
                record.geometry.update(copied_to_cpu(on_card))

    def shared(self, name: str, group: str, layer: int, shared: Shared, result: Result) -> None:
        """Measure a call that several processes make together: each records the statistics of the whole sequence."""
        if names := [s.name for s in self.measures.statistics]:
            raise InputError(
                f"statistics has {', '.join(names)}, but {name} shares its sequence with other processes, where custom "
                "statistics are not supported; expected none"
            )
        self.group, call = shared.group, detached(shared.call)
        mass, of_prefix = self.measures.masses(0, shared.grid.n_keys), [PrefixSinkScores(PREFIX)]
        found = sweep(call, RowState(result.lse), mass=mass, statistics=of_prefix, shared=shared)
        whole = mapped(replace(found, prefix_sink_scores=None), lambda x: ring.unshard(x, shared.group))
        whole = replace(whole, prefix_sink_scores=found.prefix_sink_scores)  # every process has all of them
        self.records.append(Record(name, group, layer, whole, {}, None, None, None, is_causal(call.mask)))


def served(call: Call) -> Result:
    """The result of a call that the observer itself records."""
    with serving(None):
        return serve(call)


def weights_of(call: Call) -> Tensor:
    """The weights of a short call, in float32 or a wider dtype."""
    q, k, v = (x.to(at_least_float32(x.dtype)) for x in (call.q, call.k, call.v))
    weights = eager.forward(replace(call, q=q, k=k, v=v)).weights
    assert weights is not None
    return weights


T = TypeVar("T")


def mapped(value: T, one: Callable[[Tensor], Tensor]) -> T:
    """The value with every tensor in tuples, mappings and dataclasses changed by a function."""
    found: Any = value
    if isinstance(value, Tensor):
        found = one(value)
    elif isinstance(value, tuple):
        found = tuple(mapped(x, one) for x in value)
    elif isinstance(value, Mapping):
        found = {name: mapped(x, one) for name, x in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        found = replace(value, **{f.name: mapped(getattr(value, f.name), one) for f in fields(value)})
    return found


def of_items(value: T, items: Int[Tensor, " b"]) -> T:
    """The value with some batch items of all its tensors."""
    return mapped(value, lambda x: x[items.to(x.device)])


def copied_to_cpu(values: T) -> T:
    """The values with float32 copies of all tensors, made by one transfer."""
    tensors: list[Tensor] = []
    mapped(values, lambda x: tensors.append(x) or x)  # type: ignore[func-returns-value]
    together = torch.cat([x.reshape(-1).float() for x in tensors]).cpu()
    copies = iter(together.split([x.numel() for x in tensors]))
    return mapped(values, lambda x: next(copies).view(x.shape))


TOGETHER = 2**23  # bytes of the tensors that are summarised together: they stay in the cache of a processor


class Together:
    """Summarises tensors of equal sizes together: on a short text an operation costs more than its numbers.

    Args:
        summarise: gives tensors by name; the first dimension of its arguments and its results is the batch.
    """

    def __init__(self, summarise: Callable[..., dict[str, Tensor]]) -> None:
        self.summarise = summarise
        self.waiting: dict[Any, list[tuple[list[Tensor | None], dict[str, Tensor]]]] = {}

    def add(self, *tensors: Tensor | None) -> dict[str, Tensor]:
        """A mapping that has the summary of these tensors at the latest after `finish`.

        The tensors are copied, because the model may change them in place; large ones are summarised at once.
        """
        found = dict[str, Tensor]()
        size = sum(x.nbytes for x in tensors if x is not None)
        with torch.inference_mode(False), torch.no_grad():
            if 2 * size > TOGETHER:
                found.update(self.summarise(*tensors))
                return found
            copies = [None if x is None else x.clone() for x in tensors]
        kind = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in tensors)
        waiting = self.waiting.setdefault(kind, [])
        waiting.append((copies, found))
        if (len(waiting) + 1) * size > TOGETHER:
            self._summarise(kind)
        return found

    def finish(self) -> None:
        """Summarise all that waits."""
        for kind in list(self.waiting):
            self._summarise(kind)

    def _summarise(self, kind: Any) -> None:
        tensors, results = zip(*self.waiting.pop(kind), strict=True)
        with torch.inference_mode(False), torch.no_grad():
            columns = zip(*tensors, strict=True)
            together = self.summarise(*(None if column[0] is None else torch.cat(column) for column in columns))
            for name, values in together.items():
                for one, value in zip(results, values.chunk(len(results)), strict=True):
                    one[name] = value


# --- lengths and directions: the key of a sink is short but has the direction of all queries, and its value is small --

DIRECTIONS = 3  # number of principal directions of the keys whose share of the variance is reported


def geometry(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    first: Int[Tensor, " b"],
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
        and ``key_directions`` (b, h, 3), shares of the variance of the keys along their first principal directions.
    """
    wide = at_least_float32(q.dtype)
    group = q.shape[1] // k.shape[1]
    real_q, real_k = _real(queries, q), _real(keys, k)
    q, k = (_without_padding(x.to(wide), real) for x, real in ((q, queries), (k, keys)))
    query_norm, key_norm = (torch.linalg.vector_norm(x, dim=-1) for x in (q, k))
    is_first = torch.arange(k.shape[2], device=k.device) == first[:, None]
    other = (real_k & ~is_first[:, None]).to(wide)

    query = _mean(q, real_q.to(wide), query_norm)
    first_key = k.gather(2, first[:, None, None, None].expand(-1, k.shape[1], 1, k.shape[3]))[:, :, 0]
    rest = _mean(k, other)
    found = {
        "query_norm": query_norm,
        "key_norm": _of_query_heads(key_norm, group),
        "cosine_first": (query * _of_query_heads(_unit(first_key), group)).sum(-1),
        "cosine_others": (query * _of_query_heads(_mean(k, other, key_norm), group)).sum(-1),
        "first_key_angle": _of_query_heads(_angle(first_key, rest), group),
        "key_directions": _of_query_heads(leading_shares(_scatter(k, real_k), DIRECTIONS), group),
    }
    single = other.sum(2) == 0  # a text of one token has no other keys
    for name in ("cosine_others", "first_key_angle"):
        found[name] = found[name].masked_fill(single, torch.nan)
    if learned is not None:
        found["key_bias_cosine"] = (query * _unit(learned.to(query))).sum(-1)
    return found


def value_norms(call: Call, keys: Bool[Tensor, "b nk"] | None) -> Float[Tensor, "b h nk"]:
    """Euclidean norms of the values, 0 at padding; `keys` is True at real keys."""
    v = _without_padding(call.v.detach().to(at_least_float32(call.v.dtype)), keys)
    return _of_query_heads(torch.linalg.vector_norm(v, dim=-1), call.q.shape[1] // call.v.shape[1])


def _real(mask: Tensor | None, x: Tensor) -> Bool[Tensor, "b 1 n"]:
    if mask is None:
        return torch.ones(len(x), 1, x.shape[2], dtype=torch.bool, device=x.device)
    return mask[:, None]


def _without_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """Set padding to 0, because it may hold NaN."""
    return x if real is None else x.masked_fill(~real[:, None, :, None], 0)


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


def _scatter(k: Float[Tensor, "b h n d"], real: Bool[Tensor, "b 1 n"]) -> Float[Tensor, "b h m m"]:
    """Sums of products of the centred keys, over keys or over dimensions, whichever are fewer in the result."""
    centred = k - _mean(k, real.to(k.dtype))[:, :, None]
    if not real.all():
        centred = centred * real[..., None]
    few = k.shape[2] < k.shape[3]  # then the smaller matrix of products of keys has the same eigenvalues
    return centred @ centred.mT if few else centred.mT @ centred
