"""The studies of bundled models that come with the package; ``python -m research.sinks`` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkv.errors import InputError, nearest
from research.sinks.studies import Study

RESULTS = Path(__file__).parent / "results"
NAMES = ("qkv-mini", "minilm")


def stored(name: str) -> Study:
    """The stored study of ``"qkv-mini"`` or ``"minilm"``."""
    if name not in NAMES:
        raise InputError(f"name is {name!r}, expected one of {', '.join(map(repr, NAMES))}{nearest(name, NAMES)}")
    return Study.load(RESULTS / f"{name}.json")


def result(name: str) -> dict[str, Any]:
    """The stored study of a model as plain data: ``attrs``, ``verdicts`` and ``lengths``, see `Study.as_dict`.

    >>> sorted(result("minilm"))
    ['attrs', 'form', 'lengths', 'verdicts']
    """
    return stored(name).as_dict()
