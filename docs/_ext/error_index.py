"""Writes every-error.md: all messages of `InputError` and other errors, from the source, with … for values."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src" / "qkv", ROOT / "lab" / "qkv_lab")
NAMES = ("InputError", "Diverged", "Incomplete", "refusing")


def sentence(node: ast.expr) -> str | None:
    """The text of a string or f-string, with … for each value; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(sentence(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{sentence(node.left) or '…'}{sentence(node.right) or '…'}"
    return None


def errors() -> dict[str, list[str]]:
    """The messages of each module, in the order of the source."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in (path for source in SOURCES for path in sorted(source.rglob("*.py"))):
        package = next(source for source in SOURCES if path.is_relative_to(source))
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in NAMES and node.args:
                text = (sentence(node.args[0]) or "").replace("{}", "…")  # of `refusing`: the other error
                if text and text not in found[module]:
                    found[module].append(text)
    return {module: texts for module, texts in found.items() if texts}


def page() -> str:
    lines = ["# Every error", "", "Messages for invalid input, by module; … stands for a value."]
    for module, texts in errors().items():
        lines += ["", f"## {module}", ""]
        lines += [f"- {' '.join(text.split()).translate(ESCAPED)}" for text in texts]
    return "\n".join(lines) + "\n"


ESCAPED = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]<>$|{}#"})


def write(app: Sphinx) -> None:
    path, text = Path(app.srcdir) / "every-error.md", page()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
