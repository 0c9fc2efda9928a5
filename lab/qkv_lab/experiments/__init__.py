"""Experiments that train small models and test claims about attention, in minutes on one machine.

`run` carries one out by name. To write one, subclass `Experiment`; an installed package registers its own as entry
points in the group ``qkv.experiments``.
"""

from __future__ import annotations

from qkv.profiler.data.frames import confidence
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect, Interval, Verdict, judge
from qkv_lab.experiments.record import table
from qkv_lab.experiments.registry import experiment, names
from qkv_lab.experiments.results import Outcome, Results
from qkv_lab.experiments.run import Result, cost, redraw, run

__all__ = [
    "Criterion",
    "Effect",
    "Experiment",
    "Interval",
    "Outcome",
    "Result",
    "Results",
    "Setting",
    "Verdict",
    "confidence",
    "cost",
    "experiment",
    "judge",
    "names",
    "redraw",
    "run",
    "table",
]
__dir__ = __all__.copy
