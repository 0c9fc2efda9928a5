"""Checks of user-defined masks, scores, biases, normalizers, statistics, edits, tasks and experiments.

Call them in your own tests. They test the contract of the base classes, on which kernels, profiles and the lab rely, as
scikit-learn's ``check_estimator`` does. Each function returns None, or raises `CheckFailed`, an `AssertionError` whose
message names the class, the method, the place, the expected result and the actual one. The checks are deterministic.
They require only torch, except those of tasks and experiments, which train: they need ``pip install 'qkv[train]'``.

>>> from qkv.masks import Mask
>>> class Even(Mask):
...     def sees(self, b, h, q, k, grid):
...         return k % 2
>>> try:
...     check_mask(Even())
... except AssertionError as error:
...     print(error)
Even.sees: returned torch.int64 of shape (9,), expected a boolean tensor, True where a query may attend
"""

from typing import TYPE_CHECKING

from qkv._lazy import lazy
from qkv.testing.biases import check_bias
from qkv.testing.edits import check_edit
from qkv.testing.masks import check_mask
from qkv.testing.normalizers import check_normalizer
from qkv.testing.report import CheckFailed
from qkv.testing.scores import check_score
from qkv.testing.statistics import check_statistic

if TYPE_CHECKING:
    from qkv.testing.lab.experiments import check_experiment
    from qkv.testing.lab.tasks import check_task

__all__ = [
    "CheckFailed",
    "check_bias",
    "check_edit",
    "check_experiment",
    "check_mask",
    "check_normalizer",
    "check_score",
    "check_statistic",
    "check_task",
]


_NAMES = {"qkv.testing.lab.experiments": ("check_experiment",), "qkv.testing.lab.tasks": ("check_task",)}
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
