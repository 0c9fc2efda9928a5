"""The default figure of an experiment: every seed, the mean and its interval beside the bound, for every effect."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qkv_lab.experiments.evidence import Effect, Interval, Verdict, number
from qkv_lab.experiments.results import Lines, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 7.2
ROW, CAPTION, LINES = 0.5, 0.42, 2.6
"""The heights in inches of a row, of the words above the first row of a claim, and of the panel of lines."""
UNCOUNTED = "#a8adb2"
Row = tuple[Interval, list[float]]


def intervals_figure(
    title: str,
    verdicts: Sequence[Verdict],
    results: Results,
    effects: Mapping[str, Sequence[Effect]],
    lines: Lines | None = None,
) -> Figure:
    """One row per effect: a dot for every seed, the mean, its interval, and the bound that it must clear.

    The rows of a claim stand under the words of its criterion; claims that are judged by the same effects share them.
    Effects that do not count are grey. Each row has a scale of its own, because effects have different units. Lines
    have a panel of their own above the rows.
    """
    from qkv_lab import draw

    claims: list[tuple[list[Verdict], list[Row]]] = []
    for verdict in verdicts:
        rows = _rows(verdict, effects)
        same = [of for of, drawn in claims if drawn == rows and of[0].holds == verdict.holds]
        if same:
            same[0].append(verdict)
        elif rows:
            claims.append(([verdict], rows))
    count = sum(len(rows) for _, rows in claims)
    height = ROW + CAPTION * len(claims) / max(1, count)
    ratios = [LINES / height] * (lines is not None) + [1.0] * count
    note = (
        f"Dots: {results.unit}s. Point and bar: their mean and its {100 * results.level:.3g} % confidence interval. "
        "The arrow points from the bound to where the claim holds. "
    ) * bool(count)
    note = f"{_outcomes(verdicts)} {note}{results.note}"
    figure, panels = draw.panels(title, note, ratios=ratios, width=WIDTH, height=height)
    free = iter(panels)
    if lines is not None:
        _draw_lines(next(free), lines)
    beside = max((len(line) for _, rows in claims for one, _ in rows for line in _label(one).splitlines()), default=0)
    for of, rows in claims:
        for i, (one, values) in enumerate(rows):
            axes = next(free)
            _draw(axes, one, values)
            if i == 0 and of[0].criterion is not None:
                words = f"{', '.join(v.claim for v in of)} ({of[0].holds}): {of[0].criterion.effect}"
                axes.set_title(textwrap.fill(words, 112 - beside), loc="left", size=8, color=draw.INK)
    return figure


def _draw_lines(axes: Axes, lines: Lines) -> None:
    from qkv_lab import draw

    found = {name: values for name, values in lines.by_name.items() if len(values)}  # runs may have diverged
    draw.curves(axes, lines.x, found)
    axes.set(xlabel=lines.axis, ylabel=textwrap.fill(lines.label, 20))
    ticks = lines.x if len(lines.x) <= 5 else [2**i for i in range(int(max(lines.x)).bit_length())]
    if lines.log:
        axes.set_xscale("log", base=2)
    if lines.log or len(lines.x) < 5:
        axes.set_xticks(ticks, list(map(str, ticks)))
    if len(found) > 1:
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1.05), "handlelength": 1} if len(found) > 3 else {}
        axes.legend(fontsize=8, frameon=False, **beside)


def _outcomes(verdicts: Sequence[Verdict]) -> str:
    """The claims by outcome, in one sentence."""
    by_outcome: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_outcome.setdefault(verdict.holds, []).append(verdict.claim)
    words = "; ".join(f"{holds}: {', '.join(claims)}" for holds, claims in by_outcome.items())
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _rows(verdict: Verdict, effects: Mapping[str, Sequence[Effect]]) -> list[Row]:
    """The intervals of a verdict with the values that they are of."""
    of = effects.get(verdict.claim, ())
    return [(one, list(effect.values)) for one, effect in zip(verdict.intervals, of, strict=True) if one.n]


def _label(one: Interval) -> str:
    return textwrap.fill(("presupposed: " if one.premise else "") + one.condition.rstrip(","), 24)


def _draw(axes: Axes, one: Interval, values: Sequence[float]) -> None:
    from qkv_lab import draw

    colour = UNCOUNTED if one.unless else draw.COLOURS[0]
    ends = (one.low, one.high) if math.isfinite(one.low) else (one.mean, one.mean)
    axes.plot(values, [-0.5] * len(values), "o", color=colour, markersize=3, alpha=0.35, markeredgewidth=0)
    axes.hlines(0.3, *ends, color=colour, linewidth=2.5)
    axes.plot(one.mean, 0.3, "o", color=colour, markersize=5)
    axes.axvline(one.bound, color=draw.MUTED, linewidth=1, linestyle="--")
    side = ("→", "left") if one.above else ("←", "right")
    axes.text(one.bound, 0.85, f" {side[0]} ", size=8, ha=side[1], va="center", color=draw.MUTED)
    shown = [x for x in (*ends, *values, one.mean, one.bound) if math.isfinite(x)]
    margin = 0.06 * (max(shown) - min(shown)) or 0.1
    axes.set(xlim=(min(shown) - margin, max(shown) + margin), ylim=(-1, 1))
    axes.set_yticks([0.3], [_label(one)])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.text(
        1.01, 0.65, f"{number(one.mean)}, n = {one.n}", transform=axes.transAxes, size=8, va="center", color=draw.INK
    )
