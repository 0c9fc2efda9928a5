"""Which requests are answered: bounded sizes, Host and Origin, security headers.

Every page in the user's browser can send requests to a server on the same machine. So the Host header must be a name
of this machine, which prevents DNS rebinding, and an Origin header, where the browser sends one, must be the same host.
Browsers request images and scripts without Origin, so Sec-Fetch-Site must not name another site either.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


HEAD_SECONDS = 10  # for a request's head to arrive: a silent client occupies a connection no longer than this


class Connection(H11Protocol):
    """Uvicorn's protocol with a timer for every request head.

    Uvicorn itself has a timer between two requests, but none before the first and none while a head arrives slowly.
    """

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def _close_if_idle(self) -> None:
        # While a request is being answered there is nothing to do: the end of its response starts the timer again.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


MAX_BODY = 1024 * 1024  # bytes: as many edits of heads as a request may have
MAX_QUERY = 4 * 1024  # bytes of the query string
BODY_SECONDS = 10  # for a body to arrive: a slow sender occupies a connection no longer than this
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OWN_SITE = frozenset({"same-origin", "none"})  # Sec-Fetch-Site of requests by our own page, and of a typed address

SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_SECURITY = [(name.encode(), value.encode()) for name, value in SECURITY.items()]


class Guard:
    """ASGI middleware that rejects invalid requests with a sentence, and adds security headers to every answer.

    Args:
        app: the application that gets the valid requests.
        port: the port that the server is bound to, on the loopback address.
    """

    # Starlette's TrustedHostMiddleware cannot do this check: it ignores the port, reads only the first of two Host
    # headers, accepts "127.0.0.1:8765@evil.example", and cuts IPv6 addresses such as [::1] at their first colon.

    def __init__(self, app: ASGIApp, *, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in LOOPBACK} | {*(LOOPBACK if port == 80 else ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # WebSocket is not supported: uvicorn answers 403

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_SECURITY]
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        if (problem := self._problem(scope, Headers(scope=scope))) is not None:
            await error_answer(*problem)(scope, receive, protected)
        else:  # HEAD is answered as GET without the body (RFC 9110, section 9.3.2).
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self.app({**scope, "method": method}, _limited(receive), protected)

    def _problem(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Status and sentence if the address or the headers are invalid; None if they are valid."""
        host = (_single(headers, "host") or "").lower()
        if host not in self.hosts:
            return 403, "The Host of the request is not this server's: open the address that its terminal shows."
        origin = _single(headers, "origin")
        if headers.getlist("origin") and (origin is None or origin.lower() != f"http://{host}"):
            return 403, "The request comes from a page of another site."
        sites = headers.getlist("sec-fetch-site")
        if scope["path"].startswith("/api/") and not OWN_SITE.issuperset(sites):
            return 403, "The request comes from a page of another site."
        if len(scope["query_string"]) > MAX_QUERY:
            return 414, "The address is too long."
        return None


def _single(headers: Headers, name: str) -> str | None:
    """The value of a header that occurs once, else None: if it occurs twice, programs differ in which they read."""
    found = headers.getlist(name)
    return found[0] if len(found) == 1 else None


def _limited(receive: Receive) -> Receive:
    """A `receive` that raises once the body is larger than `MAX_BODY`, or takes more than `BODY_SECONDS`."""
    end = asyncio.get_running_loop().time() + BODY_SECONDS
    size, is_whole = 0, False

    async def limited() -> Message:
        nonlocal size, is_whole
        if is_whole:
            return await receive()  # waits until the client leaves
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"The request took more than {BODY_SECONDS} seconds to arrive.") from None
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            raise HTTPException(413, f"The request is larger than {MAX_BODY // 1024} KiB.")
        is_whole = not message.get("more_body", False)
        return message

    return limited


def error_answer(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request that failed, in ASCII: a sentence may quote half of a character."""
    close = {"connection": "close"} if status in (408, 413) else {}  # the rest of the body is never read
    known = {"cache-control": "no-store"} | close | (headers or {})
    return Response(json.dumps({"error": sentence}), status, known, "application/json")
