"""Reads a page in MyST Markdown as a list of cells: text and code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_LINK = re.compile(r"(?<!!)\[((?:`[^`]*`|[^\]\[`])*)\]\((?!https?:)[^()\s]*(?:\.md|\.rst|#)[^()\s]*\)")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_OPTION = re.compile(r":([\w-]+): *(.*)")
_NOT_HERE = "*(On the site of the documentation, something to play with stands here.)*"


@dataclass(frozen=True)
class Cell:
    """A cell of a page: Markdown, or Python with the tags of MyST-NB, such as ``hide-cell`` for a solution."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()


def cells(page: str) -> list[Cell]:
    """The cells of a page, in order. Links between pages become plain text, because the pages are not there.

    >>> [cell.source for cell in cells("See [the terms](terms.md).\\n\\n```{code-cell}\\n1 + 1\\n```")]
    ['See the terms.', '1 + 1']
    """
    found: list[Cell] = []
    text: list[str] = []
    lines = iter(_without_front_matter(page).splitlines())
    for line in lines:
        if not line.startswith("```"):
            text.append(line)
            continue
        body = _until_fence(lines)
        if line.startswith("```{code-cell}"):
            found += [*_text(text), _code(body)]
            text = []
        elif line.startswith("```{raw}"):
            text.append(_NOT_HERE)
        else:
            text += [line, *body, "```"]
    return found + _text(text)


def title(page: str) -> str:
    """The first heading of a page.

    >>> title("---\\nkernelspec: python\\n---\\n\\n# Lab 4: attention sinks\\n")
    'Lab 4: attention sinks'
    """
    found = re.search(r"^# (.+)$", page, re.MULTILINE)
    return found[1] if found else ""


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Markdown in which everything but code is changed.

    >>> outside_code("a and `a`", str.upper)
    'A AND `a`'
    """
    parts = _CODE.split(markdown)  # every second part is code
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def _without_front_matter(page: str) -> str:
    return page.split("\n---\n", 1)[1] if page.startswith("---\n") else page


def _until_fence(lines: Iterator[str]) -> list[str]:
    body: list[str] = []
    for line in lines:
        if line.startswith("```"):
            break
        body.append(line)
    return body


def _text(lines: list[str]) -> list[Cell]:
    source = _LINK.sub(r"\1", "\n".join(lines)).strip()
    return [Cell("text", source)] if source else []


def _code(lines: list[str]) -> Cell:
    tags: tuple[str, ...] = ()
    while lines and (option := _OPTION.fullmatch(lines[0])):
        if option[1] == "tags":
            tags = tuple(re.findall(r"[\w-]+", option[2]))
        lines = lines[1:]
    return Cell("code", "\n".join(lines).strip("\n"), tags)
