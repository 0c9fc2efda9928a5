"""What follows from a mask and the shape of a call, kept for the next call of that shape in an LRU cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from cachetools import LRUCache

from qkv.masks import Mask

T = TypeVar("T")

LARGEST = 2**25  # most elements of the tensors of one entry
_CACHE: LRUCache[Hashable, tuple[Any, int]] = LRUCache(2**27, getsizeof=lambda entry: entry[1])
_LOCK = threading.Lock()


def kept(mask: Mask, key: Hashable, make: Callable[[], T], elements: Callable[[T], int] = lambda made: 1) -> T:
    """``make()``, or what it returned for an equal mask and key before; nobody may change it.

    Only masks that compare by value are kept, as tensors and functions inside of a mask may change. `elements` is the
    size of what was made.
    """
    if not mask.by_value or torch._C._len_torch_dispatch_stack():  # fake tensors must not be kept
        return make()
    with _LOCK:
        entry = _CACHE.get((mask, key))
    if entry is None:
        with torch.inference_mode(False):  # an inference tensor could not be used in training
            made = make()
        size = 1 + elements(made)
        if size <= LARGEST:
            with _LOCK:
                _CACHE[mask, key] = made, size
        return made
    found: T = entry[0]
    return found
