"""The tasks that small models learn. `task_class` finds one by name, also those of installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv._lazy import lazy
from qkv_lab.tasks.registry import BUILT_IN, names, task_class

if TYPE_CHECKING:
    from qkv_lab.tasks.backcopy import Backcopy
    from qkv_lab.tasks.caption import Caption
    from qkv_lab.tasks.copy import Copy
    from qkv_lab.tasks.coreference import Coreference
    from qkv_lab.tasks.hops import Hops
    from qkv_lab.tasks.language import Language
    from qkv_lab.tasks.lookups import Lookups
    from qkv_lab.tasks.recall import Recall
    from qkv_lab.tasks.reversal import Reversal
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

if not TYPE_CHECKING:  # a new task needs no line here: only its name in BUILT_IN
    _PLACES = (place.split(".") for place in BUILT_IN.values())
    __getattr__ = lazy(__name__, {f"{__name__}.{module}": (cls,) for module, cls in _PLACES})


def __dir__() -> list[str]:
    return __all__
