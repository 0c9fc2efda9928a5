"""Writes a page as a Jupyter notebook."""

from __future__ import annotations

import json
import re
from typing import Any

from qkv_lab.lessons.exercises import checked
from qkv_lab.lessons.page import Cell, cells

HIDDEN = {"hide-cell", "hide-input"}
NEEDS = "*The code needs `qkv` with its extras `demo` and `train`. It runs offline.*"


def notebook(page: str, *, solutions: bool = True) -> str:
    """The page as the JSON of an .ipynb file (nbformat 4.5), without outputs. The code of solutions is folded.

    Without solutions a cell that asserts the check stands in the place of each, with the metadata of nbgrader: the
    exercise is a cell for an answer, the assertion is worth a point.

    >>> import json
    >>> found = json.loads(notebook("# Title\\n\\n```{code-cell}\\n1 + 1\\n```\\n"))
    >>> [(cell["cell_type"], cell["source"]) for cell in found["cells"]][-1]
    ('code', '1 + 1')
    """
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    first, *rest = cells(page)
    made = [Cell("text", f"{first.source}\n\n{NEEDS}"), *rest]
    content = [(_cell if solutions else _unsolved)(cell, f"cell-{i}") for i, cell in enumerate(made)]
    return json.dumps({"cells": content, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _cell(cell: Cell, name: str) -> dict[str, Any]:
    if cell.kind == "text":
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": cell.source}
    metadata: dict[str, Any] = {"tags": list(cell.tags)} if cell.tags else {}
    if HIDDEN & set(cell.tags):
        metadata["jupyter"] = {"source_hidden": True}
    code = {"cell_type": "code", "id": name, "metadata": metadata, "source": cell.source}
    return code | {"execution_count": None, "outputs": []}


def _unsolved(cell: Cell, name: str) -> dict[str, Any]:
    """A cell of a notebook without solutions."""
    if cell.kind == "code" and (found := checked(cell)):
        return _graded(_cell(cell, name), f"{found[0]}-answer", solution=True)
    if cell.kind != "code" or not HIDDEN & set(cell.tags):
        return _cell(cell, name)
    if (assertion := re.search(r"^assert check\.(\w+)\(\w+\)", cell.source, re.MULTILINE)) is None:
        return _cell(Cell("code", "# Write your answer here."), name)
    return _graded(_cell(Cell("code", assertion[0]), name), assertion[1], solution=False)


def _graded(cell: dict[str, Any], name: str, *, solution: bool) -> dict[str, Any]:
    """A cell with nbgrader's metadata (version 3): for an answer, or a locked one whose success is worth a point."""
    marks = {"grade": not solution, "grade_id": name, "locked": not solution, "schema_version": 3}
    points = {} if solution else {"points": 1}
    return cell | {"metadata": {"nbgrader": {**marks, **points, "solution": solution, "task": False}}}
