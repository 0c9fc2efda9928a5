"""Attention by hand: a work sheet with small numbers, other ones for each student, and the check of its answers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from qkv_lab.check.hints import Wrong, draw, exercise, expect, numbers_of, scale_mistakes, trial

ROUNDED = 0.011  # two roundings to two decimals

Numbers = tuple[Float64[Tensor, "2 2"], Float64[Tensor, "3 2"], Float64[Tensor, "3 2"]]


def numbers() -> Numbers:
    """Queries (2, 2), keys (3, 2) and values (3, 2) of whole numbers from −2 to 2, for the student of this check.

    Outside of `qkv check --student` they are the numbers of the lab.

    >>> q, k, v = numbers()
    >>> q.tolist()
    [[1.0, -1.0], [0.0, 1.0]]
    """
    for seed in range(1000):
        shapes = (2, 2), (3, 2), (3, 2)
        drawn = (1.7 * draw(*shape, seed=10 * seed + i).double() for i, shape in enumerate(shapes))
        q, k, v = (x.round().clamp(-2, 2) + 0.0 for x in drawn)  # + 0 makes −0 to 0
        scores = q @ k.mT
        spread = scores.amax(-1) - scores.amin(-1)
        different = min(len(set(row)) for row in scores.tolist()) == 3 and len(set(map(tuple, v.tolist()))) == 3
        if different and bool(q.det() != 0) and bool((spread <= 5).all()):
            return q, k, v
    raise AssertionError("no numbers whose mistakes can be told apart")


def sheet(student: str = "") -> str:
    """A work sheet to print: the numbers of a student, and tables with empty cells.

    >>> print(sheet("Ada").splitlines()[0])
    Attention by hand · Ada
    """
    with numbers_of(student):
        q, k, v = numbers()
    names = ["query 1", "query 2"], ["key 1", "key 2", "key 3"]

    def filled(name: str, rows: Tensor) -> list[str]:
        return [f"    {f'{name} {i + 1}':<9} ({row[0]:2.0f}, {row[1]:2.0f} )" for i, row in enumerate(rows.tolist())]

    def empty(title: str, columns: list[str]) -> list[str]:
        line = " " * 13 + "+----------" * len(columns) + "+"
        head = " " * 13 + "".join(f"| {x:<9}" for x in columns) + "|"
        rows = [x for name in names[0] for x in (f"    {name:<9}" + "|          " * len(columns) + "|", line)]
        return ["", title, "", line, head, line, *rows]

    text = [f"Attention by hand{' · ' if student else ''}{student}", ""]
    text += [*filled("query", q), "", *filled("key", k), "", *filled("value", v)]
    text += empty("1. Scores q · k", names[1])
    text += empty("2. Divided by √2 = 1.414, e to their power, and the sum of each row", [*names[1], "sum"])
    text += empty("3. Weights: divide by the sum. Each row adds up to 1.00", names[1])
    text += empty("4. Output: the values, weighted and added", ["number 1", "number 2"])
    return "\n".join(text) + "\n"


@exercise
def by_hand(answer: Callable[[], tuple[object, object]]) -> None:
    """Exercise of the worked examples: the weights and the output of two queries on three keys, computed by hand.

    The numbers are those of `qkv check by_hand --student NAME`; without a student they are those of the lab.

    Args:
        answer: ``answer()`` returns the weights (2, 3) and the output (2, 2), rounded to two decimals or exact.
    """
    q, k, v = numbers()
    raw = q @ k.mT
    right = (raw / math.sqrt(2)).softmax(-1)

    with trial("weights"):
        weights, _ = _tables(answer())
        mistakes = {
            **scale_mistakes(raw, 2),
            "these are the scores divided by √2; take e to their power, and divide by the sum of the row": (
                raw / math.sqrt(2)
            ),
            "each column of the weights sums to 1, not each row": (raw / math.sqrt(2)).softmax(0),
        }
        expect(weights, right, "weights", mistakes, ROUNDED)

    with trial("output"):
        _, out = _tables(answer())
        mistakes = {"the weighted values are averaged, expected added": right @ v / 3}
        expect(out, right @ v, "out", mistakes, 2 * ROUNDED + 0.01)


def _tables(got: object) -> tuple[Tensor, Tensor]:
    """The weights and the output of an answer, as tensors."""
    if not (isinstance(got, tuple) and len(got) == 2):
        raise Wrong(f"it returns {type(got).__name__}, expected two tables: weights, out")
    try:
        return torch.as_tensor(got[0], dtype=torch.float64), torch.as_tensor(got[1], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong("the tables are no arrays of numbers") from None
