"""What a source holds: its page, its curves, and the weights of any head as tiles, rows, columns and pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response

from qkv.profiler.explore.pyramid import TILE
from qkv.profiler.explore.tile_cache import Stopped
from qkv.server.asking import ask, not_there
from qkv.server.jobs import Work
from qkv.server.page_schema import Page
from qkv.server.schemas import LARGEST_INDEX, HeadLink, Line, Links, Listed, MapShape, Weight
from qkv.server.stored import Stored

if TYPE_CHECKING:
    from qkv.server.session import Session, Source

router = APIRouter(prefix="/api/sources/{s}", tags=["sources"])

Position = Annotated[int, Path(ge=0, le=LARGEST_INDEX)]
Token = Annotated[int, Query(ge=0, le=LARGEST_INDEX)]
Few = Annotated[int, Query(ge=1, le=200)]
HeadOrMean = Annotated[Literal["mean"], Path()] | Position
KEPT = "private, max-age=31536000, immutable"
FLOATS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Little-endian float32.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class Floats(Response):
    """Numbers as they are: little-endian float32."""

    media_type = "application/octet-stream"

    def __init__(self, values: np.ndarray, headers: dict[str, str] | None = None) -> None:
        super().__init__(
            np.ascontiguousarray(values, "<f4").tobytes(), headers={"Cache-Control": "no-cache"} | (headers or {})
        )


class At(NamedTuple):
    """A text of a ready source, and where in it."""

    source: Source
    group: str
    text: int
    view: dict[str, Any]


def located(request: Request, s: int, g: int, t: int, layer: int = 0, head: int | str | None = 0) -> At:
    """The text, if that is there and its layer and head are.

    Raises:
        HTTPException: 404 with a sentence.
    """
    source = ready(request, s)
    _within("group", g, len(source.groups))
    group = source.groups[g]
    _within("text", t, len(group["texts"]))
    _within("layer", layer, len(group["layers"]))
    if isinstance(head, int):
        _within("head", head, len(group["heads"]))
    return At(source, group["name"], t, group["texts"][t])


def ready(request: Request, s: int) -> Source:
    session: Session = request.app.state.session
    _within("source", s, len(session.sources))
    source = session.sources[s]
    if source.state != "ready":
        why = source.error or f"it is still {source.what}"
        raise not_there(f"The source {source.name} is not ready: {why}")
    return source


def _within(name: str, given: int, n: int) -> None:
    if given >= n:
        raise not_there(f"{name} is {given}, expected {'0' if n == 1 else f'0..{n - 1}'}.")


@router.get("/page", responses={200: {"model": Page}})
async def page(request: Request, s: Position) -> Response:
    """Everything about a source but its curves and weights."""
    return Response(ready(request, s).page, media_type="application/json", headers={"Cache-Control": "no-cache"})


@router.get("/curves/{g}/{t}", responses=FLOATS)
async def curves(request: Request, s: Position, g: Position, t: Position) -> Response:
    """Curves along a text as planes of 16-bit integers; `arrays` in the page says how to read them."""
    at = located(request, s, g, t)
    return Response(
        at.source.curves[g, t], media_type="application/octet-stream", headers={"Cache-Control": "no-cache"}
    )


@router.get("/map/{g}/{t}/{layer}/{head}")
async def shape(request: Request, s: Position, g: Position, t: Position, layer: Position, head: Position) -> MapShape:
    """What can be seen of the map of a head."""
    at = located(request, s, g, t, layer, head)
    maps = at.source.maps[at.group]
    if isinstance(maps, Stored):
        return MapShape(tile=TILE, **maps.shape(at.group, t)._asdict())
    n_queries, n_keys, deepest, _ = maps.info(at.group, t)
    return MapShape(
        kind="exact", n_queries=n_queries, n_keys=n_keys, tile=TILE, deepest=deepest, pixel_queries=1, pixel_keys=1,
        why=None,
    )  # fmt: skip


@router.get(
    "/tiles/{version}/{g}/{t}/{layer}/{head}/{pool}/{zoom}/{i}/{j}",
    responses=FLOATS | {204: {"description": "The mask hides all of it."}},
)
async def tile(
    request: Request,
    s: Position,
    version: Annotated[str, Path(max_length=64)],
    g: Position,
    t: Position,
    layer: Position,
    head: Position,
    pool: Literal["max", "mean"],
    zoom: Annotated[int, Path(ge=0, le=32)],
    i: Position,
    j: Position,
) -> Response:
    """Tile (i, j), counted down and across: at most 256 × 256 pixels, whose numbers are rows × columns float32."""
    at = located(request, s, g, t, layer, head)
    if version != request.app.state.session.version:
        raise not_there("The page belongs to an earlier run of the server: reload it.")
    where, maps, tell = (layer, head, zoom, i, j), at.source.maps[at.group], request.app.state.lanes.slow.tell
    picture = await ask(
        request,
        ("tile", s, g, t, *where),
        lambda stopped: maps.tile(at.group, t, *where, stopped=stopped, on_progress=tell),
        long=not isinstance(maps, Stored) and zoom < maps.info(at.group, t).base,  # what is done of it is kept
    )
    if picture is None:
        return Response(status_code=204, headers={"Cache-Control": KEPT})
    values = (picture.maximum if pool == "max" else picture.mean).cpu().numpy()
    rows, columns = values.shape
    return Floats(values, {"X-Rows": str(rows), "X-Columns": str(columns), "Cache-Control": KEPT})


@router.get("/profiles/{g}/{t}/{layer}/{head}", responses=FLOATS)
async def profiles(
    request: Request, s: Position, g: Position, t: Position, layer: Position, head: Position
) -> Response:
    """The share of all attention that each key receives, (n_keys,), then the entropy of each query, (n_queries,)."""
    at = located(request, s, g, t, layer, head)
    assert at.source.profile is not None
    data, n_queries, n_keys = at.source.profile.groups[at.group], at.view["n_queries"], at.view["n_keys"]
    received = data["received"].values[t, layer, head, :n_keys].astype(np.float64) / n_queries
    return Floats(np.concatenate([received, data["entropy"].values[t, layer, head, :n_queries]]))


@router.get("/pair/{g}/{t}/{layer}/{head}")
async def pair(
    request: Request, s: Position, g: Position, t: Position, layer: Position, head: HeadOrMean, query: Token, key: Token
) -> Weight:
    """One weight."""
    at = located(request, s, g, t, layer, head)
    _within("query", query, at.view["n_queries"])
    _within("key", key, at.view["n_keys"])
    work = _method(at, "pair", layer, head, query, key)
    return Weight(weight=await ask(request, ("pair", s, g, t, layer, head, query, key), work, quick=True))


@router.get("/row/{g}/{t}/{layer}/{head}")
async def row(
    request: Request,
    s: Position,
    g: Position,
    t: Position,
    layer: Position,
    head: HeadOrMean,
    query: Token,
    k: Few = 20,
) -> Line:
    """Whom a query attends to."""
    at = located(request, s, g, t, layer, head)
    _within("query", query, at.view["n_queries"])
    keys = at.view["keys"]
    work = _listing(_method(at, "row", layer, head, query), query, at.view["queries"] or keys, keys, k)
    return await ask(request, ("row", s, g, t, layer, head, query, k), work, quick=True)


@router.get("/column/{g}/{t}/{layer}/{head}")
async def column(
    request: Request, s: Position, g: Position, t: Position, layer: Position, head: HeadOrMean, key: Token, k: Few = 20
) -> Line:
    """Who attends to a key."""
    at = located(request, s, g, t, layer, head)
    _within("key", key, at.view["n_keys"])
    keys = at.view["keys"]
    work = _listing(_method(at, "column", layer, head, key), key, keys, at.view["queries"] or keys, k)
    return await ask(request, ("column", s, g, t, layer, head, key, k), work, quick=True)


@router.get("/row-weights/{g}/{t}/{layer}/{head}", responses=FLOATS)
async def row_weights(
    request: Request, s: Position, g: Position, t: Position, layer: Position, head: HeadOrMean, query: Token
) -> Response:
    """The weights of a query, (n_keys,)."""
    at = located(request, s, g, t, layer, head)
    _within("query", query, at.view["n_queries"])
    work = _method(at, "row", layer, head, query)
    return Floats(await ask(request, ("row-weights", s, g, t, layer, head, query), work, quick=True))


@router.get("/column-weights/{g}/{t}/{layer}/{head}", responses=FLOATS)
async def column_weights(
    request: Request, s: Position, g: Position, t: Position, layer: Position, head: HeadOrMean, key: Token
) -> Response:
    """The weights onto a key, (n_queries,)."""
    at = located(request, s, g, t, layer, head)
    _within("key", key, at.view["n_keys"])
    work = _method(at, "column", layer, head, key)
    return Floats(await ask(request, ("column-weights", s, g, t, layer, head, key), work, quick=True))


@router.get("/links/{g}/{t}/{layer}")
async def links(request: Request, s: Position, g: Position, t: Position, layer: Position, query: Token) -> Links:
    """The key with the largest weight of a query, in every head of a layer."""
    at = located(request, s, g, t, layer)
    _within("query", query, at.view["n_queries"])
    keys, weights = await ask(
        request,
        ("links", s, g, t, layer, query),
        lambda stopped: at.source.maps[at.group].strongest(at.group, t, layer, query, stopped=stopped),
        quick=True,
    )
    names = at.view["keys"]
    return Links(
        heads=[
            HeadLink(head=head, position=int(key), token=names[int(key)], weight=float(weight))
            for head, (key, weight) in enumerate(zip(keys, weights, strict=True))
        ]
    )


def _method(at: At, name: str, layer: int, head: int | str, *where: int) -> Work:
    method = getattr(at.source.maps[at.group], name)
    return lambda stopped: method(
        at.group, at.text, layer, None if isinstance(head, str) else head, *where, stopped=stopped
    )


def _listing(work: Work, position: int, names: list[str], others: list[str], k: int) -> Work:
    """The k largest of the weights that `work` finds, the first of several first, and the sum of the others."""

    def listed(stopped: Stopped) -> Line:
        weights: np.ndarray = work(stopped)
        order = np.argpartition(-weights, k - 1) if k < len(weights) else np.arange(len(weights))
        first = order[:k][np.lexsort((order[:k], -weights[order[:k]]))]
        return Line(
            position=position,
            token=names[position],
            top=[Listed(position=int(x), token=others[x], weight=float(weights[x])) for x in first],
            rest=float(weights[order[k:]].sum(dtype=np.float64)),
        )

    return listed
