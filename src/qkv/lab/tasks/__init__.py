"""The tasks, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from qkv.errors import InputError
from qkv.models.config import nearest

__all__ = [
    "names",
    "task_class",
]

_CLASSES = {
    "reversal": "Reversal",
    "copy": "Copy",
    "recall": "Recall",
    "translation": "Translation",
    "caption": "Caption",
    "language": "Language",
    "backcopy": "Backcopy",
}


def names() -> tuple[str, ...]:
    """All tasks.

    >>> names()[:2]
    ('reversal', 'copy')
    """
    return tuple(_CLASSES)


def task_class(name: str) -> type[Any]:
    """The class of a task; `InputError` with the nearest name if there is none.

    >>> task_class("reversal")().length
    6
    """
    if name not in _CLASSES:
        raise InputError(f"task is {name!r}, expected one of {', '.join(_CLASSES)}{nearest(name, _CLASSES)}")
    found: type[Any] = getattr(import_module(f"qkv.lab.tasks.{name}"), _CLASSES[name])
    return found
