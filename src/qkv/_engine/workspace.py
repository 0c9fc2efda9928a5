"""Scratch memory for tiles, kept from call to call: fresh memory for each tile costs as much as its arithmetic."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

KEPT_BYTES = 2**26  # of a workspace; a larger one is given back to the system
_FREE: list[Workspace] = []
_LOCK = threading.Lock()


class Workspace:
    """Buffers by name, for one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of a shape, with the dtype and the device of `like`; what it holds is left from its last use."""
        size, key = math.prod(shape), (name, like.dtype, like.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):  # else it could only be written to in inference mode
                kept = like.new_empty(size)
            if type(kept) is Tensor:  # no fake tensor of a compiler
                self._kept[key] = kept
        return kept[:size].view(shape)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self._kept.values())


@contextmanager
def workspace() -> Iterator[Workspace]:
    """A workspace that no other thread has, given back in the end. As many are kept as there are threads."""
    with _LOCK:
        mine = _FREE.pop() if _FREE else Workspace()
    try:
        yield mine
    finally:
        if mine.bytes <= KEPT_BYTES:
            with _LOCK:
                if len(_FREE) < torch.get_num_threads():
                    _FREE.append(mine)
