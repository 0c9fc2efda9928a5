"""Figure of the similarity of heads: a matrix of all pairs, and a plane in which similar heads lie close together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkv.figures.layout import Drawing, colour_bar, heat, place, titled
from qkv.figures.style import HAIRLINE, INK, KINDS, MUTED

if TYPE_CHECKING:
    import pandas as pd

SIDE = 4.3  # inches, of both panels
NAMED = 32  # beyond this many heads, points have no labels


def similarity_figure(subtitle: str, table: pd.DataFrame, types: pd.DataFrame) -> Figure:
    """The table of `Profile.similarity`, and the types of the heads, as a figure.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
    >>> len(similarity_figure("qkv-mini", profile.similarity(), profile.types()).axes)
    3
    """
    figure = Drawing(figsize=(2 * SIDE + 3.1, SIDE + 1.85))
    of = "all weights" if table.attrs["maps"] == "weights" else "pooled maps"
    measure = "similarity: 1 − the mean Jensen-Shannon divergence of the rows, in bits"
    titled(figure, _sentence(table), f"{subtitle} · {measure} · from {of}")
    _matrix(place(figure, 0.7, 1.2, SIDE, SIDE), place(figure, 0.8 + SIDE, 1.2, 0.09, SIDE), table)
    _plane(place(figure, SIDE + 1.6, 1.2, SIDE, SIDE), table, types["type"].to_numpy())
    return figure


def plane(similarity: np.ndarray) -> np.ndarray:
    """Places (heads, 2) whose distances are near to √(1 − similarity): classical multidimensional scaling.

    For one query √(Jensen-Shannon divergence) is a metric that fits into a Euclidean space (Endres and Schindelin
    2003); two dimensions keep its largest part.

    >>> plane(np.array([[1, 0.75], [0.75, 1]]))[:, 0].round(3).tolist()
    [0.25, -0.25]
    """
    squares = 1 - np.where(np.isfinite(similarity), similarity, 0)
    inner = -(squares - squares.mean(0) - squares.mean(1, keepdims=True) + squares.mean()) / 2
    values, vectors = np.linalg.eigh(inner)
    places = np.zeros((len(squares), 2))
    for axis in range(min(2, len(squares))):
        direction = vectors[:, -1 - axis] * np.sqrt(max(0.0, float(values[-1 - axis])))
        places[:, axis] = direction * (1 if direction[np.abs(direction).argmax()] >= 0 else -1)
    return places


def _matrix(axes: Axes, bar: Axes, table: pd.DataFrame) -> None:
    image = heat(axes, table.to_numpy(), Normalize(0, 1))
    axes.set_aspect("equal")
    layer = table.index.get_level_values(0).to_numpy()
    starts = np.flatnonzero(np.r_[True, layer[1:] != layer[:-1]])
    ends = np.r_[starts[1:], len(layer)]
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="white", lw=0.8)
        axes.axvline(start - 0.5, color="white", lw=0.8)
    step = max(1, len(starts) // 16)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks((starts + ends - 1)[::step] / 2, [str(name) for name in layer[starts][::step]])
        axis.label.set(fontsize=8, color=MUTED)
    axes.set(xlabel="layer (its heads in order)", ylabel="layer")
    axes.tick_params(length=0, labelsize=7.5, colors=MUTED)
    axes.spines[:].set_visible(False)
    axes.set_title("All pairs of heads", loc="left", fontsize=9, color=INK, pad=5)
    colour_bar(bar, image, "")


def _plane(axes: Axes, table: pd.DataFrame, types: np.ndarray) -> None:
    places = plane(table.to_numpy())
    for kind, colour in KINDS.items():
        chosen = types == kind
        if chosen.any():
            label = f"{kind} ({chosen.sum()})"
            axes.scatter(
                places[chosen, 0], places[chosen, 1], s=26, color=colour, lw=0.5, ec=MUTED, label=label, zorder=2
            )
    centre, reach = (places.max(0) + places.min(0)) / 2, (np.ptp(places, 0).max() or 1) * 0.56
    axes.set(xlim=(centre[0] - reach, centre[0] + reach), ylim=(centre[1] - reach, centre[1] + reach))
    axes.set(xticks=[], yticks=[])
    if len(places) <= NAMED:
        _name(axes, table, places, reach)
    axes.spines[:].set_color(HAIRLINE)
    axes.set_title("Heads with similar maps lie close together", loc="left", fontsize=9, color=INK, pad=5)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=7.5, labelcolor=MUTED)


def _name(axes: Axes, table: pd.DataFrame, places: np.ndarray, reach: float) -> None:
    """Label the points with layer·head, towards the middle; points that nearly coincide share one label."""
    left, middle = list(range(len(places))), (places[:, 0].max() + places[:, 0].min()) / 2
    while left:
        near = [at for at in left if (np.abs(places[at] - places[left[0]]) < reach * np.array([0.22, 0.07])).all()]
        left = [at for at in left if at not in near]
        words = ", ".join("·".join(map(str, table.index[at])) for at in near)
        inside = places[near, 0].mean() < middle
        x = places[near, 0].min() if inside else places[near, 0].max()
        axes.annotate(
            words, (x, places[near, 1].max()), (-3 if inside else 3, 5), textcoords="offset points",
            ha="left" if inside else "right", fontsize=6.5, color=MUTED, zorder=3,
        )  # fmt: skip


def _sentence(table: pd.DataFrame) -> str:
    values = table.to_numpy()
    above = np.triu_indices(len(values), 1)
    known = values[above]
    if not np.isfinite(known).any():
        return "The similarity of heads is not defined: there are no two heads to compare"
    best = int(np.nanargmax(known))
    one, other = (table.index[above[side][best]] for side in (0, 1))
    return (
        f"Layer {one[0]}, head {one[1]} and layer {other[0]}, head {other[1]} are the most alike: "
        f"{known[best]:.2f}, against {np.nanmedian(known):.2f} in the median pair"
    )
