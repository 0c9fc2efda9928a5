"""Sample texts to profile models on: a short passage, and text of any length from Python's standard library."""

from __future__ import annotations

import sysconfig
from importlib.resources import files
from pathlib import Path


def default_text(model: str = "") -> str:
    """A sample text that comes with the package.

    For ``"qkv-mini"``, which was trained on Python code only, it is a short program. For every other model it is a
    passage of about 200 tokens with names, pronouns, repetition and a question.

    >>> default_text("qkv-mini").splitlines()[0], default_text().split()[:4]
    ('class LogBook:', ['The', 'lighthouse', 'keeper', 'kept'])
    """
    name = "default_code.txt" if model == "qkv-mini" else "default_text.txt"
    return (files("qkv.profiler") / name).read_text(encoding="utf-8").strip()


def library_text(characters: int) -> str:
    """The first `characters` of the source code of Python's standard library, its modules sorted by name."""
    found: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if length >= characters:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        found.append(text)
        length += len(text)
    return "".join(found)[:characters]
