"""Figure of how similar the hidden states of different tokens are, by depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qkv.errors import InputError
from qkv.figures.layout import Drawing, place, plain, titled
from qkv.figures.style import ACCENT, HAIRLINE, MUTED, WARM
from qkv.profiler.data.labels import counted

if TYPE_CHECKING:
    import xarray as xr


def states_figure(name: str, stacks: Mapping[str, xr.Dataset]) -> Figure:
    """The mean cosine similarity of the states of two tokens by depth: a line for each stack, a thin one for each text.

    Args:
        name: name of the model.
        stacks: hidden states by stack of layers, as in `Profile.residual`.

    Raises:
        InputError: if no stack has the variable `cosine`, as in profiles of older versions.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", progress=False, probe=False)
    >>> len(states_figure("qkv-mini", profile.residual).axes)
    1
    """
    cosines = {stack: data["cosine"].values.astype(float) for stack, data in stacks.items() if "cosine" in data}
    cosines = {stack: values for stack, values in cosines.items() if np.isfinite(values).any()}
    if not cosines:
        raise InputError("profile: it holds no similarity of hidden states; profile a text of two or more tokens again")
    depths = max(values.shape[1] for values in cosines.values())
    width = min(11.0, max(6.4, 1.6 + 0.45 * depths))
    figure = Drawing(figsize=(width, 4.2))
    first, values = next(iter(cosines.items()))
    texts, tokens = len(values), int(stacks[first]["n_tokens"].sum())
    subtitle = (
        f"{name} · {counted(texts, 'text')}, {counted(tokens, 'token')} · mean over all pairs of tokens of a text"
    )
    titled(figure, _sentence(np.nanmean(values, 0)), subtitle)
    axes = place(figure, 0.72, 1.05, width - 1.1, 2.6)
    plain(axes)
    axes.axhline(0, color=HAIRLINE, lw=0.8)
    colours = (ACCENT, WARM, MUTED)
    for at, (stack, values) in enumerate(cosines.items()):
        x, colour = np.arange(values.shape[1]), colours[at % len(colours)]
        for one in values if len(values) > 1 else []:
            axes.plot(x, one, color=colour, lw=0.6, alpha=0.4)
        axes.plot(x, np.nanmean(values, 0), color=colour, lw=1.6, marker="o", ms=3.5, label=stack)
    axes.set_ylim(min(0.0, *(float(np.nanmin(values)) for values in cosines.values())) - 0.02, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(min(depths, 16), integer=True))
    axes.set_xlabel("depth: 0 is the input of the first layer, i the output of layer i", fontsize=8, color=MUTED)
    axes.set_ylabel("cosine of two tokens' states", fontsize=8, color=MUTED)
    if len(cosines) > 1:
        axes.legend(loc="best", frameon=False, fontsize=7.5, labelcolor=MUTED)
    return figure


def _sentence(mean: np.ndarray) -> str:
    start, peak, end = mean[0], int(np.nanargmax(mean)), mean[-1]
    if mean[peak] > max(start, end) + 0.05:
        beside = f"against {start:.2f} at the input and {end:.2f} at the end"
        return f"States of different tokens are most alike at depth {peak}: cosine {mean[peak]:.2f}, {beside}"
    if abs(end - start) < 0.05:
        return f"States of different tokens are as alike at the end as at the input: cosine {end:.2f}"
    way = "more" if end > start else "less"
    return f"States of different tokens become {way} alike with depth: from cosine {start:.2f} to {end:.2f}"
