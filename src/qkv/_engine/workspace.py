"""Scratch buffers for tiles, reused between calls: allocating memory for each tile costs as much as its arithmetic."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

KEPT_BYTES = 2**26  # largest workspace that is kept for reuse
_FREE: list[Workspace] = []
_LOCK = threading.Lock()


class Workspace:
    """Named scratch buffers, for one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised buffer of a shape, with the dtype and device of `like`; it may hold old data."""
        size, key = math.prod(shape), (name, like.dtype, like.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
                kept = like.new_empty(size)
            if type(kept) is Tensor:  # not a compiler's fake tensor
                self._kept[key] = kept
        return kept[:size].view(shape)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self._kept.values())


@contextmanager
def workspace() -> Iterator[Workspace]:
    """A workspace for exclusive use, returned to the pool at the end. The pool keeps one per thread."""
    with _LOCK:
        mine = _FREE.pop() if _FREE else Workspace()
    try:
        yield mine
    finally:
        if mine.bytes <= KEPT_BYTES:
            with _LOCK:
                if len(_FREE) < torch.get_num_threads():
                    _FREE.append(mine)
