"""The tasks that small models learn. `task_class` finds one by name, also those of installed packages.

To add one, write its file in this folder and a line in `BUILT_IN`.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from qkv._lazy import lazy
from qkv._registry import Registry

if TYPE_CHECKING:
    from qkv_lab.tasks.backcopy import Backcopy
    from qkv_lab.tasks.caption import Caption
    from qkv_lab.tasks.language import Language
    from qkv_lab.tasks.relations import Coreference, Hops, Lookups
    from qkv_lab.tasks.sequences import Copy, Recall, Reversal
    from qkv_lab.tasks.translation import Translation

__all__ = [
    "Backcopy",
    "Caption",
    "Copy",
    "Coreference",
    "Hops",
    "Language",
    "Lookups",
    "Recall",
    "Reversal",
    "Translation",
    "names",
    "task_class",
]

BUILT_IN = {
    "reversal": "sequences.Reversal",
    "copy": "sequences.Copy",
    "recall": "sequences.Recall",
    "lookups": "relations.Lookups",
    "hops": "relations.Hops",
    "coreference": "relations.Coreference",
    "translation": "translation.Translation",
    "caption": "caption.Caption",
    "language": "language.Language",
    "backcopy": "backcopy.Backcopy",
}
GROUP = "qkv.tasks"
"""The group of entry points in which an installed package registers classes like `qkv_lab.Task`."""
_METHODS = ("training", "build", "batch", "count", "loss", "evaluate", "check", "figures", "files")


def _problem(cls: Any) -> str | None:
    """Why a class that an installed package registers cannot be used as a task."""
    if not is_dataclass(cls):
        return "is not a dataclass, as qkv_lab.Task requires"
    missing = [name for name in _METHODS if not callable(getattr(cls, name, None))]
    missing += ["model"] * ("model" not in {field.name for field in fields(cls)} and not hasattr(cls, "model"))
    missing += ["name"] * (not hasattr(cls, "name"))
    name: str = getattr(cls, "name", "")
    if not missing and name in ("task", "training"):
        return f"has the name {name!r}, which is a key of run.toml"
    return f"does not define {', '.join(missing)}" if missing else None


REGISTRY = Registry("task", "qkv_lab.tasks", BUILT_IN, GROUP, _problem)


def names() -> tuple[str, ...]:
    """The names of all tasks, those of installed packages last.

    Raises:
        InputError: if an installed package registers a name that is taken.

    >>> names()[:2]
    ('reversal', 'copy')
    """
    return REGISTRY.names()


def task_class(name: str) -> type[Any]:
    """The class of a task, built in or of an installed package (entry points in the group ``qkv.tasks``).

    Raises:
        InputError: if there is none (with the nearest name), or if an installed package's cannot be loaded.

    >>> task_class("reversal")().length
    6
    """
    return REGISTRY.load(name)


if not TYPE_CHECKING:  # a new task needs no line here: only its name in BUILT_IN
    _PLACES = [place.split(".") for place in BUILT_IN.values()]
    __getattr__ = lazy(__name__, {f"{__name__}.{m}": [cls for n, cls in _PLACES if n == m] for m, _ in _PLACES})
__dir__ = __all__.copy
