"""What is recorded of an attention call: `ObservedCall`, the call itself, or `Record`, its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from qkv.engine import Call, Result, at_least_float32, detached
from qkv.errors import InputError
from qkv.kernels import eager
from qkv.masks import Mask
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
