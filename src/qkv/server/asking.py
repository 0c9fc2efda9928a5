"""How a route has something computed, and what it says when that cannot be."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from fastapi import Request

    from qkv.server.jobs import Lanes, Work


async def ask(request: Request, key: Hashable, work: Work, *, quick: bool = False, long: bool = False) -> Any:
    """What `work` returns, from a compute thread; arguments, and what it may raise, as of `Jobs.run`.

    `quick` is what takes milliseconds, and a pointer or a person typing waits for.
    """
    lanes: Lanes = request.app.state.lanes
    jobs = lanes.quick if quick else lanes.slow

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return await jobs.run(key, work, gone, long=long)


def not_there(sentence: str) -> HTTPException:
    return HTTPException(404, sentence)
