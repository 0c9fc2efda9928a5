"""Checks of tasks and experiments of one's own, to be called in one's own tests."""

from qkv_lab.testing.experiments import check_experiment
from qkv_lab.testing.tasks import check_task

__all__ = ["check_experiment", "check_task"]
