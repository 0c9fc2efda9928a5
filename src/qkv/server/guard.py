"""Which requests are answered: bounded sizes, Host and Origin, the token, security headers.

Every page in the user's browser can send requests to a server on the same machine. So the Host header must be a name
of this machine, which prevents DNS rebinding, and an Origin header, where the browser sends one, must be the same host.
Browsers request images and scripts without Origin, so Sec-Fetch-Site must not name another site either.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


HEAD_SECONDS = 10  # for a request's head to arrive: a silent client occupies a connection no longer than this


class Connection(H11Protocol):
    """Uvicorn's protocol with a timer for every request head.

    Uvicorn itself has a timer between two requests, but none before the first and none while a head arrives slowly.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_idle(self) -> None:
        # While a request is being answered there is nothing to do: the end of its response starts the timer again.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


MAX_BODY = 1024 * 1024  # bytes: as many edits of heads as a request may have
MAX_QUERY = 4 * 1024  # bytes of the query string
BODY_SECONDS = 10  # for a body to arrive: a slow sender occupies a connection no longer than this
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # addresses that stand for all interfaces
METHODS = frozenset({"GET", "HEAD", "POST"})
OWN_SITE = frozenset({"same-origin", "none"})  # Sec-Fetch-Site of requests by our own page, and of a typed address
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")

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
        host: the address that the server is bound to.
        port: the port that the server is bound to.
        token: if given, every request must carry it: the first as ``?token=``, the others in a cookie.
    """

    # Starlette's TrustedHostMiddleware cannot do this check: it ignores the port, reads only the first of two Host
    # headers, accepts "127.0.0.1:8765@evil.example", and cuts IPv6 addresses such as [::1] at their first colon.

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str | None = None) -> None:
        self.app, self.host, self.port, self.token = app, host.strip("[]").lower(), port, token
        self.cookie = f"qkv-token-{port}"  # browsers share cookies between all ports of a host
        self.public = not is_loopback(host)
        self.names = LOOPBACK | {self.host} - WILDCARDS
        if self.public:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # WebSocket is not supported: uvicorn answers 403
        head = scope["method"] == "HEAD"

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_SECURITY]
            elif head:
                message = {**message, "body": b""}
            await send(message)

        headers = Headers(scope=scope)
        if (problem := self._problem(scope, headers)) is not None:
            await error_answer(*problem)(scope, receive, protected)
            return
        if self.token is not None:
            request = Request(scope)
            if _equal(request.query_params.get("token", ""), self.token):
                await self._with_cookie(request)(scope, receive, protected)
                return
            if not _equal(request.cookies.get(self.cookie, ""), self.token):
                sentence = "The request lacks the server's token: open the address that its terminal shows."
                await error_answer(401, sentence)(scope, receive, protected)
                return
        if scope["method"] != "POST":
            # HEAD is answered as GET without the body (RFC 9110, section 9.3.2).
            await self.app({**scope, "method": "GET"}, receive, protected)
            return
        try:
            body = await asyncio.wait_for(_body(receive), BODY_SECONDS)
        except TimeoutError:
            sentence = f"The request took more than {BODY_SECONDS} seconds to arrive."
            await error_answer(408, sentence)(scope, receive, protected)
            return
        if body is None:
            return  # the client has left
        if len(body) > MAX_BODY:
            await error_answer(413, f"The request is larger than {MAX_BODY // 1024} KiB.")(scope, receive, protected)
            return
        await self.app(scope, _replay(body, receive), protected)

    def _problem(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Status and sentence if the method, the address or the headers are invalid; None if they are valid."""
        host = _single(headers, "host")
        if host is None or not self.is_own_host(host):
            return 403, "The Host of the request is not this server's: open the address that its terminal shows."
        origin = _single(headers, "origin")
        if headers.getlist("origin") and (origin is None or origin.lower() != f"http://{host.lower()}"):
            return 403, "The request comes from a page of another site."
        sites = headers.getlist("sec-fetch-site")
        if scope["path"].startswith("/api/") and not OWN_SITE.issuperset(sites):
            return 403, "The request comes from a page of another site."
        if scope["method"] not in METHODS:
            return 405, "The method is not GET, HEAD or POST."
        if len(scope["query_string"]) > MAX_QUERY:
            return 414, "The address is too long."
        length = _single(headers, "content-length") or "0"
        if not length.isdecimal() or len(length) > 12 or int(length) > MAX_BODY:
            return 413, f"The request is larger than {MAX_BODY // 1024} KiB."
        return None

    def is_own_host(self, host: str) -> bool:
        """Whether the value of a Host header is a name or address of this server, with its port."""
        found = _HOST.fullmatch(host)
        if found is None or int(found["port"] or 80) != self.port:
            return False
        name = found["name"].strip("[]").lower()
        return name in self.names or (self.public and _is_address(name))

    def _with_cookie(self, request: Request) -> Response:
        """Put the token into a cookie and redirect to the address without it: people share addresses."""
        rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
        # A browser reads a path that begins with two slashes as another host.
        path = "/" + request.scope.get("raw_path", request.scope["path"].encode()).decode("latin-1").lstrip("/\\")
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        location = path + (f"?{urlencode(rest)}" if rest else "")
        return Response(
            status_code=303, headers={"location": location, "set-cookie": cookie, "cache-control": "no-store"}
        )


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    name = host.strip("[]").lower()
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _single(headers: Headers, name: str) -> str | None:
    """The value of a header that occurs once, else None: if it occurs twice, programs differ in which they read."""
    found = headers.getlist(name)
    return found[0] if len(found) == 1 else None


def _equal(sent: str, token: str) -> bool:
    """Compare in constant time."""
    return secrets.compare_digest(sent.encode(), token.encode())


async def _body(receive: Receive) -> bytes | None:
    """The body, or its beginning if it is larger than `MAX_BODY`; None if the client leaves."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY or not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns a body that was already read."""
    returned = False

    async def replayed() -> Message:
        nonlocal returned
        if returned:
            return await receive()
        returned = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def error_answer(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request that failed, in ASCII: a sentence may quote half of a character."""
    close = {"connection": "close"} if status in (408, 413) else {}  # the rest of the body is never read
    known = {"cache-control": "no-store"} | close | (headers or {})
    return Response(json.dumps({"error": sentence}), status, known, "application/json")
