"""The style shared by figures and reports: colours that work in print and with colour blindness, names and units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from qkv.profiler.data.frames import COLUMNS
from qkv.profiler.data.variables import OF_HEADS, VARIABLES, Variable, custom_variables

if TYPE_CHECKING:
    import xarray as xr

INK, MUTED, HAIRLINE = "#1b2126", "#626b73", "#dfe3e4"
ACCENT, WARM = "#1f6f8b", "#b8501a"

# From small to large values, evenly darker, so that it also works in greyscale. The dark page has its own ramp.
RAMP = ("#f3f6f5", "#d9e7e6", "#a8ccd0", "#66a6b4", "#2f7793", "#174a6c", "#0b2545")
RAMP_DARK = ("#1f262c", "#203d4c", "#236079", "#3a8a9a", "#6fb5b5", "#b0dccf", "#effbee")

# Destinations of weight. Warm: tokens that receive it regardless of content. Cool: by position. Grey: the rest.
DESTINATIONS = {
    "first": ("first token", "#b8501a"),
    "special": ("other special tokens", "#e3a25b"),
    "sink_logit": ("learned sink", "#7c4a86"),
    "self": ("self", "#12415f"),
    "previous": ("previous", "#26748f"),
    "next": ("next", "#78b9c6"),
    "nearby": ("nearby", "#bfdcd6"),
    "elsewhere": ("elsewhere", "#c8ccd0"),
}
DESTINATIONS_DARK = {
    "first": "#d9723b",
    "special": "#f0c48c",
    "sink_logit": "#b98cc3",
    "self": "#d3eef0",
    "previous": "#77c0cd",
    "next": "#3f90a5",
    "nearby": "#2c5d69",
    "elsewhere": "#464e56",
}

# Types of heads. Warm: sinks, regardless of content. Blue: by position. Green: by content. Grey: no single role.
# Distinguishable with every kind of colour blindness, on white and on the dark page (ΔE ≥ 13 between any two).
KINDS = {
    "induction": "#4b7450",
    "duplicate token": "#76b562",
    "previous token": "#26748f",
    "self": "#12415f",
    "first token": "#b8501a",
    "other sink": "#dd8e29",
    "delimiter": "#f7d99d",
    "local": "#74b8d9",
    "uniform": "#9aa2a8",
    "mixed": "#e4e7e8",
}
KINDS_DARK = {
    "induction": "#45bd80",
    "duplicate token": "#a6ee9c",
    "previous token": "#3f90a5",
    "self": "#d3eef0",
    "first token": "#d9723b",
    "other sink": "#f0c061",
    "delimiter": "#8a5433",
    "local": "#215a72",
    "uniform": "#8b7d80",
    "mixed": "#2c3339",
}


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
