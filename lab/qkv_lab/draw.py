"""Shared parts of the lab's figures: panels, colours, curves, heatmaps. They do not use pyplot's global state."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkv.plot.layout import HAIRLINE, INK, MUTED, heat, save_figure, write_cells

__all__ = [
    "COLOURS", "HAIRLINE", "INK", "MARKERS", "MUTED", "curves", "heatmap", "panels", "plain", "save_figure", "scale",
    "write_cells",
]  # fmt: skip

COLOURS = ("#12415f", "#b8501a", "#26748f", "#e3a25b", "#7c4a86", "#78b9c6", "#626b73", "#8a9a3b", "#c45a7c")
"""Colours of lines and points, in this order. `MARKERS` tells them apart in grey and for colour-blind readers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def panels(
    title: str, note: str = "", *, columns: int = 1, rows: int = 1, width: float = 7.0, height: float = 3.4,
    ratios: Sequence[float] = (),
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """A figure of `rows` × `columns` panels; `height` in inches is that of a panel, `width` that of the figure.

    With `ratios` there is a row for each, as high as `height` times the ratio.

    The title states the finding in a sentence. The note, in smaller type, describes model, data and seeds.
    """
    with mpl.rc_context({"font.size": 9, "axes.titlesize": 9}):
        lines = textwrap.wrap(title, int(width * 10.8)), textwrap.wrap(note, int(width * 16.5))
        top = 0.14 + 0.22 * len(lines[0]) + 0.165 * len(lines[1]) + 0.1
        heights = list(ratios) or [1.0] * rows
        total = height * sum(heights) + top
        figure = Figure(figsize=(width, total), facecolor="white", layout="constrained")
        figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 1 - top / total - 0.01))  # type: ignore[union-attr, call-arg]
        figure.text(0.18 / width, 1 - 0.12 / total, "\n".join(lines[0]), size=11, weight="bold", color=INK, va="top")
        below = 1 - (0.16 + 0.22 * len(lines[0])) / total
        figure.text(0.18 / width, below, "\n".join(lines[1]), size=8, color=MUTED, va="top")
        made = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for axes in made.flat:
        plain(axes)
    return figure, list(made.flat)


def plain(axes: Axes) -> None:
    """Style axes with two spines and a faint horizontal grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=8)
    axes.grid(axis="y", color=HAIRLINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def curves(
    axes: Axes, x: Sequence[float], by_name: Mapping[str, Any], *, markers: bool = False, level: float = 0.95
) -> None:
    """Plot one line per name over x. Values (seeds, x) become their mean, with its confidence interval as a band."""
    from qkv.profiler.data.frames import confidence

    for at, (name, values) in enumerate(by_name.items()):
        y = np.atleast_2d(np.asarray(values, float))
        colour, marker = COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)] if markers else None
        axes.plot(x, y.mean(0), color=colour, marker=marker, markersize=4, linewidth=1.6, label=name)
        if len(y) > 1:
            _, low, high = np.array([confidence(column, level) for column in y.T.tolist()]).T
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def heatmap(
    axes: Axes,
    weights: Any,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    vmax: float | None = None,
) -> Any:
    """Plot attention weights with queries as rows and keys as columns; returns the image, for a colour bar."""
    w = np.asarray(weights, float)
    image = heat(axes, w, Normalize(0, w.max() if vmax is None else vmax))
    axes.set_aspect("equal")
    if rows is not None:
        axes.set_yticks(range(len(rows)), list(rows))
    if columns is not None:
        axes.set_xticks(range(len(columns)), list(columns), rotation=90 if max(map(len, columns)) > 2 else 0)
    return image


def scale(image: Any, axes: Any, label: str, *, shrink: float = 1.0) -> None:
    """A colour bar beside axes, with a label."""
    bar = image.figure.colorbar(image, ax=axes, shrink=shrink, pad=0.02)
    bar.set_label(label, size=9)
    bar.ax.tick_params(labelsize=8)
