"""Sample texts to profile models on: a short passage, and text of any length from Python's standard library."""

from __future__ import annotations

import sysconfig
from importlib.resources import files
from pathlib import Path

from qkv.errors import InputError, nearest

SENTENCES = {
    "fox": "The quick brown fox jumps over the lazy dog.",
    "car": "The red car was parked next to a blue truck.",
}
"""Short texts by name, which courses use."""
PASSAGES = {"lighthouse": "default_text.txt", "logbook": "default_code.txt"}
"""Files of longer texts by name: a passage of about 200 tokens with names, pronouns, repetition and a question; a
short program."""
PRESETS = (*SENTENCES, *PASSAGES)


def preset(name: str) -> str:
    """The bundled text with a name.

    >>> preset("fox")
    'The quick brown fox jumps over the lazy dog.'
    >>> preset("lighthouse").split()[:4]
    ['The', 'lighthouse', 'keeper', 'kept']
    """
    if name in SENTENCES:
        return SENTENCES[name]
    if name not in PASSAGES:
        raise InputError(f"preset is {name!r}, expected one of {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    return (files("qkv.profiler") / PASSAGES[name]).read_text(encoding="utf-8").strip()


def default_text(model: str = "") -> str:
    """The bundled text for a model: a program for ``"qkv-mini"``, which was trained on code only, else a passage.

    >>> default_text("qkv-mini").splitlines()[0]
    'class LogBook:'
    """
    return preset("logbook" if model == "qkv-mini" else "lighthouse")


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
