"""Figure of attention rollout: contributions to a token, or from it, layer by layer along the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from qkv.errors import InputError
from qkv.figures.layout import (
    LABELLED_TOKENS,
    PERCENT,
    Drawing,
    along,
    name_peaks,
    note,
    place,
    plain,
    titled,
    token_label,
    token_strip,
)
from qkv.figures.style import ACCENT, MUTED
from qkv.profiler.data.labels import percent

if TYPE_CHECKING:
    import xarray as xr


def flow_figure(rollout: xr.DataArray, chosen: int = 0, text: int = 0) -> Figure:
    """The rollout of one chosen token, from `rollout` or `flow_to`: shares along the text, and below them by layer.

    Raises:
        InputError: if `text` or `chosen` is out of range.
    """
    for name, value, size in (("text", text, rollout.sizes["text"]), ("chosen", chosen, rollout.sizes["chosen"])):
        if not 0 <= value < size:
            raise InputError(f"{name} is {value}, expected a number from 0 to {size - 1}")
    n = int(rollout["n_tokens"].values[text])
    by_depth = rollout.values[text, chosen, :, :n]
    tokens, position = rollout["token_name"].values[text, :n], int(rollout["chosen_position"].values[text, chosen])
    backward = rollout.attrs["of"] == "queries"
    share = by_depth[0 if backward else -1]
    strip = max(0.9, 0.16 * len(by_depth))
    below = 0.95 if n <= LABELLED_TOKENS else 0.6
    figure = Drawing(figsize=(9.8, 3.27 + strip + below))
    titled(figure, _sentence(share, tokens, position, backward), _subtitle(rollout, n))
    curve = place(figure, 1.02, 0.95, 7.98, 2.2)
    heat, bar = place(figure, 1.02, 3.27, 7.98, strip), place(figure, 9.09, 3.27, 0.08, strip)
    plain(curve)
    _shares(curve, share, tokens)
    equal = 1 / n if backward else float(share.mean())
    curve.axhline(equal, color=MUTED, lw=0.7, ls=(0, (4, 3)))
    note(curve, equal, "equal\nshare" if backward else "mean")
    what = "share of its final state\nfrom each token" if backward else "share of each token's\nfinal state"
    curve.set_ylabel(what, fontsize=8, color=MUTED)
    along(curve, tokens, labels=False)
    _by_depth(heat, bar, by_depth)
    along(heat, tokens, what="token")
    return figure


def _shares(axes: Axes, share: np.ndarray, tokens: np.ndarray) -> None:
    """Shares along the text on a logarithmic scale, with the largest named; shares of 0 are left blank."""
    positive = share[share > 0]
    top = float(positive.max())
    low = min(max(float(np.quantile(positive, 0.02)), top * 1e-6), top / 4)
    edges, shown = np.arange(len(share) + 1) - 0.5, np.where(share > 0, np.maximum(share, low), np.nan)
    axes.set_yscale("log")
    axes.stairs(shown, edges, baseline=low / 2, fill=True, color="#cfe1e4", lw=0)
    axes.stairs(shown, edges, baseline=None, color=ACCENT, lw=0.9 if len(share) < 500 else 0.5)
    axes.set_ylim(low / 1.3, top * (top / low) ** 0.2 * 1.2)
    steps = (1, 2, 5) if top < 100 * low else (1,)
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**p for p in range(-9, 1) for m in steps if m * 10.0**p <= 1]))
    axes.yaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    name_peaks(axes, share, tokens, 9)


def _by_depth(axes: Axes, bar: Axes, values: np.ndarray) -> None:
    """Depth by token, embeddings at the bottom. The scale is logarithmic: a token's own share exceeds all others."""
    positive = values[values > 0]
    low = max(float(np.quantile(positive, 0.05)), 1e-6)
    token_strip(axes, bar, values, LogNorm(low, max(float(values.max()), 10 * low)))
    top = len(values) - 1
    step = max(1, top // 6)
    axes.set_yticks([*range(0, top, step), top], ["embeddings", *map(str, range(step, top, step)), "final"])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_ylabel("after layer", fontsize=8, color=MUTED)


def _sentence(share: np.ndarray, tokens: np.ndarray, position: int, backward: bool) -> str:
    others = share.copy()
    others[position] = -1
    top = int(others.argmax())
    here, there = (f"{_quoted(tokens[at])} (token {at:,})" for at in (position, top))
    if others[top] <= 0:
        return f"The final state of {here} is all its own" if backward else f"{here} takes part in no token but itself"
    if backward:
        return (
            f"{percent(share[position])} of the final state of {here} is its own; {percent(share[top])} is from {there}"
        )
    return (
        f"{percent(share.mean())} of the average final state is from {here}; {percent(share[top])} of that of {there}"
    )


def _quoted(token: str) -> str:
    label = token_label(token)
    return label if label.startswith("“") else f"“{label}”"


def _subtitle(rollout: xr.DataArray, n: int) -> str:
    group = rollout.attrs["group"]
    kind = "" if group == "self" else f" · {group} attention"
    layers = rollout.sizes["depth"] - 1
    rest = f"attention rollout, residual weight {rollout.attrs['residual']:g} · {layers} layers · {n:,} tokens"
    return f"{rollout.attrs['model']}{kind} · {rest}"
