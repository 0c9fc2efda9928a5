"""Biases: functions of the score, applied after the score function and before the mask.

Each bias maps a tile of scores to a tile of scores (`apply`). Several biases are passed as a tuple and apply in that
order. An `AdditiveBias` adds a tensor (`tile`), which fused kernels support. Every call binds its biases (`bound`):
those of this package then become tensors by pair, by distance, or by query and distance.
"""

from qkv.biases.base import AdditiveBias, Bias
from qkv.biases.built_in import (
    ALiBi,
    ByDistance,
    RelativePosition,
    SoftCap,
    T5Bias,
    TensorBias,
    alibi_slopes,
    distances,
    t5_bucket,
)

__all__ = [
    "ALiBi",
    "AdditiveBias",
    "Bias",
    "ByDistance",
    "RelativePosition",
    "SoftCap",
    "T5Bias",
    "TensorBias",
    "alibi_slopes",
    "distances",
    "t5_bucket",
]
__dir__ = __all__.copy
