"""Figure of attention sinks: sink scores of every head, the values of sinks, and the tokens that are sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from qkv.figures.layout import Drawing, layer_by_head, place, plain, titled
from qkv.figures.style import ACCENT, HAIRLINE, INK, MUTED, WARM
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.labels import percent
from qkv.profiler.data.sinks import EPSILON, sink_table, sink_tokens
from qkv.profiler.data.tables import readable

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

KINDS = {"alpha_first": "this text", "alpha_random": "random tokens", "alpha_repeated": "one token repeated"}
TOKENS = 8  # number of sink tokens listed


def sinks_figure(name: str, data: xr.Dataset) -> Figure:
    """Above: α of the first token, layer × head, on three kinds of text. Below: values, and the sink tokens.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
    >>> len(sinks_figure("qkv-mini", profile.data).axes)
    6
    """
    table = sink_table(data)
    kinds = {column: label for column, label in KINDS.items() if table[column].notna().any()}
    layers, heads = data.sizes["layer"], data.sizes["head"]
    cell = min(0.32, 2.3 / heads, 4.6 / layers)
    wide, tall = max(cell * heads, 1.2), max(cell * layers, 0.8)
    left, top, gap = 0.75, 1.3, 0.45
    width = max(left + len(kinds) * (wide + gap) + 0.6, 9.2)
    lower = top + tall + 1.0
    figure = Drawing(figsize=(width, lower + 2.6 + 0.6))
    titled(
        figure,
        _sentence(data),
        f"{name} · sink score α: mean share of the row on a token, of queries that see it; above, of the first "
        f"64{_floor(data)}",
    )
    for index, (column, label) in enumerate(kinds.items()):
        axes = place(figure, left + index * (wide + gap), top, wide, tall)
        picture = _map(axes, table, column, label)
        if index == 0:
            axes.set_ylabel("layer", fontsize=8, color=MUTED)
        if index < len(kinds) - 1:
            continue
        _bar(figure, picture, place(figure, left + len(kinds) * (wide + gap) - gap + 0.12, top, 0.09, tall))
    _values(place(figure, left, lower, 3.4, 2.4), table)
    _tokens(place(figure, left + 5.0, lower, width - left - 5.6, 2.4), sink_tokens(data), len(table))
    return figure


def _floor(data: xr.Dataset) -> str:
    even = sink_table(data)["alpha_even"].mean()
    return "" if np.isnan(even) else f" (even rows: {percent(even)})"


def _map(axes: Axes, table: pd.DataFrame, column: str, label: str) -> AxesImage:
    grid = table.pivot(index="layer", columns="head", values=column)
    picture = layer_by_head(axes, grid, Normalize(0, max(1.0, float(grid.max(axis=None)))), ticks=8)
    over = int((table[column] > EPSILON).sum())
    axes.set_title(f"{label}: {over} of {len(table)} heads", fontsize=8.5, color=INK, loc="left", pad=5)
    axes.set_xlabel("head", fontsize=8, color=MUTED)
    for (i, j), value in np.ndenumerate(grid.to_numpy()):
        if value > EPSILON:
            axes.plot(j, i, marker="o", ms=2.2, mew=0, color=WARM)
    return picture


def _bar(figure: Figure, picture: AxesImage, axes: Axes) -> None:
    bar = figure.colorbar(picture, cax=axes)
    bar.set_label("α of the first token", fontsize=7.5, color=MUTED)
    axes.axhline(EPSILON, color=WARM, lw=1.2)
    axes.tick_params(labelsize=7, colors=MUTED, length=2)
    bar.outline.set_visible(False)


def _values(axes: Axes, table: pd.DataFrame) -> None:
    """Norm of the first token's value against its sink score: values of sinks are small."""
    plain(axes)
    axes.set_title("The value that a sink adds", fontsize=8.5, color=INK, loc="left", pad=5)
    if "value_norm_first" not in table:
        axes.text(0.5, 0.5, "values were not recorded", ha="center", color=MUTED, fontsize=8, transform=axes.transAxes)
        return
    strong = table["alpha_first"] > EPSILON
    for chosen, colour in ((~strong, ACCENT), (strong, WARM)):
        axes.scatter(
            table.loc[chosen, "alpha_first"], table.loc[chosen, "value_norm_first"], s=16, color=colour, lw=0, alpha=0.8
        )
    axes.axhline(1, color=HAIRLINE, lw=0.8)
    axes.axvline(EPSILON, color=MUTED, lw=0.8, ls=(0, (4, 3)))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("α of the first token", fontsize=8, color=MUTED)
    axes.set_ylabel("norm of its value / mean of the others", fontsize=8, color=MUTED)


def _tokens(axes: Axes, tokens: pd.DataFrame, heads: int) -> None:
    """The tokens that are sinks over the whole text, with the number of heads."""
    plain(axes)
    axes.set_title("Tokens that are sinks over the whole text", fontsize=8.5, color=INK, loc="left", pad=5)
    rows = tokens.head(TOKENS)
    if rows.empty:
        axes.set_axis_off()
        axes.text(0, 0.9, f"none: no token has α > {EPSILON:g} in any head", color=MUTED, fontsize=8.5)
        return
    axes.barh(np.arange(len(rows)), rows["heads"], height=0.62, color=WARM, lw=0)
    names = [f"{readable(row.token)}  ({row.position:,})" for row in rows.itertuples()]
    axes.set_yticks(np.arange(len(rows)), [n.replace("$", r"\$") for n in names])
    axes.set(ylim=(max(len(rows), 4) - 0.4, -0.6), xlim=(0, max(2, 1.15 * rows["heads"].max())))
    axes.set_xlabel(f"heads, of {heads:,}", fontsize=8, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.tick_params(axis="y", length=0, labelsize=8, colors=INK)


def _sentence(data: xr.Dataset) -> str:
    found = Findings(data)
    if found.sinks is None:
        return "A text of one token has no sink score"
    parts = [f"{found.sinks.value} {found.sinks.label}{found.whole_clause}"]
    if "sink_mass" in data and (learned := float(np.nanmean(data["sink_mass"].values))) >= 0.01:
        parts.append(f"the learned sink takes {percent(learned)}")
    return ", ".join(parts)
