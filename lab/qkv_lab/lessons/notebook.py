"""Writes a page as a Jupyter notebook."""

from __future__ import annotations

import json
from typing import Any

from qkv_lab.lessons.page import Cell, cells

HIDDEN = {"hide-cell", "hide-input"}
NEEDS = "*The code needs `qkv` with its extras `demo` and `train`. It runs offline.*"


def notebook(page: str) -> str:
    """The page as the JSON of an .ipynb file (nbformat 4.5), without outputs. The code of solutions is folded.

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
    content = [_cell(cell, f"cell-{i}") for i, cell in enumerate(made)]
    return json.dumps({"cells": content, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _cell(cell: Cell, name: str) -> dict[str, Any]:
    if cell.kind == "text":
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": cell.source}
    metadata: dict[str, Any] = {"tags": list(cell.tags)} if cell.tags else {}
    if HIDDEN & set(cell.tags):
        metadata["jupyter"] = {"source_hidden": True}
    code = {"cell_type": "code", "id": name, "metadata": metadata, "source": cell.source}
    return code | {"execution_count": None, "outputs": []}
