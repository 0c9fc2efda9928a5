"""Figure of the sink at the first token: its score by layer, and the weight on it along the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from qkv.figures.layout import PERCENT, Drawing, place, plain, titled
from qkv.figures.overview import subtitle_of
from qkv.figures.style import ACCENT, HAIRLINE, MUTED, WARM
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.sinks import EPSILON, sink_table, trend_by_head

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes


def sink_figure(name: str, data: xr.Dataset) -> Figure:
    """Left: α of the first token by layer, one dot for each head. Right: its weight by position of the query.

    A ring is the score over the whole text, a dot that over the first 64 queries. The right panel has one line for each
    head, and is left out for texts that are not longer than 64 tokens.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", progress=False)
    >>> len(sink_figure("qkv-mini", profile.data).axes)
    2
    """
    table = sink_table(data)
    trend = trend_by_head(data)
    found = Findings(data)
    long = len(trend.ranges) > 1
    layers = data.sizes["layer"]
    wide = min(8.0, max(3.2, 0.5 * layers))
    beside = 3.6 if long else 0.0
    figure = Drawing(figsize=(max(6.4, 0.72 + wide + 0.5 + (0.75 + beside if long else 0.4)), 4.5))
    title = "The first token has no sink score" if found.sinks is None else f"{found.sinks.value} {found.sinks.label}"
    titled(figure, title + found.whole_clause, subtitle_of(name, data))
    window = f"the first {data.sizes.get('prefix_key', 64)} queries" if long else "the text"
    _by_layer(place(figure, 0.72, 1.3, wide, 2.6), data, table, window, long=long)
    if long:
        _along(place(figure, 0.72 + wide + 0.75, 1.3, beside, 2.6), trend.ranges, trend.share, trend.even)
    return figure


def _by_layer(axes: Axes, data: xr.Dataset, table: pd.DataFrame, window: str, *, long: bool) -> None:
    plain(axes)
    layers = data["layer"].values
    for index, layer in enumerate(layers):
        rows = table[table["layer"] == layer].sort_values("alpha_first")
        # Spread the dots of a layer sideways, so that equal values do not overlap.
        at = index + (np.arange(len(rows)) * 0.618 % 1 - 0.5) * 0.5
        first, whole = rows["alpha_first"].to_numpy(), rows["alpha_whole"].to_numpy()
        colours = [WARM if value > EPSILON else ACCENT for value in first]
        axes.scatter(
            at, first, s=19, color=colours, lw=0, zorder=3, label=None if index else f"one head, over {window}"
        )
        if long:
            axes.vlines(at, whole, first, color=HAIRLINE, lw=1, zorder=1)
            axes.scatter(
                at, whole, s=15, facecolor="white", edgecolor=MUTED, lw=0.9, zorder=2,
                label=None if index else "over the whole text",
            )  # fmt: skip
    _threshold(axes)
    step = max(1, len(layers) // 16)
    axes.set_xticks(np.arange(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set(xlim=(-0.6, len(layers) - 0.4), ylim=(0, _top(table["alpha_first"].to_numpy())))
    axes.set_xlabel("layer", fontsize=8, color=MUTED)
    axes.set_ylabel("α: mean share of the row on the first token", fontsize=8, color=MUTED)
    axes.yaxis.set_major_formatter(PERCENT)
    if not np.isfinite(table["alpha_first"]).any():
        axes.text(
            0.5,
            0.4,
            "the profile has no score of\nthese heads over the first queries",
            transform=axes.transAxes,
            ha="center",
            fontsize=8,
            color=MUTED,
        )
        return
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=7.5, labelcolor=MUTED,
                handletextpad=0.2, columnspacing=1.2, scatteryoffsets=[0.5])  # fmt: skip


def _along(axes: Axes, ranges: list[tuple[int, int]], share: np.ndarray, even: np.ndarray) -> None:
    """A line for each head: its weight on the first token, by range of query positions."""
    plain(axes)
    x = np.arange(len(ranges))
    for values in share.reshape(len(ranges), -1).T:
        axes.plot(x, values, color=WARM if values[0] > EPSILON else ACCENT, lw=0.9, alpha=0.55)
    axes.plot(x, np.nanmean(share, (1, 2)), color="black", lw=2, label="mean of all heads")
    axes.plot(x, np.nanmean(even, (1, 2)), color=MUTED, lw=0.9, ls=(0, (1, 1.5)), label="rows of even weights")
    _threshold(axes)
    axes.set_xticks(x, [f"{first:,}–{stop - 1:,}" for first, stop in ranges])
    axes.tick_params(axis="x", labelrotation=0 if len(ranges) <= 4 else 40)
    axes.set(xlim=(-0.1, len(ranges) - 0.9), ylim=(0, _top(share)))
    axes.set_xlabel("position of the query", fontsize=8, color=MUTED)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=7.5, labelcolor=MUTED,
                handletextpad=0.5, columnspacing=1.2)  # fmt: skip


def _top(shares: np.ndarray) -> float:
    """The upper end of the axis; heads across two sequences have no score, so that all values may be NaN."""
    return max([0.4, *(1.08 * shares[np.isfinite(shares)])])


def _threshold(axes: Axes) -> None:
    axes.axhline(EPSILON, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=0)
