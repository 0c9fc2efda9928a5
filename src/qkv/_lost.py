"""Errors that name the process of a group that was lost, where the backend names a connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

TAG = 9_999
"""Of messages that nobody receives."""


@contextmanager
def naming_lost(what: str, group: dist.ProcessGroup, peers: Sequence[int] = ()) -> Iterator[None]:
    """An error of the communication inside becomes one that names the lost process.

    Args:
        what: what communicates; begins the sentence.
        group: the process group.
        peers: the ranks with which it communicates, if these are not all.
    """
    try:
        yield
    except RuntimeError as error:
        ranks = " or ".join(map(str, dict.fromkeys(peers or _closed(group))))
        whom = f"the process of rank {ranks} of the group" if ranks else "a process of the group"
        raise RuntimeError(
            f"{what}: the communication with {whom} failed ({str(error).partition(chr(10))[0][:200]}); if it was lost, "
            "start all processes again, from a checkpoint"
        ) from error


def _closed(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a gloo group whose connection to this process is closed: sending to them raises at once."""
    found = []
    for peer in range(dist.get_world_size(group)) if dist.get_backend(group) == "gloo" else ():
        if peer == dist.get_rank(group):
            continue
        try:
            dist.isend(torch.zeros(1), group=group, group_dst=peer, tag=TAG)  # nobody waits for it
        except RuntimeError:
            found.append(peer)
    return found
