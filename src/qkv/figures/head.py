"""Figures of received attention along a text, of one head, and of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from qkv.errors import InputError
from qkv.figures.layout import (
    LABELLED_TOKENS,
    PERCENT,
    Drawing,
    along,
    bins,
    heat,
    name_peaks,
    note,
    place,
    plain,
    titled,
    token_label,
    token_strip,
)
from qkv.figures.style import ACCENT, DESTINATIONS, INK, MUTED
from qkv.profiler.data import tables
from qkv.profiler.data.labels import percent, written

if TYPE_CHECKING:
    import xarray as xr

from qkv.figures.overview import subtitle_of


def received_figure(name: str, data: xr.Dataset) -> Figure:
    n_keys = int(data["n_keys"][0])
    tokens = data["key_token"].values[0, :n_keys]
    by_layer = tables.received_share(data)[0, ..., :n_keys].mean(1)  # (layer, key)
    mean, layers = by_layer.mean(0), data.sizes["layer"]
    top = int(mean.argmax())
    strip = max(0.9, 0.16 * layers)
    figure = Drawing(figsize=(9.6, 3.3 + strip + 0.6))
    title = f"“{token_label(tokens[top])}” at position {top} receives {percent(mean[top])} of all attention"
    if np.sort(mean)[-1] > 5 * np.median(mean):
        title += f", {mean[top] / np.median(mean):,.0f} × the median token"
    titled(figure, title, subtitle_of(name, data))
    curve = place(figure, 0.82, 0.85, 7.98, 2.3)
    heat = place(figure, 0.82, 3.27, 7.98, strip)
    bar = place(figure, 8.89, 3.27, 0.08, strip)

    plain(curve)
    received_curve(curve, mean, tokens, 9)
    curve.axhline(1 / n_keys, color=MUTED, lw=0.7, ls=(0, (4, 3)))
    note(curve, 1 / n_keys, "equal\nshare")
    curve.set_ylabel("share of all attention", fontsize=8, color=MUTED)

    low = max(float(np.quantile(by_layer, 0.05)), by_layer.max() * 1e-6, 1e-12)
    token_strip(heat, bar, by_layer, LogNorm(low, by_layer.max()))
    heat.set_ylim(layers - 0.5, -0.5)
    heat.set_ylabel("layer", fontsize=8, color=MUTED)
    step = max(1, layers // 6)
    heat.set_yticks(np.arange(0, layers, step), [str(layer) for layer in data["layer"].values[::step]])
    for spine in heat.spines.values():
        spine.set_visible(False)
    along(heat, tokens)
    along(curve, tokens, labels=False)
    return figure


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
    figure = Drawing(figsize=(9.6, 2.0 + curves * (height + 0.52) + 0.35))
    title = f"Layer {row['layer']}, head {row['head']}: {row['goes_to']}"
    titled(figure, title, f"{name} · {row['module']} · " + " · ".join(facts))
    _stack(place(figure, left, 1.12, width, 0.3), data, layer, head)

    def axes_at(index: int, label: str, tokens: np.ndarray, what: str) -> Axes:
        axes = place(figure, left, 2.12 + index * (height + 0.52), width, height)
        axes.set_title(label, loc="left", fontsize=8.5, color=INK, pad=6)
        plain(axes)
        along(axes, tokens, labels=index == curves - 1, what=what)
        return axes

    received = tables.received_share(data)[0, layer, head, :n_keys]
    axes = axes_at(0, "Received by each key, share of the head's weight", keys, "key")
    received_curve(axes, received, keys, 6)

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
    for name, (label, colour) in DESTINATIONS.items():
        share = shares[name] / whole
        if share > 0:
            axes.barh(0, share, left=left, height=1, color=colour, lw=0.8, edgecolor="white")
            if share >= 0.05:
                dark = name in ("first", "sink_logit", "self", "previous")
                axes.text(
                    left + share / 2, 0, percent(shares[name]), ha="center", va="center", fontsize=8,
                    color="white" if dark else INK,
                )  # fmt: skip
            left += share
            if share >= 0.005:
                window = f" ±{data.attrs['local_window']}" if name == "nearby" else ""
                shown.append((label + window, colour))
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, 0.5)
    handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in shown]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(-0.004, -0.18), ncols=len(handles), frameon=False,
        fontsize=7.5, labelcolor=MUTED, handlelength=0.9, handleheight=0.9, handletextpad=0.5,
        columnspacing=1.3, borderaxespad=0,
    )  # fmt: skip
    axes.set_title("Where the weight goes", loc="left", fontsize=8.5, color=INK, pad=5)


def weights_figure(name: str, data: xr.Dataset, layer: int, head: int, weights: np.ndarray) -> Figure:
    row = tables.head_table(data).iloc[layer * data.sizes["head"] + head]
    n_queries, n_keys = weights.shape
    wide = min(5.6, 5.6 * n_keys / n_queries)
    tall = max(wide * n_queries / n_keys, 1.2)
    below = 1.0 if n_keys <= LABELLED_TOKENS else 0.6
    figure = Drawing(figsize=(max(wide + 1.9, 6.4), 1.15 + tall + below))
    titled(figure, f"Layer {row['layer']}, head {row['head']}: {row['goes_to']}", subtitle_of(name, data))
    axes = place(figure, 0.95, 1.15, wide, tall)
    bar = place(figure, 0.95 + wide + 0.12, 1.15, 0.1, tall)
    norm = PowerNorm(0.5, 0, float(np.nanmax(weights)) or 1)
    image = heat(axes, weights, norm)
    along(axes, data["key_token"].values[0, :n_keys])
    along(axes, data["query_token"].values[0, :n_queries], vertical=True)
    axes.tick_params(length=0, colors=MUTED)
    drawn = figure.colorbar(image, cax=bar)
    drawn.outline.set_visible(False)
    bar.yaxis.set_major_formatter(PERCENT)
    bar.tick_params(length=0, labelsize=7, colors=MUTED)
    bar.set_title("weight", fontsize=7.5, color=MUTED, loc="left", pad=5)
    return figure


def _curve(axes: Axes, values: np.ndarray) -> None:
    """A curve along the text; a long one is drawn faint, with its binned mean over it."""
    if len(values) <= 400:
        axes.plot(values, color=ACCENT, lw=1.1)
    else:
        axes.plot(values, color="#b9d3d9", lw=0.4, rasterized=True)
        mean, edges = bins(values[None], 160)
        axes.plot((edges[:-1] + edges[1:] - 1) / 2, mean[0], color=ACCENT, lw=1.3)
    axes.set_ylim(bottom=0)


def received_curve(axes: Axes, share: np.ndarray, tokens: np.ndarray, named: int) -> None:
    """Received attention by key on a logarithmic scale: a sink receives a thousand times more than other keys."""
    top = float(share.max()) or 1.0
    low = max(float(np.quantile(share, 0.02)), top * 1e-6)
    edges = np.arange(len(share) + 1) - 0.5
    shown = np.maximum(share, low)
    axes.set_yscale("log")
    axes.stairs(shown, edges, baseline=low / 2, fill=True, color="#cfe1e4", lw=0)
    axes.stairs(shown, edges, baseline=None, color=ACCENT, lw=0.9 if len(share) < 500 else 0.5)
    axes.set_ylim(low / 1.3, top * (top / low) ** 0.25 * 1.2)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    if top < 100 * low:  # a narrow range: powers of ten would give too few ticks
        axes.yaxis.set_major_locator(FixedLocator([m * 10.0**p for p in range(-9, 1) for m in (1, 2, 5)]))
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
