"""What several threads ask for again and again: made once, kept as long as there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")
Stopped = Callable[[], bool]

WAIT = 0.05  # seconds after which one who waits for another looks whether it is still wanted


class Cancelled(Exception):  # noqa: N818  (no error: nobody wants the answer any more)
    """What was asked for is not wanted any more."""


def never() -> bool:
    """Nobody stops this."""
    return False


class Kept(Generic[V]):
    """Values by key, the ones used last, in at most `room` bytes; the one made last stays, whatever it takes.

    >>> squares = Kept[int](100, size=lambda x: 40)
    >>> [squares.get(n, lambda n=n: n * n) for n in (3, 4, 5)], squares.bytes
    ([9, 16, 25], 80)
    >>> squares.find(3) is None, squares.find(5)
    (True, 25)
    """

    def __init__(self, room: int, size: Callable[[V], int]) -> None:
        self.room, self.bytes = room, 0
        self._size = size
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._making: dict[Hashable, threading.Event] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(self, key: Hashable, make: Callable[[], V], stopped: Stopped = never) -> V:
        """The value of a key; if it is not there it is made, by one thread while others that ask for it wait.

        If the maker fails or is cancelled, one of those who wait begins anew.

        Raises:
            Cancelled: if `stopped` says so while another thread is at it.
        """
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                others = self._making.get(key)
                if others is None:
                    done = self._making[key] = threading.Event()
                    break
            while not others.wait(WAIT):
                if stopped():
                    raise Cancelled
        try:
            value = make()
            self.put(key, value)
            return value
        finally:
            with self._lock:
                del self._making[key]
            done.set()

    def find(self, key: Hashable) -> V | None:
        """The value of a key, if it is kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Keep a value; those that were not used for longest make room for it."""
        with self._lock:
            self._drop(key)
            size = self._size(value)
            while self._values and self.bytes + size > self.room:
                self._drop(next(iter(self._values)))
            self._values[key] = value
            self.bytes += size

    def put_if_room(self, key: Hashable, value: V) -> None:
        """Keep a value if nothing has to go for it."""
        with self._lock:
            if key not in self._values and self.bytes + (size := self._size(value)) <= self.room:
                self._values[key] = value
                self.bytes += size

    def _drop(self, key: Hashable) -> None:
        if key in self._values:
            self.bytes -= self._size(self._values.pop(key))
