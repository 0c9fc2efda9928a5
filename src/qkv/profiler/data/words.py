"""Sizes of a model's attention, and where a head sends its weight, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


def size_of(data: xr.Dataset) -> str:
    """Layers, heads and tokens of a group in words."""
    texts, layers, heads = (data.sizes[dim] for dim in ("text", "layer", "head"))
    queries, keys = int(data["n_queries"].max()), int(data["n_keys"].max())
    tokens = counted(queries, "token") if queries == keys else f"{queries:,} × {keys:,} tokens"
    return f"{layers_and_heads(layers, heads)}, {tokens}" + (f", {texts} texts" if texts > 1 else "")


def layers_and_heads(layers: int, heads: int) -> str:
    """How large a model's attention is, in words.

    >>> layers_and_heads(12, 1)
    '12 layers × 1 head'
    """
    return f"{counted(layers, 'layer')} × {counted(heads, 'head')}"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 head", "1,024 heads"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def went(before: str, after: str) -> str:
    """Where a head sends its weight, in words: "[CLS] 43 %", or "[CLS] 43 % → previous 51 %"."""
    return before if before == after else f"{before} → {after}"
