"""Work for the threads that compute: queues with an end, in which nobody's place is kept after they have gone."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from qkv.profiler.explore.tile_cache import Cancelled, Stopped

MOST = 64  # waiting jobs: more than the pages of one person ask for at a time


class Busy(Exception):  # noqa: N818  (no error of the program's)
    """The queue is full: try again later."""


class Gone(Exception):  # noqa: N818
    """Whoever asked is no longer there to hear."""


Work = Callable[[Stopped], Any]
"""Something to compute; it may ask, again and again, whether it should stop, and then raise `Cancelled`."""


@dataclass(eq=False)
class _Job:
    key: Hashable
    work: Work
    long: bool
    done: Future[Any] = field(default_factory=Future)
    waiting: int = 0


class Jobs:
    """A bounded queue and its thread, which starts with the first job and ends with `close`.

    One thread, because two would compete for the same cores.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.share: float | None = None
        """How much of the work at hand is done, from 0 to 1, if it says so: see `tell`."""
        self._cores = torch.get_num_threads()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[Hashable, _Job] = {}  # waiting or at work, by what they compute
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, key: Hashable, work: Work, gone: Callable[[], Any] | None = None, *, long: bool = False) -> Any:
        """What `work` returns, computed by the thread.

        Args:
            key: of what is computed: who asks for the same while it waits or is at work gets the same.
            work: to do.
            gone: a coroutine function that returns when the client has left. What nobody waits for any more is dropped,
                and if it is at work told to stop.
            long: it gives way to work that is not, is told to stop for it, and goes on afterwards: what it had done
                by then should not have been in vain.

        Raises:
            Busy: if as many jobs as allowed are waiting.
            Gone: if the client left first.
        """
        job = self._place(key, work, long)
        answer = asyncio.wrap_future(job.done)  # never cancelled: the job may be others', too
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())  # heard, even if by nobody
        watch = [answer] if gone is None else [answer, asyncio.ensure_future(gone())]
        try:
            await asyncio.wait(watch, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Gone
            return answer.result()
        finally:
            for other in watch[1:]:
                other.cancel()
            self._leave(job)

    def tell(self, share: float) -> None:
        """For work that takes long, from any thread: so much of it is done."""
        self.share = share

    def close(self, wait: float = 2) -> bool:
        """No more work; what is being done is told to stop. Whether it has, after so many seconds at most."""
        with self._changed:
            self._closed = True
            for job in self._queue:
                job.done.set_exception(Busy())
            self._queue.clear()
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(wait)
        return not self._thread.is_alive()

    def _place(self, key: Hashable, work: Work, long: bool) -> _Job:
        with self._changed:
            job = self._jobs.get(key)
            if job is None:
                if self._closed or len(self._queue) >= self.most:
                    raise Busy
                job = _Job(key, work, long)
                self._jobs[key] = job
                self._queue.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._labour, name="qkv compute", daemon=True)
                    self._thread.start()
                self._changed.notify()
            job.waiting += 1
            return job

    def _leave(self, job: _Job) -> None:
        with self._changed:
            job.waiting -= 1
            if job.waiting:
                return
            self._forget(job)  # at work, it may stop: whoever comes now begins anew
            if job in self._queue:
                self._queue.remove(job)

    def _labour(self) -> None:
        # A new thread takes over what any other has set last, which may be 1 for as long as that one works.
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
                    result = job.work(lambda job=job: self._stopped(job))  # type: ignore[misc]
                except Cancelled:
                    self._stop(job)
                except Exception as error:
                    self._finish(job, error=error)
                else:
                    self._finish(job, result)

    def _stopped(self, job: _Job) -> bool:
        """Whether to stop what is at work."""
        with self._changed:
            return job.waiting == 0 or self._closed or (job.long and any(not x.long for x in self._queue))

    def _stop(self, job: _Job) -> None:
        with self._changed:
            if job.waiting and not self._closed:
                self._queue.appendleft(job)
                return
        self._finish(job, error=Gone())

    def _finish(self, job: _Job, result: Any = None, *, error: Exception | None = None) -> None:
        with self._changed:
            self._forget(job)
            self.share = None
        if error is None:
            job.done.set_result(result)
        else:
            job.done.set_exception(error)

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]


class Lanes:
    """Two queues with a thread each: what is quick never waits for a map that takes its time."""

    def __init__(self, most: int = MOST) -> None:
        self.quick, self.slow = Jobs(most), Jobs(most)

    def close(self) -> bool:
        """Both: see `Jobs.close`."""
        return all([self.quick.close(), self.slow.close()])
