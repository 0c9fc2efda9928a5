"""A profile as an interactive widget in a notebook, built on anywidget."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import anywidget
import numpy as np
import traitlets
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.profiler.explore import explorer
from qkv.profiler.explore.explorer import Explorer
from qkv.report.html import asset, bundled
from qkv.report.payload import as_json, payload
from qkv.report.stored import StoredMaps
from qkv.statistics.maps import Picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qkv.profiler.data.profile import ProfileData

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

    def __init__(self, profile: ProfileData) -> None:
        page, blobs = payload(profile)
        self._profile = profile
        self._maps: Explorer | StoredMaps = StoredMaps(profile)
        data, group = profile.data, page["groups"][page["main"]]
        layer, head = (group[side][at] for side, at in zip(("layers", "heads"), group["telling"][0], strict=True))
        sizes = int(data["n_queries"][0]), int(data["n_keys"][0])
        super().__init__(
            _page=as_json(page),
            _packed=blobs,
            selection={
                "group": profile.main, "text": 0, "layer": layer, "head": head,
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
        _check("text", new["text"], range(data.sizes["text"]))
        for name in ("layer", "head"):
            _check(name, new[name], data[name].values.tolist())
        moved = bool(old) and any(old[name] != new[name] for name in ("group", "text"))
        for side, span in (("query", "queries"), ("key", "keys")):
            n = int(data["n_queries" if side == "query" else "n_keys"][new["text"]])
            if moved:
                new |= {side: None, span: [0, n]}
            if new[side] is not None:
                _check(side, new[side], range(n))
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

    def _found(self, what: str, group: str, text: int, row: int = 0, **at: Any) -> tuple[dict[str, Any], list[bytes]]:
        maps, data = self._maps, self._profile.group(group)
        layer, head = divmod(row, data.sizes["head"])
        if isinstance(maps, Explorer):  # it has all layers of the model, the profile perhaps some
            layer = int(data["layer"][layer])
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
        info, data = self._maps.info(group, text), self._profile.group(group)
        if info.kind in ("small", "none"):
            return None
        sizes = int(data["n_queries"][text]), int(data["n_keys"][text])
        if (info.n_queries, info.n_keys) != sizes:
            raise InputError(
                f"inputs have {info.n_queries} queries and {info.n_keys} keys in text {text} of {group!r}, expected "
                f"{sizes[0]} and {sizes[1]} as in the profile"
            )
        return {"n_queries": info.n_queries, "n_keys": info.n_keys, "deepest": info.deepest}


def _check(name: str, value: object, known: Sequence[int]) -> None:
    if not isinstance(value, int) or value not in known:
        raise InputError(f"{name} is {value!r}, expected one of {known[0]} to {known[-1]}")


_WIDGETS: WeakKeyDictionary[ProfileData, ProfileWidget] = WeakKeyDictionary()


def widget_of(profile: ProfileData) -> ProfileWidget:
    """The widget of a profile, the same at each call, so that its selection is that of every cell which shows it."""
    if profile not in _WIDGETS or _WIDGETS[profile].comm is None:  # it was closed
        _WIDGETS[profile] = ProfileWidget(profile)
    return _WIDGETS[profile]
