"""One of each thing that a package can add to qkv: import the objects, or use the names on qkv's command line."""

from qkv_example.bias import Weekly
from qkv_example.mask import Triangle
from qkv_example.normalizer import SoftplusSquared
from qkv_example.policy import MeanAttention
from qkv_example.score import Gaussian
from qkv_example.statistic import Older

__all__ = ["Gaussian", "MeanAttention", "Older", "SoftplusSquared", "Triangle", "Weekly"]
