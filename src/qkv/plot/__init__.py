"""Figures of attention weights that one already has, of any library, or of a `qkv.Profile`.

Functions with an argument `ax` draw one panel, into those axes or into a new figure, and return the axes. The others
make a new figure and return it. In a notebook both are shown as a picture. pyplot is not needed.

It imports the data of profiles, and no run of a model. Read `layout.py`, then `matrices.py`.

>>> import torch
>>> from qkv import plot
>>> plot.weights(torch.eye(3), ["a", "b", "c"], title="Each token attends to itself").get_title(loc="left")
'Each token attends to itself'
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from qkv.errors import InputError, finite, kind_of
from qkv.plot.composition import composition
from qkv.plot.matrices import arcs, heads, matrix, model, panels, weights
from qkv.plot.summaries import alignment, by_head, entropy, overlay, received, sinks

__all__ = [
    "alignment",
    "arcs",
    "by_head",
    "composition",
    "entropy",
    "heads",
    "matrix",
    "model",
    "overlay",
    "panels",
    "received",
    "sinks",
    "weights",
]
__dir__ = __all__.copy


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("title", "what", "note", "statistic"), ("a text", lambda x: isinstance(x, str))),
    **dict.fromkeys(("vmin", "vmax", "power"), ("a number", finite)),
    **dict.fromkeys(("tokens", "queries"), ("one name for each token", lambda x: isinstance(x, Iterable))),
    "first": ("a whole number", lambda x: hasattr(x, "__index__")),
    "labels": ("two texts, of queries and keys", lambda x: isinstance(x, tuple | list) and len(x) == 2),
    "ax": ("one Axes of matplotlib", lambda x: hasattr(x, "imshow")),
}


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a check that its arguments are of the right kind; None stands for a default."""

    @functools.wraps(function)
    def drawn(*args: Any, **named: Any) -> Any:
        for name, value in inspect.signature(function).bind_partial(*args, **named).arguments.items():
            expected, right = KINDS.get(name, ("", finite))
            if expected and value is not None and not right(value):
                raise InputError(f"{name} is {kind_of(value)}, expected {expected}")
        return function(*args, **named)

    return drawn


for _name in __all__:
    globals()[_name] = _checked(globals()[_name])
