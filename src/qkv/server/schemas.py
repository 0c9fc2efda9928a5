"""What the page and the server say to each other, as JSON. Indices are positions in the page, from 0: see `Page`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from qkv.server.page_schema import Looks

MOST_CHARACTERS = 2_000  # of a text that a model is to read while somebody waits
MOST_EDITS = 256
MOST_IDS = 2_000  # no text has more tokens than characters, but for those put around it
MOST_STEPS = 10_000
LARGEST_INDEX = 2**31 - 1

Index = Annotated[int, Field(ge=0, le=LARGEST_INDEX)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=MOST_CHARACTERS)]
Few = Annotated[int, Field(ge=1, le=50)]
Temperature = Annotated[float, Field(ge=0.05, le=20, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Normalizer = Literal["softmax", "off-by-one", "sigmoid"]


class Asked(BaseModel):
    """What a page asks for: nothing unknown, and no text where a number is meant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Failed(BaseModel):
    """Every answer that is not a success."""

    error: str = Field(description="One sentence.")


# --- the session ------------------------------------------------------------------------------------------------------


class SourceState(BaseModel):
    """Something to look at, and how far it is."""

    id: int
    name: str
    kind: Literal["model", "profile", "remedy"]
    state: Literal["running", "ready", "failed"]
    done: int = Field(description="Steps done, of `total`.")
    total: int
    what: str = Field(description="What it is doing.")
    error: str | None = Field(description="Why it failed, one sentence.")


class LiveModel(BaseModel):
    """The model that answers to text typed."""

    model: str
    layers: int
    heads: int
    most_tokens: int
    most_characters: int
    normalizers: list[Normalizer]
    example: str


class AlignModel(BaseModel):
    """A model whose attention aligns two sequences."""

    name: str
    kind: Literal["translation", "reversal"]
    example: str
    words: list[str] | None = Field(description="All it knows; null if it takes any.")


class Captioner(BaseModel):
    name: str
    scenes: int


class Alignment(BaseModel):
    models: list[AlignModel]
    captioner: Captioner | None


class SessionState(BaseModel):
    version: str = Field(description="Of this run of the server: part of the addresses of tiles.")
    title: str
    sources: list[SourceState]
    live: LiveModel | None
    align: Alignment
    looks: Looks
    computing: float | None = Field(
        description="How much of the map that is being computed is done, from 0 to 1; null if none is."
    )


# --- maps -------------------------------------------------------------------------------------------------------------


class MapShape(BaseModel):
    """What is known of the map of a head."""

    kind: Literal["exact", "stored", "small", "none"] = Field(
        description="Computed on demand; whole weights from the profile; only its pooled map (tile 0/0/0); nothing."
    )
    n_queries: int
    n_keys: int
    tile: int = Field(description="Pixels a side of a tile.")
    deepest: int = Field(description="The largest zoom. A pixel covers 2^(deepest − zoom) × what it covers there.")
    pixel_queries: int = Field(description="Queries that a pixel covers at the deepest zoom: 1, but in a small map.")
    pixel_keys: int
    why: str | None = Field(description="Why it is not exact, one sentence.")


class Weight(BaseModel):
    weight: float


class Listed(BaseModel):
    """A token at the other end, and the weight."""

    position: int
    token: str
    weight: float


class Line(BaseModel):
    """The largest weights of a query (or onto a key), and the sum of the others."""

    position: int
    token: str
    top: list[Listed]
    rest: float


class HeadLink(Listed):
    head: int


class Links(BaseModel):
    """The key with the largest weight of one query, in every head of a layer."""

    heads: list[HeadLink]


# --- live -------------------------------------------------------------------------------------------------------------


class Edit(Asked):
    """Another normalizer or temperature in one head."""

    layer: Index
    head: Index
    normalizer: Normalizer
    temperature: Temperature = Field(description="Scores are divided by it.")


class LiveRequest(Asked):
    text: Text
    ids: Annotated[list[Index], Field(max_length=MOST_IDS)] | None = Field(
        None, description="Of the text's tokens, from the step that made it: cut anew they might be others."
    )
    edits: Annotated[list[Edit], Field(max_length=MOST_EDITS)] = []
    layer: Index
    head: Index
    k: Few = 12


class Likely(BaseModel):
    token: str
    probability: float


class Before(BaseModel):
    before: list[list[float]] = Field(description="(layers, heads), as the model is.")
    after: list[list[float]] = Field(description="The same with the edits.")


class NextToken(BaseModel):
    before: list[Likely]
    after: list[Likely]


class LiveAnswer(BaseModel):
    tokens: list[str]
    next: NextToken
    divergence: float = Field(description="KL(before ‖ after) of the next token, nats.")
    sink: Before
    entropy: Before
    rows: list[list[list[float]]] = Field(description="(layers, heads, n): weights of the last query, after.")
    map: str = Field(description="base64 of float32 (n, n), little-endian: the head asked for, after.")
    map_before: str


class StepRequest(LiveRequest):
    sampling_temperature: Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)]
    seed: Index
    step: Annotated[int, Field(ge=0, le=MOST_STEPS)]


class StepAnswer(BaseModel):
    text: str = Field(description="What was sent, with the new token appended.")
    ids: list[int] = Field(description="Of its tokens.")
    token: str
    probability: float
    top: list[Likely]
    tokens: list[str]
    row: list[float] = Field(description="(n,): weights of the last query in the head asked for.")


# --- alignment, captions, remedies ------------------------------------------------------------------------------------


class AlignRequest(Asked):
    model: Name
    text: Text


class AlignAnswer(BaseModel):
    source: list[str]
    target: list[str]
    layers: int
    heads: int
    weights: list[list[list[list[float]]]] = Field(description="(layers, heads, target, source)")
    probability: list[float] = Field(description="Of each target word.")


class CaptionRequest(Asked):
    scene: Index


class CaptionAnswer(BaseModel):
    size: int
    image: str = Field(description="base64 of RGB bytes (size, size, 3).")
    words: list[str]
    truth: str
    weights: list[list[list[float]]] = Field(description="(words, gh, gw)")
    gh: int
    gw: int


class RemedyRequest(Asked):
    source: Index
    normalizer: Literal["off-by-one", "sigmoid"]


class Made(BaseModel):
    id: int = Field(description="Of the new source.")
