"""The visible pairs of every mask as a dense boolean tensor, by the definition of each mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qkv import masks


@dataclass(frozen=True)
class Place:
    """The whole score matrix as a region, for user-defined biases."""

    n_queries: int
    n_keys: int

    @property
    def queries(self) -> Tensor:
        return (torch.arange(self.n_queries) + self.n_keys - self.n_queries)[:, None]

    @property
    def keys(self) -> Tensor:
        return torch.arange(self.n_keys)

    def of(self, x: Tensor) -> Tensor:
        """The slice of a tensor (b, h, nq, nk) for this region: all of it."""
        return x


@dataclass(frozen=True)
class Pairs:
    """Batch items, heads, rows, positions and keys of all pairs, shaped to broadcast to (b, h, nq, nk)."""

    b: Tensor
    h: Tensor
    row: Tensor
    p: Tensor
    j: Tensor
    n_keys: int

    def at(self, p: Tensor) -> Pairs:
        """The same pairs with other query positions."""
        return Pairs(self.b, self.h, self.row, p, self.j, self.n_keys)


def dense(mask: Any, batch: int, heads: int, n_queries: int, n_keys: int) -> Tensor:
    """(b, h, nq, nk), True where a query may attend."""
    size = (batch, heads, n_queries, n_keys)
    row = torch.arange(n_queries)[:, None]
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    pairs = Pairs(b, h, row, row + n_keys - n_queries, torch.arange(n_keys), n_keys)
    return torch.ones(size, dtype=torch.bool) if mask is None else is_visible(mask, pairs).expand(size)


def is_visible(mask: Any, x: Pairs) -> Tensor:
    """Whether each pair is visible under the mask."""
    match mask:
        case Tensor():
            tensor = mask[(None,) * (4 - mask.ndim)]
            where = zip((x.b, x.h, x.row, x.j), tensor.shape, strict=True)
            return tensor[tuple(i if size > 1 else i * 0 for i, size in where)]
        case masks.Dense(tensor):
            return is_visible(tensor, x)
        case masks.TopKeys():
            index_scores, among = mask.drawn  # type: ignore[attr-defined]
            first = torch.arange(index_scores.shape[-1]) * mask.block
            if among is not None:
                seen = is_visible(among, replace(x, j=first))
                index_scores = index_scores.masked_fill(~seen, -torch.inf)
            above = (index_scores[..., None, :] > index_scores[..., None]).sum(-1)
            return ((above < mask.k) & (index_scores > -torch.inf))[..., x.j // mask.block]
        case masks.Causal():
            return x.j <= x.p
        case masks.Window(size, ahead):
            return (x.j > x.p - size) & (x.j <= x.p + ahead)
        case masks.Strided(step):
            return (x.p - x.j) % step == 0
        case masks.Dilated(size, step, ahead):
            steps = torch.arange(-ahead, size) * step
            return (x.p - x.j)[..., None].eq(steps).any(-1)
        case masks.Prefix(length):
            return (x.j < length) & (x.p == x.p)
        case masks.Global(indices):
            chosen = torch.tensor([i % x.n_keys for i in indices], dtype=torch.long)
            return torch.isin(x.p, chosen) | torch.isin(x.j, chosen)
        case masks.Padding(lengths, side):
            length = torch.as_tensor(lengths)
            length = length[x.b if len(length) > 1 else x.b * 0]
            return x.j < length if side == "right" else x.j >= x.n_keys - length
        case masks.Document(ids):
            ids = torch.as_tensor(ids)
            item = x.b if len(ids) > 1 else x.b * 0
            of_query, of_key = ids[item, x.p], ids[item, x.j]
            return (of_query == of_key) & (of_query >= 0)
        case masks.Predicate(function):
            return function(x.b, x.h, x.p, x.j)
        case masks.Blockwise(inner, size):
            first = (x.p - x.row).flatten()[0] // size  # the block of query 0
            of_query = x.p // size
            return is_visible(inner, Pairs(x.b, x.h, of_query - first, of_query, x.j // size, -(-x.n_keys // size)))
        case masks.Shifted(inner, offset):
            return is_visible(inner, x.at(x.row + offset))
        case masks.And(left, right):
            return is_visible(left, x) & is_visible(right, x)
        case masks.Or(left, right):
            return is_visible(left, x) | is_visible(right, x)
        case masks.Not(inner):
            return ~is_visible(inner, x)
    if type(mask).__module__.startswith("qkv."):
        raise TypeError(f"no formula for {type(mask).__name__}")
    seen: Tensor = mask.sees(x.b, x.h, x.p, x.j, SimpleNamespace(n_keys=x.n_keys))
    return seen
