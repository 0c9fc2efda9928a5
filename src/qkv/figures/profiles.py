"""Figures of a profile: all heads and their types, one head along the text, attention sinks, and hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from qkv.errors import InputError
from qkv.figures.layout import (
    ACCENT,
    DESTINATIONS,
    HAIRLINE,
    INK,
    KINDS,
    MUTED,
    PERCENT,
    WARM,
    along,
    bins,
    cell_number,
    chart,
    head_map,
    hundredths,
    ink_on,
    layer_by_head,
    legend,
    name_peaks,
    note,
    number_ticks,
    place,
    reference_line,
    room_below,
    titled,
    token_label,
    token_strip,
)
from qkv.profiler.data import tables
from qkv.profiler.data.findings import Findings, shared_by
from qkv.profiler.data.frames import columns_of, counted, layers_and_heads, percent, size_of, written
from qkv.profiler.data.sinks import EPSILON, sink_table, sink_tokens, trend_by_head
from qkv.profiler.data.tables import MIXED, ROLES, TRAITS

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
    figure = titled(width, top + down * (tall + gap_y), sentence(data, heads, names), subtitle_of(name, data))
    # All shares have the same scale, so that panels compare; at least 0.1, so that tiny shares look tiny.
    known = columns_of(data)
    shares = [heads[name].max() for name in names if known[name].unit == "%"]
    for index, statistic in enumerate(names):
        row, column = divmod(index, across)
        (label, unit), largest = known[statistic][:2], heads[statistic].max()
        most = {"%": max([0.1, *shares]), "ratio": max(1.0, largest)}.get(unit, largest)
        least = min(0.0, float(np.nanmin(heads[statistic], initial=0)))
        norm = Normalize(least, most if most > least else least + 1.0)
        axes = head_map(
            figure, left + column * (wide + gap_x), top + row * (tall + gap_y), wide, tall, heads, statistic, norm,
            label + {"%": ", %", "ratio": "", "": ""}.get(unit, f", {unit}"),
            number=hundredths if unit == "%" else None, ticks=12 if cell >= 0.25 else 6,
            written=lambda value, share=unit == "%": f"{100 * value:.0f}" if share else cell_number(value),
        )  # fmt: skip
        axes.set(xlabel="head" if row == down - 1 else "", ylabel="" if column else "layer")
    return figure


def entropy_figure(name: str, data: xr.Dataset) -> Figure:
    """The entropy of every head: one dot for each head, one column for each layer, and the median of each layer."""
    heads, layers = tables.head_table(data), data["layer"].values
    medians = heads.groupby("layer")["entropy"].median()[layers]  # NaN if the text is too short
    sharpest = medians.idxmin()
    where, whose = f"sharpest in layer {sharpest}", "its median head"
    if medians.max() - medians.min() < 0.05:  # nats: a negligible difference
        where, whose = "equally sharp in every layer", "the median head"
    least = medians[sharpest]
    width = min(11.0, max(6.4, 1.6 + 0.62 * len(layers)))
    title = f"Attention is {where}: {least:.1f} nats in {whose}, {shared_by(least)}"
    figure = titled(width, 4.4, title, subtitle_of(name, data))
    axes = chart(figure, 0.72, 1.2, width - 1.4, 2.65)
    at, rows = layer_columns(axes, layers, heads, "entropy")
    axes.scatter(at, rows["entropy"], s=17, color=ACCENT, alpha=0.75, lw=0, zorder=3, label="one head")
    middle = np.arange(len(layers))
    axes.hlines(medians, middle - 0.34, middle + 0.34, color=WARM, lw=1.8, zorder=4, label="median of the layer")
    legend(
        axes, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2, handletextpad=0.5,
        columnspacing=1.4, scatteryoffsets=[0.5],
    )  # fmt: skip
    visible = data["visible"].values
    uniform = float(np.log(visible[visible > 0]).mean())
    reference_line(axes, uniform, "uniform\nattention")
    axes.set(ylabel="entropy, nats", ylim=(0, uniform * 1.1 or 1))
    return figure


def layer_columns(
    axes: Axes, layers: np.ndarray, heads: pd.DataFrame, statistic: str
) -> tuple[np.ndarray, pd.DataFrame]:
    """A column for each layer: the places across of the dots of all heads, and the table's rows in the same order.

    The dots of a column are spread sideways, so that equal values do not overlap.
    """
    rows = heads.sort_values(["layer", statistic], kind="stable")
    rank = rows.groupby("layer").cumcount().to_numpy()
    number_ticks(axes.xaxis, layers)
    axes.set(xlim=(-0.6, len(layers) - 0.4), xlabel="layer")
    return np.searchsorted(layers, rows["layer"]) + (rank * 0.618 % 1 - 0.5) * 0.5, rows


def sentence(data: xr.Dataset, heads: pd.DataFrame, names: tuple[str, ...]) -> str:
    if len(names) > 1:
        return Findings(data).headline.removesuffix(".")
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
    group = data.attrs.get("group", "self")
    kind = "" if group == "self" else f"{group} attention · "
    return f"{name} · {kind}{size_of(data)}" + (" · mean of the texts" if data.sizes["text"] > 1 else "")


MARKS = {"sparse": "•", "streaming": "s", "retrieval": "r", "positional": "p", "content": "c"}


def types_figure(name: str, table: pd.DataFrame) -> Figure:
    """The table of `Profile.types` as a layer × head map.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
    >>> len(types_figure("qkv-mini", profile.types()).axes)
    2
    """
    grid = table.pivot(index="layer", columns="head", values="type")
    traits = table.pivot(index="layer", columns="head", values="traits")
    layers, heads = grid.shape
    cell = min(0.42, 7.5 / heads, 8.0 / layers)
    wide, tall = cell * heads, cell * layers
    present = [kind for kind in KINDS if (grid == kind).any(axis=None)]
    shown = [trait for trait in TRAITS if table["traits"].str.split(", ").apply(lambda x, t=trait: t in x).any()]
    key = 0.235 * (len(present) + len(shown) + (1 if shown else 0))
    left, top = 0.75, 1.05
    width = max(left + wide + 3.9, 7.2)
    subtitle = f"{name} · {layers_and_heads(layers, heads)} · the first type that a head reaches"
    figure = titled(width, top + max(tall, key) + 0.7, _sentence(table), subtitle)
    axes = place(figure, left, top, wide, tall)
    order = {kind: float(at) for at, kind in enumerate(KINDS)}
    colours = ListedColormap([*KINDS.values()])
    layer_by_head(axes, grid.replace(order).astype(float), Normalize(-0.5, len(KINDS) - 0.5), colours=colours, ticks=16)
    axes.set(xlabel="head", ylabel="layer")
    for (row, column), kind in np.ndenumerate(grid.to_numpy()):
        marks = "".join(MARKS[t] for t in traits.to_numpy()[row, column].split(", ") if t in MARKS)
        if marks and cell > 0.2:
            axes.text(column, row, marks, ha="center", va="center", fontsize=6.5, color=ink_on(KINDS[kind]))
    _key(place(figure, left + wide + 0.35, top, 3.2, key), table, present, shown)
    return figure


def _key(axes: Axes, table: pd.DataFrame, present: list[str], shown: list[str]) -> None:
    axes.set_axis_off()
    axes.set(xlim=(0, 3.2), ylim=(len(present) + len(shown) + bool(shown), 0))
    for row, kind in enumerate(present):
        axes.add_patch(Rectangle((0, row + 0.15), 0.16, 0.7, color=KINDS[kind], lw=0))
        bound = "" if kind == MIXED else f"  {'≤' if ROLES[kind].below else '≥'} {ROLES[kind].threshold:g}"
        axes.text(0.25, row + 0.5, kind, va="center", fontsize=8.5, color=INK)
        axes.text(1.45, row + 0.5, f"{(table['type'] == kind).sum():,}{bound}", va="center", fontsize=8, color=MUTED)
    for row, trait in enumerate(shown, len(present) + 1):
        has = table["traits"].str.split(", ").apply(lambda x, t=trait: t in x).sum()
        bound = f"{'≤' if TRAITS[trait].below else '≥'} {TRAITS[trait].threshold:g}"
        axes.text(0.08, row + 0.5, MARKS[trait], va="center", ha="center", fontsize=8.5, color=INK)
        axes.text(0.25, row + 0.5, trait, va="center", fontsize=8.5, color=INK)
        axes.text(1.45, row + 0.5, f"{has:,}  {bound}", va="center", fontsize=8, color=MUTED)


def _sentence(table: pd.DataFrame) -> str:
    counts = table["type"].value_counts()
    named = counts.drop(MIXED, errors="ignore")
    parts = [f"{n:,} {kind}" for kind, n in named.head(3).items()]
    if not parts:
        return f"None of the {len(table):,} heads has a single role"
    return f"Of {len(table):,} heads: {', '.join(parts)}" + (f"; {counts[MIXED]:,} mixed" if MIXED in counts else "")


def received_figure(name: str, data: xr.Dataset) -> Figure:
    n_keys = int(data["n_keys"][0])
    tokens = data["key_token"].values[0, :n_keys]
    rows = tables.received_share(data)[0, ..., :n_keys].mean(1)  # (layer, key)
    mean, layers = rows.mean(0), data.sizes["layer"]
    top = int(mean.argmax())
    title = f"“{token_label(tokens[top])}” at position {top} receives {percent(mean[top])} of all attention"
    if np.sort(mean)[-1] > 5 * np.median(mean):
        title += f", {mean[top] / np.median(mean):,.0f} × the median token"
    low = max(float(np.quantile(rows, 0.05)), rows.max() * 1e-6, 1e-12)
    figure, curve, strip = text_figure(
        title, subtitle_of(name, data), tokens, mean, rows, LogNorm(low, rows.max()), "key"
    )
    reference_line(curve, 1 / n_keys, "equal\nshare")
    curve.set_ylabel("share of all attention")
    strip.set(ylim=(layers - 0.5, -0.5), ylabel="layer")
    number_ticks(strip.yaxis, data["layer"].values, 6)
    return figure


def text_figure(
    title: str, subtitle: str, tokens: np.ndarray, share: np.ndarray, rows: np.ndarray, norm: LogNorm, what: str
) -> tuple[Figure, Axes, Axes]:
    """Shares along a text as a curve, and below it a strip of rows along the text; returns the figure and both axes."""
    left, wide, tall = 1.02, 7.98, max(0.9, 0.16 * len(rows))
    figure = titled(9.8, 3.27 + tall + room_below(tokens, wide), title, subtitle)
    curve, strip = chart(figure, left, 0.95, wide, 2.2), place(figure, left, 3.27, wide, tall)
    share_curve(curve, share, tokens, 9)
    token_strip(strip, place(figure, left + wide + 0.09, 3.27, 0.08, tall), rows, norm)
    strip.spines[:].set_visible(False)
    along(curve, tokens, what, labels=False)
    along(strip, tokens, what)
    return figure, curve, strip


def head_figure(name: str, data: xr.Dataset, layer: int, head: int) -> Figure:
    row = tables.head_table(data).iloc[layer * data.sizes["head"] + head]
    n_queries, n_keys = int(data["n_queries"][0]), int(data["n_keys"][0])
    queries, keys = data["query_token"].values[0, :n_queries], data["key_token"].values[0, :n_keys]
    one = data.isel(text=0, layer=layer, head=head)
    facts = [
        f"entropy {written(row['entropy'], 'nats')} (ratio {row['entropy_ratio']:.2f})",
        written(row["effective_keys"], "effective keys"),
        *([f"distance {written(row['distance'], 'tokens')}"] if np.isfinite(row["distance"]) else []),
        f"spread {written(row['spread'], 'tokens')}",
    ]
    distance = one["distance"].values[:n_queries]
    curves = 3 if np.isfinite(distance).any() else 2
    height, left, width = 1.05, 0.82, 7.98
    below = max(room_below(names, width) for names in (queries, keys))
    title = f"Layer {row['layer']}, head {row['head']}: {row['goes_to']}"
    subtitle = f"{name} · {row['module']} · " + " · ".join(facts)
    figure = titled(9.6, 1.6 + curves * (height + 0.52) + below, title, subtitle)
    _stack(place(figure, left, 1.12, width, 0.3, "Where the weight goes"), data, layer, head)

    def axes_at(index: int, label: str, tokens: np.ndarray, what: str) -> Axes:
        axes = chart(figure, left, 2.12 + index * (height + 0.52), width, height, label)
        along(axes, tokens, what, labels=index == curves - 1)
        return axes

    received = tables.received_share(data)[0, layer, head, :n_keys]
    axes = axes_at(0, "Received by each key, share of the head's weight", keys, "key")
    share_curve(axes, received, keys, 6)

    entropy, visible = one["entropy"].values[:n_queries], one["visible"].values[:n_queries]
    uniform = np.log(np.maximum(visible, 1))
    axes = axes_at(1, "Entropy of each query, nats", queries, "query")
    _curve(axes, entropy)
    axes.plot(uniform, color=MUTED, lw=0.8, ls=(0, (4, 3)))
    axes.set_ylim(0, float(np.nanmax([*entropy, uniform.max()])) * 1.1 or 1)
    note(axes, float(uniform[-1]), "uniform\nattention")

    if curves == 3:
        axes = axes_at(2, "Mean distance to what each query attends to, tokens", queries, "query")
        _curve(axes, distance)
    return figure


def _stack(axes: Axes, data: xr.Dataset, layer: int, head: int) -> None:
    """One stacked bar of disjoint shares, with a legend; large shares are printed inside."""
    axes.set_axis_off()
    shares = {name: float(value[0, layer, head]) for name, value in tables.destinations(data).items()}
    whole, left, shown = sum(shares.values()) or 1.0, 0.0, []
    for name, (label, colour, _) in DESTINATIONS.items():
        share = shares[name] / whole
        if share > 0:
            axes.barh(0, share, left=left, height=1, color=colour, lw=0.8, edgecolor="white")
            if share >= 0.05:
                text, at = percent(shares[name]), left + share / 2
                axes.text(at, 0, text, ha="center", va="center", fontsize=8, color=ink_on(colour))
            left += share
            if share >= 0.005:
                window = f" ±{data.attrs['local_window']}" if name == "nearby" else ""
                shown.append((label + window, colour))
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5))
    handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in shown]
    legend(
        axes, handles=handles, loc="upper left", bbox_to_anchor=(-0.004, -0.18), ncols=len(handles), handlelength=0.9,
        handleheight=0.9, handletextpad=0.5, columnspacing=1.3, borderaxespad=0,
    )  # fmt: skip


def _curve(axes: Axes, values: np.ndarray) -> None:
    """A curve along the text; a long one is drawn faint, with its binned mean over it."""
    if len(values) <= 400:
        axes.plot(values, color=ACCENT, lw=1.1)
    else:
        axes.plot(values, color="#b9d3d9", lw=0.4, rasterized=True)
        mean, edges = bins(values[None], 160)
        axes.plot((edges[:-1] + edges[1:] - 1) / 2, mean[0], color=ACCENT, lw=1.3)
    axes.set_ylim(bottom=0)


def share_curve(axes: Axes, share: np.ndarray, tokens: np.ndarray, named: int) -> None:
    """Shares along a text on a logarithmic scale, with the largest named; shares of 0 are left blank.

    A sink receives a thousand times more than other keys.
    """
    positive = share[share > 0] if (share > 0).any() else np.ones(1)
    top = float(positive.max())
    low = min(max(float(np.quantile(positive, 0.02)), top * 1e-6), top / 4)
    edges, shown = np.arange(len(share) + 1) - 0.5, np.where(share > 0, np.maximum(share, low), np.nan)
    axes.set_yscale("log")
    axes.stairs(shown, edges, baseline=low / 2, fill=True, color="#cfe1e4", lw=0)
    axes.stairs(shown, edges, baseline=None, color=ACCENT, lw=0.9 if len(share) < 500 else 0.5)
    axes.set_ylim(low / 1.3, top * (top / low) ** 0.25 * 1.2)
    steps = (1, 2, 5) if top < 100 * low else (1,)  # in a narrow range, powers of ten would give too few ticks
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**p for p in range(-9, 1) for m in steps if m * 10.0**p <= 1]))
    axes.yaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    name_peaks(axes, share, tokens, named)


def position(data: xr.Dataset, layer: int, head: int) -> tuple[int, int]:
    """The indices of a layer and a head, given their ids."""
    indices = []
    for name, value in (("layer", layer), ("head", head)):
        places = np.flatnonzero(data[name].values == value)
        if not len(places):
            ids = data[name].values
            raise InputError(f"{name}: got {value}; this group has {name}s {ids[0]} to {ids[-1]}")
        indices.append(int(places[0]))
    return indices[0], indices[1]


# --- sinks and hidden states ------------------------------------------------------------------------------------------


KINDS_OF_TEXT = {"alpha_first": "this text", "alpha_random": "random tokens", "alpha_repeated": "one token repeated"}
TOKENS = 8  # number of sink tokens listed


def sinks_figure(name: str, data: xr.Dataset) -> Figure:
    """Above: α of the first token, layer × head, on three kinds of text. Below: values, and the sink tokens.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
    >>> len(sinks_figure("qkv-mini", profile.data).axes)
    6
    """
    table = sink_table(data)
    kinds = {column: label for column, label in KINDS_OF_TEXT.items() if table[column].notna().any()}
    layers, heads = data.sizes["layer"], data.sizes["head"]
    cell = min(0.32, 2.3 / heads, 4.6 / layers)
    wide, tall = max(cell * heads, 1.2), max(cell * layers, 0.8)
    left, top, gap = 0.75, 1.3, 0.45
    width = max(left + len(kinds) * (wide + gap) + 0.6, 9.2)
    lower = top + tall + 1.0
    score = "α: mean weight on a token; above, of the first 64 queries"
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
    names = [f"{tables.readable(row.token)}  ({row.position:,})" for row in rows.itertuples()]
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
