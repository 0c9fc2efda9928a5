"""The application: pages, files and routes over a session, with every error as one sentence."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

import qkv
from qkv.errors import InputError
from qkv.report.payload import looks
from qkv.server import data_routes, model_routes
from qkv.server.asking import not_there
from qkv.server.data_routes import KEPT
from qkv.server.docs_page import STYLE, docs_page
from qkv.server.guard import Guard
from qkv.server.jobs import Busy, Gone, Lanes
from qkv.server.page_schema import Looks
from qkv.server.schemas import Alignment, Failed, LiveModel, SessionState, SourceState

if TYPE_CHECKING:
    from qkv.server.session import Session

TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png"}
ERRORS = (400, 404, 422, 503)
DESCRIPTION = (
    "What the page of qkv view asks its server. Indices of sources (s), groups (g), texts (t), layers and heads are "
    "positions, from 0; so are those of queries and keys, which are tokens. Numbers that are many come as "
    "little-endian float32. Every answer that is not a success is of the type Failed: 400 and 422 for what cannot be "
    "asked, 404 for what is not there, 503 for a server that has too much to do."
)


def create_app(
    session: Session, *, host: str = "127.0.0.1", port: int = 8765, token: str | None = None, lanes: Lanes | None = None
) -> Guard:
    """The ASGI application of a session.

    Args:
        session: what there is to look at.
        host: the address that the server is bound to: what the Host of a request may be follows from it.
        port: likewise.
        token: that every request must carry, if any.
        lanes: what computes for it; made if not given. The application closes it when the server ends.
    """
    lanes = lanes or Lanes()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        session.start()
        yield
        lanes.close()

    app = FastAPI(
        title="qkv view", version=qkv.__version__, description=DESCRIPTION, lifespan=lifespan, docs_url=None,
        redoc_url=None, openapi_url=None, redirect_slashes=False,
        responses={code: {"model": Failed} for code in ERRORS},
    )  # fmt: skip
    app.state.session, app.state.lanes = session, lanes
    _errors(app)
    _pages(app)
    app.include_router(data_routes.router)
    app.include_router(model_routes.router)
    return Guard(app, host=host, port=port, token=token)


def _pages(app: FastAPI) -> None:
    folder = files("qkv.page")
    # Only what was there at the start, by name: what a client sends never becomes a path.
    known = {x.name: x.read_bytes() for x in folder.iterdir() if _type_of(x.name)}
    packed = {name: gzip.compress(content, mtime=0) for name, content in known.items()}

    @app.get("/", include_in_schema=False)
    async def viewer() -> Response:
        return HTMLResponse((folder / "viewer.html").read_bytes(), headers={"Cache-Control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204, headers={"Cache-Control": KEPT})  # browsers ask, whatever the page says

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        if name not in known:
            raise not_there("There is no such file.")
        headers = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed[name], media_type=_type_of(name), headers=headers | {"Content-Encoding": "gzip"})
        return Response(known[name], media_type=_type_of(name), headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))

    @app.get("/docs.css", include_in_schema=False)
    async def docs_style() -> Response:
        return Response(STYLE, media_type="text/css")

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(app.openapi())

    @app.get("/api/session", tags=["session"])
    async def state(request: Request, response: Response) -> SessionState:
        """What there is to look at, and how far it is."""
        response.headers["Cache-Control"] = "no-store"
        session: Session = request.app.state.session
        return SessionState(
            version=session.version,
            title=session.title,
            sources=[
                SourceState(
                    id=x.id, name=x.name, kind=x.kind, state=x.state, done=x.done, total=x.total, what=x.what,
                    error=x.error,
                )
                for x in session.sources
            ],
            live=None if session.live_described is None else LiveModel(**session.live_described),
            align=Alignment(**session.aligners_described),
            looks=Looks(**looks()),
            computing=request.app.state.lanes.slow.share,
        )  # fmt: skip


def _type_of(name: str) -> str | None:
    return TYPES.get(name[name.rfind(".") :])


def _errors(app: FastAPI) -> None:
    async def bad_input(request: Request, error: Any) -> Response:
        said = f"{error}"  # in the terminal sentences have no full stop
        return _said(400, said if said.endswith(("?", ".")) else f"{said}.")

    async def http(request: Request, error: Any) -> Response:
        said = {404: "There is nothing at this address.", 405: "This address is not asked in this way."}
        code, detail = error.status_code, str(error.detail)
        if detail == HTTPStatus(code).phrase:  # Starlette's own, which says no more than the code
            detail = said.get(code, detail)
        return _said(code, detail if detail.endswith(".") else f"{detail}.")

    async def invalid(request: Request, error: Any) -> Response:
        return _said(422, _sentence(error))

    async def busy(request: Request, error: Any) -> Response:
        return _said(
            503, "The server has more to compute than it can queue: try again in a moment.", {"Retry-After": "1"}
        )

    async def gone(request: Request, error: Any) -> Response:
        return _said(499, "The client has left.")  # which nobody reads

    async def unexpected(request: Request, error: Exception) -> Response:
        return _said(500, f"Something went wrong in the server ({type(error).__name__}): its terminal says more.")

    app.add_exception_handler(InputError, bad_input)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Busy, busy)
    app.add_exception_handler(Gone, gone)
    app.add_exception_handler(Exception, unexpected)


def _said(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps({"error": sentence})
    return Response(body, status, {"Cache-Control": "no-store"} | (headers or {}), "application/json")


def _sentence(error: RequestValidationError) -> str:
    """The first thing that is wrong, and how many others are."""
    first, *others = error.errors()
    where = ".".join(str(x) for x in first["loc"][1:] if not str(x).startswith(("constrained-", "literal[")))
    more = f" (and {len(others)} more)" if others else ""
    return f"{where or 'the request'}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}."
