"""The JSON of a source's page as types, to read about at /docs; `qkv.report.payload` makes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Column = list[Any]


class Array(BaseModel):
    """How to read one array of the curves: codes of 16 bits, all low bytes of all arrays first, then all high ones.

    Code c of 1 to 65534 is low + (c − 1) × step, or e to that power where the scale is "log"; 0 is zero or less, 65535
    is not a number.
    """

    shape: list[int]
    start: int = Field(description="Its first code.")
    scale: Literal["log", "linear"]
    low: float
    step: float


class PageText(BaseModel):
    """A text as a group of heads sees it. Columns about heads go through them layer by layer."""

    n_queries: int
    n_keys: int
    headline: str
    findings: list[dict[str, str]]
    heads: dict[str, Column] = Field(description="Statistics, a column each: see `Profile.heads`.")
    shares: dict[str, Column] = Field(description="Where the weight goes, a column for each destination.")
    keys: list[str] = Field(description="Tokens, as text to be set in a row.")
    queries: list[str] | None = Field(description="Null where they are the keys.")
    tokens: dict[str, Column] = Field(description="The tokens that receive most.")
    bins: dict[str, int]
    arrays: dict[str, Array]
    maps: Literal["none", "left out", "kept"] = Field(description="Of a report.")


class Group(BaseModel):
    """Heads of one kind of attention. It may also have `sinks`, `sink_tokens` and `residual`, where measured."""

    name: str
    causal: bool
    window: int = Field(description="“Local” is at most so many tokens away.")
    layers: list[int] = Field(description="Numbers to show; in addresses a layer is a position in this list.")
    heads: list[int] = Field(description="Likewise.")
    modules: list[str]
    texts: list[PageText]
    types: dict[str, Column] = Field(description="What kind each head is, and its scores: see `Profile.types`.")


class Looks(BaseModel):
    """Words and colours, the same for all pages."""

    statistics: dict[str, dict[str, str | bool]] = Field(
        description="Label, unit and meaning of columns of `heads`, and whether tables show them."
    )
    destinations: list[dict[str, str]] = Field(description="Names, labels and colours, in the order of `shares`.")
    ramp: dict[str, list[str]] = Field(description="Colours from 0 to 1, light and dark.")


class Page(Looks):
    attrs: dict[str, Any] = Field(description="Facts about the run.")
    main: int = Field(description="Of the groups, the one to begin with.")
    groups: list[Group]
    roles: list[dict[str, str]] = Field(description="Kinds of heads that occur.")
