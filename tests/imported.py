"""What a file of Python imports, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def statements(file: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements of a file, in functions too, but not those for types alone."""
    left: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left += node.orelse
        else:
            left += (
                x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt | ast.excepthandler | ast.match_case)
            )
