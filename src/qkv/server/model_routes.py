"""Models at work: text typed, alignment, captions, and the same model with another normalizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from qkv.server.asking import ask, not_there
from qkv.server.data_routes import ready
from qkv.server.schemas import (
    AlignAnswer,
    AlignRequest,
    CaptionAnswer,
    CaptionRequest,
    LiveAnswer,
    LiveRequest,
    Made,
    RemedyRequest,
    StepAnswer,
    StepRequest,
)

if TYPE_CHECKING:
    from qkv.server.live import Live
    from qkv.server.session import Session

router = APIRouter(prefix="/api", tags=["models"])


@router.post("/live")
async def answer(request: Request, asked: LiveRequest) -> LiveAnswer:
    """Where every head attends on a text and what would come next, without the edits and with them."""
    live = _live(request)
    key = ("live", asked.model_dump_json())
    return LiveAnswer(**await ask(request, key, lambda stopped: live.answer(asked), quick=True))


@router.post("/live/step")
async def step(request: Request, asked: StepRequest) -> StepAnswer:
    """One more token of a text. The server keeps nothing: the same request gives the same token."""
    live = _live(request)
    key = ("step", asked.model_dump_json())
    return StepAnswer(**await ask(request, key, lambda stopped: live.step(asked), quick=True))


@router.post("/align")
async def align(request: Request, asked: AlignRequest) -> AlignAnswer:
    """What a model makes of some words, and where it looked for each word of that."""
    aligners = _session(request).aligners
    key = ("align", asked.model_dump_json())
    return AlignAnswer(**await ask(request, key, lambda stopped: aligners.align(asked), quick=True))


@router.post("/caption")
async def caption(request: Request, asked: CaptionRequest) -> CaptionAnswer:
    """What the captioner says of a scene, and where it looked for each word."""
    aligners = _session(request).aligners
    return CaptionAnswer(
        **await ask(request, ("caption", asked.scene), lambda stopped: aligners.caption(asked), quick=True)
    )


@router.post("/remedies")
async def remedy(request: Request, asked: RemedyRequest) -> Made:
    """The model of a source that is ready, on the same texts with another normalizer in all heads, as a new source."""
    ready(request, asked.source)
    return Made(id=_session(request).add_remedy(asked.source, asked.normalizer).id)


def _session(request: Request) -> Session:
    session: Session = request.app.state.session
    return session


def _live(request: Request) -> Live:
    live = _session(request).live
    if live is None:
        raise not_there("There is no model here that goes on with a text.")
    return live
