"""Statistics of attention: reductions of the weights, exact and in memory linear in the sequence.

`measure` returns the common ones. Each statistic is an object with a name, a unit and a definition; users can write
their own by inheriting from `Statistic`.

It imports the engine and the kernels. Read `base.py`, then `measure.py`.

>>> BUILT_IN["entropy"].unit, BUILT_IN["received"].over
('nats', 'key')
"""

from typing import TYPE_CHECKING

from qkv._lazy import lazy
from qkv.results import Statistics, Thumbnail
from qkv.statistics import base
from qkv.statistics.base import Extremes, Local, Mass, PrefixSinkScores, Statistic, Streaming, WeightTile

if TYPE_CHECKING:
    from qkv.statistics.paged import PagedKeys, measure_paged
    from qkv.statistics.weights import measure_weights

BUILT_IN: dict[str, Statistic] = base.BUILT_IN
"""The statistics that `measure` always returns, by name."""

__all__ = [
    "BUILT_IN",
    "Extremes",
    "Local",
    "Mass",
    "PagedKeys",
    "PrefixSinkScores",
    "Statistic",
    "Statistics",
    "Streaming",
    "Thumbnail",
    "WeightTile",
    "measure_paged",
    "measure_weights",
]
__dir__ = __all__.copy


if not TYPE_CHECKING:
    __getattr__ = lazy(
        __name__,
        {"qkv.statistics.weights": ("measure_weights",), "qkv.statistics.paged": ("PagedKeys", "measure_paged")},
    )
