"""Writes each notebook page as .ipynb, as `qkv lab --notebook` does, and links it under the title of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from qkv_lab.lessons.notebook import notebook

HEAD = "---\njupytext:"
TOLD = "---\nlanguage_info:\n  name: python\n  pygments_lexer: ipython3\njupytext:"  # for cells that do not run


def link(app: Sphinx, name: str, source: list[str]) -> None:
    """Write the notebook, and add its link under the title."""
    text = source[0]
    if not text.startswith(HEAD):
        return
    target = Path(app.outdir) / "_notebooks" / f"{name}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(notebook(text), encoding="utf-8")
    head, title, rest = _split(text)
    up = "../" * name.count("/")
    line = f'<p class="notebook"><a href="{up}_notebooks/{name}.ipynb" download>Download as a Jupyter notebook</a></p>'
    source[0] = f"{head.replace(HEAD, TOLD, 1)}{title}\n\n{line}\n{rest}"


def _split(text: str) -> tuple[str, str, str]:
    """Front matter, title line, and the rest of the page."""
    head, body = text.split("\n---\n", 1)
    before, title, rest = body.partition("# ")
    heading, _, rest = rest.partition("\n")
    return f"{head}\n---\n{before}", f"{title}{heading}", rest


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
