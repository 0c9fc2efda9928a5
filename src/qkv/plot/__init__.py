"""Figures of attention weights that one already has, of any library, or of a `qkv.Profile`.

Functions with an argument `ax` draw one panel, into those axes or into a new figure, and return the axes. The others
make a new figure and return it. In a notebook both are shown as a picture. pyplot is not needed.

>>> import torch
>>> from qkv import plot
>>> plot.weights(torch.eye(3), ["a", "b", "c"], title="Each token attends to itself").get_title(loc="left")
'Each token attends to itself'
"""

from qkv.plot.many import arcs, heads, model, panels
from qkv.plot.single import alignment, by_head, entropy, matrix, overlay, received, sinks, weights

__all__ = [
    "alignment",
    "arcs",
    "by_head",
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
