"""Sample texts to profile models on: a short passage, and text of any length from Python's standard library."""

from __future__ import annotations

import sysconfig
from importlib.resources import files
from pathlib import Path

from qkv.errors import InputError, nearest

PRESETS = {
    "fox": "The quick brown fox jumps over the lazy dog.",
    "car": "The red car was parked next to a blue truck.",
    "lighthouse": "the passage of about 200 tokens",
    "logbook": "the program",
}
"""Bundled texts by name; of the long ones, what they are."""


def default_text(model: str = "") -> str:
    """A sample text that comes with the package.

    For ``"qkv-mini"``, which was trained on Python code only, it is a short program. For every other model it is a
    passage of about 200 tokens with names, pronouns, repetition and a question.

    >>> default_text("qkv-mini").splitlines()[0], default_text().split()[:4]
    ('class LogBook:', ['The', 'lighthouse', 'keeper', 'kept'])
    """
    name = "default_code.txt" if model == "qkv-mini" else "default_text.txt"
    return (files("qkv.profiler") / name).read_text(encoding="utf-8").strip()


def preset(name: str) -> str:
    """A bundled text by name: two sentences that courses use, and the passages of `default_text`.

    >>> preset("fox")
    'The quick brown fox jumps over the lazy dog.'
    >>> preset("wolf")
    Traceback (most recent call last):
    qkv.errors.InputError: preset is 'wolf', expected one of fox, car, lighthouse, logbook; did you mean 'fox'?
    """
    if name not in PRESETS:
        raise InputError(f"preset is {name!r}, expected one of {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    if name in ("lighthouse", "logbook"):
        return default_text("qkv-mini" if name == "logbook" else "")
    return PRESETS[name]


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
