"""Profiles in notebooks: a card without scripts, the report in a frame, and the interactive widget."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import unicodedata
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import anywidget
import numpy as np
import traitlets
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv.errors import InputError
from qkv.profiler.data import frames, tables
from qkv.profiler.data.findings import headline
from qkv.profiler.data.frames import size_of
from qkv.profiler.explore import explorer
from qkv.profiler.explore.explorer import Explorer
from qkv.report.html import asset, bundled
from qkv.report.payload import payload
from qkv.report.stored import StoredMaps
from qkv.statistics.maps import Picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    import xarray as xr

    from qkv.profiler.profiles import Profile


INK = "#2f86a3"  # colour of cells, drawn with opacity, so that it works on light and dark pages
FAINT = 'style="opacity:.75"'
LEAST_SINK = 0.1  # if no head puts this share on the first token, the card shows entropy instead
HINT = (
    ("profile.view()", "the interactive page, here"),
    ("profile.heads()", "every number of every head"),
    ("profile.plot.overview()", "figures"),
    ('profile.report("report.html")', "one file to send"),
)
MAX_TARGETS = 288  # with more heads than this, the grid leaves out their targets to stay small
MAX_HEIGHT = 4000  # largest height of a notebook's frame, in pixels


def card(profile: Profile) -> str:
    """The HTML card that a notebook shows for a profile, without scripts, for light and dark pages.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
    >>> "<script" in card(profile), " 6 heads" in card(profile)
    (False, True)
    """
    data = profile.data
    heads = tables.head_table(data)
    statistic = _informative(heads)
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
        f'<div style="font-size:17px;line-height:1.3;margin:2px 0 8px"><bdi>{text(headline(data))}</bdi></div>'
        f'{sizes}<div style="margin-top:8px;opacity:.75">{hints}</div></div>'
        f"{_grid(data, heads, statistic)}</div>"
    )


class Card:
    """The card of a profile for marimo, which calls `_repr_html_` of what `_display_` returns."""

    def __init__(self, profile: Profile) -> None:
        self._html = card(profile)

    def _repr_html_(self) -> str:
        return self._html


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
    shown = "".join(f"‹U+{ord(c):04X}›" if _invisible(c) else c for c in str(value))
    return escape(shown, quote=True)


def _invisible(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200d"


def _informative(heads: pd.DataFrame) -> str:
    """The statistic to show: the weight on the first token if any head has a sink, else the entropy."""
    if heads["sink"].max() >= LEAST_SINK:
        return "sink"
    return "entropy_ratio" if heads["entropy_ratio"].notna().any() else "entropy"


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


class View:
    """The interactive report of a profile in a sandboxed frame, as notebooks show it.

    It needs no server and no network, and is saved with the notebook. `Profile.view` returns it.

    Args:
        profile: the profile to show.
        height: height of the frame, in pixels.

    >>> import qkv
    >>> view = View(qkv.profile("qkv-mini", "for name in names:", progress=False), height=400)
    >>> view
    View of 'qkv-mini', 400 pixels high: a notebook shows it, .save("view.html") writes it
    """

    def __init__(self, profile: Profile, height: int = 720) -> None:
        from qkv.report.html import render

        if isinstance(height, bool) or not isinstance(height, int) or not 100 <= height <= MAX_HEIGHT:
            raise InputError(f"height is {height!r}, expected a whole number of pixels from 100 to {MAX_HEIGHT:,}")
        self.height = height
        self.html = render(profile)
        """The HTML of the page."""
        self._model = str(profile.attrs.get("model", "unnamed model"))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page as one file, atomically, and return its path."""
        target = Path(path)
        write_atomically(target, self.html.encode("utf-8", "replace"))
        return target

    def __repr__(self) -> str:
        return f'View of {self._model!r}, {self.height} pixels high: a notebook shows it, .save("view.html") writes it'

    def _repr_html_(self) -> str:
        # Lone surrogates cannot be encoded: a notebook with them could not be saved.
        page = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", self.html)
        return (
            f'<iframe title="{text(self._model)}: attention profile" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{self.height}px;border:1px solid #8884;border-radius:6px" '
            f'loading="lazy" srcdoc="{escape(page, quote=True)}"></iframe>'
        )


STYLES = ("base.css", "maps.css", "widget.css")
ROOT = re.compile(r":root((?:\[[^]]*\]|:not\([^)]*\))*)")


def script() -> str:
    """The widget's JavaScript module: the modules of the report and `widget.js` as one."""
    return bundled("widget.js") + "\nexport default { render: renderWidget };\n"


def style() -> str:
    """The widget's style sheet. It applies within the widget's shadow tree only, not to the notebook."""
    text = "\n".join(asset(name) for name in STYLES)
    text = ROOT.sub(lambda match: f":host({match[1]})" if match[1] else ":host", text)
    return re.sub(r"^html ", ":host ", text, flags=re.MULTILINE)


class ProfileWidget(anywidget.AnyWidget):
    """The maps, the text and the numbers of a profile in a notebook. `Profile.widget` returns it.

    It works offline. Moving to another head or position changes `selection`, and setting that moves the widget.

    >>> import qkv
    >>> widget = qkv.profile("qkv-mini", "for name in names:", progress=False).widget()
    >>> widget.select(layer=2, head=4)
    >>> widget.selection["layer"], widget.selection["head"], widget.selection["queries"]
    (2, 4, [0, 6])
    """

    _esm = script()
    _style = traitlets.Unicode(style()).tag(sync=True)
    _page = traitlets.Unicode().tag(sync=True)
    _packed = traitlets.Dict().tag(sync=True)
    selection: dict[str, Any] = traitlets.Dict().tag(sync=True)  # type: ignore[assignment]
    """What is shown: ``group`` (a name), ``text`` (an index), ``layer`` and ``head`` (as in ``profile.data``),
    ``query`` and ``key`` (the positions selected on the map or in the text, or None), and ``queries`` and ``keys`` (the
    visible part of the map, as [first, stop])."""

    def __init__(self, profile: Profile) -> None:
        page, blobs = payload(profile)
        self._profile = profile
        self._maps: Explorer | StoredMaps = StoredMaps(profile)
        data, found = profile.data, page["groups"][page["main"]]["texts"][0]["findings"]
        steps = [step for one in found for step in one["steps"] if step["layer"] is not None]
        layer, head = (steps[0]["layer"], steps[0]["head"]) if steps else (int(data["layer"][0]), int(data["head"][0]))
        sizes = int(data["n_queries"][0]), int(data["n_keys"][0])
        super().__init__(
            _page=_sendable(json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
            _packed=blobs,
            selection={
                "group": profile.main, "text": 0, "layer": int(layer), "head": int(head),
                "query": None, "key": None, "queries": [0, sizes[0]], "keys": [0, sizes[1]],
            },
        )  # fmt: skip
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"ProfileWidget of {self._profile!r}"

    def select(
        self,
        *,
        group: str | None = None,
        text: int | None = None,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        key: int | None = None,
    ) -> None:
        """Show a head, and mark a query and a key on its map. Arguments that are not given stay as they are.

        Another group or text is shown whole, without a marked query and key.
        """
        given = {"group": group, "text": text, "layer": layer, "head": head, "query": query, "key": key}
        self.selection = self.selection | {name: value for name, value in given.items() if value is not None}

    @traitlets.validate("selection")
    def _validated(self, proposal: Any) -> dict[str, Any]:
        new = dict(proposal["value"])
        old = self.selection
        if old and set(new) != set(old):
            raise InputError(f"selection has {', '.join(new)}, expected {', '.join(old)}")
        data = self._profile.group(new["group"])
        texts = data.sizes["text"]
        if not isinstance(new["text"], int) or not 0 <= new["text"] < texts:
            raise InputError(f"text is {new['text']!r}, expected 0..{texts - 1}")
        for name in ("layer", "head"):
            if new[name] not in data[name].values:
                raise InputError(f"{name} is {new[name]!r}, expected one of {data[name].values.tolist()}")
        moved = bool(old) and any(old[name] != new[name] for name in ("group", "text"))
        for side, span in (("query", "queries"), ("key", "keys")):
            n = int(data["n_queries" if side == "query" else "n_keys"][new["text"]])
            if moved:
                new |= {side: None, span: [0, n]}
            if new[side] is not None and not (isinstance(new[side], int) and 0 <= new[side] < n):
                raise InputError(f"{side} is {new[side]!r}, expected None or 0..{n - 1}")
            new[span] = [int(at) for at in new[span]]
        return new

    # --- exact maps ---------------------------------------------------------------------------------------------------

    def read_from(
        self,
        model: nn.Module | str | Explorer,
        inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
        *,
        tokenizer: Any = None,
        target: str | None = None,
    ) -> None:
        """Compute exact maps of long texts with a model, at any zoom. The arguments are those of `Profile.widget`."""
        if isinstance(model, Explorer):
            self._maps = model
            return
        if inputs is None:
            raise InputError("inputs is missing, expected the text or the token ids that the profile was made of")
        self._maps = explorer.of(model, inputs, tokenizer=tokenizer, target=target)

    def _answer(self, _: Any, asked: dict[str, Any], __: list[memoryview]) -> None:
        """Answer a request of the page: the shape of maps, a tile, or one weight."""
        try:
            answer, buffers = self._found(**asked["of"])
        except InputError as error:
            answer, buffers = {"error": str(error)}, []
        self.send({"id": asked["id"]} | answer, buffers)

    def _found(
        self, what: str, group: str, text: int, layer: int = 0, head: int = 0, **at: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        maps = self._maps
        if isinstance(maps, Explorer):  # it has all layers of the model, the profile perhaps some
            layer = int(self._profile.group(group)["layer"][layer])
        if what == "shape":
            return {"shape": self._shape(group, text)}, []
        if what == "pair":
            return {"weight": maps.pair(group, text, layer, head, at["query"], at["key"])}, []
        picture: Picture | None = maps.tile(group, text, layer, head, at["zoom"], at["i"], at["j"])
        if picture is None:
            return {"rows": 0, "columns": 0}, [b""]
        values = (picture.maximum if at["pool"] == "max" else picture.mean).float().cpu().numpy()
        return {"rows": values.shape[0], "columns": values.shape[1]}, [np.ascontiguousarray(values).tobytes()]

    def _shape(self, group: str, text: int) -> dict[str, int] | None:
        """The size of exact maps; None if there are none."""
        maps, data = self._maps, self._profile.group(group)
        if isinstance(maps, StoredMaps):
            stored = maps.shape(group, text)
            if stored.kind != "stored":
                return None
            return {"n_queries": stored.n_queries, "n_keys": stored.n_keys, "deepest": stored.deepest}
        info = maps.info(group, text)
        sizes = int(data["n_queries"][text]), int(data["n_keys"][text])
        if (info.n_queries, info.n_keys) != sizes:
            raise InputError(
                f"inputs have {info.n_queries} queries and {info.n_keys} keys in text {text} of {group!r}, expected "
                f"{sizes[0]} and {sizes[1]} as in the profile"
            )
        return {"n_queries": info.n_queries, "n_keys": info.n_keys, "deepest": info.deepest}


def _sendable(text: str) -> str:
    """The text without lone surrogates, which cannot be encoded: a notebook with them could not be saved."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


_WIDGETS: WeakKeyDictionary[Profile, ProfileWidget] = WeakKeyDictionary()


def widget_of(profile: Profile) -> ProfileWidget:
    """The widget of a profile, the same at each call, so that its selection is that of every cell which shows it."""
    if profile not in _WIDGETS or _WIDGETS[profile].comm is None:  # it was closed
        _WIDGETS[profile] = ProfileWidget(profile)
    return _WIDGETS[profile]
