"""The processes of a survey: they agree on the settings, and gather the shards at the end.

They communicate over gloo, on every device: only a few files are exchanged, which NCCL would not make faster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from qkv.errors import InputError


class Lost(Exception):  # noqa: N818  # named like StopIteration, after the event
    """Raised when another process has died or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and its communication with the others. There may be only one process."""

    rank: int = 0
    world: int = 1
    group: Any = None
    patience: timedelta = timedelta(minutes=30)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of ranks.

        Raises:
            Lost: if a process does not answer within the patience.
        """
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with _waiting():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in rank 0; an empty list in the other ranks.

        Raises:
            Lost: if a process does not answer within the patience.
        """
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with _waiting():
            dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self.group)
        return values if self.rank == 0 else []

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, in every process.

        Raises:
            Lost: if rank 0 does not answer within the patience.
        """
        values = [value]
        if self.world > 1:
            with _waiting():
                dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def check_equal(self, name: str, value: Any) -> None:
        """Check that all processes have the same value.

        Raises:
            InputError: in every process, if a value differs.
        """
        values = self.all_gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise InputError(f"{name} differ between processes: rank {rank} has {other}, rank 0 has {values[0]}")

    def barrier(self) -> None:
        """Wait until all processes have called it.

        Raises:
            Lost: if a process does not arrive within the patience; the message names it if it is known.
        """
        if self.world == 1:
            return
        with _waiting():
            dist.monitored_barrier(group=self.group, timeout=self.patience, wait_all_ranks=True)


@contextmanager
def joined(patience: float) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started, or those of a process group that exists already.

    Args:
        patience: seconds to wait for other processes before they count as lost.
    """
    wait, world = timedelta(seconds=patience), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=wait)
        yield Ranks(dist.get_rank(), dist.get_world_size(), group, wait)
        return
    if world == 1:
        yield Ranks(patience=wait)
        return
    try:
        dist.init_process_group("gloo", timeout=wait)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"WORLD_SIZE is {world}, but the processes cannot connect ({_line(error)}); start them with torchrun"
        ) from error
    try:
        yield Ranks(dist.get_rank(), world, dist.group.WORLD, wait)
    finally:
        with suppress(RuntimeError):  # other processes may have left already
            dist.destroy_process_group()


@contextmanager
def _waiting() -> Iterator[None]:
    """Inside, an error of the communication is raised as `Lost`."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(_line(error)) from error


def _line(error: Exception) -> str:
    lines = re.sub(r"\[[^\]]*\]", "", str(error)).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:160]
