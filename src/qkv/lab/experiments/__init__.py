"""Questions that small models answer: which claims about attention sinks hold, seen in minutes on one machine."""

from __future__ import annotations

from qkv.lab.experiments.registry import experiment, names
from qkv.lab.experiments.run import Result, redraw, run, table

__all__ = ["Result", "experiment", "names", "redraw", "run", "table"]


def __dir__() -> list[str]:
    return __all__
