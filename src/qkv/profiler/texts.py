"""Texts to profile on: a short one written for the purpose, and as long a one as anybody needs."""

from __future__ import annotations

import sysconfig
from importlib.resources import files
from pathlib import Path


def default_text(model: str = "") -> str:
    """A passage that comes with the package: for ``"qkv-mini"``, which has read nothing but Python, a program; for all
    others about 200 tokens with names, pronouns, repetition and a question.

    >>> default_text("qkv-mini").splitlines()[0], default_text().split()[:4]
    ('class LogBook:', ['The', 'lighthouse', 'keeper', 'kept'])
    """
    name = "default_code.txt" if model == "qkv-mini" else "default_text.txt"
    return (files("qkv.profiler") / name).read_text(encoding="utf-8").strip()


def library_text(characters: int) -> str:
    """The first `characters` of Python's own standard library, its modules in order of name: text that everyone has."""
    found: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if length >= characters:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        found.append(text)
        length += len(text)
    return "".join(found)[:characters]
