"""Follow a cache of keys while it is used: its batch items are reordered by beam search, its tokens cropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SELECT = ("reorder_cache", "reorder", "batch_select_indices")
REPEAT, CROP = "batch_repeat_interleave", "crop"


class Followed:
    """Reports every change of one cache object until it is released; the cache itself works as before.

    Args:
        cache: a cache of transformers, or the state of one of qkv's models.
        on_reorder: callback with the batch items in their new order.
        on_crop: callback with the number of newest tokens that are removed.
    """

    def __init__(self, cache: Any, on_reorder: Callable[[Tensor], None], on_crop: Callable[[int], None]) -> None:
        self.cache = weakref.ref(cache)
        self.batch = 0
        """Number of batch items, which `batch_repeat_interleave` needs."""
        self._replaced: list[str] = []
        self._inside = False
        self._on_reorder, self._on_crop = on_reorder, on_crop
        for name in SELECT:
            self._replace(cache, name, lambda rows: on_reorder(rows.detach()))
        self._replace(cache, REPEAT, self._repeated)
        self._replace(cache, CROP, lambda tokens: on_crop(abs(int(tokens))))

    def _repeated(self, repeats: int) -> None:
        self._on_reorder(torch.arange(self.batch).repeat_interleave(repeats))

    def _replace(self, cache: Any, name: str, report: Callable[[Any], None]) -> None:
        own = getattr(cache, name, None)
        if own is None or name in vars(cache):
            return

        def method(*args: Any, **named: Any) -> Any:
            if not self._inside:  # one such method may call another
                report(next(iter((*args, *named.values()))))
            self._inside, before = True, self._inside
            try:
                return own(*args, **named)
            finally:
                self._inside = before

        vars(cache)[name] = method
        self._replaced.append(name)

    def release(self) -> None:
        cache = self.cache()
        for name in self._replaced if cache is not None else ():
            vars(cache).pop(name, None)
        self._replaced.clear()
