"""A thread pool for independent tiles of work on CPU."""

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
    """Run `work` on every item, without gradients; on CPU with as many threads as torch may use.

    `single_threaded` runs everything on the calling thread, for work so small that starting threads takes longer.

    Each thread runs single-threaded operations on its own item, with its own workspace. Parallelism inside operations
    would synchronise all threads dozens of times per tile, which on a busy machine costs more than the arithmetic.
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
        torch.set_num_threads(before)  # the default of threads that start later
