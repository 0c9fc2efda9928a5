"""Computed sentences about a profile, for the headline of reports and the titles of figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from qkv.figures.style import percent, written
from qkv.profiler.data import tables
from qkv.profiler.data.words import counted

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


_TARGETS = {
    "self": "the token itself",
    "previous": "the previous token",
    "next": "the next token",
    "first token": "the first token",
    "learned sink": "the learned sink",
}


class Finding(NamedTuple):
    """One tile of a report: a number, its meaning, and a detail to compare it with."""

    value: str
    label: str
    detail: str


def headline(data: xr.Dataset, heads: pd.DataFrame) -> str:
    """One sentence: the tokens that receive most attention, and the most common targets of heads."""
    shares = {name: float(np.nanmean(share)) for name, share in tables.destinations(data).items()}
    parts = [f"{percent(shares['first'])} of all attention goes to {first_token(data)}"]
    if shares["special"] >= 0.02:
        parts.append(f"{percent(shares['special'])} to other special tokens")
    if shares["sink_logit"] >= 0.02:
        parts.append(f"{percent(shares['sink_logit'])} to the learned sink")
    (kind, count), *others = kinds(heads).items()
    second = [f"{number:,} {_does(other, number)}" for other, number in others[:1] if number >= 0.1 * len(heads)]
    first = f"{count:,} of {counted(len(heads), 'head')} {_does(kind, count)}"
    return f"{listed(parts)}; {listed([first, *second])}."


def findings(data: xr.Dataset, heads: pd.DataFrame) -> list[Finding]:
    """The tiles of a group (or of one of its texts)."""
    shares = {name: float(np.nanmean(share)) for name, share in tables.destinations(data).items()}
    n_keys, n_sinks = float(data["n_keys"].mean()), int((heads["sink"] > tables.SINK_THRESHOLD).sum())
    tiles = [
        Finding(
            percent(shares["first"]),
            f"of all attention lands on {first_token(data)}",
            f"uniform attention would put {percent(_uniform_first(data))} there; "
            f"{n_sinks:,} of {counted(len(heads), 'head')} {'puts' if n_sinks == 1 else 'put'} more than 30 %",
        )
    ]
    if shares["sink_logit"] > 0:
        tiles.append(Finding(percent(shares["sink_logit"]), "goes to the learned sink", "mass that no token receives"))
    special = tables.special_keys(data)
    special[:, 0] = False
    if special.any():
        names = sorted(set(data["key_token"].values[special]))
        tiles.append(
            Finding(
                percent(shares["special"]),
                "lands on other special tokens",
                f"{listed(names[:4])}: {special.sum(1).mean():.0f} of {n_keys:,.0f} keys",
            )
        )
    counts = kinds(heads)
    named = {kind: count for kind, count in counts.items() if kind != "spread"}
    tiles.append(
        Finding(
            f"{sum(named.values()):,} of {len(heads):,}",
            "head has one clear target" if len(heads) == 1 else "heads have one clear target",
            " · ".join(f"{count} × {kind}" for kind, count in list(named.items())[:5]) or "all are spread",
        )
    )
    ratio, entropy = heads["entropy_ratio"].median(), heads["entropy"].median()
    tiles.append(
        Finding(
            written(ratio, "ratio"),
            "of the largest possible entropy, in the median head",
            f"{written(entropy, 'nats')}, {shared_by(entropy)}",
        )
    )
    if heads["distance"].notna().any():
        near, far = heads.loc[heads["distance"].idxmin()], heads.loc[heads["distance"].idxmax()]
        tiles.append(
            Finding(
                written(heads["distance"].median(), "tokens"),
                "between query and key, in the median head",
                f"from {written(near['distance'], 'tokens')} ({head_name(near)}) "
                f"to {written(far['distance'], 'tokens')} ({head_name(far)})",
            )
        )
    return tiles


def kinds(heads: pd.DataFrame) -> dict[str, int]:
    """The number of heads with each target, most common first."""
    return {str(kind): int(count) for kind, count in heads["target"].value_counts().items()}


def head_name(row: pd.Series) -> str:
    """The short name of a head: "L3 · H7"."""
    return f"L{row['layer']} · H{row['head']}"


def first_token(data: xr.Dataset) -> str:
    """The first token in words, with its name if it is a special token and the same in every text."""
    names = set(data["key_token"].values[:, 0])
    name = names.pop()
    known = not names and name in data.attrs["special_tokens"]
    return f"the first token, {name}" if known else "the first token"


def listed(parts: list[str]) -> str:
    """ "a, b and c" """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def shared_by(entropy: float) -> str:
    """An entropy in nats in words: the number of keys that would share the weight evenly."""
    keys = round(np.exp(entropy))
    return "as if one key had all the weight" if keys == 1 else f"as if {keys:,} keys shared the weight evenly"


def _does(kind: str, count: int) -> str:
    """The predicate of a sentence about `count` heads with a target."""
    one = count == 1
    if kind == "spread":
        return "spreads its weight over many keys" if one else "spread their weight over many keys"
    if kind.startswith("local"):
        return f"{'stays' if one else 'stay'} within {kind.removeprefix('local ')} tokens"
    return f"{'attends' if one else 'attend'} most to {_TARGETS.get(kind, kind)}"


def _uniform_first(data: xr.Dataset) -> float:
    """The weight that uniform attention puts on the first token, averaged over queries and texts."""
    visible = data["visible"].values
    return float((1 / visible[visible > 0]).mean())
