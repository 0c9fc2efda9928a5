"""Write figures to disk."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from qkv._files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    write_atomically(path, png_of(figure))


def png_of(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    return drawn.getvalue()
