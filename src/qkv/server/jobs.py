"""Bounded job queues for the threads that compute; jobs of disconnected clients are dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from qkv.profiler.explore.pyramid import Cancelled, Stopped

if TYPE_CHECKING:
    from fastapi import Request


MAX_WAITING = 64  # jobs in a queue: more than the open pages of one person request at a time


class QueueFull(Exception):  # noqa: N818  (an expected condition, not a bug)
    """The queue is full: try again later."""


class ClientDisconnected(Exception):  # noqa: N818
    """The client has left before the result was ready."""


Work = Callable[[Stopped], Any]
"""A computation. It polls its argument, a function that returns True once it should stop, and then raises
`Cancelled`."""


@dataclass(eq=False)
class _Job:
    work: Work
    long: bool
    result: Future[Any] = field(default_factory=Future)
    clients: int = 0
    running: bool = False


class JobQueue:
    """A bounded queue and its thread, which starts with the first job and ends with `close`.

    There is one thread, because two would compete for the same cores. anyio's `to_thread` with a `CapacityLimiter` of
    one cannot replace it: it runs jobs first come, first served, and ties a job to the request that started it, while
    here a job is shared by all clients that request it, short jobs interrupt long ones, and `close` joins the thread.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = max_waiting
        self.progress: float | None = None
        """The finished share of the running job, from 0 to 1, if the job reports it: see `report_progress`."""
        self._jobs: dict[Hashable, _Job] = {}  # waiting or running, in the order in which they were requested
        self._changed = threading.Condition()
        self._closed = False
        cores = torch.get_num_threads()  # a new thread inherits the number that any other thread has set last
        self._thread = threading.Thread(target=self._run_jobs, args=(cores,), name="qkv compute", daemon=True)

    async def run(
        self, key: Hashable, work: Work, disconnected: Callable[[], Any] | None = None, *, long: bool = False
    ) -> Any:
        """Run `work` in the thread and return its result.

        Args:
            key: identifies the result. Clients that request the same key while the job waits or runs share one job.
            work: the computation.
            disconnected: a coroutine function that returns when the client has left. A job without clients is removed
                from the queue, or told to stop if it is running.
            long: the job is told to stop as soon as a job that is not long waits, and runs again afterwards. It should
                keep its partial results, so that no work is lost.

        Raises:
            QueueFull: if `max_waiting` jobs are waiting.
            ClientDisconnected: if the client has left before the job ended.
        """
        with self._changed:
            job = self._jobs.get(key)
            if job is None:
                if self._closed or len(self._waiting()) >= self.max_waiting:
                    raise QueueFull
                job = self._jobs[key] = _Job(work, long)
                if self._thread.ident is None:
                    self._thread.start()
                self._changed.notify()
            job.clients += 1
        result = asyncio.wrap_future(job.result)  # never cancelled, because other clients may share the job
        # Retrieve the exception in any case: asyncio complains about one that no client awaits.
        result.add_done_callback(lambda future: future.cancelled() or future.exception())
        futures = [result] if disconnected is None else [result, asyncio.ensure_future(disconnected())]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ClientDisconnected
            return result.result()
        finally:
            for future in futures[1:]:
                future.cancel()
            with self._changed:
                job.clients -= 1
                if not job.clients and self._jobs.get(key) is job:
                    del self._jobs[key]  # a running job may stop now, so a new client gets a new job

    def report_progress(self, share: float) -> None:
        """Called by a running job, from any thread: this share of it is finished."""
        self.progress = share

    def stop(self) -> None:
        """Refuse new jobs, fail the waiting ones and tell the running one to stop."""
        with self._changed:
            self._closed = True
            for key in self._waiting():
                self._jobs.pop(key).result.set_exception(QueueFull())
            self._changed.notify()

    def close(self, wait: float = 2) -> bool:
        """As `stop`; returns whether the thread has ended, after at most `wait` seconds."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(wait)
        return not self._thread.is_alive()

    def _waiting(self) -> list[Hashable]:
        """The keys of the jobs that wait, in the order in which they will run: those that are not long come first."""
        return sorted((key for key, job in self._jobs.items() if not job.running), key=lambda key: self._jobs[key].long)

    def _run_jobs(self, cores: int) -> None:
        torch.set_num_threads(cores)
        with torch.no_grad():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._waiting())
                    if self._closed:
                        return
                    key = self._waiting()[0]
                    job = self._jobs[key]
                    job.running = True
                self._run(key, job)
                self.progress = None

    def _run(self, key: Hashable, job: _Job) -> None:
        """Run a job to its end, or until it should stop; a stopped job that still has clients waits again."""

        def should_stop() -> bool:
            with self._changed:
                waiting = job.long and not all(self._jobs[other].long for other in self._waiting())
                return waiting or self._closed or not job.clients

        result: Any = None
        error: Exception | None = None
        try:
            result = job.work(should_stop)
        except Cancelled:
            error = ClientDisconnected()
        except Exception as failure:
            error = failure
        with self._changed:
            if isinstance(error, ClientDisconnected) and job.clients and not self._closed:
                job.running = False
                return
            if self._jobs.get(key) is job:
                del self._jobs[key]
        if error is None:
            job.result.set_result(result)
        else:
            job.result.set_exception(error)


class JobQueues(NamedTuple):
    """Two queues with a thread each, so that quick jobs never wait for a slow map."""

    quick: JobQueue
    slow: JobQueue


async def compute(request: Request, work: Work, *, quick: bool = False, long: bool = False) -> Any:
    """Run `work` in a compute thread and return its result; arguments and errors as of `JobQueue.run`.

    Equal requests share a job. `quick` selects the queue for work of a few milliseconds, which answers a pointer or a
    person typing.
    """
    queues: JobQueues = request.app.state.queues
    jobs = queues.quick if quick else queues.slow

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    key = request.url.path, request.url.query, await request.body()
    return await jobs.run(key, work, disconnected, long=long)
