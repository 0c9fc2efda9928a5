"""Profile models: observe their attention, keep exact statistics, save, plot and report them."""

from qkv.profiler.data import Profile
from qkv.profiler.run import profile

__all__ = ["Profile", "profile"]
