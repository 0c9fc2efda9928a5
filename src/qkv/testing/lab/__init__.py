"""Checks of tasks and experiments, which need the lab."""
