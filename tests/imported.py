"""What a file of Python imports, without importing it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def statements(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, in functions too, but not those for types alone."""
    found: list[ast.Import | ast.ImportFrom] = []
    left: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left += node.orelse
        else:
            left += (
                x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt | ast.excepthandler | ast.match_case)
            )
    return found
