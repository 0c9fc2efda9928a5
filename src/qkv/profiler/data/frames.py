"""Tables of heads as pandas or polars frames; labels, units, number formats and phrases of their columns."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv._files import write_atomically
from qkv._packages import require
from qkv.errors import InputError, one_of
from qkv.profiler.data.tables import ROLES, TRAITS
from qkv.profiler.data.variables import OF_HEADS, VARIABLES, Variable, custom_variables

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


FRAMES = ("pandas", "polars")
SCORE = " score"  # suffix of a head type's score column where the tables are joined
SUFFIXES = (".parquet", ".csv")
_SHARE = "share of the weight"
_LATER = "mean over the queries after the first"

# Unit and definition of every column of `Profile.heads`, `.sinks` and `.types`.
COLUMNS: dict[str, tuple[str, str]] = {
    "layer": ("1", "number of the layer, from 0"),
    "head": ("1", "number of the head, from 0"),
    "module": ("1", "name of the module that attends"),
    "entropy_ratio": ("1", "mean over queries of entropy / ln(visible keys): 1 is uniform"),
    "sink_share": ("1", "part of the queries after the first with a share above the threshold on the first token"),
    "top_key": ("tokens", "position of the key that receives the most weight"),
    "top_key_token": ("1", "the token at that position"),
    "top_key_share": ("1", f"{_SHARE} of the head on that key"),
    "target": ("1", "where the head sends most of its weight"),
    "target_share": ("1", f"{_SHARE} of the head on that target"),
    "goes_to": ("1", "the target and its share in words"),
    "type": ("1", "first of the roles whose score reaches its threshold"),
    "traits": ("1", "all traits whose score reaches its threshold"),
    "weight_first": ("1", f"{_LATER}: the model's own weight on the first token, not divided by the sum of the row"),
    "share_first": ("1", f"{_LATER}: share of the row on the first token"),
    "even_share": ("1", f"{_LATER}: 1 / visible keys, the share that rows of even weights would give each key"),
    "contribution_first": ("1", f"{_LATER}: {VARIABLES['first_contribution'].definition}"),
    "alpha_first": ("1", "sink score of the first token: share of the row on it, averaged over the first 64 queries"),
    "alpha_even": ("1", "that of rows of even weights: 1 / visible keys, averaged over the first 64 queries"),
    "alpha_whole": ("1", "sink score of the first token over all queries of the text that may attend to it"),
    "alpha_random": ("1", "sink score of the first token on random tokens"),
    "alpha_repeated": ("1", "sink score of the first token on one token repeated"),
    "alpha_best": ("1", "the largest sink score of any token, over all queries that may attend to it"),
    "best_text": ("1", "number of the text with the token of the largest sink score"),
    "best_key": ("tokens", "position of that token"),
    "best_token": ("1", "that token"),
    "learned_sink": ("1", f"{_LATER}: {VARIABLES['sink_mass'].definition}"),
    "key_norm_first": ("1", "norm of the first token's key / mean norm of the others"),
    "key_norm_best": ("1", "norm of that token's key / mean norm of the others"),
    "value_norm_first": ("1", "norm of the first token's value / mean norm of the others"),
    "value_norm_best": ("1", "norm of that token's value / mean norm of the others"),
}
COLUMNS |= {
    name: (about.units, f"{_LATER if about.from_second else 'mean over queries'}: {about.definition}")
    for name, about in ((name, VARIABLES[name]) for name in OF_HEADS)
}
COLUMNS |= {
    name: (VARIABLES[name].units, VARIABLES[name].definition)
    for name in ("cosine_first", "cosine_others", "first_key_angle", "key_bias_cosine")
}


def described(table: pd.DataFrame, statistics: Mapping[str, Variable] | None = None) -> pd.DataFrame:
    """Put the unit and definition of each column into the table's ``attrs``; `statistics` are the custom ones."""
    about = {name: about_column(name, statistics or {}) for name in table.columns}
    table.attrs = {"units": {n: a[0] for n, a in about.items()}, "definitions": {n: a[1] for n, a in about.items()}}
    return table


def about_column(column: str, statistics: Mapping[str, Variable]) -> tuple[str, str]:
    """Unit and definition of a column; `statistics` are the custom ones."""
    if column in COLUMNS:
        return COLUMNS[column]
    if column in statistics:
        variable = statistics[column]
        return variable.units, f"of each head: {variable.definition}"
    kind = (ROLES | TRAITS)[column.removesuffix(SCORE)]
    bound = "at most" if kind.below else "at least"
    unit = "keys" if column.startswith("sparse") else "1"
    return unit, f"{kind.definition}; a head is of this type if {bound} {kind.threshold:g}"


def as_frame(table: pd.DataFrame, frame: str) -> Any:
    """Convert a pandas table to the requested kind of frame."""
    one_of("frame", frame, FRAMES)
    if frame == "pandas":
        return table
    require("frame", "polars")
    import polars

    return polars.DataFrame({name: column.tolist() for name, column in table.items()})


def all_of_heads(
    heads: pd.DataFrame, types: pd.DataFrame, sinks: pd.DataFrame, custom: Mapping[str, Variable]
) -> pd.DataFrame:
    """The tables of a profile joined into one, with a row per head."""
    types = types.rename(columns={name: name + SCORE for name in (*ROLES, *TRAITS)})
    table = heads.join(types.drop(columns=["layer", "head"]))
    return described(table.join(sinks.drop(columns=["layer", "head", "sink_share"])), custom)


def export(table: pd.DataFrame, path: Path) -> Path:
    """Write the table of `all_of_heads` atomically, in the format of the suffix of `path`."""
    if path.suffix == ".parquet":
        write_atomically(path, _parquet(table))
    elif path.suffix == ".csv":
        write_atomically(path, table.to_csv(index=False))
    else:
        raise InputError(f"path is {str(path)!r}, expected a suffix of {', '.join(SUFFIXES)}")
    return path


def _parquet(table: pd.DataFrame) -> memoryview:
    require("path", "pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    made = pa.table({name: pa.array(column.tolist()) for name, column in table.items()})
    about = table.attrs
    fields = [
        made.schema.field(name).with_metadata({"units": about["units"][name], "definition": about["definitions"][name]})
        for name in made.column_names
    ]
    file = io.BytesIO()
    parquet.write_table(made.cast(pa.schema(fields, metadata={"qkv": json.dumps(about)})), file)
    return file.getbuffer()


class Column(NamedTuple):
    """The label, unit and meaning of a column of `Profile.heads`."""

    label: str
    unit: str  # "%" (a share), "ratio" (its scale ends at 1), or the unit to print after the number
    meaning: str
    table: bool = True  # whether it is in tables of heads; else only on the card of a head

    @classmethod
    def of(cls, name: str, about: Variable) -> Column:
        """The column of a statistic."""
        plain = "ratio" if about.highest == 1 else ""
        unit = "%" if about.share else plain if about.units == "1" else about.units
        return cls(about.label, unit, about.definition, name not in ON_CARDS)


ON_CARDS = ("entropy", "spread")  # nearly redundant with entropy_ratio and distance
FIRST = "sink"  # the first statistic on pages
STATISTICS = {name: Column.of(name, VARIABLES[name]) for name in sorted(OF_HEADS, key=lambda name: name != FIRST)} | {
    "entropy_ratio": Column("Entropy ratio", "ratio", COLUMNS["entropy_ratio"][1]),
    "sink_share": Column("Sink share", "%", COLUMNS["sink_share"][1].replace("the threshold", "30 %"), table=False),
    "top_key_share": Column("Top key", "%", "share of the head's weight on the key that receives most", table=False),
}


def columns_of(data: xr.Dataset) -> dict[str, Column]:
    """The statistics of the heads of a group: built-in and user-defined ones."""
    return STATISTICS | {name: Column.of(name, about) for name, about in custom_variables(data).items()}


def percent(share: float) -> str:
    """A share as a percentage with up to two significant digits: "0.4 %", "7 %", "62 %"."""
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 0.95 else f"{value:.0f} %"


def signed(value: float, digits: int = 3) -> str:
    """A difference with its sign and a true minus: "+0.250", "−0.002"; "0.000" where nothing is left of it."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def confidence(
    values: Sequence[float], level: float = 0.95, sizes: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """The mean, and the ends of its confidence interval by Student's t distribution; infinite for one value.

    With the `sizes` of texts it is Σ values / Σ sizes, and the error is that of a ratio of two means (Cochran 1977,
    Sampling Techniques, §2.11).

    Raises:
        InputError: without values.

    >>> [round(x, 3) for x in confidence([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    >>> [round(x, 3) for x in confidence([1.0, 4.0, 9.0], sizes=[1, 2, 3])]
    [2.333, 0.143, 4.524]
    """
    import numpy as np
    from scipy.special import stdtrit

    if not values:
        raise InputError("values is empty, expected at least one number")
    of, freedom = np.array([1.0] * len(values) if sizes is None else sizes), len(values) - 1
    mean = float(np.sum(values) / of.sum())
    if not freedom:
        return mean, -math.inf, math.inf
    error = np.sqrt(((np.array(values) - mean * of) ** 2).sum() / freedom / len(values)) / of.mean()
    half = float(stdtrit(freedom, (1 + level) / 2) * error)
    return mean, mean - half, mean + half


def written(value: float, unit: str) -> str:
    """A number with its unit, three significant digits at most."""
    if math.isnan(value):
        return "–"
    if unit == "%":
        return percent(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}" + ("" if unit in ("ratio", "") else f" {unit}")


def size_of(data: xr.Dataset) -> str:
    """The number of layers, heads and tokens of a group, as a phrase."""
    texts, layers, heads = (data.sizes[dim] for dim in ("text", "layer", "head"))
    queries, keys = int(data["n_queries"].max()), int(data["n_keys"].max())
    tokens = counted(queries, "token") if queries == keys else f"{queries:,} × {keys:,} tokens"
    return f"{layers_and_heads(layers, heads)}, {tokens}" + (f", {texts} texts" if texts > 1 else "")


def layers_and_heads(layers: int, heads: int) -> str:
    """The number of layers and heads of a model, as a phrase.

    >>> layers_and_heads(12, 1)
    '12 layers × 1 head'
    """
    return f"{counted(layers, 'layer')} × {counted(heads, 'head')}"


def counted(number: int, noun: str) -> str:
    """A number and its noun, singular or plural: "1 head", "1,024 heads"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def target_change(before: str, after: str) -> str:
    """A head's target before and after a change: "[CLS] 43 % → previous 51 %", or "[CLS] 43 %" if it is the same."""
    return before if before == after else f"{before} → {after}"
