"""The colours of figures and reports, which work in print and with colour blindness."""

from __future__ import annotations

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
