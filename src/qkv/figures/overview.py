"""All heads as layer × head maps, their types, and one head with its curves along the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from qkv.errors import InputError
from qkv.figures.layout import (
    ACCENT,
    DESTINATIONS,
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
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.frames import STATISTICS, columns_of, layers_and_heads, percent, size_of, written
from qkv.profiler.data.types import MIXED, ROLES, TRAITS

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


def by_layer_figure(
    name: str, data: xr.Dataset, heads: pd.DataFrame, statistic: str, title: str
) -> tuple[Figure, Axes]:
    """One dot for each head, one column for each layer, and the median of each layer."""
    label, unit = STATISTICS[statistic][:2]
    layers = data["layer"].values
    width = min(11.0, max(6.4, 1.6 + 0.62 * len(layers)))
    figure = titled(width, 4.4, title, subtitle_of(name, data))
    axes = chart(figure, 0.72, 1.2, width - 1.4, 2.65)
    at, rows = layer_columns(axes, layers, heads, statistic)
    axes.scatter(at, rows[statistic], s=17, color=ACCENT, alpha=0.75, lw=0, zorder=3, label="one head")
    medians = heads.groupby("layer")[statistic].median()[layers]  # NaN if the text is too short
    middle = np.arange(len(layers))
    axes.hlines(medians, middle - 0.34, middle + 0.34, color=WARM, lw=1.8, zorder=4, label="median of the layer")
    axes.set(ylabel=label.lower() if unit == "%" else f"{label.lower()}, {unit}")
    legend(
        axes, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2, handletextpad=0.5,
        columnspacing=1.4, scatteryoffsets=[0.5],
    )  # fmt: skip
    return figure, axes


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
    subtitle = f"{name} · {layers_and_heads(layers, heads)} · a head has the first type whose threshold it reaches"
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
