"""Profile models: observe their attention, keep exact statistics, save, plot and report them."""

from qkv.profiler.data import Profile
from qkv.profiler.edits import Edit, edited
from qkv.profiler.eviction import Eviction
from qkv.profiler.explore import Explorer
from qkv.profiler.maps import AttentionMap
from qkv.profiler.run import profile
from qkv.profiler.survey_data import Survey

__all__ = ["AttentionMap", "Edit", "Eviction", "Explorer", "Profile", "Survey", "edited", "profile"]
