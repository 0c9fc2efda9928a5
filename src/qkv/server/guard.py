"""Who may ask what: the checks that every request passes before anything else reads it.

A server on one's own machine can be reached by every page that one's browser shows. So the Host must be a name of this
machine (or a page could rebind its own name to this address), and an Origin, where a browser sends one, the same host.
What browsers say of the page that asks (Sec-Fetch-Site) must fit, too: images and scripts are asked for without Origin.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
import socket
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY = 64 * 1024
MOST_QUERY = 4 * 1024
BODY_SECONDS = 10  # for a body to arrive: who sends it drop by drop holds nothing for longer
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE = frozenset({"0.0.0.0", "::", ""})
METHODS = frozenset({"GET", "POST"})
OWN_SITE = frozenset({"same-origin", "none"})  # what a browser says of our own page, and of an address typed
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
    """An ASGI application around another one, which hears only of requests that are all right.

    Args:
        app: the one inside.
        host: the address it is bound to.
        port: the port it is bound to.
        token: if given, every request must carry it: once as ``?token=``, then in a cookie.
    """

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str | None = None) -> None:
        self.app, self.host, self.port, self.token = app, host.strip("[]").lower(), port, token
        self.cookie = f"qkv-token-{port}"  # cookies are of a host, whatever its port
        self.elsewhere = not is_loopback(host)
        self.names = LOOPBACK | {self.host} - EVERYWHERE
        if self.elsewhere:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks WebSocket: the server answers 403
        started = False

        async def protected(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *_SECURITY]
            await send(message)

        headers = _Headers(scope)
        refused = self._refused(scope, headers)
        if refused is not None:
            await _say(protected, *refused)
            return
        if self.token is not None:
            given = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("token")
            if given is not None and _same(given, self.token):
                await self._welcome(scope, protected)
                return
            if not _same(_cookie(headers.one("cookie") or "", self.cookie), self.token):
                await _say(protected, 401, "This server wants its token: open the address that its terminal shows.")
                return
        if scope["method"] != "POST":
            await self.app(scope, receive, protected)
            return
        try:
            body = await asyncio.wait_for(_body(receive), BODY_SECONDS)
        except TimeoutError:
            await _say(protected, 408, f"The request took more than {BODY_SECONDS} seconds to arrive.")
            return
        if body is None:
            return  # the client has left
        if len(body) > MOST_BODY:
            await _say(protected, 413, f"The request is larger than {MOST_BODY // 1024} KiB.")
            return
        await self.app(scope, _replay(body, receive), protected)

    def _refused(self, scope: Scope, headers: _Headers) -> tuple[int, str] | None:
        """Status and sentence, if the request is not all right as far as can be seen from outside."""
        host = headers.one("host")
        if host is None or not self.knows(host):
            return 403, "The Host of the request is not this server's: open the address that its terminal shows."
        origin = headers.one("origin")
        if headers.many("origin") and (origin is None or origin.lower() != f"http://{host.lower()}"):
            return 403, "The request comes from a page of another site."
        sites = headers.many("sec-fetch-site")
        if scope["path"].startswith("/api/") and not OWN_SITE.issuperset(sites):
            return 403, "The request comes from a page of another site."
        if scope["method"] not in METHODS:
            return 405, "The method is neither GET nor POST."
        if len(scope["query_string"]) > MOST_QUERY:
            return 414, "The address is too long."
        length = headers.one("content-length") or "0"
        if not length.isdecimal() or len(length) > 12 or int(length) > MOST_BODY:
            return 413, f"The request is larger than {MOST_BODY // 1024} KiB."
        return None

    def knows(self, host: str) -> bool:
        """Whether a Host header means this server."""
        found = _HOST.fullmatch(host)
        if found is None or int(found["port"] or 80) != self.port:
            return False
        name = found["name"].strip("[]").lower()
        return name in self.names or (self.elsewhere and _is_address(name))

    async def _welcome(self, scope: Scope, send: Send) -> None:
        """The token goes into a cookie, and out of the address: addresses are kept, shown and sent about."""
        rest = [(k, v) for k, v in parse_qsl(scope["query_string"].decode("latin-1")) if k != "token"]
        # A path of two slashes would be another host's.
        path = "/" + scope.get("raw_path", scope["path"].encode()).decode("latin-1").lstrip("/\\")
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        headers = [
            (b"location", (path + (f"?{urlencode(rest)}" if rest else "")).encode("latin-1")),
            (b"set-cookie", cookie.encode()),
            (b"cache-control", b"no-store"),
            (b"content-length", b"0"),
        ]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

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


class _Headers:
    def __init__(self, scope: Scope) -> None:
        self._pairs: list[tuple[bytes, bytes]] = scope["headers"]

    def many(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self._pairs if key.lower() == name.encode()]

    def one(self, name: str) -> str | None:
        """Its value if it is there once: of two, another program might read the other one."""
        found = self.many(name)
        return found[0] if len(found) == 1 else None


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())


def _cookie(header: str, name: str) -> str:
    try:
        return SimpleCookie(header)[name].value
    except (CookieError, KeyError):
        return ""


async def _body(receive: Receive) -> bytes | None:
    """The body, or its beginning if it is too large; None if the client leaves."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MOST_BODY or not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    told = False

    async def replayed() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _say(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if status in (408, 413):  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
