"""Independent pieces of work on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from qkv._engine.workspace import Workspace, workspace

T = TypeVar("T")


def each(
    work: Callable[[T, Workspace], None], items: Sequence[T], device: torch.device, *, single_threaded: bool = False
) -> None:
    """Run `work` on every item, without gradients; on CPU by as many threads as torch may use.

    If it is `little` in all, this thread does it alone: to start others, or wait for them, would take longer.

    Each thread runs its own single-threaded operations on its own item, with a workspace of its own. One operation
    shared by all threads would wait for the slowest of them dozens of times a tile, which on a busy machine costs more
    than the arithmetic.
    """

    def run(item: T) -> None:
        with torch.no_grad(), workspace() as space:
            work(item, space)

    before = torch.get_num_threads()
    threads = min(before, len(items)) if device.type == "cpu" else 1
    try:
        if single_threaded:
            torch.set_num_threads(1)
        if single_threaded or threads <= 1:
            for item in items:
                run(item)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(run, items))
    finally:
        torch.set_num_threads(before)  # what threads that start later will find
