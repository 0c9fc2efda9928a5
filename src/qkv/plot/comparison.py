"""Two profiles compared head by head, and the similarity of the heads of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkv.plot.layout import (
    ACCENT,
    HAIRLINE,
    INK,
    KINDS,
    MUTED,
    HeadMap,
    chart,
    colour_bar,
    head_maps,
    heat,
    in_percent,
    legend,
    place,
    titled,
)
from qkv.plot.map import Stored
from qkv.profiler.data.findings import head_name
from qkv.profiler.data.frames import STATISTICS, size_of, target_change

if TYPE_CHECKING:
    import pandas as pd

    from qkv.profiler.comparison import Comparison


# From decrease to increase; equally dark at both ends, and distinguishable with every kind of colour blindness.
SHOWN = ("entropy", "sink", "local")
MIN_SCALE = {"%": 0.05, "nats": 0.1}  # smallest colour scale, so that rounding errors do not look like changes
# What rounding of the model's numbers can change in a weight of up to 1.
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}
COMPARISON_NAMED = 8  # heads that changed most


def comparison_figure(comparison: Comparison, group: str) -> Figure:
    """Maps of the differences in entropy, weight on the first token and local weight; below, the most changed heads.

    Blue is a decrease from a to b, orange an increase. All shares have the same scale.

    >>> import qkv
    >>> from qkv.profiler.comparison import compare
    >>> profile = qkv.profile("minilm", "The keeper kept two logbooks.", progress=False)
    >>> len(comparison_figure(compare(profile, profile), "self").axes)
    7
    """
    heads = comparison.heads(group)
    names = [name for name in SHOWN if heads[f"{name}_difference"].notna().any()]
    most = heads.sort_values("change", ascending=False, kind="stable").head(COMPARISON_NAMED)
    shares = [heads[f"{n}_difference"].abs().max() for n in names if STATISTICS[n].unit == "%"]
    maps = []
    for name in names:
        label, unit = STATISTICS[name][:2]
        limit = np.nanmax([MIN_SCALE[unit], *(shares if unit == "%" else [heads[f"{name}_difference"].abs().max()])])
        title = label + (", % points" if unit == "%" else f", {unit}")
        maps.append(HeadMap(heads, f"{name}_difference", title, Normalize(-limit, limit), percent=unit == "%"))
    title, row = comparison.summary(group)[0].removesuffix("."), 0.25
    figure, _, lower = head_maps(title, _subtitle(comparison, group), maps, below=row * len(most) + 0.6)
    title = "Weight that moved to other tokens, most changed heads (bold: another target)"
    _most(chart(figure, 0.65, lower + 0.15, figure.get_figwidth() - 4.1, row * len(most), title), most)
    return figure


def _most(axes: Axes, heads: pd.DataFrame) -> None:
    """One bar for each head: the share of its weight that moved, and its targets before and after."""
    places = np.arange(len(heads))
    axes.barh(places, 100 * heads["change"], height=0.5, color=ACCENT, lw=0)
    axes.set(ylim=(len(heads) - 0.45, -0.55), xlim=(0, max(100 * float(heads["change"].max()), 1) * 1.02))
    axes.set_yticks(places, [head_name(row) for _, row in heads.iterrows()])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g} %"))
    for height, (_, row) in zip(places, heads.iterrows(), strict=True):
        words = target_change(row["goes_to_a"], row["goes_to_b"]).replace("$", r"\$")
        axes.annotate(
            words, (1, height), xycoords=axes.get_yaxis_transform(), xytext=(10, 0), textcoords="offset points",
            va="center", fontsize=7.5, color=INK, weight="bold" if row["moved"] else "normal", annotation_clip=False,
        )  # fmt: skip


MAPS, MAP_SIDE = 3, 2.5  # heads whose maps are drawn, and the side of a map in inches


def changed_maps_figure(comparison: Comparison, group: str) -> Figure | None:
    """The maps of the heads that changed most, before and after, and their difference; None without stored maps.

    The scale of the differences has numbers. It ends at the largest one, and at ten times what rounding in the wider of
    the two dtypes can change at least; what lies below rounding is white.

    >>> import qkv
    >>> a, b = (qkv.profile("qkv-mini", "x = 1", progress=False) for _ in range(2))
    >>> len(changed_maps_figure(a.compare(b), "self").axes)
    15
    """
    sides = [(profile, profile.groups[group]) for profile in (comparison.a, comparison.b)]
    stored = [Stored.of(data) for _, data in sides]
    if stored[0] is None or stored[1] is None or stored[0].bins != stored[1].bins:
        return None
    most = comparison.heads(group).sort_values("change", ascending=False, kind="stable").head(MAPS)
    rounding = min(ROUNDING.get(str(profile.attrs.get("dtype")), ROUNDING["float32"]) for profile, _ in sides)
    gap, top = 0.95, 1.15
    figure = titled(0.65 + 3 * (MAP_SIDE + gap), top + len(most) * (MAP_SIDE + 0.75), "The heads that changed most",
                    f"{_subtitle(comparison, group)} (difference) · grey: masked")  # fmt: skip
    for row, (_, one) in enumerate(most.iterrows()):
        at = divmod(most.index[row], comparison.groups[group].sizes["head"])
        before, after = (np.where(x.visible, x.largest[at], np.nan) for x in stored if x is not None)
        difference = np.where(np.abs(after - before) > rounding, after - before, np.where(np.isnan(after), np.nan, 0))
        largest = max(float(np.nanmax(np.abs(difference), initial=0)), 10 * rounding)
        scale = Normalize(0, max(float(np.nanmax(x, initial=0)) for x in (before, after)) or 1.0)
        names = (str(profile.attrs.get("dtype", "unknown")) for profile, _ in sides)
        titles = [f"{head_name(one)}, {word} ({name})" for word, name in zip(("before", "after"), names, strict=True)]
        panels = zip((before, after, difference), [*titles, "after − before"],
                     (scale, scale, Normalize(-largest, largest)), strict=True)  # fmt: skip
        for column, (values, title, norm) in enumerate(panels):
            place_at = 0.65 + column * (MAP_SIDE + gap), top + row * (MAP_SIDE + 0.75)
            axes = place(figure, *place_at, MAP_SIDE, MAP_SIDE, title)
            axes.set(xlabel="key" if row + 1 == len(most) else "", ylabel="" if column else "query")
            axes.tick_params(labelsize=6.5, colors=MUTED, length=0)
            image = heat(axes, values, norm)
            if column:
                colour_bar(image, in_percent if column == 1 else _points)
    return figure


def _points(value: float) -> str:
    """A difference of shares in percentage points."""
    return "0" if not value else f"{100 * value:+.3g} %".replace("-", "−")


def _subtitle(comparison: Comparison, group: str) -> str:
    models, dtypes = (
        list(dict.fromkeys(str(p.attrs.get(key, "unknown")) for p in (comparison.a, comparison.b)))
        for key in ("model", "dtype")
    )
    names = " → ".join(m if len(m) <= 28 else f"{m[:27]}…" for m in models)
    kind = "" if group == "self" else f"{group} attention · "
    size = size_of(comparison.groups[group])
    return f"{names} · {' → '.join(dtypes)} · {kind}{size} · blue: less, orange: more"


SIDE = 4.3  # inches, of both panels
SIMILARITY_NAMED = 32  # beyond this many heads, points have no labels


def similarity_figure(subtitle: str, table: pd.DataFrame, types: pd.DataFrame) -> Figure:
    """The table of `Profile.similarity`, and the types of the heads, as a figure.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
    >>> len(similarity_figure("qkv-mini", profile.similarity(), profile.types()).axes)
    3
    """
    of = "all weights" if table.attrs["maps"] == "weights" else "pooled maps"
    measure = "similarity: 1 − the mean Jensen-Shannon divergence of the rows, in bits"
    subtitle = f"{subtitle} · {measure} · from {of}"
    figure = titled(2 * SIDE + 3.1, SIDE + 1.85, _similarity_sentence(table), subtitle)
    pairs = place(figure, 0.7, 1.2, SIDE, SIDE, "All pairs of heads")
    _matrix(pairs, table)
    points = place(figure, SIDE + 1.6, 1.2, SIDE, SIDE, "Heads with similar maps lie close together")
    _plane(points, table, types["type"].to_numpy())
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


def _matrix(axes: Axes, table: pd.DataFrame) -> None:
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
    axes.set(xlabel="layer (its heads in order)", ylabel="layer")
    axes.tick_params(length=0, labelsize=7.5, colors=MUTED)
    axes.spines[:].set_visible(False)
    colour_bar(image)


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
    low, high = centre - reach, centre + reach
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xticks=[], yticks=[])
    if len(places) <= SIMILARITY_NAMED:
        _name(axes, table, places, reach)
    axes.spines[:].set_color(HAIRLINE)
    legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1))


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


def _similarity_sentence(table: pd.DataFrame) -> str:
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
