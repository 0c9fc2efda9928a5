"""Figures of all heads of a profile: a layer × head map for each statistic, and heads by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkv.figures.layout import (
    Drawing,
    colour_bar,
    layer_by_head,
    place,
    plain,
    titled,
)
from qkv.figures.style import ACCENT, INK, MUTED, WARM
from qkv.profiler.data.findings import headline
from qkv.profiler.data.labels import STATISTICS, Column, columns_of, counted, layers_and_heads, written

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def overview_figure(name: str, data: xr.Dataset, heads: pd.DataFrame, names: tuple[str, ...]) -> Figure:
    layers, columns = data.sizes["layer"], data.sizes["head"]
    across = min(len(names), 3)
    down = -(-len(names) // across)
    cell = min(0.5, 9 / columns, 9 / layers) if across == 1 else min(0.3, 3.6 / columns, 4.6 / layers)
    wide, tall = cell * columns, cell * layers
    left, top, gap_x, gap_y = 0.62, 1.45, 0.85, 0.62
    width = max(left + across * (wide + gap_x), 7.2)
    figure = Drawing(figsize=(width, top + down * (tall + gap_y)))
    titled(figure, sentence(data, heads, names), subtitle_of(name, data))
    # All shares have the same scale, so that panels compare; at least 0.1, so that tiny shares look tiny.
    known = columns_of(data)
    shares = [heads[name].max() for name in names if known[name].unit == "%"]
    for index, statistic in enumerate(names):
        row, column = divmod(index, across)
        x, y = left + column * (wide + gap_x), top + row * (tall + gap_y)
        axes, bar = place(figure, x, y, wide, tall), place(figure, x + wide + 0.09, y, 0.08, tall)
        unit = known[statistic].unit
        most = {"%": max([0.1, *shares]), "ratio": max(1.0, heads[statistic].max())}.get(unit, heads[statistic].max())
        _grid(axes, heads.pivot(index="layer", columns="head", values=statistic), known[statistic], most, cell)
        colour_bar(bar, axes.images[0], unit)
        if column == 0:
            axes.set_ylabel("layer", fontsize=8, color=MUTED)
        if row == down - 1:
            axes.set_xlabel("head", fontsize=8, color=MUTED)
    return figure


def _grid(axes: Axes, values: pd.DataFrame, column: Column, most: float, cell: float) -> None:
    """One layer × head map with its values."""
    label, unit = column[:2]
    least = min(0.0, float(np.nanmin(values.to_numpy(), initial=0)))
    norm = Normalize(least, most if most > least else least + 1.0)
    layer_by_head(axes, values, norm, ticks=12 if cell >= 0.25 else 6, written=lambda value: _in_cell(value, unit))
    suffix = {"%": ", %", "ratio": "", "": ""}.get(unit, f", {unit}")
    axes.set_title(label + suffix, loc="left", fontsize=9, color=INK, pad=5)


def _in_cell(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.0f}"
    if unit == "ratio":
        return f"{value:.2f}".removeprefix("0")
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"


def by_layer_figure(
    name: str, data: xr.Dataset, heads: pd.DataFrame, statistic: str, title: str
) -> tuple[Figure, Axes]:
    """One dot for each head, one column for each layer, and the median of each layer."""
    label, unit = STATISTICS[statistic][:2]
    layers = data.sizes["layer"]
    width = min(11.0, max(6.4, 1.6 + 0.62 * layers))
    figure = Drawing(figsize=(width, 4.4))
    titled(figure, title, subtitle_of(name, data))
    axes = place(figure, 0.72, 1.2, width - 1.4, 2.65)
    plain(axes)
    for index, layer in enumerate(data["layer"].values):
        column = heads.loc[heads["layer"] == layer, statistic]
        values, middle = np.sort(column.to_numpy()), column.median()  # NaN if the text is too short
        # Spread the dots of a column sideways, so that equal values do not overlap.
        offsets = (np.arange(len(values)) * 0.618 % 1 - 0.5) * 0.5
        axes.scatter(
            index + offsets, values, s=17, color=ACCENT, alpha=0.75, lw=0, zorder=3,
            label="one head" if index == 0 else None,
        )  # fmt: skip
        axes.plot(
            [index - 0.34, index + 0.34], [middle] * 2, color=WARM, lw=1.8, zorder=4,
            solid_capstyle="butt", label="median of the layer" if index == 0 else None,
        )  # fmt: skip
    step = max(1, layers // 16)
    axes.set_xticks(np.arange(0, layers, step), [str(layer) for layer in data["layer"].values[::step]])
    axes.set_xlim(-0.6, layers - 0.4)
    axes.set_xlabel("layer", fontsize=8, color=MUTED)
    axes.set_ylabel(label.lower() if unit == "%" else f"{label.lower()}, {unit}", fontsize=8, color=MUTED)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=7.5,
        labelcolor=MUTED, borderaxespad=0.2, handletextpad=0.5, columnspacing=1.4,
        scatteryoffsets=[0.5],
    )  # fmt: skip
    return figure, axes


def sentence(data: xr.Dataset, heads: pd.DataFrame, names: tuple[str, ...]) -> str:
    if len(names) > 1:
        return headline(data).removesuffix(".")
    label, unit = columns_of(data)[names[0]][:2]
    values = heads[names[0]]
    if values.isna().all():
        return f"{label} is not defined for this kind of attention"
    best = heads.loc[values.idxmax()]
    return (
        f"{label}: {written(values.median(), unit)} in the median head, "
        f"most in layer {best['layer']}, head {best['head']} ({written(best[names[0]], unit)})"
    )


def subtitle_of(name: str, data: xr.Dataset) -> str:
    n_queries, n_keys = data["n_queries"].values, data["n_keys"].values
    length = counted(round(n_queries.mean()), "token")
    if (n_queries != n_keys).any():
        length = f"{n_queries.mean():,.0f} queries × {n_keys.mean():,.0f} keys"
    texts = f" · mean of {len(n_queries)} texts" if len(n_queries) > 1 else ""
    group = data.attrs.get("group", "self")
    kind = "" if group == "self" else f"{group} attention · "
    return f"{name} · {kind}{layers_and_heads(data.sizes['layer'], data.sizes['head'])} · {length}{texts}"
