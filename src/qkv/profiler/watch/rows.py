"""Statistics of a few queries from their weights, at any positions of the keys.

A step of generation has one query, so its weights are one row and need no tiles. A cache may have evicted keys, so the
positions of the keys are given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.engine import Call
from qkv.kernels import eager
from qkv.masks import Region
from qkv.statistics import Streaming
from qkv.statistics.measure import rows_in_shares

SUMS = (
    "mass", "away", "away²", "distance", "sink", "self_", "previous", "next_", "local", "streaming_mass",
    "entropy", "effective_keys", "visible", "lse", "sink_mass", "row_sum", "contributions", "first_contribution",
)  # fmt: skip
"""Columns of `Rows.sums`: the first ten are sums of weights times a number of each pair."""


@dataclass(frozen=True, eq=False)
class Places:
    """Positions in the text of the queries and keys of a call; the layers of a forward share them."""

    queries: Int[Tensor, " nq"]
    keys: Int[Tensor, "*b nk"]
    """(nk,), or (b, hkv, nk) if each key head holds other keys."""
    first: int | Int[Tensor, " b"]
    """The position of the first key of the text, by batch item if there is padding on the left."""
    local_window: int

    def of_heads(self, heads: int) -> Int[Tensor, "#b #h nk"]:
        if self.keys.ndim == 1:
            return self.keys[None, None]
        return self.keys.repeat_interleave(heads // self.keys.shape[1], 1)

    @cached_property
    def first_of(self) -> Int[Tensor, "#b 1 1"]:
        return torch.as_tensor(self.first, device=self.keys.device).view(-1, 1, 1)

    @cached_property
    def shared_columns(self) -> Float[Tensor, "#b #h nq nk columns"]:
        return self.columns(1)

    def columns(self, heads: int) -> Float[Tensor, "#b #h nq nk columns"]:
        """The number of each pair by which its weight is multiplied for each of the first ten sums."""
        at = self.of_heads(heads)[:, :, None]
        away = at - self.queries[:, None]
        of_text, near = at - self.first_of[..., None], away.abs()
        streamed = ((of_text >= 0) & (of_text < Streaming.first_keys)) | (near < Streaming.last_keys)
        columns = (
            torch.ones_like(away), away, away * away, near, of_text == 0, away == 0, away == -1, away == 1,
            near <= self.local_window, streamed,
        )  # fmt: skip
        shape = torch.broadcast_shapes(*(x.shape for x in columns))
        return torch.stack([x.expand(shape).double() for x in columns], -1)


@dataclass(frozen=True, eq=False)
class Rows:
    """What a few queries add to the statistics of a sequence."""

    sums: Float[Tensor, "b h nq sums"]
    received: Float[Tensor, "b h nk"]
    visible_queries: Float[Tensor, "#b #h nk"]
    weights: Float[Tensor, "b h nq nk"]
    """As they are, not divided by the sum of their row."""
    shares: Float[Tensor, "b h nq nk"]
    visible: Bool[Tensor, "#b #h nq nk"] | None
    missing: frozenset[str]
    """What was not measured, and is 0 in `sums`."""


def rows_of(call: Call, places: Places, value_norms: Float[Tensor, "b h nk"] | None) -> Rows:
    """The statistics of every query of a call that has few scores; weights are formed.

    The weights are shares of their row, as in a profile, except those of `row_sum`.
    """
    if call.q.dtype.itemsize < 4:
        call = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    found = eager.forward(call)
    assert found.weights is not None
    row_sum = found.weights.sum(-1)
    weights = rows_in_shares(found.weights, call.normalizer)
    b, h, n_queries, n_keys = weights.shape
    visible = None
    if call.mask is not None:
        visible = call.mask.visible(Region(slice(0, n_queries), slice(0, n_keys)), call.grid)
    columns = places.shared_columns if places.keys.ndim == 1 else places.columns(h)
    wide = weights.double()
    sums = torch.empty(b, h, n_queries, len(SUMS), dtype=torch.float64, device=weights.device)
    sums[..., :10] = (wide[..., None, :] @ columns)[..., 0, :]
    sums[..., 10] = torch.special.entr(wide).sum(-1)
    sums[..., 11] = wide.square().sum(-1)
    sums[..., 12] = n_keys if visible is None else visible.sum(-1)
    if found.lse is not None:
        sums[..., 13] = found.lse
        if call.sink is not None:
            empty = found.lse == -torch.inf
            sums[..., 14] = torch.exp(call.sink - found.lse.masked_fill(empty, 0)).masked_fill(empty, 0)
    sums[..., 15] = row_sum
    if value_norms is not None:
        contributions = wide * value_norms[:, :, None]
        sums[..., 16], sums[..., 17] = contributions.sum(-1), (contributions * columns[..., 4]).sum(-1)
    number = weights.new_full((1, 1, n_keys), n_queries) if visible is None else visible.sum(2).to(weights)
    missing = {
        "lse": found.lse is None,
        "sink_mass": found.lse is None or call.sink is None,
        "first_contribution": value_norms is None,
    }
    names = frozenset(name for name, is_missing in missing.items() if is_missing)
    return Rows(sums, weights.sum(2), number, found.weights, weights, visible, names)


def by_query(sums: Float[Tensor, "b h nq sums"]) -> dict[str, Float[Tensor, "b h nq"]]:
    """The statistics of each query, from `Rows.sums`."""
    found = dict(zip(SUMS, sums.unbind(-1), strict=True))
    mass = found.pop("mass")
    some = mass > 0
    safe = torch.where(some, mass, 1.0)
    mean, mean2 = found.pop("away") / safe, found.pop("away²") / safe
    squares, contributions = found["effective_keys"], found.pop("contributions")
    return found | {
        "first_contribution": found["first_contribution"] / torch.where(contributions > 0, contributions, 1.0),
        "distance": found["distance"] / safe,
        "spread": (mean2 - mean.square()).clamp(min=0).sqrt(),
        "entropy": torch.where(some, found["entropy"] / safe + safe.log(), 0.0).clamp(min=0),
        "effective_keys": torch.where(some, mass.square() / torch.where(squares > 0, squares, 1.0), 0.0),
    }
