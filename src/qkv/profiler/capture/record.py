"""What is recorded of an attention call: `ObservedCall`, the call itself as it is read, or `Record`, its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qkv.edits import with_head
from qkv.engine import Call, Result, at_least_float32, detached
from qkv.errors import InputError
from qkv.huggingface.client import is_known, name_of
from qkv.huggingface.masks import LazyMask
from qkv.kernels import eager, serve, serving
from qkv.masks import And, Causal, Dense, Grid, Mask, Window
from qkv.profiler.capture.residual import geometry, value_norms
from qkv.profiler.data.variables import UNFUSED
from qkv.statistics import Local, Statistic, Streaming
from qkv.statistics.measure import in_shares, measured, row_state, sweep
from qkv.statistics.result import Statistics

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

    @property
    def vectors(self) -> dict[str, Tensor]:
        """Lengths and directions of queries, keys and values, if the call has them."""
        if self.source in WEIGHTS_ONLY:
            return {}
        return geometry(detached(self.call), self.first, self.queries, self.keys)


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
        self, observed: ObservedCall, result: Result | None = None, norms: Tensor | None = None, *, whole: bool = True
    ) -> tuple[Result, Statistics, Tensor | None]:
        """Result, statistics, and the weights of a short call.

        Args:
            observed: the call.
            result: its result, if it has been computed.
            norms: the norms of its values, without which there is no ``first_contribution``.
            whole: the call has all queries of the text, and not only some of them, which have no small map.
        """
        call = detached(observed.call)
        options: dict[str, Any] = {
            "mass": self.masses(observed.first, call.k.shape[2]),
            "first": observed.first,
            "queries": observed.queries,
            "prefix_keys": PREFIX,
        }
        further: dict[str, Any] = {
            "bins": self.map_bins if whole and self.map_bins else None,
            "statistics": (*UNFUSED, *self.statistics),
            "value_norms": norms,
        }
        if result is None:
            result, rows, statistics = measured(call, output=True, **options, **further)
            assert result is not None
        else:
            rows = row_state(call, None if result.lse is None else result.lse.detach())
            statistics = sweep(call, rows, **options, **further)
        statistics = in_shares(call, statistics, **options)
        nan = statistics.received.isnan().any()
        nan = nan if result.lse is None else nan | result.lse.isnan().any()
        if nan:  # one synchronization with a GPU a layer
            what = "scores" if result.lse is not None and result.lse.isnan().any() else "weights"
            raise InputError(
                f"model computes {what} that are NaN in {observed.module}: its parameters or its inputs contain NaN"
            )
        short = max(call.q.shape[2], call.k.shape[2]) <= self.map_tokens
        return result, statistics, weights_of(call) if short else None

    def record(
        self, observed: ObservedCall, result: Result | None = None, changed: Mapping[int, Call] | None = None
    ) -> tuple[Result, Record]:
        """Measure a call of a whole text.

        Args:
            observed: the call.
            result: its result, if it has been computed.
            changed: the calls of single heads whose weights an edit changed.
        """
        result, statistics, weights = self.of(observed, result, observed.norms)
        found = (statistics, observed.vectors, weights)
        if statistics.entropy.device.type != "cpu":
            found = copied_to_cpu(found)  # those of all layers could fill a card
        record = Record(
            observed.module, observed.group, observed.layer, *found, observed.queries, observed.keys, observed.causal
        )
        others: dict[int, Record] = {}  # several heads may share a call
        for head, call in (changed or {}).items():
            if id(call) not in others:
                _, others[id(call)] = self.record(replace(observed, call=detached(call)))
            record = record.with_head(head, others[id(call)])
        return result, record


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


def copied_to_cpu(values: T) -> T:
    """The values with float32 copies of all tensors, made by one transfer."""
    tensors: list[Tensor] = []
    mapped(values, lambda x: tensors.append(x) or x)  # type: ignore[func-returns-value]
    together = torch.cat([x.reshape(-1).float() for x in tensors]).cpu()
    copies = iter(together.split([x.numel() for x in tensors]))
    return mapped(values, lambda x: next(copies).view(x.shape))


# --- how the arguments of an attention function are read --------------------------------------------------------------


def readings(
    module: nn.Module,
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **others: Any,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Any, dict[str, Any]]]:
    """The arguments of an attention function, in each way in which they can be meant.

    Transformers passes no mask to a function that has no mask function of its own, and some functions apply the
    causality of the module, or its window, by themselves: FlashAttention the window, torch's SDPA not, which aligns
    the first query with the first key. A tensor of 2 dimensions marks the real keys.
    """
    described = getattr(attention_mask, "qkv_mask", None)
    if described is not None and described.shape[2:] == (query.shape[2], key.shape[2]):
        yield query, key, value, described, others
        return
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        yield query, key, value, attention_mask, others
        return
    n_queries, n_keys = query.shape[2], key.shape[2]
    real = None if attention_mask is None else attention_mask[:, None, None, -n_keys:].bool()
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    window = others.get("sliding_window")
    masks: list[Mask | None] = [Causal() if causal and n_queries > 1 else None]
    flash = "flash" in name_of(function)
    if causal and isinstance(window, int) and (flash or not is_known(function)):
        masks = [Window(window), *masks]
    masks = masks[:1] if is_known(function) else [*masks, None] if masks[-1] is not None else masks
    used = n_queries if masks[0] is not None and is_known(function) and not flash else n_keys  # of a static cache
    grid = Grid(len(query), 1, n_queries, used, used - n_queries, query.device)
    for mask in masks:
        whole = mask if real is None else Dense(real) if mask is None else mask & Dense(real)
        keys = None if real is None else real[:, 0, 0]
        yield query, key, value, LazyMask(whole, grid, query.dtype, keys, n_keys), others


def served(call: Call) -> Result:
    """The result of a call that the observer itself records."""
    with serving(None):
        return serve(call)


def is_causal(mask: Mask | None) -> bool:
    """True if no query can attend to a later key."""
    match mask:
        case None:
            return False
        case And(left, right):
            return is_causal(left) or is_causal(right)
        case Dense(tensor):
            n_queries, n_keys = tensor.shape[2:]
            offset = n_keys - n_queries
            to_self = n_queries > 1 and bool(tensor.diagonal(offset, 2, 3).any())  # queries and keys are one text
            return to_self and not bool(tensor.triu(offset + 1).any())
    return mask.band is not None and mask.band[0] >= 0
