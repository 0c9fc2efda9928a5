"""Small models that are trained on tasks with a known ground truth, to test claims about attention.

`train` trains the model of a task; `qkv_lab.experiments` compares variants; `qkv_lab.check` checks exercises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv._lazy import lazy

if TYPE_CHECKING:
    from qkv_lab import check, course, experiments, heads, models, scenes, tasks, testing, translation
    from qkv_lab.loop import Diverged, Interrupted, Trained, train
    from qkv_lab.task import Task, Training
    from qkv_lab.translation import translate

__version__ = "0.1.0"
__all__ = [
    "Diverged",
    "Interrupted",
    "Task",
    "Trained",
    "Training",
    "check",
    "course",
    "experiments",
    "heads",
    "models",
    "scenes",
    "tasks",
    "testing",
    "train",
    "translate",
    "translation",
]

_MODULES = (
    "check", "course", "experiments", "heads", "models", "scenes", "tasks", "testing",
    "translation",
)  # fmt: skip
_NAMES = {
    "qkv_lab.loop": ("Diverged", "Interrupted", "Trained", "train"),
    "qkv_lab.task": ("Task", "Training"),
    "qkv_lab.translation": ("translate",),
}
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _NAMES, _MODULES)
__dir__ = __all__.copy
