"""The server of a session: its FastAPI application, in a thread of a program or until an interrupt.

Every error is answered with one sentence.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

import qkv
from qkv.errors import InputError
from qkv.report.payload import looks
from qkv.server import routes
from qkv.server.guard import Connection, Guard, error_answer
from qkv.server.jobs import ClientDisconnected, JobQueue, JobQueues, QueueFull
from qkv.server.routes import IMMUTABLE
from qkv.server.schemas import ErrorAnswer, SessionState

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from qkv.server.session import Session

TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png"}
ERRORS = (400, 404, 422, 503)
DESCRIPTION = (
    "The interface between the page of qkv view and its server. Indices of sources (s), groups (g), texts (t), layers "
    "and heads are positions that count from 0; so are queries and keys, which are positions of tokens. Arrays are "
    "little-endian float32. Every answer that is not a success has the type ErrorAnswer: 400 and 422 for invalid "
    "requests, 404 for an index or address that does not exist, 503 if the job queue of the server is full."
)


def create_app(session: Session, *, port: int = 8765, queues: JobQueues | None = None) -> Guard:
    """The ASGI application of a session at a port of the loopback address. It computes in `queues`, or in new ones."""
    app = FastAPI(
        title="qkv view", version=qkv.__version__, description=DESCRIPTION, docs_url=None, redoc_url=None,
        redirect_slashes=False,
        responses={code: {"model": ErrorAnswer} for code in ERRORS},
    )  # fmt: skip
    app.state.session, app.state.queues = session, queues or JobQueues(JobQueue(), JobQueue())
    _add_error_handlers(app)
    _add_pages(app, [page.folder for page in session.pages])
    for router in (routes.data_router, routes.model_router, *(page.router for page in session.pages)):
        app.include_router(router)
    return Guard(app, port=port)


def _add_pages(app: FastAPI, others: Sequence[Traversable]) -> None:
    """Serve the viewer and its static files, with those of the pages that other packages add."""
    folder = files("qkv.page")
    # All files are read at the start and found by name, so a name that a client sends never becomes a path.
    known = {x.name: x.read_bytes() for where in (*others, folder) for x in where.iterdir() if _type_of(x.name)}
    styles = "".join(
        f'<link rel="stylesheet" href="/static/{name}">\n'
        for name in sorted(known) if name.startswith("page_") and name.endswith(".css")
    )  # fmt: skip
    html = (folder / "viewer.html").read_text(encoding="utf-8").replace("{{page styles}}\n", styles)

    @app.get("/", include_in_schema=False)
    async def viewer() -> Response:
        return HTMLResponse(html, headers={"Cache-Control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204, headers={"Cache-Control": IMMUTABLE})  # browsers always request it

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in known:
            raise HTTPException(404, "There is no such file.")
        return Response(known[name], media_type=_type_of(name), headers={"Cache-Control": "no-cache"})

    @app.get("/api/session", tags=["session"])
    async def state(request: Request, response: Response) -> SessionState:
        """The sources of the session with their progress, the model for text, and the pages that other packages add."""
        response.headers["Cache-Control"] = "no-store"
        session: Session = request.app.state.session
        return SessionState(
            version=session.version,
            title=session.title,
            sources=session.sources,
            live=None if session.live is None else session.live.description,
            pages=session.pages,
            looks=looks(),
            computing=request.app.state.queues.slow.progress,
        )  # fmt: skip


def _type_of(name: str) -> str | None:
    return TYPES.get(name[name.rfind(".") :])


def _add_error_handlers(app: FastAPI) -> None:
    def answer(
        error_type: type[Exception], status: int, sentence: Callable[[Any], str], headers: dict[str, str] | None = None
    ) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return error_answer(status, sentence(error), headers)

        app.add_exception_handler(error_type, handler)

    async def http(request: Request, error: Any) -> Response:
        sentences = {404: "There is nothing at this address.", 405: "This address does not support the method."}
        code, detail = error.status_code, str(error.detail)
        if detail == HTTPStatus(code).phrase:  # Starlette's default, which only names the code
            detail = sentences.get(code, detail)
        return error_answer(code, detail if detail.endswith(".") else f"{detail}.")

    app.add_exception_handler(HTTPException, http)
    answer(InputError, 400, lambda error: f"{error}" if f"{error}".endswith(("?", ".")) else f"{error}.")
    answer(RequestValidationError, 422, _validation_sentence)
    busy = "The job queue of the server is full: try again in a moment."
    answer(QueueFull, 503, lambda _: busy, {"Retry-After": "1"})
    answer(ClientDisconnected, 499, lambda _: "The client has disconnected.")  # never delivered
    failed = "The server failed ({}): its terminal shows the traceback."
    answer(Exception, 500, lambda error: failed.format(type(error).__name__))


def _validation_sentence(error: RequestValidationError) -> str:
    """The first invalid field, and the number of further ones."""
    first, *others = error.errors()
    where = ".".join(str(x) for x in first["loc"][1:] if not str(x).startswith(("constrained-", "literal[")))
    more = f" (and {len(others)} more)" if others else ""
    return f"{where or 'the request'}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}."


MAX_CONNECTIONS = 1000  # at a time; further requests are answered with 503
GRACE = 1  # seconds in which requests may still be answered after an interrupt, a whole number for uvicorn
CLOSE = 0.7  # seconds in which the threads that compute may end after that


@contextmanager
def serve_in_thread(session: Session, *, port: int = 0, queues: JobQueues | None = None) -> Iterator[str]:
    """Serve a session in a thread while the context lasts; the context's value is the address.

    Only this machine can connect. At the end all computation is stopped, so that no request waits for its result.
    """
    queues = queues or JobQueues(JobQueue(), JobQueue())
    with _socket(port) as sock:
        # The socket comes first: for port 0 the system chooses the port, which the checks of the Host header must know.
        port = sock.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(
            create_app(session, port=port, queues=queues), http=Connection, log_level="warning", access_log=False,
            server_header=False, proxy_headers=False, ws="none", lifespan="off", limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        ))  # fmt: skip
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="qkv server", daemon=True)
        session.start()
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{port}/"
        finally:
            for queue in queues:
                queue.stop()
            server.should_exit = True
            thread.join()


def serve(session: Session, *, port: int = 0, on_start: Callable[[str], None] = lambda url: None) -> bool:
    """Serve a session until interrupted. `on_start` is called with the address.

    An interrupt ends it within 2 seconds, whatever is computed at that moment.

    Returns:
        Whether all threads of the server have ended. The interpreter cannot exit cleanly while one still computes.
    """
    queues = JobQueues(JobQueue(), JobQueue())
    with (
        suppress(KeyboardInterrupt),
        serve_in_thread(session, port=port, queues=queues) as url,
    ):  # the normal way to end it
        try:
            on_start(url)
            threading.Event().wait()
        finally:
            session.stop()
    end = time.monotonic() + CLOSE
    return all(part.close(max(0.0, end - time.monotonic())) for part in (*queues, session))


def _socket(port: int) -> socket.socket:
    # asyncio only turns Nagle's algorithm off, which delays the end of a small answer by 40 ms, if the protocol is TCP
    # explicitly.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(MAX_CONNECTIONS)  # clients that connect before the server runs wait instead of being refused
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--port: cannot listen at 127.0.0.1:{port} ({reason})") from error
    return sock
