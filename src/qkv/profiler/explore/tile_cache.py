"""A thread-safe LRU cache bounded in bytes, with single flight: concurrent requests for a key compute it once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

V = TypeVar("V")
Stopped = Callable[[], bool]

POLL_SECONDS = 0.05  # a waiting thread checks at this interval whether its request was cancelled


class Cancelled(Exception):  # noqa: N818  (not an error: the caller cancelled the request)
    """Raised when the caller has cancelled the computation."""


def never() -> bool:
    """The default of `stopped`: the computation is not cancelled."""
    return False


class SingleFlightCache(Generic[V]):
    """An LRU cache of at most `max_bytes` in which a missing value is computed by one thread while others wait for it.

    The newest value is always kept, even if it alone is larger than `max_bytes`; all others are then evicted.

    Args:
        max_bytes: bound on the size of all values.
        size: bytes of a value.

    >>> squares = SingleFlightCache[int](100, size=lambda x: 40)
    >>> [squares.get_or_compute(n, lambda n=n: n * n) for n in (3, 4, 5)], squares.bytes
    ([9, 16, 25], 80)
    >>> squares.get(3) is None, squares.get(5)
    (True, 25)
    """

    def __init__(self, max_bytes: int, size: Callable[[V], int]) -> None:
        self.max_bytes = max(1, max_bytes)
        self._size = size
        # cachetools refuses a value that is larger than the cache: such a value counts as a full cache.
        self._values: LRUCache[Hashable, V] = LRUCache(self.max_bytes, lambda value: min(size(value), self.max_bytes))
        self._running: dict[Hashable, threading.Event] = {}
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes in use, at most `max_bytes`."""
        return int(self._values.currsize)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get_or_compute(self, key: Hashable, compute: Callable[[], V], stopped: Stopped = never) -> V:
        """The cached value of a key; if it is missing, one thread computes it while the others wait for the result.

        If the computation fails or is cancelled, one of the waiting threads starts it anew.

        Raises:
            Cancelled: if `stopped` returns True while another thread computes the value.
        """
        while True:
            with self._lock:
                if key in self._values:
                    return self._values[key]
                running = self._running.get(key)
                if running is None:
                    done = self._running[key] = threading.Event()
                    break
            while not running.wait(POLL_SECONDS):
                if stopped():
                    raise Cancelled
        try:
            value = compute()
            self.put(key, value)
            return value
        finally:
            with self._lock:
                del self._running[key]
            done.set()

    def get(self, key: Hashable) -> V | None:
        """The value of a key, or None if it is not cached."""
        with self._lock:
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Insert a value; the least recently used values are evicted until it fits."""
        with self._lock:
            self._values[key] = value

    def put_if_it_fits(self, key: Hashable, value: V) -> None:
        """Insert a value only if nothing has to be evicted for it."""
        with self._lock:
            if key not in self._values and self._values.currsize + self._size(value) <= self.max_bytes:
                self._values[key] = value
