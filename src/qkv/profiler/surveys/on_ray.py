"""Carry out the shards of a survey as tasks of Ray, which places them, repeats those of lost machines, and scales."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qkv.errors import InputError, refusing
from qkv.profiler.surveys.folder import Folder, Incomplete
from qkv.profiler.surveys.surveyor import OnBatch, Surveyor

RETRIES = 20
"""How often a shard is begun again after its process or machine was lost."""
Done = tuple[bytes, tuple[int, int, int]]
"""What a task returns: the file of the shard, and the numbers of documents, bytes and tokens."""


def carry_out(
    surveyor: Surveyor, numbers: Sequence[int], folder: Folder, threads: int, gpus: int | None, on_batch: OnBatch
) -> None:
    """Carry out these shards on a cluster of Ray, and return when their files are in the folder.

    The cluster is the one that Ray finds (``RAY_ADDRESS``, or one on this machine), else one of this process alone. The
    model is sent to each machine once; the files come back to this process. Each task reserves `threads` CPUs, for as
    many threads, and `gpus` GPUs; None is one if the cluster has any now. `on_batch` is called after each shard.
    """
    if surveyor.device.type != "cpu":
        raise InputError(
            f"model is on {surveyor.device}, expected it on the CPU: engine='ray' sends it to tasks, which move "
            "it to the GPUs that they have"
        )
    with _cluster() as ray:
        if gpus is None:
            gpus = 1 if ray.cluster_resources().get("GPU") else 0
        task = ray.remote(_carry_out).options(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)
        sent = ray.put(surveyor)
        waiting = {task.remote([sent], number, threads): number for number in numbers}
        try:
            while waiting:
                for ready in ray.wait([*waiting])[0]:
                    number = waiting.pop(ready)
                    data, progress = _result(ray, ready, number)
                    folder.write_shard(number, data)
                    on_batch(*progress)
        finally:
            for unfinished in waiting:
                ray.cancel(unfinished, force=True)


def _carry_out(sent: list[Any], number: int, threads: int) -> Done:
    """Carry out a shard; runs in a process of Ray. `sent` is in a list so that Ray does not load it for each task."""
    torch.set_num_threads(threads)
    progress: list[tuple[int, int, int]] = []
    data = _loaded(sent[0]).shard(number, lambda *new: progress.append(new))
    documents, size, tokens = (sum(x) for x in zip(*progress, strict=True))
    return data, (documents, size, tokens)


@functools.lru_cache(maxsize=1)
def _loaded(sent: Any) -> Surveyor:
    """The surveyor, on the GPU that Ray assigned to this process if there is one; kept for the next shard."""
    import ray

    surveyor: Surveyor = ray.get(sent)
    return surveyor.on("cuda:0") if ray.get_gpu_ids() else surveyor  # Ray hides all other GPUs from the process


def _result(ray: Any, ready: Any, number: int) -> Done:
    try:
        done: Done = ray.get(ready)
        return done
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:  # its process or machine was lost once more than RETRIES, for example
        raise Incomplete(
            f"Ray gave up shard {number} after at most {RETRIES + 1} attempts ({type(error).__name__}); run the "
            "command of the survey again: it computes missing shards only"
        ) from error


@contextmanager
def _cluster() -> Iterator[Any]:
    """Connect to a cluster, or start one of this machine, which ends with the survey."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends statistics of its usage otherwise
    import ray

    if ray.is_initialized():
        yield ray
        return
    absent = "engine is 'ray', but no cluster can be reached or started ({})"
    with refusing(absent, ConnectionError, RuntimeError, ValueError):
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()
