"""Draws a wrong answer beside the right one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from torch import Tensor

from qkv.plot.layout import COLOURS, DIVERGING, heat, write_cells
from qkv_lab.draw import INK, panels, save_figure

WRITTEN = 8  # tables up to this many rows and columns have their numbers written in the cells


def draw(title: str, got: Any, expected: Any, path: Path) -> bool:
    """Draw each part of a result in a row: the answer's, the expected one, and their difference.

    Of a batch, the table that differs most is drawn. Returns False, and draws nothing, if the answer has no numbers.
    """
    wrong, right = _parts(got), _parts(expected)
    if not wrong:
        return False
    note = "Your result and the expected one have the same scale of colours; grey is NaN or infinite."
    lines = max(np.atleast_2d(part).shape[-2] for part in right)
    height = 1.1 if lines == 1 else min(2.9, 1.0 + 0.3 * lines)
    figure, axes = panels(title, note, rows=len(right), columns=3, width=9.0, height=height)
    for i, (name, mine, true) in enumerate(zip_longest(_names(right), wrong[: len(right)], right)):
        _row(axes[3 * i : 3 * i + 3], name, mine, true)
    save_figure(figure, path)
    return True


def _names(parts: list[np.ndarray]) -> list[str]:
    """Most answers return one result, or output and weights."""
    if len(parts) == 2 and parts[1].ndim > 1:
        return ["out", "weights"]
    return ["result"] if len(parts) == 1 else [f"result {i + 1}" for i in range(len(parts))]


def _row(axes: Sequence[Axes], name: str, mine: np.ndarray | None, true: np.ndarray) -> None:
    """The answer's part of a result, the expected one, and the difference; their shapes, if they are not equal."""
    at = _largest_difference(mine, true)
    if mine is None or mine.shape != true.shape:
        _table(axes[1], true[at], f"expected {name}", _scale(true[at]))
        shape = "missing" if mine is None else f"shape {mine.shape}"
        for one, text in ((axes[0], f"yours: {shape}"), (axes[2], f"expected: shape {true.shape}")):
            one.set_axis_off()
            one.text(0.5, 0.5, text, ha="center", va="center", color=INK)
        return
    where = f", [{', '.join(map(str, at))}]" if at else ""
    scale = _scale(mine[at], true[at])
    _table(axes[0], mine[at], f"your {name}{where}", scale)
    _table(axes[1], true[at], f"expected {name}{where}", scale)
    with np.errstate(invalid="ignore"):
        difference = mine[at] - true[at]
    _table(axes[2], difference, "difference", _scale(difference))


def _parts(result: Any) -> list[np.ndarray]:
    """The numbers in a result as arrays; nothing for what is no number."""
    if isinstance(result, tuple | list):
        return [part for one in result for part in _parts(one)]
    if isinstance(result, Tensor):
        return [result.detach().double().numpy()]
    if isinstance(result, np.ndarray | np.generic | float | int):
        return [np.asarray(result, dtype=float)] if np.asarray(result).dtype.kind in "bifu" else []
    return []


def _largest_difference(mine: np.ndarray | None, true: np.ndarray) -> tuple[int, ...]:
    """The index, in all dimensions but the last two, of the table that differs most; of the first one otherwise."""
    if true.ndim <= 2:
        return ()
    if mine is None or mine.shape != true.shape:
        return (0,) * (true.ndim - 2)
    with np.errstate(invalid="ignore"):
        distance = np.nan_to_num(np.abs(mine - true), nan=np.inf).max((-1, -2))
    return tuple(int(i) for i in np.unravel_index(distance.argmax(), distance.shape))


def _scale(*tables: np.ndarray) -> tuple[float, float]:
    """The limits of the colours: from 0, or symmetric around 0 if there are negative numbers."""
    finite = np.concatenate([table[np.isfinite(table)].ravel() for table in tables] or [np.zeros(1)])
    top = float(np.abs(finite).max(initial=0)) or 1.0
    return (-top if (finite < 0).any() else 0.0), top


def _table(axes: Axes, values: np.ndarray, title: str, scale: tuple[float, float]) -> None:
    """A table of numbers as a heatmap; one number as text."""
    axes.set_title(title, fontsize=8.5, color=INK)
    if values.ndim == 0:
        axes.set_axis_off()
        axes.text(0.5, 0.4, _number(values.item()), ha="center", va="center", size=14, color=INK)
        return
    table = np.atleast_2d(values)
    finite = np.where(np.isfinite(table), table, np.nan)
    image = heat(axes, finite, Normalize(*scale), DIVERGING if scale[0] < 0 else COLOURS, missing="0.75")
    rows, columns = table.shape
    axes.set_xticks(range(columns) if columns <= WRITTEN else [])
    axes.set_yticks(range(rows) if 1 < rows <= WRITTEN else [])
    if max(table.shape) <= WRITTEN:
        write_cells(axes, image, lambda value: f"{round(value, 2) + 0.0:.2f}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
