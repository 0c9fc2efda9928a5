"""The routes below /api: the data of profiles, and models that run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Path, Request, Response

from qkv.profiler.data.similarity import held_maps, similarities
from qkv.profiler.explore.pyramid import Stopped
from qkv.server.jobs import compute
from qkv.server.schemas import (
    Index,
    InterventionRequest,
    Links,
    LiveAnswer,
    LiveRequest,
    Similarities,
    StepAnswer,
    StepRequest,
)

if TYPE_CHECKING:
    from qkv.profiler.explore.explorer import Explorer
    from qkv.report.stored import StoredMaps
    from qkv.server.live import Live
    from qkv.server.session import Session, Source


data_router = APIRouter(prefix="/api/sources/{s}", tags=["sources"])

MOST_WEIGHTS = 2**23  # of all heads, which are compared in less than half a second
IMMUTABLE = "private, max-age=31536000, immutable"
FLOATS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Little-endian float32.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def floats(values: np.ndarray, headers: dict[str, str] | None = None) -> Response:
    """A response of raw little-endian float32."""
    all_headers = {"Cache-Control": "no-cache"} | (headers or {})
    return Response(np.ascontiguousarray(values, "<f4").tobytes(), 200, all_headers, "application/octet-stream")


class Location(NamedTuple):
    """A text of a source that is ready, and a layer and a head in it."""

    source: Source
    of_group: dict[str, Any]
    """The entry of its group in the page: see `qkv.report.payload.payload`."""
    text: int
    layer: int
    head: int | None
    """None for the mean over heads."""

    @property
    def group(self) -> str:
        return str(self.of_group["name"])

    @property
    def view(self) -> dict[str, Any]:
        """The entry of the text in the page."""
        view: dict[str, Any] = self.of_group["texts"][self.text]
        return view

    @property
    def maps(self) -> Explorer | StoredMaps:
        return self.source.maps[self.group]


async def location_of(
    request: Request, s: Index, g: Index, t: Index, layer: Index = 0, head: Index | None = None
) -> Location:
    """The location that a request names. Its source must be ready, and all indices must exist."""
    source = ready_source(request, s)
    _check_index("group", g, len(source.groups))
    group = source.groups[g]
    for name, index, entries in (("text", t, "texts"), ("layer", layer, "layers"), ("head", head, "heads")):
        _check_index(name, index, len(group[entries]))
    return Location(source, group, t, layer, head)


At = Annotated[Location, Depends(location_of)]


def ready_source(request: Request, s: int) -> Source:
    """The source of this index."""
    session: Session = request.app.state.session
    _check_index("source", s, len(session.sources))
    source = session.sources[s]
    if source.state != "ready":
        reason = source.error or f"it is still {source.stage}"
        raise HTTPException(404, f"The source {source.name} is not ready: {reason}")
    return source


def _check_index(name: str, index: int | None, n: int) -> None:
    if index is not None and index >= n:
        raise HTTPException(404, f"{name} is {index}, expected {'0' if n == 1 else f'0..{n - 1}'}.")


@data_router.get("/page", responses={200: {"model": dict[str, Any]}})
async def page(request: Request, s: Index) -> Response:
    """Statistics, tokens and texts of a source: all of its data except curves and weights."""
    return Response(ready_source(request, s).page, media_type="application/json", headers={"Cache-Control": "no-cache"})


@data_router.get("/{kind}/{g}/{t}", responses={200: {"content": {"text/plain": {}}}})
async def packed(at: At, g: Index, t: Index, kind: Literal["curves", "pooled"]) -> Response:
    """The curves along a text, or the pooled map of each head, as text; the page describes how to decode them."""
    text = at.source.blobs.get(f"{kind}-{g}-{t}", "")
    return Response(text, media_type="text/plain", headers={"Cache-Control": "no-cache"})


@data_router.get(
    "/tiles/{version}/{g}/{t}/{layer}/{head}/{pool}/{zoom}/{i}/{j}",
    responses=FLOATS | {204: {"description": "All pairs of the tile are masked."}},
)
async def tile(
    request: Request, at: At, version: Annotated[str, Path(max_length=64)], pool: Literal["max", "mean"],
    zoom: Annotated[int, Path(ge=0, le=32)], i: Index, j: Index,
) -> Response:  # fmt: skip
    """Tile (i, j) of the map, in row i and column j of tiles: at most 256 × 256 pixels, rows × columns float32."""
    if version != request.app.state.session.version:
        raise HTTPException(404, "The page belongs to an earlier run of the server: reload it.")
    report = request.app.state.queues.slow.report_progress
    assert at.head is not None
    where = at.group, at.text, at.layer, at.head, zoom, i, j
    picture = await compute(
        request,
        lambda stopped: at.maps.tile(*where, stopped=stopped, on_progress=report),
        # The explorer keeps partial results, so a stopped tile loses no work.
        long=zoom < at.maps.info(at.group, at.text).base,
    )
    if picture is None:
        return Response(status_code=204, headers={"Cache-Control": IMMUTABLE})
    values = (picture.maximum if pool == "max" else picture.mean).cpu().numpy()
    rows, columns = values.shape
    return floats(values, {"X-Rows": str(rows), "X-Columns": str(columns), "Cache-Control": IMMUTABLE})


@data_router.get("/profiles/{g}/{t}/{layer}/{head}", responses=FLOATS)
async def profiles(at: At) -> Response:
    """The share of all attention that each key receives, (n_keys,), and the entropy of each query, (n_queries,)."""
    assert at.source.profile is not None
    data, n_queries, n_keys = at.source.profile.groups[at.group], at.view["n_queries"], at.view["n_keys"]
    of_head = at.text, at.layer, at.head
    received = data["received"].values[of_head][:n_keys].astype(np.float64) / n_queries
    return floats(np.concatenate([received, data["entropy"].values[of_head][:n_queries]]))


@data_router.get("/weights/{g}/{t}/{layer}", responses=FLOATS)
async def weights(request: Request, at: At, query: Index | None = None, key: Index | None = None) -> Response:
    """The weights of a query, (n_keys,), of all queries on a key, (n_queries,), or of a query on a key, (1,).

    They are those of one head, or means over all heads of the layer.
    """
    if query is None and key is None:
        raise HTTPException(422, "query and key are missing, expected at least one of them.")
    _check_index("query", query, at.view["n_queries"])
    _check_index("key", key, at.view["n_keys"])
    where = at.group, at.text, at.layer, at.head, query, key
    of_heads = await compute(request, lambda stopped: at.maps.weights(*where, stopped), quick=True)
    return floats(of_heads.mean(0, dtype=np.float64))


@data_router.get("/links/{g}/{t}/{layer}")
async def links(request: Request, at: At, query: Index) -> Links:
    """The key with the largest weight of a query, in every head of a layer."""
    _check_index("query", query, at.view["n_queries"])
    where = at.group, at.text, at.layer, query
    keys, largest = await compute(request, lambda stopped: at.maps.strongest(*where, stopped=stopped), quick=True)
    return Links(keys=keys.tolist(), weights=largest.tolist())


@data_router.get("/similar/{g}/{t}/{layer}/{head}")
async def similar(request: Request, at: At) -> Similarities:
    """How similar the map of every head is to that of one: a row of `Profile.similarity`.

    It compares all weights, or the pooled maps where the weights are many, because it answers for every head that is
    selected.
    """
    assert at.source.profile is not None
    assert at.head is not None
    data = at.source.profile.one_text(at.text, at.group)
    row = at.layer * data.sizes["head"] + at.head

    def work(stopped: Stopped) -> Similarities:
        held = held_maps(data)
        if not held:
            return Similarities(maps=None, values=[])
        large = data.sizes["layer"] * data.sizes["head"] * data.sizes["query"] * data.sizes["key"] > MOST_WEIGHTS
        maps = held[-1] if large else held[0]
        values = similarities(data, range(row, row + 1), maps)[0]
        return Similarities(maps=maps, values=[float(x) if np.isfinite(x) else None for x in values])

    return await compute(request, work)


model_router = APIRouter(prefix="/api", tags=["models"])


@model_router.post("/live")
async def answer(request: Request, body: LiveRequest) -> LiveAnswer:
    """Attention weights of every head and the probabilities of the next token, before and after the edits."""
    live = _live(request)
    return LiveAnswer(**await compute(request, lambda stopped: live.answer(body), quick=True))


@model_router.post("/live/step")
async def step(request: Request, body: StepRequest) -> StepAnswer:
    """Sample the next token of a text. The server is stateless: the same request gives the same token."""
    live = _live(request)
    return StepAnswer(**await compute(request, lambda stopped: live.step(body), quick=True))


@model_router.post("/interventions")
async def intervention(request: Request, body: InterventionRequest) -> dict[str, int]:
    """Create a source: the model of another source on the same texts, with another normalizer in all heads; its id."""
    ready_source(request, body.source)
    return {"id": _session(request).add_intervention(body.source, body.normalizer).id}


def _session(request: Request) -> Session:
    session: Session = request.app.state.session
    return session


def _live(request: Request) -> Live:
    live = _session(request).live
    if live is None:
        raise HTTPException(404, "The server has no language model for live text.")
    return live
