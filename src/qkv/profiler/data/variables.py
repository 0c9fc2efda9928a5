"""The variables of a profile, and what a file of it declares before anything is allocated.

Statistics of weights describe themselves (`qkv.statistics`); this module adds the other variables, and the custom
statistics of the user.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qkv._untrusted import Budget, parse_json
from qkv.errors import InputError
from qkv.statistics import BUILT_IN, Local, Statistic, Statistics, Streaming
from qkv.statistics.base import validated
from qkv.statistics.result import field_of

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
        "‖a v‖ of the first token / Σ ‖a v‖ over all keys, a the weights and v the values before the output projection "
        "(after Kobayashi et al. 2020, arXiv:2004.10102)",
        share=True,
    ),
    "lse": Variable(QUERY, "nats", "log-sum-exp of the query's scores, a learned sink included", True),
    "sink_mass": Variable(
        QUERY, "1", "weight on the null key: a sink logit, a learned key with value 0, or the 1 of softmax off by one",
        label="Learned sink", share=True,
    ),
    "prefix_sink_scores": Variable(
        ("text", "layer", "head", "prefix_key"), "1",
        "sink score α_k: share of the row on the k-th token, averaged over those of the first 64 queries that may "
        "attend to it",
        one_text=True,
    ),
    "map_max": Variable(BIN, "1", "the largest weight of a bin of `bin_queries` queries × `bin_keys` keys"),
    "map_mean": Variable(BIN, "1", "the average weight of such a bin; masked pairs count as 0"),
    "weights": Variable((*QUERY, "key"), "1", "all weights; kept for short texts only"),
    "query_norm": Variable(QUERY, "1", "Euclidean norm of the query vector"),
    "key_norm": Variable(KEY, "1", "Euclidean norm of the key vector that enters the dot product"),
    "value_norm": Variable(KEY, "1", "Euclidean norm of the value vector"),
    "cosine_first": Variable(TEXT, "1", "mean cosine of the queries to the first token's key"),
    "cosine_others": Variable(TEXT, "1", "mean cosine of the queries to all other keys"),
    "first_key_angle": Variable(TEXT, "degrees", "angle between the first token's key and the mean of the other keys"),
    "key_bias_cosine": Variable(TEXT, "1", "mean cosine of the queries to the learned key"),
    "key_directions": Variable((*TEXT, "direction"), "1", "share of the keys' variance in a principal direction"),
    "probe_sink_random": Variable(HEAD, "1", "sink score α of the first token on random tokens"),
    "probe_sink_repeated": Variable(HEAD, "1", "sink score α of the first token on one token repeated"),
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


META = "zarr.json"
REQUIRED = {"shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"}
NUMBERS = {"bool"} | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
NUMBERS |= {"float16", "float32", "float64"}
STRING = "string"
STRING_BYTES = 64  # a pointer and a short string
SPARE_CHUNKS = 4096
"""Chunks that a file may leave out, besides four for each member: zarr visits them all."""
KEYS = {"name": "default", "configuration": {"separator": "/"}}
ZSTD_MAGIC = 0xFD2FB528


def check_hierarchy(members: Mapping[str, bytes], budget: Budget) -> None:
    """Check all groups and arrays of a zarr hierarchy, given its files by name, before any of them is allocated."""
    left = SPARE_CHUNKS + 4 * len(members)
    chunks: dict[str, list[str]] = {}
    for name in members:
        if not name.endswith(META):
            chunks.setdefault(name.rpartition("/c/")[0] or name.removesuffix("/c"), []).append(name)
    for name, data in members.items():
        if name.rpartition("/")[2] != META:
            continue
        found = parse_json(data)
        if not isinstance(found, dict) or found.get("zarr_format") != 3:
            raise ValueError(f"{name} is not the metadata of zarr 3")
        if found.get("node_type") == "array":
            own = chunks.pop(name.removesuffix(f"/{META}"), [])
            left -= _check_array(name, found, {chunk: members[chunk] for chunk in own}, budget)
            if left < 0:
                raise ValueError("it declares too many chunks")
        elif found.get("node_type") != "group" or found.get("consolidated_metadata") is not None:
            raise ValueError(f"{name} is not the metadata of a group or an array")
    if chunks:
        raise ValueError(f"{next(iter(chunks.values()))[0][:80]} belongs to no array")


def _check_array(name: str, found: Mapping[str, Any], stored: Mapping[str, bytes], budget: Budget) -> int:
    """Check an array and its chunks; returns the number of its chunks, those that are not stored included."""
    missing = REQUIRED - set(found)
    if missing:
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}")
    shape, kind = _sizes(name, found["shape"]), found["data_type"]
    names = found.get("dimension_names")
    if names is not None and not (isinstance(names, list) and len(set(map(str, names))) == len(names) == len(shape)):
        raise ValueError(f"{name} has the dimensions {str(names)[:80]!r}, expected {len(shape)} different names")
    grid, keys = found["chunk_grid"], found["chunk_key_encoding"]
    if not isinstance(grid, dict) or grid.get("name") != "regular" or keys != KEYS or found.get("storage_transformers"):
        raise ValueError(f"{name} has chunks in another order than qkv writes them")
    chunk = _sizes(name, grid["configuration"]["chunk_shape"])
    if len(chunk) != len(shape) or 0 in chunk:
        raise ValueError(f"{name} has chunks of shape {chunk} for an array of shape {shape}")
    if kind != STRING and kind not in NUMBERS:
        raise ValueError(f"{name} has the data type {str(kind)[:80]!r}, expected numbers or strings")
    _check_fill_value(name, kind, found["fill_value"])
    counts = [math.ceil(n / m) for n, m in zip(shape, chunk, strict=True)]
    number, items = math.prod(counts), math.prod(chunk)
    item = STRING_BYTES if kind == STRING else np.dtype(kind).itemsize
    budget.take(number * items * item)
    zstd = _compressed(name, found["codecs"], "vlen-utf8" if kind == STRING else "bytes")
    base = name.removesuffix(META)
    for member, data in stored.items():
        at = member.removeprefix(base).removeprefix("c").removeprefix("/")
        index = [int(part) for part in at.split("/")] if at else []
        if (
            "/".join(map(str, index)) != at
            or len(index) != len(counts)
            or any(i >= n for i, n in zip(index, counts, strict=True))
        ):
            raise ValueError(f"{member[:80]} is not a chunk of its array")
        size = frame_size(data) if zstd else len(data)
        if kind == STRING:
            budget.take(size)
            _check_strings(member, data, items, zstd)
        elif size != items * item:
            raise ValueError(f"{member[:80]} has {size} bytes, expected {items * item}")
    return number


def _check_fill_value(name: str, kind: str, value: Any) -> None:
    """Raise ValueError for a number that the data type cannot hold, of which numpy would only warn."""
    if kind.startswith("float") and isinstance(value, int | float | str):
        try:
            with np.errstate(over="raise"):
                np.dtype(kind).type(value)
        except (FloatingPointError, OverflowError, ValueError):
            raise ValueError(f"{name} has the fill value {str(value)[:80]!r}, expected a {kind}") from None


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 32 or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{name} has the shape {str(value)[:80]}, expected a list of whole numbers")
    return tuple(value)


def _compressed(name: str, codecs: Any, first: str) -> bool:
    """Whether the chunks are compressed by Zstandard; raises ValueError for any other codec."""
    names = [codec["name"] for codec in codecs]
    if names not in ([first], [first, "zstd"]):
        raise ValueError(f"{name} has the codecs {str(names)[:80]}, expected {first!r} and 'zstd'")
    return len(names) == 2


def frame_size(data: bytes) -> int:
    """The size that a Zstandard frame declares for its contents (RFC 8878, section 3.1.1.1)."""
    try:
        magic, descriptor = struct.unpack_from("<IB", data)
        kind, single = descriptor >> 6, descriptor >> 5 & 1
        at = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]  # after the window and the number of the dictionary
        size = struct.unpack_from(("<B", "<H", "<I", "<Q")[kind], data, at)[0] + 256 * (kind == 1)
    except struct.error:
        raise ValueError("a chunk is truncated") from None
    if magic != ZSTD_MAGIC or (kind == 0 and not single):
        raise ValueError("a chunk is not compressed by Zstandard, or does not declare its size")
    return int(size)


def _check_strings(member: str, data: bytes, items: int, zstd: bool) -> None:
    """Raise ValueError if a chunk of strings has another number of strings than its array declares."""
    from numcodecs.zstd import decompress  # type: ignore[import-untyped]

    plain = bytes(decompress(data)) if zstd else data
    if len(plain) < 4 or struct.unpack_from("<I", plain)[0] != items:
        raise ValueError(f"{member[:80]} does not have {items} strings")
