"""Checks on steps 3 to 5 of the build-along: what the model learns, where its heads attend, and the analysis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from research.claims import Verdict, claim, false, holds
from research.claims.lesson.model import LENGTH, sequences

TASK, LOOK, ANALYSIS = "Step 3: reversal", "Step 4: visualise", "Step 5: analysis"
N = 2 * LENGTH
"""Positions that the model reads."""


def lessons_analysis(strongest: torch.Tensor) -> float:
    """The share that step 5 reports, from the strongest key of each of a head's 12 queries."""
    right = 0
    for place in range(LENGTH):
        query, key = LENGTH + 1 + place, LENGTH - 1 - place
        right += query < N and int(strongest[query]) == key
    return right / LENGTH


def panels(layers: int, heads: int) -> Any:
    """The lesson's grid of panels, with its cases for one layer and for one head."""
    grid = Figure().subplots(layers, heads)
    if layers == 1:
        grid = grid.unsqueeze(0) if heads > 1 else [[grid]]
    return grid if heads > 1 else [[row] for row in grid]


@claim("C216", "lesson", LOOK, "The plotting function works for any number of layers and heads.")
def c216() -> Verdict:
    def works(grid: Callable[[int, int], Any], layers: int, heads: int) -> bool:
        try:
            shown = grid(layers, heads)
            pictures = [shown[i][j].imshow(np.full((2, 2), heads * i + j)) for i in range(layers) for j in range(heads)]
        except AttributeError:
            return False
        return [int(picture.get_array().mean()) for picture in pictures] == list(range(layers * heads))

    def unsqueezed(layers: int, heads: int) -> Any:
        return Figure().subplots(layers, heads, squeeze=False)

    sizes = [(1, 1), (1, 3), (2, 1), (2, 3)]
    found = [[size for size in sizes if works(grid, *size)] for grid in (panels, unsqueezed)]
    return false(
        found == [[(2, 1), (2, 3)], sizes],
        "Of 1 or 2 layers with 1 or 3 heads it draws those of two layers. One layer is an AttributeError: the panels "
        "are a NumPy array, which has no `unsqueeze`. One layer with one head ends in a list where a panel should be. "
        "`subplots(…, squeeze=False)` does all of it.",
    )


@claim("C217", "lesson", LOOK, "In the figure rows are layers and columns are heads.")
def c217() -> Verdict:
    shape = np.shape(panels(2, 4))
    return holds(shape == (2, 4), f"2 layers × 4 heads make a grid of {shape[0]} × {shape[1]} panels.")


@claim(
    "C218", "lesson", LOOK, "Position SEP + 1 should attend to position seq_len − 1, SEP + 2 to seq_len − 2, and so on."
)
def c218() -> Verdict:
    ids = sequences(500, torch.Generator().manual_seed(0))
    place = torch.arange(LENGTH - 1)
    query, printed = LENGTH + 1 + place, LENGTH - 1 - place
    own = torch.equal(ids[:, printed], ids[:, query])
    mirror = torch.equal(ids[:, N - 1 - query], ids[:, query + 1])
    first = torch.equal(ids[:, LENGTH - 1], ids[:, LENGTH + 1])
    return false(
        own and mirror and first,
        "One query earlier: the separator itself to seq_len − 1, SEP + 1 to seq_len − 2, so that query + key is "
        f"2 · seq_len − 1 = {N - 1}. There stands the symbol to be said next; the printed pairs point at the symbol "
        "that the query already is.",
    )


@claim("C219", "lesson", LOOK, "The pattern is an anti-diagonal.")
def c219() -> Verdict:
    ids, query = sequences(500, torch.Generator().manual_seed(0)), np.arange(LENGTH, N)
    key = [[k for k in range(LENGTH) if torch.equal(ids[:, k], ids[:, q + 1])] for q in query]  # what is said next
    slope, offset = np.polyfit(query, np.array(key)[:, 0], 1)
    return holds(
        all(len(found) == 1 for found in key) and abs(slope + 1) < 1e-9,
        f"Key = {offset:.0f} − query, a line of slope {slope:.0f} (by the printed pairs it is 12 − query: next to it).",
    )


@claim(
    "C222",
    "lesson",
    ANALYSIS,
    "The analysis reports the share of queries at which a head attends to the right position.",
)
def c222() -> Verdict:
    perfect = torch.tensor([0] * LENGTH + [N - 1 - q for q in range(LENGTH, N)])
    printed = torch.tensor([0] * LENGTH + [min(N - q, LENGTH) for q in range(LENGTH, N)])
    return false(
        lessons_analysis(perfect) == 0 and abs(lessons_analysis(printed) - 5 / 6) < 1e-9,
        f"A head that reverses perfectly gets {lessons_analysis(perfect):.1%}, for the analysis looks one key too far "
        f"to the right, and a head that does what it asks for {lessons_analysis(printed):.1%}: it counts 5 queries and "
        "divides by 6. Right is: query seq_len + p, key seq_len − 1 − p, for p from 0 to 5.",
    )
