"""Figure of attention over an image: each region is as bright as its weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkv.errors import InputError
from qkv.figures.layout import Drawing, place, titled, token_label
from qkv.figures.style import HAIRLINE, INK, MUTED
from qkv.profiler.data.labels import percent

ACROSS = 6  # pictures in a row
DARK = 0.22  # brightness, relative to the image, at a weight of 0


def overlay_figure(
    subtitle: str,
    of: str,
    image: np.ndarray,
    maps: np.ndarray,
    names: Sequence[str],
    *,
    corners: bool = False,
) -> Figure:
    """The image, followed by a picture for each query.

    The brightness of a picture is proportional to the weights, interpolated between the centres of cells; the cell with
    the largest weight is as bright as the image. Below each picture is the share of the weight on that cell.

    Args:
        subtitle: model, length and texts, for the second line.
        of: the head or heads of the weights; empty for a model with one head.
        image: (h, w, 3), numbers from 0 to 1 or bytes.
        maps: (queries, gh, gw) weights.
        names: names of the queries.
        corners: whether cell (i, j) is centred on the pixel (i h / gh, j w / gw), as after strided convolutions with
            padding; otherwise on the middle of its part of the image.
    """
    picture = checked(image)
    across = min(ACROSS, len(maps) + 1)
    down = -(-(len(maps) + 1) // across)
    wide = 1.45 if len(maps) > 2 else 2.6
    tall = wide * picture.shape[0] / picture.shape[1]
    left, top, gap_x, gap_y = 0.3, 1.25, 0.2, 0.55
    width = max(left + across * (wide + gap_x) + 0.1, 7.2)
    figure = Drawing(figsize=(width, top + down * (tall + gap_y)))
    titled(figure, f"{of}: {_sentence(maps, names)}" if of else _sentence(maps, names), subtitle)
    panels = [place(figure, left + n % across * (wide + gap_x), top + n // across * (tall + gap_y), wide, tall)
              for n in range(len(maps) + 1)]  # fmt: skip
    show_image(panels[0], picture, "the image")
    for axes, weights, name in zip(panels[1:], maps, names, strict=True):
        show_image(axes, lit(picture, weights, corners=corners), token_label(name))
        peak = f"{percent(float(weights.max()))} on one of {weights.size:,} cells"
        axes.set_xlabel(peak, fontsize=6.5, color=MUTED, labelpad=3, loc="left")
    return figure


def lit(picture: np.ndarray, weights: np.ndarray, *, corners: bool = False) -> np.ndarray:
    """A picture (h, w, 3) in [0, 1], dark where the weights (gh, gw) are small.

    >>> lit(np.ones((2, 2, 3)), np.array([[1.0, 0.0], [0.0, 0.0]]))[..., 0].tolist()
    [[1.0, 0.22], [0.22, 0.22]]
    """
    (height, width), (down, across) = picture.shape[:2], weights.shape
    top = float(weights.max())
    light = weights / top if top > 0 else weights
    rows, columns = (_middles(n, cells, corners) for n, cells in ((height, down), (width, across)))
    along = np.stack([np.interp(np.arange(height), rows, column) for column in light.T], 1)
    smooth = np.stack([np.interp(np.arange(width), columns, row) for row in along])
    result: np.ndarray = picture * (DARK + (1 - DARK) * smooth[..., None])
    return result


def checked(image: np.ndarray) -> np.ndarray:
    """The image as numbers from 0 to 1; `InputError` for other shapes or ranges."""
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise InputError(f"image has shape {array.shape}, expected (height, width, 3)")
    bytes_ = array.dtype == np.uint8
    numbers = array.astype(np.float64) / (255 if bytes_ else 1)
    if not (np.isfinite(numbers).all() and numbers.min() >= 0 and numbers.max() <= 1):
        span = f"{numbers.min():.3g} to {numbers.max():.3g}"
        raise InputError(f"image holds {span}, expected numbers from 0 to 1, or bytes")
    return numbers


def _middles(length: int, cells: int, corners: bool) -> np.ndarray:
    step = length / cells
    return np.arange(cells) * step if corners else (np.arange(cells) + 0.5) * step - 0.5


def show_image(axes: Axes, picture: np.ndarray, name: str) -> None:
    """An image without ticks, with its name above it."""
    axes.imshow(picture, aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(HAIRLINE)
    axes.set_title(name, loc="left", fontsize=8.5, color=INK, pad=4)


def _sentence(maps: np.ndarray, names: Sequence[str]) -> str:
    peaks = maps.reshape(len(maps), -1).max(1)
    sharpest = int(peaks.argmax())
    name = token_label(names[sharpest]).strip("“”")
    return f"“{name}” is the sharpest, with {percent(float(peaks[sharpest]))} on one of {maps[0].size:,} cells"
