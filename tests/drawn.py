"""What all tests of figures ask."""

from __future__ import annotations

import io

from matplotlib.figure import Figure
from matplotlib.text import Text


def all_text_is_on_the_page(figure: Figure, form: str = "png") -> bytes:
    """No text that is drawn is cut off by the edge of the figure, which is returned as a file of this form."""
    file = io.BytesIO()
    figure.savefig(file, format=form, dpi=72)  # settles every position
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            out = [tick for tick in ticks if not axes.axison or not low <= tick.get_loc() <= high]
            unseen |= {label for tick in out for label in (tick.label1, tick.label2)}
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in unseen:
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, f"{text.get_text()!r} at {box}"
    return file.getvalue()
