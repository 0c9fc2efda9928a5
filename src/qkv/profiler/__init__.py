"""Observe the attention of models and compute exact statistics of it; `qkv.profile` and `qkv.watch` are in `runs`.

It imports models and statistics. Read `capture/observe.py`, which observes a model, then `data/profile.py`.
"""

from qkv.profiler.analyses.ablation import Ablation, ablation
from qkv.profiler.analyses.eviction import Eviction, eviction
from qkv.profiler.analyses.flow import rollout
from qkv.profiler.analyses.mixing import mixing
from qkv.profiler.analyses.needle import needle
from qkv.profiler.analyses.sources import Readers, Sources, sources
from qkv.profiler.comparison import Comparison, compare
from qkv.profiler.corpora import default_text
from qkv.profiler.editing import everywhere, head_outputs
from qkv.profiler.explore.explorer import AttentionMap, Explorer, attention_map
from qkv.profiler.surveys.data import Survey
from qkv.profiler.surveys.survey import survey

__all__ = [
    "Ablation",
    "AttentionMap",
    "Comparison",
    "Eviction",
    "Explorer",
    "Readers",
    "Sources",
    "Survey",
    "ablation",
    "attention_map",
    "compare",
    "default_text",
    "everywhere",
    "eviction",
    "head_outputs",
    "mixing",
    "needle",
    "rollout",
    "sources",
    "survey",
]
__dir__ = __all__.copy
