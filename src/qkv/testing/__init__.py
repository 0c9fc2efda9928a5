"""Checks of user-defined masks, scores, biases, normalizers, statistics and edits.

Call them in your own tests. They test the contract of the base classes, on which kernels, profiles and the lab rely, as
scikit-learn's ``check_estimator`` does. Each function returns None, or raises `CheckFailed`, an `AssertionError` whose
message names the class, the method, the place, the expected result and the actual one. The checks are deterministic.
They require only torch. `qkv_lab.testing` of the distribution qkv-lab checks tasks and experiments.

It imports definitions and attention. Read `parts.py` first.

>>> from qkv.masks import Mask
>>> class Even(Mask):
...     def sees(self, b, h, q, k, grid):
...         return k % 2
>>> try:
...     check_mask(Even())
... except AssertionError as error:
...     print(str(error).split(", expected")[0])
Even.sees: called for a grid of 7 queries and 9 keys: sees returned torch.int64 of shape (9,)
"""

from qkv.testing.laws import CheckFailed
from qkv.testing.parts import check_bias, check_normalizer, check_score
from qkv.testing.weights import check_edit, check_mask, check_statistic

__all__ = [
    "CheckFailed",
    "check_bias",
    "check_edit",
    "check_mask",
    "check_normalizer",
    "check_score",
    "check_statistic",
]
__dir__ = __all__.copy
