"""The code that stands in the documentation's pages: what Python it is, and which commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = (
    "docs/every-error.md",
    "docs/command-line.md",
    "docs/claims/",
    "docs/reference/",
    "docs/experiments/",
    "docs/_build/",
)
"""Written by programs whose own tests check them."""
FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<kind>\{code-cell\}[^\n]*|python|console|sh)\n(?P<body>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
OPTION = re.compile(r"^:(\w[\w-]*): *(.*)$")


class Block(NamedTuple):
    """One block of code."""

    kind: str
    code: str
    tags: tuple[str, ...]
    line: int


def pages() -> list[str]:
    """Every page with code that people wrote, from the repository's root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if not name.startswith(MADE)]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order: code cells, Python, and commands."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [_block(match, text) for match in FENCE.finditer(text)]


def python(page: str) -> list[Block]:
    """The blocks that are Python."""
    return [b for b in blocks(page) if b.kind not in ("console", "sh")]


def commands(page: str) -> list[list[str]]:
    """The `qkv …` commands of a page, from blocks of commands, indented lines and cells: the words after `qkv`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"^(?: {4}|!|\$ )?(qkv(?: .*)?)$", text, re.MULTILINE)
    split = (shlex.split(line.split("   #")[0], comments=True)[1:] for line in lines)
    return [words for words in split if "|" not in words and ">" not in words]


def _block(match: re.Match[str], text: str) -> Block:
    tags: tuple[str, ...] = ()
    lines = match["body"].splitlines()
    while lines and (option := OPTION.match(lines[0])):
        if option[1] == "tags":
            tags = tuple(re.findall(r"[\w-]+", option[2]))
        lines.pop(0)
    kind = "cell" if match["kind"].startswith("{") else match["kind"]
    return Block(kind, "\n".join(lines).strip("\n"), tags, text.count("\n", 0, match.start()) + 1)
