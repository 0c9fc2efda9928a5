"""Start the server, in the foreground until it is interrupted or in a background thread of a program."""

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
from qkv.server.guard import WILDCARDS, Connection, is_loopback
from qkv.server.jobs import JobQueues

if TYPE_CHECKING:
    from qkv.server.session import Session

MAX_CONNECTIONS = 1000  # at a time; further requests are answered with 503
GRACE = 1  # seconds in which requests may still be answered after an interrupt, a whole number for uvicorn
CLOSE = 0.7  # seconds in which the threads that compute may end after that


def serve(
    session: Session, *, host: str = "127.0.0.1", port: int = 0, on_start: Callable[[str], None] = lambda url: None
) -> bool:
    """Serve a session until interrupted. `on_start` is called with the address, which holds the token if there is one.

    An interrupt ends it within 2 seconds, whatever is computed at that moment.

    Returns:
        Whether all threads of the server have ended. The interpreter cannot exit cleanly while one still computes.
    """
    queues = JobQueues()

    def stop() -> None:
        queues.stop()
        session.stop()

    sock, server, url = _bind(session, queues, host, port, stop)
    with sock:
        on_start(url)
        try:
            with suppress(KeyboardInterrupt):  # the normal way to end the server
                server.run(sockets=[sock])
        finally:
            end = time.monotonic() + CLOSE
            ended = [queues.close(CLOSE), session.close(max(0.0, end - time.monotonic()))]
    return all(ended)


@contextmanager
def serve_in_thread(session: Session, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve a session in a thread while the context lasts; the context's value is the address."""
    queues = JobQueues()
    sock, server, url = _bind(session, queues, host, port, queues.stop)
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


class _Server(uvicorn.Server):
    """A server that stops all computation as soon as it is told to end, so that no request waits for its result."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop_computing = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop_computing()
        await super().shutdown(sockets)


def _bind(
    session: Session, queues: JobQueues, host: str, port: int, stop: Callable[[], None]
) -> tuple[socket.socket, _Server, str]:
    """A bound socket, the server for it and its address.

    The socket comes first: for port 0 the system chooses the port, which the checks of the Host header must know.
    """
    host = host.strip("[]")
    sock = _socket(host, port)
    port = sock.getsockname()[1]
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    app = create_app(session, host=host, port=port, token=token, queues=queues)
    config = uvicorn.Config(
        app, http=Connection, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        ws="none", limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=GRACE,
    )  # fmt: skip
    name = "localhost" if host in WILDCARDS else f"[{host}]" if ":" in host else host
    return sock, _Server(config, stop), f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio only turns Nagle's algorithm off, which delays the end of a small answer by 40 ms, if the protocol is TCP
    # explicitly.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(MAX_CONNECTIONS)  # clients that connect before the server runs wait instead of being refused
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--port: cannot listen at {host}:{port} ({reason})") from error
    return sock
