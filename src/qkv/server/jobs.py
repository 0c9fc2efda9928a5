"""Bounded job queues for the threads that compute; jobs of disconnected clients are dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from starlette.exceptions import HTTPException

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
    key: Hashable
    work: Work
    long: bool
    result: Future[Any] = field(default_factory=Future)
    clients: int = 0


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
        self._cores = torch.get_num_threads()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[Hashable, _Job] = {}  # waiting or running, by key
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

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
        job = self._enqueue(key, work, long)
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
            self._remove_client(job)

    def report_progress(self, share: float) -> None:
        """Called by a running job, from any thread: this share of it is finished."""
        self.progress = share

    def stop(self) -> None:
        """Refuse new jobs, fail the waiting ones and tell the running one to stop."""
        with self._changed:
            self._closed = True
            for job in self._queue:
                job.result.set_exception(QueueFull())
            self._queue.clear()
            self._changed.notify()

    def close(self, wait: float = 2) -> bool:
        """As `stop`; returns whether the thread has ended, after at most `wait` seconds."""
        self.stop()
        if self._thread is None:
            return True
        self._thread.join(wait)
        return not self._thread.is_alive()

    def _enqueue(self, key: Hashable, work: Work, long: bool) -> _Job:
        """The job of this key, new or shared, with one client more."""
        with self._changed:
            job = self._jobs.get(key)
            if job is None:
                if self._closed or len(self._queue) >= self.max_waiting:
                    raise QueueFull
                job = _Job(key, work, long)
                self._jobs[key] = job
                self._queue.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run_jobs, name="qkv compute", daemon=True)
                    self._thread.start()
                self._changed.notify()
            job.clients += 1
            return job

    def _remove_client(self, job: _Job) -> None:
        with self._changed:
            job.clients -= 1
            if job.clients:
                return
            self._forget(job)  # a running job may stop now, so a new client gets a new job
            if job in self._queue:
                self._queue.remove(job)

    def _run_jobs(self) -> None:
        # A new thread inherits the number of threads that any other thread has set last, which may be 1 for a moment.
        torch.set_num_threads(self._cores)
        with torch.no_grad():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._closed)
                    if self._closed:
                        return
                    job = next((x for x in self._queue if not x.long), self._queue[0])
                    self._queue.remove(job)
                try:
                    result = job.work(lambda job=job: self._should_stop(job))  # type: ignore[misc]
                except Cancelled:
                    self._requeue_or_drop(job)
                except Exception as error:
                    self._finish(job, error=error)
                else:
                    self._finish(job, result)

    def _should_stop(self, job: _Job) -> bool:
        """Whether the running job should stop."""
        with self._changed:
            return job.clients == 0 or self._closed or (job.long and any(not x.long for x in self._queue))

    def _requeue_or_drop(self, job: _Job) -> None:
        """Put a stopped job that still has clients back at the front of the queue."""
        with self._changed:
            if job.clients and not self._closed:
                self._queue.appendleft(job)
                return
        self._finish(job, error=ClientDisconnected())

    def _finish(self, job: _Job, result: Any = None, *, error: Exception | None = None) -> None:
        with self._changed:
            self._forget(job)
            self.progress = None
        if error is None:
            job.result.set_result(result)
        else:
            job.result.set_exception(error)

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]


class JobQueues:
    """Two queues with a thread each, so that quick jobs never wait for a slow map."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.quick, self.slow = JobQueue(max_waiting), JobQueue(max_waiting)

    def stop(self) -> None:
        """Stop both: see `JobQueue.stop`."""
        self.quick.stop()
        self.slow.stop()

    def close(self, wait: float = 2) -> bool:
        """Close both: see `JobQueue.close`. It takes at most `wait` seconds in all."""
        self.stop()
        end = time.monotonic() + wait
        return all(queue.close(max(0.0, end - time.monotonic())) for queue in (self.quick, self.slow))


async def compute(request: Request, key: Hashable, work: Work, *, quick: bool = False, long: bool = False) -> Any:
    """Run `work` in a compute thread and return its result; arguments and errors as of `JobQueue.run`.

    `quick` selects the queue for work of a few milliseconds, which answers a pointer or a person typing.
    """
    queues: JobQueues = request.app.state.queues
    jobs = queues.quick if quick else queues.slow

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return await jobs.run(key, work, disconnected, long=long)


def not_found(sentence: str) -> HTTPException:
    """A 404 error whose detail is the sentence."""
    return HTTPException(404, sentence)
