"""Kernels with tiles so small that few tokens make many of them: else only long sequences would be merged."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from qkv._engine.sizes import BY_DEVICE, Sizes
from qkv.kernels import linear
from qkv.kernels.flash import decompose


def small(size: int) -> Sizes:
    """Sizes for tiles of `size`, with panels of few rows and blocks for masks of any size."""
    return replace(
        BY_DEVICE["cpu"],
        tile=size,
        panel=2 * size * size,
        few_scores=0,
        whole_mask=0,
        sparse_tile=max(1, size // 2),
        sparse_keys=1,
    )


@contextlib.contextmanager
def tiles(size: int | None) -> Iterator[None]:
    """Inside, tiles of `size` everywhere, and chunks of `size`; as usual if None."""
    if size is None:
        yield
        return
    with (
        patch.dict(BY_DEVICE, cpu=small(size)),
        patch.object(decompose, "_CACHE", OrderedDict()),  # what was cut with other tiles
        patch.object(linear, "attention", functools.partial(linear.attention, chunk=size)),
    ):
        yield
