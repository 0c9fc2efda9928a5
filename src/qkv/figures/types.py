"""Figure of the types of heads: layer × head, a colour for each role, marks for traits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from qkv.figures.layout import Drawing, place, titled
from qkv.figures.style import INK, KINDS, MUTED
from qkv.profiler.data.labels import layers_and_heads
from qkv.profiler.data.types import MIXED, ROLES, TRAITS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

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
    legend = 0.235 * (len(present) + len(shown) + (1 if shown else 0))
    left, top = 0.75, 1.05
    width = max(left + wide + 3.9, 7.2)
    figure = Drawing(figsize=(width, top + max(tall, legend) + 0.7))
    titled(
        figure,
        _sentence(table),
        f"{name} · {layers_and_heads(layers, heads)} · a head has the first type whose threshold it reaches",
    )
    axes = place(figure, left, top, wide, tall)
    _cells(axes, grid, traits, cell)
    _legend(place(figure, left + wide + 0.35, top, 3.2, legend), table, present, shown)
    return figure


def _cells(axes: Axes, grid: pd.DataFrame, traits: pd.DataFrame, cell: float) -> None:
    layers, heads = grid.shape
    for (i, j), kind in np.ndenumerate(grid.to_numpy()):
        axes.add_patch(Rectangle((j + 0.03, i + 0.03), 0.94, 0.94, color=KINDS[kind], lw=0))
        marks = "".join(MARKS[t] for t in traits.to_numpy()[i, j].split(", ") if t in MARKS)
        if marks and cell > 0.2:
            axes.text(j + 0.5, i + 0.52, marks, ha="center", va="center", fontsize=6.5, color=_ink(KINDS[kind]))
    axes.set(xlim=(0, heads), ylim=(layers, 0), xlabel="head", ylabel="layer")
    for axis, names in ((axes.xaxis, grid.columns), (axes.yaxis, grid.index)):
        step = max(1, len(names) // 16)
        axis.set_ticks(np.arange(0, len(names), step) + 0.5, [str(n) for n in names[::step]])
        axis.label.set(fontsize=8, color=MUTED)
    axes.tick_params(length=0, labelsize=7.5, colors=MUTED)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(axes: Axes, table: pd.DataFrame, present: list[str], shown: list[str]) -> None:
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


def _ink(colour: str) -> str:
    """A text colour that is readable on `colour`."""
    red, green, blue = to_rgb(colour)
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _sentence(table: pd.DataFrame) -> str:
    counts = table["type"].value_counts()
    named = counts.drop(MIXED, errors="ignore")
    parts = [f"{n:,} {kind}" for kind, n in named.head(3).items()]
    if not parts:
        return f"None of the {len(table):,} heads has a single role"
    return f"Of {len(table):,} heads: {', '.join(parts)}" + (f"; {counts[MIXED]:,} mixed" if MIXED in counts else "")
