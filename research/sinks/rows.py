"""Rows of attention weights: how much each query gives the first token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._engine.call import Call
from qkv.masks import Region
from qkv.statistics.measure import measured
from research.sinks.criteria import SINK


def visible(call: Call) -> Bool[Tensor, "b h n n"]:
    """Which keys each query sees; b and h are 1 where all are the same."""
    n = call.q.shape[2]
    if call.mask is None:
        return torch.ones(1, 1, n, n, dtype=torch.bool, device=call.q.device)
    return call.mask.visible(Region(slice(0, n), slice(0, n)), call.grid)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one layer."""

    first: Float[Tensor, "b h n"]
    """The weight on the first token; 0 where it is masked."""
    entropy: Float[Tensor, "b h n"]
    sees_first: Bool[Tensor, "b h n"]
    visible: Int[Tensor, "b h n"]
    """The number of visible keys."""

    @staticmethod
    def of(call: Call) -> Rows:
        """Measure the rows of a call."""
        found = measured(call, first=0)[2]
        sees = visible(call)
        first, count = sees[..., 0].expand_as(found.sink), sees.sum(-1).expand_as(found.sink)
        return Rows(found.sink.double(), found.entropy.double(), first, count)

    @property
    def alpha(self) -> Float[Tensor, "b h"]:
        """The mean weight on the first token over the queries that see it (Gu et al. 2025, eq. 4)."""
        return self.first.sum(-1) / self.sees_first.sum(-1)

    @property
    def share(self) -> Float[Tensor, "b h"]:
        """The share of the queries after the first, of those that see it, with more than 0.3 on the first token."""
        return (self.first[..., 1:] > SINK).sum(-1) / self.sees_first[..., 1:].sum(-1)

    @property
    def uniformity(self) -> Float[Tensor, "b h"]:
        """The mean of entropy / ln(visible keys), over the queries that see more than one key; 1 for uniform rows."""
        several = self.visible > 1
        ratio = self.entropy / self.visible.clamp(min=2).log()
        return (ratio * several).sum(-1) / several.sum(-1)
