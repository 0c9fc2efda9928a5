"""Adds the tables of contents to the first page of each folder, from the pages that it links."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

FOLDERS = ("tutorial", "labs", "background", "howto", "mechanisms", "dev")


def toctrees(page: str, captions: bool) -> str:
    """A table of contents of the linked pages, or one for each section: first those of tables and lists."""
    seen: set[str] = set()
    lines: list[str] = []
    for section in page.split("\n## ") if captions else [page]:
        rows = sorted(section.splitlines(), key=lambda line: not line.startswith(("| ", "- ")))
        names = dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md", "\n".join(rows)))
        new = [name for name in names if name not in seen]
        seen.update(new)
        if new:
            caption = [f":caption: {section.splitlines()[0]}"] if captions else []
            lines += ["", "```{toctree}", ":hidden:", *caption, "", *new, "```"]
    return "\n".join(lines) + "\n"


def add(app: Sphinx, name: str, source: list[str]) -> None:
    folder, _, page = name.partition("/")
    if folder in FOLDERS and page == "index":
        source[0] += toctrees(source[0], captions=folder == "mechanisms")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
