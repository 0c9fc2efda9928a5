"""What follows from a mask and the shape of a call, kept for the next call of that shape in an LRU cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from cachetools import LRUCache
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from qkv._engine.launches import Launches
from qkv._engine.transforms import transforming
from qkv.masks import Grid, Mask

T = TypeVar("T")

LARGEST = 2**25  # bytes of the largest entry
ENTRY = 1000  # bytes of an entry besides the tensors
_CACHE: LRUCache[Hashable, tuple[Any, int]] = LRUCache(2**27, getsizeof=lambda entry: entry[1])
_LOCK = threading.Lock()


def kept(
    mask: Mask, grid: Grid, key: Hashable, make: Callable[[], T], nbytes: Callable[[T], int] = lambda made: 0
) -> T:
    """``make()``, or what it returned for an equal mask, grid and key before; nobody may change it.

    Only masks that compare by value are kept, as tensors and functions inside of a mask may change. Nothing is kept
    while decoding, where each step has another grid. `nbytes` is the memory of what was made.
    """
    if grid.n_queries == 1 or not mask.by_value or transforming() or _other_tensors():
        return make()
    place = mask, grid, key
    with _LOCK:
        entry = _CACHE.get(place)
    if entry is not None:
        found: T = entry[0]
        return found
    with torch.inference_mode(False):  # an inference tensor could not be used in training
        made = make()
    size = ENTRY + nbytes(made)
    if size <= LARGEST:
        with _LOCK:
            _CACHE[place] = made, size
    return made


def _other_tensors() -> bool:
    """Whether a dispatch mode is active under which new tensors may be fake or wrapped."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return not all(isinstance(mode, Launches) for mode in _get_current_dispatch_mode_stack())
