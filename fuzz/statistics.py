"""The statistics of `qkv.measure` from the dense weights, by their definitions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

OF_SHAPE = ("entropy", "distance", "spread", "effective_keys")
"""Statistics of a row's weights divided by their sum."""
OF_COLUMNS = ("received", "prefix_sink_scores", "thumbnail maximum", "thumbnail mean")
"""Statistics that sum over queries."""
COUNTS = ("visible", "visible_queries")


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `measure`, with masks as dense tensors."""

    first: list[int]
    """First key of the text, for each batch item."""
    queries: Tensor | None = None
    prefix_keys: int | None = None
    bins: int | None = None
    mass: dict[str, Tensor] = field(default_factory=dict)


def statistics(weights: Tensor, visible: Tensor, sink_weight: Tensor | None, request: Request) -> dict[str, Tensor]:
    """Every statistic by name, float64; rows that are not in `queries` are 0."""
    b, h, n_queries, n_keys = weights.shape
    counted = torch.ones(b, 1, n_queries, 1, dtype=torch.bool)
    if request.queries is not None:
        counted = request.queries[:, None, :, None]
    a, counted_pairs = weights.masked_fill(~counted, 0), (visible & counted).to(weights)
    p = torch.arange(n_queries)[:, None] + n_keys - n_queries
    j = torch.arange(n_keys)
    mass = a.sum(-1, keepdim=True)
    share = (a / torch.where(mass > 0, mass, 1.0)).clamp(min=0)  # negative only by rounding
    mean = (share * j).sum(-1, keepdim=True)
    squares = share.square().sum(-1)
    first = torch.tensor(request.first)[:, None, None, None].expand(b, h, n_queries, 1)
    found = {
        "entropy": -torch.special.xlogy(share, share).sum(-1),
        "distance": (share * (p - j).abs()).sum(-1),
        "spread": (share * (j - mean).square()).sum(-1).sqrt(),
        "effective_keys": torch.where(squares > 0, 1 / torch.where(squares > 0, squares, 1.0), 0.0),
        "row_sum": mass[..., 0],
        "sink": a.gather(-1, first)[..., 0],
        "received": a.sum(-2),
        "visible": counted_pairs.sum(-1),
        "visible_queries": counted_pairs.sum(-2),
    }
    for name, ahead in (("self_", 0), ("previous", -1), ("next_", 1)):
        found[name] = (a * (j == p + ahead)).sum(-1)
    for name, inside in request.mass.items():
        found[f"mass {name}"] = (a * inside).sum(-1)
    if sink_weight is not None:
        found["sink_mass"] = sink_weight.masked_fill(~counted[..., 0], 0)
    if request.prefix_keys is not None:
        found["prefix_sink_scores"] = _prefix_sink_scores(a, counted_pairs, request.prefix_keys, request.first)
    if request.bins is not None:
        found |= _thumbnail(a, request.bins)
    return found


def _prefix_sink_scores(a: Tensor, counted_pairs: Tensor, count: int, first: list[int]) -> Tensor:
    """Weight on each of the text's first keys, averaged over those of as many first queries to which it is visible."""
    b, h, n_queries, n_keys = a.shape
    found = a.new_zeros(b, h, count)
    for item, start in enumerate(first):
        rows = slice(max(0, start - n_keys + n_queries), max(0, start + count - n_keys + n_queries))
        keys = slice(start, min(start + count, n_keys))
        n_visible = counted_pairs[item, :, rows, keys].sum(-2).clamp(min=1)
        found[item, :, : keys.stop - start] = a[item, :, rows, keys].sum(-2) / n_visible
    return found


def _thumbnail(a: Tensor, bins: int) -> dict[str, Tensor]:
    """Maximum and mean weight of each bin; bin sizes are the smallest powers of two that give at most `bins` bins."""
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
