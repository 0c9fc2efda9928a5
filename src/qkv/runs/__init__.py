"""Runs of a model that users ask for: `qkv.profile`, `qkv.watch`, and the `qkv.Profile` that they return.

They may import all of `profiler`, which measures, and of `plot` and `report`, which show. Read `run.py` first.
"""
