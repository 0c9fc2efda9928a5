"""Analyses of a model: attention rollout, over-mixing, eviction and interventions.

It imports capture, editing and data. Read `ablation.py` first.
"""
