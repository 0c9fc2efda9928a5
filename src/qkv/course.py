"""`qkv.course` is `qkv_lab.course` of the distribution qkv-lab: attention with the calls that courses use."""

from __future__ import annotations

from typing import Any

from qkv._packages import from_lab


def __getattr__(name: str) -> Any:
    return from_lab("qkv.course", "qkv_lab.course", name)


def __dir__() -> list[str]:
    """The names, from which Python 3.12 suggests one for an import that fails."""
    return list(from_lab("qkv.course", "qkv_lab.course", "__all__"))
