"""Analyses of a model: attention rollout, over-mixing, eviction and interventions."""
