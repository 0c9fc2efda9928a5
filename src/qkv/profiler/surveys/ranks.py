"""The processes of a survey: they agree on the settings, and gather the shards at the end.

They communicate over gloo, on every device: only a few files are exchanged, which NCCL would not make faster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from qkv.errors import InputError
from qkv.profiler.surveys.heartbeat import Heartbeat


class Lost(Exception):  # noqa: N818  # named like StopIteration, after the event
    """Raised when another process has died or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and its communication with the others. There may be only one process."""

    rank: int = 0
    world: int = 1
    group: Any = None
    patience: timedelta = timedelta(minutes=30)
    heartbeat: Heartbeat | None = None
    """Tells which processes are lost; None in a process group that existed before."""

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of ranks.

        Raises:
            Lost: if a process does not answer within the patience.
        """
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with self._waiting():
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
        with self._waiting():
            dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self.group)
        return values if self.rank == 0 else []

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, in every process.

        Raises:
            Lost: if rank 0 does not answer within the patience.
        """
        values = [value]
        if self.world > 1:
            with self._waiting():
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
            Lost: if a process does not arrive within the patience; the message names it.
        """
        if self.world == 1:
            return
        with self._waiting():
            dist.monitored_barrier(group=self.group, timeout=self.patience, wait_all_ranks=True)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, an error of the communication is raised as `Lost`, with the ranks of the lost processes."""
        try:
            yield
        except RuntimeError as error:
            raise Lost(self._who() or f"another process was lost ({_line(error)})") from error

    def _who(self) -> str:
        """The lost processes, if they are known."""
        if self.heartbeat is None:
            return ""
        lost = self.heartbeat.silent()
        if lost is None:
            return "the process of rank 0 has ended, which says why, or the connection to it was lost"
        return _ranks(lost) if lost else ""


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
    heartbeat = Heartbeat(dist.get_rank(), world)
    try:
        yield Ranks(dist.get_rank(), world, dist.group.WORLD, wait, heartbeat)
    finally:
        heartbeat.leave()
        with suppress(RuntimeError):  # other processes may have left already
            dist.destroy_process_group()


def _ranks(lost: Sequence[int]) -> str:
    """Name the lost processes.

    >>> _ranks([1]), _ranks([1, 3])
    ('the process of rank 1 was lost', 'the processes of ranks 1 and 3 were lost')
    """
    if len(lost) == 1:
        return f"the process of rank {lost[0]} was lost"
    return f"the processes of ranks {', '.join(map(str, lost[:-1]))} and {lost[-1]} were lost"


def _line(error: Exception) -> str:
    lines = re.sub(r"\[[^\]]*\]", "", str(error)).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:160]
