"""Checks of your own masks, scores, biases, normalizers and statistics, to call in your own tests.

What the base classes promise to the kernels is checked here by a public test, as scikit-learn's ``check_estimator``
does. Each function returns None, or raises `CheckFailed`, an `AssertionError` whose one sentence names the class, the
method, the place, what was expected and what came. The checks are deterministic and need torch alone.

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

from qkv.testing.biases import check_bias
from qkv.testing.masks import check_mask
from qkv.testing.normalizers import check_normalizer
from qkv.testing.report import CheckFailed
from qkv.testing.scores import check_score
from qkv.testing.statistics import check_statistic

__all__ = ["CheckFailed", "check_bias", "check_mask", "check_normalizer", "check_score", "check_statistic"]


def __dir__() -> list[str]:
    return __all__
