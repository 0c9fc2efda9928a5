"""Labels, units, number formats and phrases of the statistics of heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from qkv.profiler.data.frames import COLUMNS
from qkv.profiler.data.variables import OF_HEADS, VARIABLES, Variable, custom_variables

if TYPE_CHECKING:
    import xarray as xr


class Column(NamedTuple):
    """The label, unit and meaning of a column of `Profile.heads`."""

    label: str
    unit: str  # "%" (a share), "ratio" (its scale ends at 1), or the unit to print after the number
    meaning: str
    table: bool = True  # whether it is in tables of heads; else only on the card of a head

    @classmethod
    def of(cls, name: str, about: Variable) -> Column:
        """The column of a statistic."""
        plain = "ratio" if about.highest == 1 else ""
        unit = "%" if about.share else plain if about.units == "1" else about.units
        return cls(about.label, unit, about.definition, name not in ON_CARDS)


ON_CARDS = ("entropy", "spread")  # nearly redundant with entropy_ratio and distance
FIRST = "sink"  # the first statistic on pages
STATISTICS = {name: Column.of(name, VARIABLES[name]) for name in sorted(OF_HEADS, key=lambda name: name != FIRST)} | {
    "entropy_ratio": Column("Entropy ratio", "ratio", COLUMNS["entropy_ratio"][1]),
    "sink_share": Column("Sink share", "%", COLUMNS["sink_share"][1].replace("the threshold", "30 %"), table=False),
    "top_key_share": Column("Top key", "%", "share of the head's weight on the key that receives most", table=False),
}


def columns_of(data: xr.Dataset) -> dict[str, Column]:
    """The statistics of the heads of a group: built-in and user-defined ones."""
    return STATISTICS | {name: Column.of(name, about) for name, about in custom_variables(data).items()}


def percent(share: float) -> str:
    """A share as a percentage with up to two significant digits: "0.4 %", "7 %", "62 %"."""
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 0.95 else f"{value:.0f} %"


def written(value: float, unit: str) -> str:
    """A number with its unit, three significant digits at most."""
    if math.isnan(value):
        return "–"
    if unit == "%":
        return percent(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}" + ("" if unit in ("ratio", "") else f" {unit}")


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
