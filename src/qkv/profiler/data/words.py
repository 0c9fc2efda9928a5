"""Phrases for figures, reports and the command line: sizes of a model's attention, and a head's target."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


def size_of(data: xr.Dataset) -> str:
    """The number of layers, heads and tokens of a group, as a phrase."""
    texts, layers, heads = (data.sizes[dim] for dim in ("text", "layer", "head"))
    queries, keys = int(data["n_queries"].max()), int(data["n_keys"].max())
    tokens = counted(queries, "token") if queries == keys else f"{queries:,} × {keys:,} tokens"
    return f"{layers_and_heads(layers, heads)}, {tokens}" + (f", {texts} texts" if texts > 1 else "")


def layers_and_heads(layers: int, heads: int) -> str:
    """The number of layers and heads of a model, as a phrase.

    >>> layers_and_heads(12, 1)
    '12 layers × 1 head'
    """
    return f"{counted(layers, 'layer')} × {counted(heads, 'head')}"


def counted(number: int, noun: str) -> str:
    """A number and its noun, singular or plural: "1 head", "1,024 heads"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def target_change(before: str, after: str) -> str:
    """A head's target before and after a change: "[CLS] 43 % → previous 51 %", or "[CLS] 43 %" if it is the same."""
    return before if before == after else f"{before} → {after}"
