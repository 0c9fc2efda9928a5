"""Small tile sizes, so that short sequences are split into many tiles and test the merging of results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from qkv.engine.sizes import BY_DEVICE, Sizes
from qkv.kernels import linear


def small(size: int) -> Sizes:
    """Sizes with tiles of `size`, panels of few rows, and block decomposition for masks of any size."""
    return replace(BY_DEVICE["cpu"], tile=size, panel=2 * size * size, few_scores=0)


@contextlib.contextmanager
def tiles(size: int | None) -> Iterator[None]:
    """Context with tiles and chunks of `size` in all kernels; None for the usual sizes."""
    if size is None:
        yield
        return
    with (
        patch.dict(BY_DEVICE, cpu=small(size)),
        patch.object(linear, "attention", functools.partial(linear.attention, chunk=size)),
    ):
        yield
