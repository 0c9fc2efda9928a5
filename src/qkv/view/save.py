"""Figures on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160


def save_figure(figure: Figure, path: Path) -> None:
    """As PNG, written to a temporary name and renamed: never half a picture."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(unfinished, format="png", dpi=DPI)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
