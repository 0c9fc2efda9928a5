"""The processes of a survey: who takes which shards, and how what each has found comes together.

They speak over gloo, whatever the model runs on: what they say is a few files at the end, which no card makes faster.
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


class Lost(Exception):  # noqa: N818  # as StopIteration: what happened
    """Some process is not there any more."""


@dataclass(frozen=True)
class Ranks:
    """This process among all of them; by itself if there is only one."""

    rank: int = 0
    world: int = 1
    group: Any = None
    patience: timedelta = timedelta(minutes=30)

    def everyone(self, value: Any) -> list[Any]:
        """What each process says, in the order of ranks.

        Raises:
            Lost: if one says nothing within the patience.
        """
        if self.world == 1:
            return [value]
        said: list[Any] = [None] * self.world
        with _others():
            dist.all_gather_object(said, value, group=self.group)
        return said

    def to_first(self, value: Any) -> list[Any]:
        """What each process says, in rank 0; nothing in the others.

        Raises:
            Lost: if one says nothing within the patience.
        """
        if self.world == 1:
            return [value]
        said: list[Any] = [None] * self.world
        with _others():
            dist.gather_object(value, said if self.rank == 0 else None, dst=0, group=self.group)
        return said if self.rank == 0 else []

    def from_first(self, value: Any) -> Any:
        """What rank 0 says, in every process.

        Raises:
            Lost: if it says nothing within the patience.
        """
        said = [value]
        if self.world > 1:
            with _others():
                dist.broadcast_object_list(said, src=0, group=self.group)
        return said[0]

    def agreed(self, what: str, value: Any) -> None:
        """Make sure that all processes have the same.

        Raises:
            InputError: in every process, if some have another.
        """
        said = self.everyone(value)
        for rank, other in enumerate(said):
            if other != said[0]:
                raise InputError(f"{what} differs between the processes: rank {rank} has {other}, rank 0 has {said[0]}")

    def meet(self) -> None:
        """Wait until all have done their part.

        Raises:
            Lost: naming those that do not come within the patience, if it is known.
        """
        if self.world == 1:
            return
        with _others():
            dist.monitored_barrier(group=self.group, timeout=self.patience, wait_all_ranks=True)


@contextmanager
def joined(patience: float) -> Iterator[Ranks]:
    """The processes that ``torchrun`` started, or those of a process group that is there already.

    Args:
        patience: seconds to wait for the others, before they count as lost.
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
            f"the {world} processes of this run cannot find one another ({_line(error)}); start them with torchrun"
        ) from error
    try:
        yield Ranks(dist.get_rank(), world, dist.group.WORLD, wait)
    finally:
        with suppress(RuntimeError):  # of one that others have left
            dist.destroy_process_group()


@contextmanager
def _others() -> Iterator[None]:
    """Where others are waited for."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(_line(error)) from error


def _line(error: Exception) -> str:
    lines = re.sub(r"\[[^\]]*\]", "", str(error)).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:160]
