"""A profile as a card in a notebook, without scripts: where anywidget is not installed, or nothing runs."""

from __future__ import annotations

import importlib.util
import sys
import unicodedata
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from qkv.profiler.data import frames, tables
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.frames import size_of

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from qkv.profiler.profiles import Profile


INK = "#2f86a3"  # colour of cells, drawn with opacity, so that it works on light and dark pages
FAINT = 'style="opacity:.75"'
LEAST_SINK = 0.1  # if no head puts this share on the first token, the card shows entropy instead
HINT = (
    ("profile.heads()", "every number of every head"),
    ("profile.plot.overview()", "figures"),
    ('profile.report("report.html")', "one file to send"),
)
MAX_TARGETS = 288  # with more heads than this, the grid leaves out their targets to stay small


def card(profile: Profile) -> str:
    """The HTML card that a notebook shows for a profile, without scripts, for light and dark pages.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
    >>> "<script" in card(profile), " 6 heads" in card(profile)
    (False, True)
    """
    data = profile.data
    heads = tables.head_table(data)
    statistic = "entropy_ratio" if heads["entropy_ratio"].notna().any() else "entropy"
    if heads["sink"].max() >= LEAST_SINK:
        statistic = "sink"
    sizes = "".join(
        f'<div><b style="font-weight:600">{text(name)}</b> <span {FAINT}>{text(size_of(group))}</span></div>'
        for name, group in profile.groups.items()
    )
    hints = " · ".join(f'<span title="{text(what)}"><code>{text(call)}</code></span>' for call, what in HINT)
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:12px 32px;align-items:flex-start;margin:6px 0;'
        'font-family:system-ui,sans-serif;font-size:13px;line-height:1.45">'
        '<div style="flex:1 1 300px;max-width:560px">'
        f"<div {FAINT}><bdi>{text(profile.attrs.get('model', 'unnamed model'))}</bdi> · attention profile</div>"
        f'<div style="font-size:17px;line-height:1.3;margin:2px 0 8px"><bdi>{text(Findings(data).headline)}</bdi></div>'
        f'{sizes}<div style="margin-top:8px;opacity:.75">{hints}</div></div>'
        f"{_grid(data, heads, statistic)}</div>"
    )


def has_anywidget() -> bool:
    """Whether anywidget is installed, on which the widget is built."""
    return importlib.util.find_spec("anywidget") is not None


def can_show_widgets() -> bool:
    """Whether this process is the kernel of a notebook, and anywidget is installed."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None and has_anywidget()


def text(value: object) -> str:
    """Any value as escaped text, safe in an element or an attribute.

    Invisible characters and those that change the direction of text are replaced by their code points.

    >>> text("<b>a\\u202eb")
    '&lt;b&gt;a‹U+202E›b'
    """
    hidden = {c for c in str(value) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c != "\u200d"}
    shown = "".join(f"‹U+{ord(c):04X}›" if c in hidden else c for c in str(value))
    return escape(shown, quote=True)


def _grid(data: xr.Dataset, heads: pd.DataFrame, statistic: str) -> str:
    """A layer × head map as SVG; each cell has a tooltip with its number."""
    label, unit = frames.STATISTICS[statistic][:2]
    layers, columns = data.sizes["layer"], data.sizes["head"]
    cell = max(3, min(22, 320 // columns, 200 // layers))
    gap = 1 if cell > 5 else 0
    values = heads[statistic].to_numpy(np.float64)
    top = 1.0 if unit == "ratio" else max(float(np.nanmax(values, initial=0)), 0.1)
    left, above = 22, 16
    cells = []
    for place, (layer, head, value, goes) in enumerate(
        zip(heads["layer"], heads["head"], values, heads["goes_to"], strict=True)
    ):
        row, column = divmod(place, columns)
        share = float(np.clip(np.nan_to_num(value) / top, 0, 1))
        tooltip = f"L{layer} · H{head}: {frames.written(float(value), unit)}"
        tooltip += f"; {goes}" if len(values) <= MAX_TARGETS else ""
        cells.append(
            f'<rect x="{left + column * cell}" y="{above + row * cell}" width="{cell - gap}" height="{cell - gap}" '
            f'fill="{INK}" fill-opacity="{0.08 + 0.92 * share:.3f}"><title>{text(tooltip)}</title></rect>'
        )
    every = max(1, -(-14 // cell))
    ids = "".join(
        f'<text x="{left - 5}" y="{above + (row + 0.5) * cell + 3:g}" text-anchor="end">{text(name)}</text>'
        for row, name in enumerate(data["layer"].values)
        if row % every == 0
    )
    wide, tall = left + columns * cell, above + layers * cell
    caption = f"{label}, 0 to {frames.written(top, unit)} · layers ↓ heads →"
    wide = max(wide, left + 210)  # room for the caption
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
        f'viewBox="0 0 {wide} {tall}" role="img" aria-label="{text(caption)}" '
        'style="flex:none;max-width:100%" font-family="system-ui,sans-serif" font-size="10" fill="currentColor">'
        f'<text x="{left}" y="10" fill-opacity=".75">{text(caption)}</text>'
        f'<g fill-opacity=".75">{ids}</g>{"".join(cells)}</svg>'
    )
