"""The variables of a profile.

Statistics of weights describe themselves (`qkv.statistics`); this module adds the other variables, and the custom
statistics of the user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from qkv.errors import InputError
from qkv.results import field_of
from qkv.statistics import BUILT_IN, Local, Statistic, Statistics, Streaming
from qkv.statistics.base import validated

if TYPE_CHECKING:
    import xarray as xr


QUERY, KEY = ("text", "layer", "head", "query"), ("text", "layer", "head", "key")
TEXT, HEAD = ("text", "layer", "head"), ("layer", "head")
BIN = ("text", "layer", "head", "query_bin", "key_bin")


@dataclass(frozen=True)
class Variable:
    """A variable of a profile; `qkv.statistics.Statistic` documents the fields that have the same names there."""

    dims: tuple[str, ...]
    units: str
    """"1" stands for a plain number or a share."""
    definition: str
    always: bool = False
    """True if every profile has the variable."""
    label: str = ""
    share: bool = False
    highest: float = 1.0
    logarithmic: bool = False
    one_text: bool = False
    from_second: bool = False

    @classmethod
    def of(cls, statistic: Statistic, *, always: bool = False) -> Variable:
        """The variable that stores a statistic, computed from weights."""
        return cls(
            QUERY if statistic.over == "query" else KEY, statistic.unit, statistic.definition, always, statistic.label,
            statistic.share, statistic.highest, statistic.logarithmic, statistic.one_text, statistic.from_second,
        )  # fmt: skip

    @classmethod
    def in_shares(cls, statistic: Statistic, *, always: bool = False) -> Variable:
        """The variable that stores a statistic, computed from shares of the row (`qkv.statistics.measure`)."""
        about = cls.of(statistic, always=always)
        return replace(about, definition=f"{about.definition}, as a share of the row") if about.share else about

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the variable in a data set."""
        return {"units": self.units, "definition": self.definition}


_MEASURED = {f.name for f in fields(Statistics)}
UNFUSED = tuple(s for s in BUILT_IN.values() if field_of(s.name) not in _MEASURED)
"""Built-in statistics that `measure` computes only on request."""
OF_WEIGHTS: dict[str, Statistic] = BUILT_IN | {s.name: s for s in (Local(), Streaming())}
"""All statistics of weights in a profile: those of `qkv.statistics`, and the masses `local` and `streaming_mass`."""
_NOT_IN_FIRST = {"visible_queries", "streaming_mass", *(s.name for s in UNFUSED)}  # missing in the oldest files
VARIABLES = {name: Variable.in_shares(s, always=name not in _NOT_IN_FIRST) for name, s in OF_WEIGHTS.items()} | {
    "received": Variable(
        KEY, "queries", "sum of the weights that all queries put on the key, as shares of their rows", True, "Received",
    ),
    "row_sum": Variable(
        QUERY, "1", "sum of the query's weights on all keys: 1 for softmax, less with a null key, any for sigmoid"
    ),
    "first_contribution": Variable(
        QUERY, "1",
        "contribution of the first token: the norm of weight × value, as a share of the sum of these norms over all "
        "keys, with the values before the output projection (after Kobayashi et al. 2020, arXiv:2004.10102)",
        share=True,
    ),
    "lse": Variable(QUERY, "nats", "log-sum-exp of the query's scores, a learned sink included", True),
    "max_logit": Variable(QUERY, "nats", "largest score of the query, without a learned sink"),
    "sink_mass": Variable(
        QUERY, "1", "weight on the null key: a sink logit, a learned key with value 0, or the 1 of softmax off by one",
        label="Learned sink", share=True,
    ),
    "prefix_sink_scores": Variable(
        ("text", "layer", "head", "prefix_key"), "1",
        "sink score, alpha of Gu et al. (2025, arXiv:2410.10781): share of the row on the token, averaged over those "
        "of the first 64 queries that may attend to it",
        one_text=True,
    ),
    "map_max": Variable(BIN, "1", "the largest weight of a bin of `bin_queries` queries × `bin_keys` keys"),
    "map_mean": Variable(BIN, "1", "the average weight of such a bin; masked pairs count as 0"),
    "weights": Variable((*QUERY, "key"), "1", "all weights; kept for short texts only"),
    "negative": Variable(QUERY, "1", "share of the row's absolute weight that is negative; of linear attention"),
    "map_signed": Variable(BIN, "1", "the average weight of a bin, with signs; of linear attention"),
    "signed": Variable((*QUERY, "key"), "1", "all weights with their signs; of linear attention, for short texts only"),
    "query_norm": Variable(QUERY, "1", "Euclidean norm of the query vector"),
    "key_norm": Variable(KEY, "1", "Euclidean norm of the key vector that enters the dot product"),
    "value_norm": Variable(KEY, "1", "Euclidean norm of the value vector"),
    "cosine_first": Variable(TEXT, "1", "mean cosine of the queries to the first token's key"),
    "cosine_others": Variable(TEXT, "1", "mean cosine of the queries to all other keys"),
    "first_key_angle": Variable(TEXT, "degrees", "angle between the first token's key and the mean of the other keys"),
    "key_bias_cosine": Variable(TEXT, "1", "mean cosine of the queries to the learned key"),
    "image": Variable(
        QUERY, "1", "share of the row on patches of images that are no sinks of the head; at tokens of text", share=True
    ),
    "image_sink": Variable(QUERY, "1", "share of the row on patches that are sinks of the head", share=True),
    "image_rows": Variable(
        (*TEXT, "image_query", "image_key"), "1",
        "shares of the rows of the last tokens of text on each patch; kept for long texts, instead of all weights",
    ),
    "patch": Variable(
        ("text", "key", "place"), "1",
        "number of the patch's image; 1 in a thumbnail, else 0; top, left, bottom and right edge, as fractions of what "
        "the model sees",
    ),
    "key_directions": Variable((*TEXT, "direction"), "1", "share of the keys' variance in a principal direction"),
    "probe_sink_random": Variable(HEAD, "1", "sink score of the first token on random tokens"),
    "probe_sink_repeated": Variable(HEAD, "1", "sink score of the first token on one token repeated"),
    "probe_previous": Variable(HEAD, "1", "share of the row on the previous token, in a repeated random sequence"),
    "probe_duplicate": Variable(
        HEAD, "1", "share of the row on the earlier occurrence of the same token, in a repeated random sequence"
    ),
    "probe_induction": Variable(
        HEAD, "1", "share of the row on the token after the earlier occurrence, in a repeated random sequence"
    ),
    "probe_positional": Variable(
        HEAD, "1",
        "1 − total variation distance between the shares of the row on random tokens and on the same tokens shuffled",
    ),
}  # fmt: skip
OF_HEADS = tuple(
    name for name, s in OF_WEIGHTS.items() if s.over == "query" and name not in ("visible", "streaming_mass")
)
"""Statistics whose mean is a column of the head table. `visible` depends on the mask, not on the head."""

COORDINATES = {
    "layer": ("layer",),
    "head": ("head",),
    "module": ("layer",),
    "query_token": ("text", "query"),
    "key_token": ("text", "key"),
    "n_queries": ("text",),
    "n_keys": ("text",),
}
ATTRIBUTES = ("causal", "local_window", "special_tokens")


# --- custom statistics: the data set stores each object's description, so reading a profile does not need its class

_DESCRIPTION = ("label", "share", "highest", "logarithmic", "one_text", "from_second")
BY_HEAD = "_by_head"
"""Suffix of the variable (text, layer, head) that holds a custom statistic averaged by head."""


def custom_attrs(statistic: Statistic) -> dict[str, Any]:
    """The attributes of a custom statistic's variable."""
    about = Variable.of(statistic)
    return about.attrs | {"statistic": statistic.over} | {name: getattr(about, name) for name in _DESCRIPTION}


def custom_variables(data: xr.Dataset) -> dict[str, Variable]:
    """The custom statistics of a data set, sorted by name."""
    found = {}
    for name, x in sorted(data.data_vars.items(), key=lambda item: str(item[0])):
        if "statistic" in x.attrs and f"{name}{BY_HEAD}" in data:
            description = {attribute: x.attrs[attribute] for attribute in _DESCRIPTION}
            found[str(name)] = Variable(QUERY if x.attrs["statistic"] == "query" else KEY, x.attrs["units"],
                                        x.attrs["definition"], **description)  # fmt: skip
    return found


def checked_custom(
    statistics: Iterable[Statistic], taken: Iterable[str] = (), over: Literal["query", "key"] | None = None
) -> tuple[Statistic, ...]:
    """Validate custom statistics: their names must be free, and if `over` is given, all must be over that dimension."""
    statistics = validated(statistics)
    names = {*VARIABLES, *COORDINATES, "text", "query", "key", *taken}
    for s in statistics:
        if s.name in names or any(s.name == f"{other.name}{BY_HEAD}" for other in statistics):
            raise InputError(f"statistics: the name {s.name!r} is taken; expected a name that is not in use")
        if over is not None and s.over != over:
            raise InputError(
                f"statistics: {s.name!r} is a number for each {s.over}; expected one for each {over}, because a "
                f"survey keeps means and histograms over each {over} only"
            )
    return statistics
