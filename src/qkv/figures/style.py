"""One look for figures and reports: colours that survive colour blindness and print, and names with units."""

from __future__ import annotations

import math
from typing import NamedTuple

INK, MUTED, HAIRLINE, PAPER = "#1b2126", "#626b73", "#dfe3e4", "#ffffff"
ACCENT, WARM = "#1f6f8b", "#b8501a"

# From little to much, evenly darker, so that it reads in grey as well. The dark page has its own.
RAMP = ("#f3f6f5", "#d9e7e6", "#a8ccd0", "#66a6b4", "#2f7793", "#174a6c", "#0b2545")
RAMP_DARK = ("#1f262c", "#203d4c", "#236079", "#3a8a9a", "#6fb5b5", "#b0dccf", "#effbee")

# Where weight goes. Warm: parked on a token whatever it says. Cool: by position. Grey: the rest.
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

# Kinds of heads. Warm: rests on a token whatever it says. Blue: by position. Green: by content. Grey: no one thing.
# Apart for every kind of colour blindness, on white and on the dark page (a ΔE of 13 and more between any two).
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


class Statistic(NamedTuple):
    """How a column of `Profile.heads` is named and written."""

    label: str
    unit: str  # "%" (a share), "ratio", or the unit to print after the number
    meaning: str


STATISTICS = {
    "sink": Statistic("First token", "%", "mean weight on the text's first token"),
    "entropy_ratio": Statistic("Entropy ratio", "ratio", "entropy / ln(visible keys); 1 is uniform"),
    "distance": Statistic("Distance", "tokens", "mean distance between a query and what it attends to"),
    "local": Statistic("Local window", "%", "mean weight within the local window around the query"),
    "previous": Statistic("Previous token", "%", "mean weight on the token before the query"),
    "self": Statistic("Self", "%", "mean weight on the query's own position"),
    "next": Statistic("Next token", "%", "mean weight on the token after the query"),
    "entropy": Statistic("Entropy", "nats", "mean entropy of the attention weights"),
    "spread": Statistic("Spread", "tokens", "standard deviation of the attended position"),
    "participation": Statistic("Effective keys", "keys", "1 / Σ weight²: how many keys share the weight"),
    "sink_share": Statistic("Sink share", "%", "share of queries with more than 30 % on the first token"),
    "top_key_share": Statistic("Top key", "%", "share of all weight on the one most attended key"),
}


def percent(share: float) -> str:
    """A share as a percentage with no more digits than it deserves: "0.4 %", "7 %", "62 %"."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 0.95 else f"{value:.0f} %"


def written(value: float, unit: str) -> str:
    """A number with its unit, three significant digits at most."""
    if math.isnan(value):
        return "–"
    if unit == "%":
        return percent(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}" + ("" if unit == "ratio" else f" {unit}")
