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
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    write_atomically(path, drawn.getbuffer())
