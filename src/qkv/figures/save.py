"""Figures on disk."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from qkv._files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160


def save_figure(figure: Figure, path: Path) -> None:
    """As PNG: never half a picture."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    write_whole(path, drawn.getbuffer())
