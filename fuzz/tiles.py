"""Kernels with tiles so small that few tokens make many of them: else only long sequences would be merged."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import qkv.kernels  # loads all of them


@contextlib.contextmanager
def tiles(size: int | None) -> Iterator[None]:
    """Inside, tiles of `size` in every kernel and in the sweep of `measure`; as usual if None."""
    if size is None:
        yield
        return
    modules, linear = sys.modules, qkv.kernels.KERNELS["linear"]
    values: list[tuple[str, str, Any]] = [
        *(
            (name, "TILE", size)
            for name in ("qkv.kernels.flash.decompose", "qkv.kernels.tiled", "qkv.statistics.measure")
        ),
        ("qkv.kernels.tiled", "PANEL", 2 * size * size),
        ("qkv.kernels.flash.decompose", "SPARSE_TILE", max(1, size // 2)),
        ("qkv.kernels.flash.decompose", "SPARSE_KEYS", 1),
        ("qkv.kernels.flash.decompose", "SMALL", 0),
        ("qkv.kernels.flash.decompose", "_KEPT", OrderedDict()),  # what was cut with other tiles
        ("qkv.kernels", "FEW", 0),
        ("qkv.kernels.linear", "attention", functools.partial(linear.attention, chunk=size)),
    ]
    before = [(name, what, getattr(modules[name], what)) for name, what, _ in values]
    try:
        for name, what, value in values:
            setattr(modules[name], what, value)
        yield
    finally:
        for name, what, value in before:
            setattr(modules[name], what, value)
