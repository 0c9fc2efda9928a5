"""The figure of an experiment, and the page of all results."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.errors import InputError
from qkv_lab.experiments.evidence import ONLY, Effect, Interval, Verdict, number
from qkv_lab.experiments.record import load, seconds_in
from qkv_lab.experiments.registry import BUILT_IN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from qkv_lab.experiments.base import Conclusion, Results


WIDTH = 7.2
ROW, CAPTION = 0.5, 0.42
"""The heights in inches of a row and of the words above the first row of a claim."""
UNCOUNTED = "#a8adb2"


def intervals_figure(found: Conclusion, results: Results, effects: Mapping[str, Sequence[Effect]]) -> Figure:
    """One row per effect: a dot for every seed, the mean, its interval, and the bound that it must clear.

    The rows of a claim stand under the words of its criterion. Effects that do not count are grey. Each row has a scale
    of its own, because effects have different units.
    """
    from qkv_lab import draw

    claims = [(v, _rows(v, effects)) for v in found.verdicts]
    claims = [(v, rows) for v, rows in claims if rows]
    count = max(1, sum(len(rows) for _, rows in claims))
    height = ROW + CAPTION * len(claims) / count
    note = (
        f"Dots: seeds. Point and bar: their mean and its {100 * results.level:.3g} % confidence interval. The arrow "
        f"points from the bound to where the claim holds. {results.note}"
    )
    figure, panels = draw.panels(found.title, note, rows=count, width=WIDTH, height=height)
    free = iter(panels)
    beside = max((len(line) for _, rows in claims for one, _ in rows for line in _label(one).splitlines()), default=0)
    for verdict, rows in claims:
        for i, (one, values) in enumerate(rows):
            axes = next(free)
            _draw(axes, one, values)
            if i == 0 and verdict.criterion is not None:
                words = f"{verdict.claim} {verdict.holds}: {verdict.criterion.effect}"
                axes.set_title(textwrap.fill(words, 112 - beside), loc="left", size=8, color=draw.INK)
    return figure


def _rows(verdict: Verdict, effects: Mapping[str, Sequence[Effect]]) -> list[tuple[Interval, Sequence[float]]]:
    """The intervals of a verdict with the values that they are of."""
    of = effects.get(verdict.claim, ())
    return [(one, effect.values) for one, effect in zip(verdict.intervals, of, strict=True) if one.n]


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
    shown = (*ends, *values, one.mean, one.bound)
    margin = 0.06 * (max(shown) - min(shown)) or 0.1
    axes.set(xlim=(min(shown) - margin, max(shown) + margin), ylim=(-1, 1))
    axes.set_yticks([0.3], [_label(one)])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.text(
        1.01, 0.65, f"{number(one.mean)}, n = {one.n}", transform=axes.transAxes, size=8, va="center", color=draw.INK
    )


def table(out: str | Path) -> str:
    """All results in a folder as a Markdown page with questions, verdicts, costs and links to the figures."""
    lines = [
        "# Experiments",
        "",
        "Each verdict compares a confidence interval of a mean over seeds (Student's t) with a bound that was written",
        "down before the runs. Runs with the same seed share initial weights and data. Seeds are added until no claim",
        "is undecided, the last look is reached, or a budget ends; the level of each interval allows for all looks.",
        "Variants that did not learn their task are not counted. Verdicts hold for the small models trained here.",
    ]
    for name, found in _results(Path(out)):
        lines += ["", f"## {name}", "", f"*{found['question']}*", ""]
        lines += [] if all(v["text"] in found["paragraph"] for v in found["verdicts"]) else [found["paragraph"], ""]
        lines += [f"- **{v['claim']} {_outcome_text(v)}**: {v['text']}" for v in found["verdicts"]]
        lines += ["", f"![{found['title']}]({name}.png)", "", _origin(found)]
    return "\n".join(lines).replace("<s>", "`<s>`") + "\n"  # a browser would take <s> for strike-through


def _outcome_text(verdict: Mapping[str, Any]) -> str:
    """The outcome of a verdict, with the conditions under which the claim holds."""
    if verdict["holds"] != ONLY:
        return str(verdict["holds"])
    intervals = (Interval(**i) for i in verdict["intervals"])
    under = [i.condition for i in intervals if i.clears and not i.unless and not i.premise]
    return f"{ONLY}: {', '.join(under)}"


def _origin(found: Mapping[str, Any]) -> str:
    """How a result was made: command, seeds, cost, machine, commit and dates."""
    seeds = sorted({len(x["results"]) for x in found["variants"].values()})
    number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    dated = {v["criterion"]["dated"] for v in found["verdicts"] if "criterion" in v}
    parts = [
        f"`{found.get('command', 'qkv experiment ' + found['name'])}`",
        f"{number} seeds",
        f"of at most {found['design']['looks'][-1]} (a budget)" if "budget" in found.get("design", {}) else "",
        f"{seconds_in(found) / 60:.0f} minutes of processor time" if seconds_in(found) else "",
        f"{found['machine']['cpu']}" if "machine" in found else "",
        f"criteria of {', '.join(sorted(dated))}" if dated else "",
        f"run {found['created'][:10]}" if "created" in found else "",
        f"commit {found['versions']['commit'][:9]}" if found.get("versions", {}).get("commit") else "",
    ]
    return f"Made by {', '.join(filter(None, parts))}."


def _results(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results in a folder by name: of built-in experiments in their order, then of all others."""
    for name in BUILT_IN:
        if (folder / f"{name}.json").exists():
            yield name, load(folder / f"{name}.json")
    for file in sorted(folder.glob("*.json")):
        if file.stem not in BUILT_IN:
            with suppress(InputError):  # a JSON file of something else
                yield file.stem, load(file)
