"""The statistics of `qkv.measure` from the dense weights, by their definitions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

OF_SHAPE = ("entropy", "distance", "spread", "effective_keys")
"""Statistics of a row's weights divided by their sum."""
OF_COLUMNS = ("received", "prefix_sink_scores", "thumbnail maximum", "thumbnail mean")
"""Statistics that all queries add to."""
COUNTS = ("visible", "visible_queries")


@dataclass(frozen=True, eq=False)
class Asked:
    """The arguments of `measure`, with masks as dense tensors."""

    first: list[int]
    """One for each batch item."""
    queries: Tensor | None = None
    prefix_keys: int | None = None
    bins: int | None = None
    mass: dict[str, Tensor] = field(default_factory=dict)


def statistics(weights: Tensor, allowed: Tensor, sink_weight: Tensor | None, asked: Asked) -> dict[str, Tensor]:
    """Every statistic by name, float64; those of rows that do not count are 0."""
    b, h, n_queries, n_keys = weights.shape
    counted = torch.ones(b, 1, n_queries, 1, dtype=torch.bool)
    if asked.queries is not None:
        counted = asked.queries[:, None, :, None]
    a, seen = weights.masked_fill(~counted, 0), (allowed & counted).to(weights)
    p = torch.arange(n_queries)[:, None] + n_keys - n_queries
    j = torch.arange(n_keys)
    mass = a.sum(-1, keepdim=True)
    share = (a / torch.where(mass > 0, mass, 1.0)).clamp(min=0)  # below 0 by rounding alone
    mean = (share * j).sum(-1, keepdim=True)
    squares = share.square().sum(-1)
    first = torch.tensor(asked.first)[:, None, None, None].expand(b, h, n_queries, 1)
    found = {
        "entropy": -torch.special.xlogy(share, share).sum(-1),
        "distance": (share * (p - j).abs()).sum(-1),
        "spread": (share * (j - mean).square()).sum(-1).sqrt(),
        "effective_keys": torch.where(squares > 0, 1 / torch.where(squares > 0, squares, 1.0), 0.0),
        "sink": a.gather(-1, first)[..., 0],
        "received": a.sum(-2),
        "visible": seen.sum(-1),
        "visible_queries": seen.sum(-2),
    }
    for name, ahead in (("self_", 0), ("previous", -1), ("next_", 1)):
        found[name] = (a * (j == p + ahead)).sum(-1)
    for name, inside in asked.mass.items():
        found[f"mass {name}"] = (a * inside).sum(-1)
    if sink_weight is not None:
        found["sink_mass"] = sink_weight.masked_fill(~counted[..., 0], 0)
    if asked.prefix_keys is not None:
        found["prefix_sink_scores"] = _prefix_sink_scores(a, seen, asked.prefix_keys, asked.first)
    if asked.bins is not None:
        found |= _thumbnail(a, asked.bins)
    return found


def _prefix_sink_scores(a: Tensor, seen: Tensor, prefix_keys: int, first: list[int]) -> Tensor:
    """Weight on each of the text's first keys, averaged over those of as many first queries that see it."""
    b, h, n_queries, n_keys = a.shape
    found = a.new_zeros(b, h, prefix_keys)
    for item, start in enumerate(first):
        rows = slice(max(0, start - n_keys + n_queries), max(0, start + prefix_keys - n_keys + n_queries))
        keys = slice(start, min(start + prefix_keys, n_keys))
        count = seen[item, :, rows, keys].sum(-2).clamp(min=1)
        found[item, :, : keys.stop - start] = a[item, :, rows, keys].sum(-2) / count
    return found


def _thumbnail(a: Tensor, bins: int) -> dict[str, Tensor]:
    """The largest and the mean weight of each bin, whose sides are the least powers of two that make so few of them."""
    sizes = []
    for length in a.shape[2:]:
        size = 1
        while -(-length // size) > bins:
            size *= 2
        sizes.append(size)
    strips = [x.split(sizes[1], 3) for x in a.split(sizes[0], 2)]
    return {
        "thumbnail maximum": torch.stack([torch.stack([x.amax((2, 3)) for x in s], -1) for s in strips], -2),
        "thumbnail mean": torch.stack([torch.stack([x.mean((2, 3)) for x in s], -1) for s in strips], -2),
    }
