"""`qkv.lab` is the package `qkv_lab` of the distribution qkv-lab: tasks, training, experiments and exercises."""

from __future__ import annotations

from typing import Any

from qkv._packages import from_lab


def __getattr__(name: str) -> Any:
    return from_lab("qkv.lab", "qkv_lab", name)
