"""Which of several processes are alive: each increases a counter of its own, and says so when it leaves."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

EVERY = 2.0
"""Seconds between two beats."""
SILENT = 6.0
"""A process without a beat in so many seconds has died, or its machine is not reached."""
TIMEOUT = timedelta(seconds=5)
PREFIX = "qkv-survey"


class Heartbeat:
    """The beats of this process, and those of the others, in the store of ``torchrun``.

    A process that computes beats too, because the beats come from a thread: so one that is busy is not silent.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="qkv heartbeat", daemon=True)
        self._thread.start()

    def silent(self) -> list[int] | None:
        """The ranks that do not beat and have not left by themselves; takes `SILENT` seconds.

        None if the store is not reached: the process that holds it, of rank 0 or of ``torchrun``, has ended.
        """
        try:
            store = _store()
            before = self._beats(store)
            time.sleep(SILENT)
            after = self._beats(store)
            others = [rank for rank in range(self.world) if rank != self.rank and before[rank] == after[rank]]
            return [rank for rank in others if not store.add(f"left/{rank}", 0)]
        except (OSError, RuntimeError):
            return None

    def leave(self) -> None:
        """Stop beating, and tell the others that this process ends by itself."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError, RuntimeError):  # the store may be lost
            _store().add(f"left/{self.rank}", 1)

    def _beats(self, store: Any) -> list[int]:
        return [store.add(f"beats/{rank}", 0) for rank in range(self.world)]

    def _beat(self) -> None:
        with suppress(OSError, RuntimeError):  # the store may be lost: then nobody reads the beats
            store = _store()
            while not self._ended.wait(EVERY):
                _check_reached()
                store.add(f"beats/{self.rank}", 1)


def _store() -> Any:
    """A connection to the store; one for each thread, which would wait for each other."""
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's own hints lack it
        *_check_reached(), is_master=False, timeout=TIMEOUT, wait_for_workers=False
    )
    return dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]


def _check_reached() -> tuple[str, int]:
    """The address of the store; OSError if nothing listens there any more, where a `TCPStore` would print a stack."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    socket.create_connection(address, TIMEOUT.total_seconds()).close()
    return address
