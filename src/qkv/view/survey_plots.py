"""Figures of a survey: every head at a glance, how texts differ, and where sinks are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkv.errors import InputError
from qkv.profiler.accumulators import EARLY_THRESHOLD, QUANTITIES, edges
from qkv.view.style import ACCENT, HAIRLINE, INK, MUTED, RAMP, WARM

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from qkv.profiler.survey_data import Survey

COLOURS = LinearSegmentedColormap.from_list("qkv", RAMP)
SMALL_MULTIPLES = ("sink_score", "previous", "self", "local", "distance", "entropy_ratio", "special", "delimiter")
NAMES = {
    "sink_score": "Sink score of the first token",
    "previous": "Previous token",
    "self": "Self",
    "local": "Local window",
    "distance": "Distance, tokens",
    "entropy_ratio": "Entropy / uniform",
    "special": "Special tokens",
    "delimiter": "Delimiters",
}
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g} %")


def heads(survey: Survey, group: str | None = None) -> Figure:
    """Layer × head maps of means over the corpus, one for each quantity that says something here."""
    table = survey.heads(group)
    names = [name for name in SMALL_MULTIPLES if table[name].notna().any()]
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.1 * columns, 0.9 + 2.5 * rows), layout="constrained")
    for at, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, at + 1)
        _map(axes, table, name)
        figure.colorbar(axes.images[0], ax=axes, shrink=0.8).outline.set_visible(False)
    figure.suptitle(f"{_about(survey)}: means of every head", x=0.01, ha="left", color=INK)
    return figure


def texts(survey: Survey, quantity: str = "entropy_ratio", group: str | None = None) -> Figure:
    """How much a head differs from text to text: the middle 90 % of the sequences' means, around their median."""
    if quantity not in QUANTITIES:
        raise InputError(f"quantity: got {quantity!r}; expected one of {', '.join(QUANTITIES)}")
    table = survey.heads(group).sort_values(f"{quantity}_text_p50", kind="stable").reset_index(drop=True)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = _plain(figure.add_subplot())
    low, middle, high = (table[f"{quantity}_text_p{p}"] for p in (5, 50, 95))
    axes.vlines(table.index, low, high, color=ACCENT, alpha=0.35, lw=max(0.6, min(4.0, 400 / len(table))))
    axes.plot(table.index, middle, "o", ms=2.5, color=ACCENT)
    axes.set(xlabel="heads, in order of their median", ylabel=f"{quantity.replace('_', ' ')} ({_unit(quantity)})")
    axes.set_title(f"{_about(survey)}: the middle 90 % of sequences", loc="left", fontsize=10, color=INK)
    return figure


def distribution(survey: Survey, quantity: str = "distance", group: str | None = None) -> Figure:
    """The histogram of a quantity over all queries, a row a head: exact counts."""
    if quantity not in QUANTITIES:
        raise InputError(f"quantity: got {quantity!r}; expected one of {', '.join(QUANTITIES)}")
    q = list(QUANTITIES).index(quantity)
    layers = [layer for _, layer in sorted(survey.group(group).layers.items())]
    counts = np.concatenate([layer.added["histogram"][q] for layer in layers]).astype(float)
    counts = counts[:, : min(counts.shape[1], int(np.flatnonzero(counts.sum(0)).max(initial=0)) + 2)]
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    figure = Figure(figsize=(7, 1.5 + 0.035 * len(share) + 1), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(np.sqrt(share), aspect="auto", cmap=COLOURS, interpolation="nearest", vmin=0)
    borders = edges(quantity)
    ticks = np.linspace(0, counts.shape[1], 6).round().astype(int)
    axes.set_xticks(ticks - 0.5, [f"{borders[t]:.2g}" if borders[t] < 10 else f"{borders[t]:,.0f}" for t in ticks])
    ends = np.cumsum([layer.heads for layer in layers])
    axes.set_yticks(ends - [layer.heads for layer in layers], [str(n) for n in sorted(survey.group(group).layers)])
    axes.set(xlabel=f"{quantity.replace('_', ' ')} ({_unit(quantity)})", ylabel="layer, its heads below one another")
    bar = figure.colorbar(picture, ax=axes, shrink=0.8, format=FuncFormatter(lambda v, _: f"{100 * v * v:.0f} %"))
    bar.set_label("of the head's queries")
    bar.outline.set_visible(False)
    axes.set_title(f"{_about(survey)}: all queries", loc="left", fontsize=10, color=INK)
    return figure


def sinks(survey: Survey, group: str | None = None) -> Figure:
    """How often each of the first 64 keys is a sink, over texts and heads."""
    table = survey.sinks(group)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = _plain(figure.add_subplot())
    if table["share"].notna().any():
        axes.bar(table["key"], table["share"], color=WARM, width=0.8)
        axes.yaxis.set_major_formatter(_PERCENT)
    else:
        axes.text(0.5, 0.5, "no text has 64 tokens", transform=axes.transAxes, ha="center", color=MUTED)
    axes.set(xlabel="key, counted from the beginning of the text", ylabel="of texts × heads")
    title = f"{_about(survey)}: how often the sink score is above {EARLY_THRESHOLD}"
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    return figure


FIGURES: dict[str, Callable[..., Figure]] = {
    "heads": heads,
    "texts": texts,
    "distribution": distribution,
    "sinks": sinks,
}


def _map(axes: Axes, table: pd.DataFrame, name: str) -> None:
    grid = table.pivot(index="layer", columns="head", values=name)
    axes.imshow(grid.to_numpy(), cmap=COLOURS, aspect="auto", vmin=0, interpolation="nearest")
    axes.set_title(NAMES[name], loc="left", fontsize=9, color=INK)
    axes.set(xlabel="head", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.tick_params(labelsize=7, colors=MUTED)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _plain(axes: Axes) -> Axes:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=HAIRLINE, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8)
    return axes


def _unit(quantity: str) -> str:
    unit = QUANTITIES[quantity].unit
    return "share of the weight" if unit == "share" else "1 is uniform" if unit == "1" else unit


def _about(survey: Survey) -> str:
    return f"{survey.definition['model']} on {survey.record['tokens']:,} tokens"
