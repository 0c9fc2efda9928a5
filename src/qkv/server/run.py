"""The server started: in the foreground until interrupted, or in a thread of a program."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

from qkv.errors import InputError
from qkv.server.app import create_app
from qkv.server.connection import Connection
from qkv.server.guard import EVERYWHERE, is_loopback
from qkv.server.jobs import Lanes

if TYPE_CHECKING:
    from qkv.server.session import Session

CONNECTIONS = 1000  # at a time; more are told that there are too many


def serve(
    session: Session, *, host: str = "127.0.0.1", port: int = 0, on_start: Callable[[str], None] = lambda url: None
) -> bool:
    """Serve a session until interrupted. `on_start` hears the address, with the token if it needs one.

    Returns:
        Whether all its threads have ended: one in the middle of a long computation would abort the interpreter's end.

    Raises:
        InputError: for a host or port that cannot be had.
    """
    lanes = Lanes()
    sock, server, url = _bound(session, lanes, host, port)
    with sock:
        on_start(url)
        try:
            with suppress(KeyboardInterrupt):  # the way it is meant to end
                server.run(sockets=[sock])
        finally:
            ended = [lanes.close(), session.close()]
    return all(ended)


@contextmanager
def serve_in_thread(session: Session, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve a session for as long as the context lasts; gives the address."""
    sock, server, url = _bound(session, Lanes(), host, port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="qkv server", daemon=True)
    with sock:
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join()


def _bound(session: Session, lanes: Lanes, host: str, port: int) -> tuple[socket.socket, uvicorn.Server, str]:
    """The socket first: of port 0 the system says which one it is, and checks of requests must know it."""
    host = host.strip("[]")
    sock = _socket(host, port)
    port = sock.getsockname()[1]
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    app = create_app(session, host=host, port=port, token=token, lanes=lanes)
    config = uvicorn.Config(
        app, http=Connection, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        ws="none", limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=2,
    )  # fmt: skip
    name = "localhost" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    return sock, uvicorn.Server(config), f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, or asyncio leaves Nagle's algorithm on, which holds back the end of a small answer for 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(CONNECTIONS)  # who comes before the server is up waits, and is not sent away
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--port: cannot listen at {host}:{port} ({reason})") from error
    return sock
