"""Attention sinks of trained models: every claim about sinks, judged on qkv-mini, MiniLM or a model of one's own.

`study` measures a model, `result` gives the stored study of a bundled one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv._lazy import lazy

if TYPE_CHECKING:
    from research.sinks.run import Study, result, study

__all__ = ["Study", "result", "study"]

_NAMES = {"research.sinks.run": ("Study", "result", "study")}
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
