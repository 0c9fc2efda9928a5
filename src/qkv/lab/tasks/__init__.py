"""The tasks, by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkv._lazy import lazy
from qkv.errors import InputError
from qkv.models.config import nearest

if TYPE_CHECKING:
    from qkv.lab.tasks.backcopy import Backcopy
    from qkv.lab.tasks.caption import Caption
    from qkv.lab.tasks.copy import Copy
    from qkv.lab.tasks.language import Language
    from qkv.lab.tasks.recall import Recall
    from qkv.lab.tasks.reversal import Reversal
    from qkv.lab.tasks.translation import Translation

__all__ = [
    "Backcopy",
    "Caption",
    "Copy",
    "Language",
    "Recall",
    "Reversal",
    "Translation",
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
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {f"qkv.lab.tasks.{module}": (name,) for module, name in _CLASSES.items()})


def __dir__() -> list[str]:
    return __all__


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
