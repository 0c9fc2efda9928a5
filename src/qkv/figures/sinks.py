"""Attention sinks by head and by position, and massive activations in the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from qkv.errors import InputError
from qkv.figures.layout import ACCENT, HAIRLINE, INK, MUTED, PERCENT, WARM, chart, head_map, legend, titled
from qkv.figures.overview import layer_columns, subtitle_of
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.frames import counted, percent
from qkv.profiler.data.sinks import EPSILON, sink_table, sink_tokens, trend_by_head
from qkv.profiler.data.tables import readable

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes


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
    score = "sink score α: mean share of the row on a token, of queries that see it; above, of the first 64"
    even = "" if np.isnan(mean := table["alpha_even"].mean()) else f" (even rows: {percent(mean)})"
    figure = titled(width, lower + 2.6 + 0.6, _sinks_sentence(data), f"{name} · {score}{even}")
    for index, (column, label) in enumerate(kinds.items()):
        strong = table[table[column] > EPSILON]
        axes = head_map(
            figure, left + index * (wide + gap), top, wide, tall, table, column,
            Normalize(0, max(1.0, table[column].max())), f"{label}\n{len(strong)} of {len(table)} heads",
            bar=index == len(kinds) - 1, ticks=8,
        )  # fmt: skip
        axes.set_ylabel("" if index else "layer")
        at = (np.searchsorted(data[name].values, strong[name]) for name in ("head", "layer"))
        axes.plot(*at, linestyle="", marker="o", ms=2.2, mew=0, color=WARM)
    for bar in figure.axes[-1:]:  # none without kinds
        bar.axhline(EPSILON, color=WARM, lw=1.2)
        bar.set_ylabel("α of the first token")
    _values(chart(figure, left, lower, 3.4, 2.4, "The value that a sink adds"), table)
    tokens = chart(figure, left + 5.0, lower, width - left - 5.6, 2.4, "Tokens that are sinks over the whole text")
    _tokens(tokens, sink_tokens(data), len(table))
    return figure


def _values(axes: Axes, table: pd.DataFrame) -> None:
    """Norm of the first token's value against its sink score: values of sinks are small."""
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
    axes.set(xlabel="α of the first token", ylabel="norm of its value / mean of the others")


def _tokens(axes: Axes, tokens: pd.DataFrame, heads: int) -> None:
    """The tokens that are sinks over the whole text, with the number of heads."""
    rows = tokens.head(TOKENS)
    if rows.empty:
        axes.set_axis_off()
        axes.text(0, 0.9, f"none: no token has α > {EPSILON:g} in any head", color=MUTED, fontsize=8.5)
        return
    axes.barh(np.arange(len(rows)), rows["heads"], height=0.62, color=WARM, lw=0)
    names = [f"{readable(row.token)}  ({row.position:,})" for row in rows.itertuples()]
    axes.set_yticks(np.arange(len(rows)), [n.replace("$", r"\$") for n in names])
    limits = {"ylim": (max(len(rows), 4) - 0.4, -0.6), "xlim": (0, max(2, 1.15 * rows["heads"].max()))}
    axes.set(xlabel=f"heads, of {heads:,}", **limits)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.tick_params(axis="y", length=0, labelsize=8, colors=INK)


def _sinks_sentence(data: xr.Dataset) -> str:
    found = Findings(data)
    if found.sinks is None:
        return "A text of one token has no sink score"
    parts = [f"{found.sinks.value} {found.sinks.label}{found.whole_clause}"]
    if "sink_mass" in data and (learned := float(np.nanmean(data["sink_mass"].values))) >= 0.01:
        parts.append(f"the learned sink takes {percent(learned)}")
    return ", ".join(parts)


ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 2, "columnspacing": 1.2}


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
    beside = max(3.6, 0.75 * len(trend.ranges)) if long else 0.0
    title = "The first token has no sink score" if found.sinks is None else f"{found.sinks.value} {found.sinks.label}"
    width = max(6.4, 0.72 + wide + 0.5 + (0.75 + beside if long else 0.4))
    figure = titled(width, 4.5, title + found.whole_clause, subtitle_of(name, data))
    window = f"the first {data.sizes.get('prefix_key', 64)} queries" if long else "the text"
    _by_layer(chart(figure, 0.72, 1.3, wide, 2.6), data["layer"].values, table, window, long=long)
    if long:
        _along(chart(figure, 0.72 + wide + 0.75, 1.3, beside, 2.6), trend.ranges, trend.share, trend.even)
    return figure


def _by_layer(axes: Axes, layers: np.ndarray, table: pd.DataFrame, window: str, *, long: bool) -> None:
    at, rows = layer_columns(axes, layers, table, "alpha_first")
    first, whole = rows["alpha_first"].to_numpy(), rows["alpha_whole"].to_numpy()
    colours = [WARM if value > EPSILON else ACCENT for value in first]
    axes.scatter(at, first, s=19, color=colours, lw=0, zorder=3, label=f"one head, over {window}")
    if long:
        axes.vlines(at, whole, first, color=HAIRLINE, lw=1, zorder=1)
        axes.scatter(at, whole, s=15, facecolor="white", edgecolor=MUTED, lw=0.9, zorder=2, label="over the whole text")
    _threshold(axes)
    axes.set(ylim=(0, _top(first)), ylabel="α: mean share of the row on the first token")
    axes.yaxis.set_major_formatter(PERCENT)
    if not np.isfinite(table["alpha_first"]).any():
        missing = "the profile has no score of\nthese heads over the first queries"
        axes.text(0.5, 0.4, missing, transform=axes.transAxes, ha="center", fontsize=8, color=MUTED)
        return
    legend(axes, handletextpad=0.2, scatteryoffsets=[0.5], **ABOVE)


def _along(axes: Axes, ranges: list[tuple[int, int]], share: np.ndarray, even: np.ndarray) -> None:
    """A line for each head: its weight on the first token, by range of query positions."""
    x = np.arange(len(ranges))
    for values in share.reshape(len(ranges), -1).T:
        axes.plot(x, values, color=WARM if values[0] > EPSILON else ACCENT, lw=0.9, alpha=0.55)
    axes.plot(x, np.nanmean(share, (1, 2)), color="black", lw=2, label="mean of all heads")
    axes.plot(x, np.nanmean(even, (1, 2)), color=MUTED, lw=0.9, ls=(0, (1, 1.5)), label="rows of even weights")
    _threshold(axes)
    axes.set_xticks(x, [f"{first:,}–{stop - 1:,}" for first, stop in ranges])
    axes.set(xlim=(-0.1, len(ranges) - 0.9), ylim=(0, _top(share)))
    axes.set_xlabel("position of the query")
    axes.yaxis.set_major_formatter(PERCENT)
    legend(axes, handletextpad=0.5, **ABOVE)


def _top(shares: np.ndarray) -> float:
    """The upper end of the axis; heads across two sequences have no score, so that all values may be NaN."""
    return max([0.4, *(1.08 * shares[np.isfinite(shares)])])


def _threshold(axes: Axes) -> None:
    axes.axhline(EPSILON, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=0)


def states_figure(name: str, stacks: Mapping[str, xr.Dataset]) -> Figure:
    """The mean cosine similarity of the states of two tokens by depth: a line for each stack, a thin one for each text.

    `stacks` are those of `Profile.residual`.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", progress=False, probe=False)
    >>> len(states_figure("qkv-mini", profile.residual).axes)
    1
    """
    cosines = {stack: data["cosine"].values.astype(float) for stack, data in stacks.items() if "cosine" in data}
    cosines = {stack: values for stack, values in cosines.items() if np.isfinite(values).any()}
    if not cosines:
        raise InputError("profile: it holds no similarity of hidden states; profile a text of two or more tokens again")
    depths = max(values.shape[1] for values in cosines.values())
    width = min(11.0, max(6.4, 1.6 + 0.45 * depths))
    first, values = next(iter(cosines.items()))
    texts, tokens = len(values), int(stacks[first]["n_tokens"].sum())
    subtitle = (
        f"{name} · {counted(texts, 'text')}, {counted(tokens, 'token')} · mean over all pairs of tokens of a text"
    )
    figure = titled(width, 4.2, _states_sentence(np.nanmean(values, 0)), subtitle)
    axes = chart(figure, 0.72, 1.05, width - 1.1, 2.6)
    axes.axhline(0, color=HAIRLINE, lw=0.8)
    colours = (ACCENT, WARM, MUTED)
    for at, (stack, values) in enumerate(cosines.items()):
        x, colour = np.arange(values.shape[1]), colours[at % len(colours)]
        for one in values if len(values) > 1 else []:
            axes.plot(x, one, color=colour, lw=0.6, alpha=0.4)
        axes.plot(x, np.nanmean(values, 0), color=colour, lw=1.6, marker="o", ms=3.5, label=stack)
    axes.set_ylim(min(0.0, *(float(np.nanmin(values)) for values in cosines.values())) - 0.02, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(min(depths, 16), integer=True))
    axes.set_xlabel("depth: 0 is the input of the first layer, i the output of layer i")
    axes.set_ylabel("cosine of two tokens' states")
    if len(cosines) > 1:
        legend(axes, loc="best")
    return figure


def _states_sentence(mean: np.ndarray) -> str:
    start, peak, end = mean[0], int(np.nanargmax(mean)), mean[-1]
    if mean[peak] > max(start, end) + 0.05:
        beside = f"against {start:.2f} at the input and {end:.2f} at the end"
        return f"States of different tokens are most alike at depth {peak}: cosine {mean[peak]:.2f}, {beside}"
    if abs(end - start) < 0.05:
        return f"States of different tokens are as alike at the end as at the input: cosine {end:.2f}"
    way = "more" if end > start else "less"
    return f"States of different tokens become {way} alike with depth: from cosine {start:.2f} to {end:.2f}"
