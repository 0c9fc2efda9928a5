"""Types of the server's JSON, but for the page (`qkv.report.payload`). Indices are positions in it from 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_CHARACTERS = 2_000  # of a text for a live model
MAX_EDITS = 2**13  # heads: a model of 70 billion parameters has 80 × 64
MAX_IDS = 2_000  # a text has at most one token per character, apart from special tokens
MAX_STEPS = 10_000
LARGEST_INDEX = 2**31 - 1

Index = Annotated[int, Field(ge=0, le=LARGEST_INDEX)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHARACTERS)]
Count = Annotated[int, Field(ge=1, le=50)]
Temperature = Annotated[float, Field(ge=0.05, le=20, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Normalizer = Literal["softmax", "off-by-one", "sigmoid"]


class RequestBody(BaseModel):
    """The body of a request: unknown fields are rejected, and values are not converted between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: str = Field(description="One sentence.")


# --- the session ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SourceState:
    """A profile or model of the session, and its progress."""

    id: int
    name: str
    kind: Literal["model", "profile", "intervention"]
    state: Literal["running", "ready", "failed"] = "running"
    done: int = 0
    """Finished steps, of `total`."""
    total: int = 1
    stage: str = "waiting"
    """The current step of its preparation, in words."""
    error: str | None = None
    """The reason why it failed, one sentence."""


class LiveModel(BaseModel):
    """The language model for live text."""

    model: str
    layers: int
    heads: int
    most_tokens: int
    most_characters: int
    normalizers: list[Normalizer]
    example: str


@dataclass(eq=False)
class AddedPage:
    """A page that another package adds to the viewer."""

    id: str
    """Its module is ``page_<id>.js``, which exports ``mount(root, app)``, and its style ``page_<id>.css``."""
    title: str
    data: dict[str, Any] | None = field(default=None, kw_only=True)
    """What the page shows at first, once it is prepared."""
    missing: str | None = field(default=None, kw_only=True)
    """The reason why it has nothing to show, one sentence."""


class SessionState(BaseModel):
    version: str = Field(description="Identifies this run of the server; part of the addresses of tiles.")
    title: str
    sources: Sequence[SourceState]
    live: LiveModel | None
    pages: Sequence[AddedPage]
    looks: dict[str, Any] = Field(description="Labels and colours of statistics and destinations.")
    computing: float | None = Field(
        description="The finished share of the map that is being computed, from 0 to 1; null if there is none."
    )


# --- maps -------------------------------------------------------------------------------------------------------------


class Links(BaseModel):
    """The key with the largest weight of one query, in every head of a layer."""

    keys: list[int]
    weights: list[float]


# --- live -------------------------------------------------------------------------------------------------------------


class Edit(RequestBody):
    """Another normalizer or temperature in one head."""

    layer: Index
    head: Index
    normalizer: Normalizer
    temperature: Temperature = Field(description="Scores are divided by it.")


class LiveRequest(RequestBody):
    text: Text
    ids: Annotated[list[Index], Field(max_length=MAX_IDS)] | None = Field(
        None, description="Token ids of the text, from the step that created it; tokenized anew they might differ."
    )
    edits: Annotated[list[Edit], Field(max_length=MAX_EDITS)] = []
    layer: Index
    head: Index
    k: Count = 12


class TokenProbability(BaseModel):
    token: str
    probability: float


class LiveRun(BaseModel):
    next: list[TokenProbability]
    sink: list[list[float]] = Field(description="(layers, heads), as is the entropy: means over the queries.")
    sinks: list[list[bool]] = Field(
        description="(layers, heads): whether the head has an attention sink, as counted in a profile."
    )
    entropy: list[list[float]]
    map: str = Field(description="base64 of float32 (n, n), little-endian: the weights of the requested head.")


class LiveAnswer(BaseModel):
    tokens: list[str]
    divergence: float = Field(description="KL(before ‖ after) of the next token, nats.")
    rows: list[list[list[float]]] = Field(description="(layers, heads, n): weights of the last query, with the edits.")
    before: LiveRun
    after: LiveRun


class Similarities(BaseModel):
    maps: Literal["weights", "pooled"] | None = Field(description="What was compared; null if there are no maps.")
    values: list[float | None] = Field(
        description="Similarity of every head, by layer × number of heads + head; null where it is not defined."
    )


class StepRequest(LiveRequest):
    sampling_temperature: Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)]
    seed: Index
    step: Annotated[int, Field(ge=0, le=MAX_STEPS)]


class StepAnswer(BaseModel):
    text: str = Field(description="The text of the request with the new token appended.")
    ids: list[int] = Field(description="Token ids of this text.")
    token: str
    probability: float
    top: list[TokenProbability]
    tokens: list[str]
    row: list[float] = Field(description="(n,): weights of the last query in the requested head.")


# --- interventions ----------------------------------------------------------------------------------------------------


class InterventionRequest(RequestBody):
    source: Index
    normalizer: Literal["off-by-one", "sigmoid"]
