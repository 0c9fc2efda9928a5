"""Interventions on single heads, for `qkv.edit`: each changes the output of a head, or the weights that it has.

Your own edit inherits from `Edit` and defines `apply`.
"""

from qkv.edits.base import Edit, Head
from qkv.edits.built_in import HideFirst, Mask, Mean, Normalizer, Patch, Scale, Steer, Temperature, Zero

__all__ = ["Edit", "Head", "HideFirst", "Mask", "Mean", "Normalizer", "Patch", "Scale", "Steer", "Temperature", "Zero"]
__dir__ = __all__.copy
