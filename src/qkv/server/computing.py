"""Helpers for routes: run work in a compute thread, and answer 404 with a sentence."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from fastapi import Request

    from qkv.server.jobs import JobQueues, Work


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
