"""`Profile`: the numbers of a profile, and the rooms that draw, show and compare them."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv._packages import require
from qkv.profiler.comparison import Comparison, compare
from qkv.profiler.data.profile import ProfileData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from qkv.plot.of_profile import Plots
    from qkv.profiler.explore.explorer import Explorer
    from qkv.report.widget import ProfileWidget


class Profile(ProfileData):
    """Exact attention statistics of a model on some texts, head by head and token by token.

    Args:
        groups: one `xarray.Dataset` per kind of attention: `{"self": …}`, or `{"encoder": …, "decoder": …,
            "cross": …}`. docs/quantities.md lists its variables; each carries its ``units`` and ``definition``. They
            are over (text, layer, head, query), such as `entropy`, and over (text, layer, head, key), such as
            `received`; `weights`, over both, is kept for short texts. Custom statistics are stored under their names.
            Values beyond a text's `n_queries` or `n_keys` are NaN. In cross-attention, where queries and keys belong to
            different texts, statistics that compare positions (`self`, `local` and others) are NaN, too.
        attrs: JSON-serialisable facts about the run: model, dtype, versions, command, created, seconds and so on.
        residual: hidden states by stack of layers, over (text, depth, token): see `qkv.profiler.capture.residual`.

    Raises:
        InputError: if a data set lacks a variable, a coordinate or an attribute, or has wrong dimensions, or if the
            attributes cannot be written as JSON.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", "import os", progress=False)
    >>> profile.data["entropy"].sel(layer=0, head=3).dims
    ('text', 'query')
    """

    def compare(self, other: Profile) -> Comparison:
        """Differences to `other`, a profile of the same heads and tokens: see `qkv.profiler.comparison.compare`."""
        return compare(self, other)

    def report(self, path: str | os.PathLike[str], image: Any = None) -> Path:
        """Write the profile as one HTML file that works offline, and return its path.

        It begins with where the model looks in the `image` that it read, if one is given, as in `plot.image`.
        """
        from qkv.report.html import write_report

        return write_report(self, path, image=image)

    def widget(
        self,
        model: nn.Module | str | Explorer | None = None,
        inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
        *,
        tokenizer: Any = None,
        target: str | None = None,
    ) -> ProfileWidget:
        """The profile as an interactive element of a notebook: all maps, the text, the numbers of a head.

        Notebooks display a profile as this widget, if anywidget is installed: ``pip install 'qkv[notebook]'``. It needs
        no network. ``widget.selection`` is what is shown, and ``widget.select(layer=2, head=4)`` changes that. Calls of
        one profile return the same object.

        Args:
            model: the model of the profile, as in `qkv.profile`, or an `Explorer`; the model runs when a map is first
                drawn, which is then exact at any zoom. Without a model, maps of long texts are pooled.
            inputs: as in `qkv.profile`, like `tokenizer` and `target`.
            tokenizer: see there.
            target: see there.

        Raises:
            InputError: if anywidget is not installed, or there is a model without inputs.

        >>> import qkv
        >>> text = "for name in names:"
        >>> widget = qkv.profile("qkv-mini", text, progress=False).widget("qkv-mini", text)
        >>> widget.select(layer=1, head=2, query=5, key=0)
        >>> widget.selection["head"]
        2
        """
        require("widget", "anywidget")
        from qkv.report.widget import widget_of

        widget = widget_of(self)
        if model is not None:
            widget.read_from(model, inputs, tokenizer=tokenizer, target=target)
        return widget

    @property
    def plot(self) -> Plots:
        """Matplotlib figures of this profile: `profile.plot.overview()`, `.received()`, `.head(3, 1)` …"""
        from qkv.plot.of_profile import Plots

        return Plots(self)

    def _repr_png_(self) -> bytes:
        """A static picture of all heads, where the widget cannot be shown."""
        picture: bytes = self.plot.overview()._repr_png_()  # type: ignore[attr-defined]
        return picture

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget for a notebook with a kernel, if anywidget is installed."""
        ipython = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        in_notebook = getattr(shell, "kernel", None) is not None and find_spec("anywidget") is not None
        bundle = self.widget()._repr_mimebundle_() if in_notebook else None
        return {} if bundle is None else dict(bundle[0])

    def _display_(self) -> Any:
        """What marimo shows: the widget, or the picture."""
        return self.plot.overview() if find_spec("anywidget") is None else self.widget()
