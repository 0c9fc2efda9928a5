"""Prints the text of a page in a terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qkv_lab.lessons.mathematics import plain
from qkv_lab.lessons.page import outside_code

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 96  # columns; longer lines are tiring to read
_DISPLAYED = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"\$([^$]+)\$")
_HEADING = re.compile(r"^(#{1,4}) (.+)$", re.MULTILINE)


def headings(text: str) -> list[str]:
    """The headings in a cell of text, without marks.

    >>> headings("# Scores, and why $\\\\sqrt d$\\n\\nText.")
    ['Scores, and why √d']
    """
    return [readable(found[2]).replace("`", "") for found in _HEADING.finditer(text)]


def readable(markdown: str) -> str:
    """Markdown with its formulas as Unicode text.

    >>> readable("Divide by $\\\\sqrt d$, not by `$d`.")
    'Divide by √d, not by `$d`.'
    """
    return outside_code(markdown, _without_formulas)


def show(console: Console, text: str) -> None:
    """Print a cell of text: headings in bold, paragraphs, lists and tables wrapped to the terminal."""
    from rich.markdown import Markdown
    from rich.padding import Padding

    parts = _HEADING.split(readable(text))
    for mark, heading, body in zip(["", *parts[1::3]], ["", *parts[2::3]], parts[::3], strict=True):
        if heading:
            plain_heading = heading.replace("`", "")
            console.print(f"\n{plain_heading.upper() if mark == '#' else plain_heading}", style="bold", markup=False)
        if body.strip():
            console.print(Padding(Markdown(body.strip()), (0, 0, 1, 0)), width=min(console.width, WIDTH))


def _without_formulas(markdown: str) -> str:
    text = _DISPLAYED.sub(lambda found: f"\n\n> {_escaped(plain(found[1]))}\n\n", markdown)
    return _INLINE.sub(lambda found: _escaped(plain(found[1])), text)


def _escaped(text: str) -> str:
    """Markdown that shows exactly this text."""
    return re.sub(r"([_*\[\]|<>])", r"\\\1", text)
