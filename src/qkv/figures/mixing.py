"""Figure of over-mixing: how far a changed token moves the states of all others, by depth and position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkv.errors import InputError
from qkv.figures.layout import Drawing, along, place, plain, titled, token_strip
from qkv.figures.style import ACCENT, HAIRLINE, INK, MUTED, WARM
from qkv.profiler.data import tables
from qkv.profiler.data.labels import percent

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

FAINTEST = 1e-3  # relative to the norm of a hidden state; smaller movements are drawn as none


def mixing_figure(data: xr.Dataset, other: xr.Dataset | None = None, *, text: int = 0, name: str = "") -> Figure:
    """The response at every depth and token, and its mean over later tokens by depth.

    Args:
        data: the result of `qkv.profiler.analyses.mixing.mixing`.
        other: a second result, without the first token or for a model with the same depth, drawn as a second curve.
        text: index of the text.
        name: name of the model; the name in `data` if empty.

    Raises:
        InputError: if `text` is out of range, or `other` has another depth.

    >>> from qkv.profiler.analyses.mixing import mixing
    >>> figure = mixing_figure(mixing("qkv-mini", "def mean(values):", position=3))
    >>> len(figure.axes)
    3
    """
    if not 0 <= text < data.sizes["text"]:
        raise InputError(f"text: got {text}; expected 0 to {data.sizes['text'] - 1}")
    if other is not None and other.sizes["depth"] != data.sizes["depth"]:
        depths = data.sizes["depth"], other.sizes["depth"]
        raise InputError(f"other: got {depths[1]} depths; expected {depths[0]} as in data")
    one = data.isel(text=text)
    moved = one["response"].values
    moved = moved[:, np.isfinite(moved).any(0)]
    depths, n = moved.shape
    tall = min(0.3 * depths, 4.6) if depths > 3 else 0.9
    figure = Drawing(figsize=(9.6, 1.05 + tall + 0.8))
    titled(figure, _sentence(data, other, text), _subtitle(data, text, name or str(data.attrs["model"])))
    heat = place(figure, 0.72, 1.05, 5.45, tall)
    bar = place(figure, 6.24, 1.05, 0.09, tall)
    curve = place(figure, 7.3, 1.05, 2.0, tall)

    most = max(float(np.nanmax(moved)), 2 * FAINTEST)
    token_strip(heat, bar, moved, LogNorm(FAINTEST, most), under="white", extend=0.06)
    along(heat, one["token_name"].values[:n], what="token")
    heat.set_title("Movement of each token, share of its norm", loc="left", fontsize=8.5, color=INK, pad=6)
    for spine in heat.spines.values():
        spine.set_color(HAIRLINE)

    plain(curve)
    curve.set_title("Mean of later tokens", loc="left", fontsize=8.5, color=INK, pad=6)
    for later, colour, label in _curves(data, other, text):
        curve.plot(100 * later, np.arange(depths), color=colour, lw=1.3, marker="o", ms=3, label=label)
    curve.set_xlim(left=0)
    curve.xaxis.set_major_locator(MaxNLocator(4))
    curve.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g} %"))
    if other is not None:
        curve.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.3 / tall), ncols=2, frameon=False, fontsize=7.5,
            labelcolor=MUTED, handlelength=1.2, columnspacing=1.2, borderaxespad=0,
        )  # fmt: skip
    for axes in (heat, curve):
        _depths(axes, depths, labelled=axes is heat)
    return figure


def _curves(data: xr.Dataset, other: xr.Dataset | None, text: int) -> list[tuple[np.ndarray, str, str]]:
    curves = [(data["later"].values[text], ACCENT, _kind(data))]
    if other is not None:
        curves.append((other["later"].values[text], WARM, _kind(other)))
    if other is not None and curves[0][2] == curves[1][2]:
        curves = [(later, colour, label) for (later, colour, _), label in zip(curves, ("this", "other"), strict=True)]
    return curves


def _kind(data: xr.Dataset) -> str:
    return "without the first token" if data.attrs["without_first"] else "whole text"


def _depths(axes: Axes, depths: int, *, labelled: bool) -> None:
    """The depth axis, downwards as in all figures, with the embeddings at the top."""
    step = max(1, round(depths / 12))
    axes.set_yticks(np.arange(0, depths, step), [str(d) if d else "emb." for d in range(0, depths, step)])
    axes.set_ylim(depths - 0.5, -0.5)
    if labelled:
        axes.set_ylabel("after layer", fontsize=8, color=MUTED)


def _sentence(data: xr.Dataset, other: xr.Dataset | None, text: int) -> str:
    later = float(data["later"].values[text, -1])
    if np.isnan(later):
        return "No token comes after the changed one"
    sentence = f"A changed token moves later ones by {percent(later)} of their norm"
    if other is not None:
        rest = percent(float(other["later"].values[text, -1]))
        sentence += f", by {rest} without the first token" if other.attrs["without_first"] else f", there by {rest}"
    return sentence


def _subtitle(data: xr.Dataset, text: int, name: str) -> str:
    position, count = data.attrs["position"], data.sizes["replacement"]
    place = int(np.flatnonzero(data["token"].values == position)[0])
    token = tables.readable(str(data["token_name"].values[text, place]))
    others = f"mean of {count} other tokens in its place" if count > 1 else "one other token in its place"
    return f"{name} · “{token}” at position {position} changed · {others} · {_kind(data)}"
