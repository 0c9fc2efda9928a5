"""A page of the viewer: the alignments of the bundled models for translation, reversal and captions."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from qkv.server.jobs import compute
from qkv.server.schemas import Index, Name, RequestBody, Text
from qkv.server.session import ViewerPage
from qkv_lab.align import models

router = APIRouter(prefix="/api", tags=["alignment"])
PAGE = ViewerPage("align", "Seq2seq & images", files("qkv_lab.align") / "page", router, models.description)


class AlignRequest(RequestBody):
    model: Name
    text: Text


class AlignAnswer(BaseModel):
    source: list[str]
    target: list[str]
    layers: int
    heads: int
    weights: list[list[list[list[float]]]] = Field(description="(layers, heads, target, source)")
    probability: list[float] = Field(description="Of each target word.")


class CaptionRequest(RequestBody):
    scene: Index


class CaptionAnswer(BaseModel):
    size: int
    image: str = Field(description="base64 of RGB bytes (size, size, 3).")
    words: list[str]
    truth: str
    weights: list[list[list[float]]] = Field(description="(words, gh, gw)")
    gh: int
    gw: int


@router.post("/align")
async def align(request: Request, body: AlignRequest) -> AlignAnswer:
    """The output of a sequence-to-sequence model, and its attention weights for each output word."""
    answer = await compute(request, lambda stopped: models.align(body.model, body.text), quick=True)
    return AlignAnswer(**answer)


@router.post("/caption")
async def caption(request: Request, body: CaptionRequest) -> CaptionAnswer:
    """The caption of a held-out scene, and the attention weights on the image for each word."""
    return CaptionAnswer(**await compute(request, lambda stopped: models.caption(body.scene), quick=True))
