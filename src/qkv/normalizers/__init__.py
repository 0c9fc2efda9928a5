"""Normalizers: functions from the scores of one query to its attention weights, such as softmax.

Your own normalizer inherits from `Pointwise` or `SumToOne` and defines one method: see docs/howto/your-own.md.
"""

from qkv.normalizers.base import Normalizer, Pointwise, SumToOne
from qkv.normalizers.built_in import EluPlusOne, Entmax, Hard, Identity, ReLU, Sigmoid, Softmax, Sparsemax

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
__dir__ = __all__.copy
