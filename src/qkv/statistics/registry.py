"""Statistics that installed packages register as entry points, for the command line."""

from __future__ import annotations

import inspect
from typing import Any

from qkv._registry import Registry
from qkv.statistics.base import Statistic


def _problem(cls: Any) -> str | None:
    """Why a class that an installed package registers cannot be used as a statistic."""
    if not issubclass(cls, Statistic):
        return "is not a subclass of qkv.statistics.Statistic"
    if not isinstance(getattr(cls, "name", None), str):
        return "has no class attribute name"
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        return f"cannot be made without arguments ({error})"
    return None


STATISTICS = Registry("statistic", "qkv.statistics", {}, "qkv.statistics", _problem)
"""Commands find statistics of other packages here, in the group of entry points ``qkv.statistics``. Every profile has
the built-in ones, so they need no name."""
