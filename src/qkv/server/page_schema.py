"""The JSON of a source's page as pydantic types, which document it at /docs. `qkv.report.payload` creates the JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Column = list[Any]


class Array(BaseModel):
    """How to decode one array of the curves. Codes have 16 bits; the low bytes of all arrays precede the high bytes.

    Code c from 1 to 65534 stands for low + (c − 1) × step, or e to that power if the scale is "log". Code 0 stands for
    zero or less, and 65535 for NaN.
    """

    shape: list[int]
    start: int = Field(description="Index of its first code.")
    scale: Literal["log", "linear"]
    low: float
    step: float


class Pooled(BaseModel):
    """How to decode the pooled maps of a text: see `qkv.report.pools.pooled_maps`."""

    rows: int
    columns: int
    bin_queries: int
    bin_keys: int
    low: float
    high: float
    coarser: bool = Field(description="Whether the profile has finer maps, too large for a page.")


class NextStep(BaseModel):
    purpose: str
    command: str = Field(description="A command, or a line of Python for a profile that no command made.")
    layer: int | None
    head: int | None


class Finding(BaseModel):
    value: str
    label: str
    detail: str
    steps: list[NextStep]


class PageText(BaseModel):
    """The data of one text for a group of heads. Columns about heads list them layer by layer."""

    n_queries: int
    n_keys: int
    headline: str
    findings: list[Finding]
    heads: dict[str, Column] = Field(description="One column per statistic: see `Profile.heads`.")
    shares: dict[str, Column] = Field(description="The share of the weight on each destination, one column each.")
    keys: list[str] = Field(
        description="Tokens as text with their spaces, special tokens included, to be shown in a row."
    )
    queries: list[str] | None = Field(description="Null if the queries are the keys.")
    tokens: dict[str, Column] = Field(description="The tokens that receive most attention.")
    bins: dict[str, int]
    arrays: dict[str, Array]
    pooled: Pooled | None = Field(description="Null if the profile has no pooled maps of this text.")
    maps: Literal["none", "left out", "kept"] = Field(description="Whether a report holds the dense maps.")


class Group(BaseModel):
    """Heads of one kind of attention. It also has `sinks`, `sink_tokens` and `residual` if these were measured."""

    name: str
    causal: bool
    window: int = Field(description="The statistic “local” counts keys at most this many tokens away.")
    layers: list[int] = Field(description="Layer numbers to display; addresses use positions in this list.")
    heads: list[int] = Field(description="Head numbers, likewise.")
    modules: list[str]
    texts: list[PageText]
    sink_sentence: str = Field(description="The sinks at the first token over all texts; empty if not measured.")
    types: dict[str, Column] = Field(description="The type of each head, and its scores: see `Profile.types`.")


class Looks(BaseModel):
    """Labels and colours that all pages share."""

    statistics: dict[str, dict[str, str | bool]] = Field(
        description="Label, unit and meaning of each column of `heads`, and whether tables show it."
    )
    destinations: list[dict[str, str]] = Field(description="Names, labels and colours, in the order of `shares`.")
    ramp: dict[str, list[str]] = Field(description="Colours from 0 to 1, light and dark.")


class Page(Looks):
    attrs: dict[str, Any] = Field(description="Attributes of the profile: model, versions, time and so on.")
    main: int = Field(description="Index of the group to show first.")
    groups: list[Group]
    roles: list[dict[str, str]] = Field(description="Types of heads that occur, with their colours.")
    effects: dict[str, str] = Field(
        description="Of an intervention: for each group, whether it removed the sinks of the model, and why."
    )
