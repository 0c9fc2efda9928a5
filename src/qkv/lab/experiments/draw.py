"""The default figure of an experiment: the interval of every effect beside its bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qkv.lab.experiments.evidence import Interval, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkv.lab.experiments.base import Conclusion, Results


def intervals_figure(found: Conclusion, results: Results) -> Figure:
    """One row per effect: the mean, its interval, and the bound that it must clear; effects that do not count in grey.

    Each row has a scale of its own, because effects have different units.
    """
    from qkv.lab import draw

    rows = [(v.claim, i) for v in found.verdicts for i in v.intervals if i.n]
    note = f"Mean and interval at level {results.level:.3g}; the dashed line is the bound. {results.note}"
    figure, panels = draw.panels(found.title, note, rows=max(1, len(rows)), width=7.2, height=0.55)
    for axes, (claim, one) in zip(panels, rows, strict=False):
        _draw(axes, claim, one)
    return figure


def _draw(axes: object, claim: str, one: Interval) -> None:
    from matplotlib.axes import Axes

    from qkv.lab import draw

    assert isinstance(axes, Axes)
    colour = "#a8adb2" if one.unless else draw.COLOURS[0]
    ends = (one.low, one.high) if math.isfinite(one.low) else (one.mean, one.mean)
    axes.hlines(0, *ends, color=colour, linewidth=2.5)
    axes.plot(one.mean, 0, "o", color=colour, markersize=5)
    axes.axvline(one.bound, color=draw.MUTED, linewidth=1, linestyle="--")
    shift = 0.15 * max(abs(x - one.bound) for x in (*ends, one.mean)) or 0.1
    axes.set_xlim(min(*ends, one.bound) - shift, max(*ends, one.bound) + shift)
    axes.set_yticks([0], [f"{claim} {one.condition}".strip()])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.text(
        1.01, 0.5, f"{number(one.mean)}, n = {one.n}", transform=axes.transAxes, size=8, va="center", color=draw.INK
    )
