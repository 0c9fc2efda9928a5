"""Normalizers: how the scores of one query become weights. Each file owns the mathematics of its kind.

A user's own inherits from `Pointwise` or `SumToOne` and has one method: docs/howto/your-own.md.
"""

from qkv.normalizers.base import Normalizer, Pointwise, SumToOne
from qkv.normalizers.entmax import Entmax, Sparsemax
from qkv.normalizers.pointwise import EluPlusOne, Identity, ReLU, Sigmoid
from qkv.normalizers.softmax import Hard, Softmax

__all__ = [
    "EluPlusOne",
    "Entmax",
    "Hard",
    "Identity",
    "Normalizer",
    "Pointwise",
    "ReLU",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "SumToOne",
]


def __dir__() -> list[str]:
    return __all__
