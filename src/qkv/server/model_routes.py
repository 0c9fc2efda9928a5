"""Routes that run models: live text, and interventions on the normalizer of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from qkv.server.computing import compute, not_found
from qkv.server.data_routes import ready_source
from qkv.server.schemas import (
    Created,
    InterventionRequest,
    LiveAnswer,
    LiveRequest,
    StepAnswer,
    StepRequest,
)

if TYPE_CHECKING:
    from qkv.server.live import Live
    from qkv.server.session import Session

router = APIRouter(prefix="/api", tags=["models"])


@router.post("/live")
async def answer(request: Request, body: LiveRequest) -> LiveAnswer:
    """Attention weights of every head and the probabilities of the next token, before and after the edits."""
    live = _live(request)
    key = ("live", body.model_dump_json())
    return LiveAnswer(**await compute(request, key, lambda stopped: live.answer(body), quick=True))


@router.post("/live/step")
async def step(request: Request, body: StepRequest) -> StepAnswer:
    """Sample the next token of a text. The server is stateless: the same request gives the same token."""
    live = _live(request)
    key = ("step", body.model_dump_json())
    return StepAnswer(**await compute(request, key, lambda stopped: live.step(body), quick=True))


@router.post("/interventions")
async def intervention(request: Request, body: InterventionRequest) -> Created:
    """Create a source: the model of another source on the same texts, with another normalizer in all heads."""
    ready_source(request, body.source)
    return Created(id=_session(request).add_intervention(body.source, body.normalizer).id)


def _session(request: Request) -> Session:
    session: Session = request.app.state.session
    return session


def _live(request: Request) -> Live:
    live = _session(request).live
    if live is None:
        raise not_found("The server has no language model for live text.")
    return live
