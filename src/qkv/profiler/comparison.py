"""Compare two profiles of the same texts: which heads changed, by how much, and where their weight goes now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from qkv._above import above
from qkv.errors import InputError
from qkv.profiler.data import archive, tables
from qkv.profiler.data.findings import Findings, first_token
from qkv.profiler.data.frames import counted, percent, target_change, written
from qkv.profiler.data.sinks import EPSILON, sink_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from qkv.profiler.data.profile import ProfileData

NOT_QUANTITIES = {"layer", "head", "top_key"}  # columns of the head table whose numbers are indices


@dataclass(frozen=True, eq=False)
class Comparison:
    """Differences between two profiles of the same heads and tokens, always `b` − `a`.

    Args:
        a: the profile to compare with: of the base model, in float32, or without the intervention.
        b: the other profile.
        groups: per-query and per-key differences of each group, as in `Profile.groups`.

    >>> import qkv
    >>> mini, tokenizer = qkv.load("qkv-mini")
    >>> a, b = (qkv.profile(mini, "x = 1", tokenizer=tokenizer, probe=False, progress=False) for _ in range(2))
    >>> found = compare(a, b)
    >>> float(abs(found.data["entropy"]).max())
    0.0
    """

    a: ProfileData
    b: ProfileData
    groups: dict[str, xr.Dataset]

    @property
    def data(self) -> xr.Dataset:
        """The main group's differences: the variables and dimensions of `Profile.data`, and `change` by head."""
        return self.groups[self.a.main]

    def heads(self, group: str | None = None) -> pd.DataFrame:
        """One row per layer and head.

        Columns: layer, head, module; change (the total variation distance between the shares of weight that keys
        receive, mean over texts: 0 means no change, 1 means that no key receives weight in both); goes_to_a, goes_to_b
        and moved (True if the target differs); and for each quantity x of `Profile.heads` x_a, x_b and x_difference.
        """
        name = self._name(group)
        a, b = (profile.heads(name) for profile in (self.a, self.b))
        table = a[["layer", "head", "module"]].copy()
        table["change"] = self.groups[name]["change"].values.mean(0).ravel()
        table["goes_to_a"], table["goes_to_b"] = a["goes_to"], b["goes_to"]
        table["moved"] = a["target"] != b["target"]
        numbers = [x for x in a.select_dtypes("number").columns if x in b and x not in NOT_QUANTITIES]
        for x in numbers:
            table[f"{x}_a"], table[f"{x}_b"], table[f"{x}_difference"] = a[x], b[x], b[x] - a[x]
        return table

    def changed(self, group: str | None = None) -> bool:
        """Whether any number of any head differs."""
        return any(np.nan_to_num(x.values).any() for x in self.groups[self._name(group)].data_vars.values())

    def summary(self, group: str | None = None) -> list[str]:
        """The most important differences, in sentences."""
        name = self._name(group)
        heads = self.heads(name)
        if not self.changed(name):
            return [f"Nothing changed: all {len(heads):,} heads attend exactly as before."]
        most, moved = heads.loc[heads["change"].idxmax()], int(heads["moved"].sum())
        return [
            f"{moved:,} of {len(heads):,} heads {'has' if moved == 1 else 'have'} another target.",
            f"In the median head {_percent(heads['change'].median())} of the weight lands on other tokens than before; "
            f"most in layer {most['layer']}, head {most['head']}: {_percent(most['change'])} "
            f"({target_change(most['goes_to_a'], most['goes_to_b'])}).",
            *_entropies(heads),
            *_sinks(*(Findings(profile.group(name), group=name) for profile in (self.a, self.b))),
        ]

    def plot(self, group: str | None = None) -> Figure:
        """Layer × head maps of the differences in entropy, sink and local weight, and the heads that changed most."""
        figure: Figure = above("plot comparison", self, self._name(group))
        return figure

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report of `b`, which begins with what changed since `a`, and return its path."""
        report: Path = above("report", self.b, path, self)
        return report

    def __repr__(self) -> str:
        names = (repr(p.attrs.get("model", "unnamed model")) for p in (self.a, self.b))
        return f"Comparison({' → '.join(names)}, {', '.join(self.groups)})"

    def _name(self, group: str | None) -> str:
        self.a.group(group)
        return self.a.main if group is None else group


def compare(a: ProfileData, b: ProfileData) -> Comparison:
    """Differences between two profiles of the same texts, head by head and query by query.

    Use it for a base model and a fine-tuned one, a model in two dtypes, or with and without an intervention against
    sinks. If one profile is rounded, as saved ones are, so is the other before they are compared. Variables that only
    one profile has (whole maps, a learned sink) are left out and named in the attributes.

    Args:
        a: the profile to compare with.
        b: the other profile; differences are ``b − a``.

    Raises:
        InputError: if the profiles differ in groups, layers, heads, texts, tokens or local window; the message names
            the first difference.

    >>> import qkv
    >>> profile = qkv.profile("minilm", "The keeper kept two logbooks.", progress=False)
    >>> compare(profile, profile).summary()
    ['Nothing changed: all 72 heads attend exactly as before.']
    """
    if archive.ROUNDED.keys() & (a.attrs | b.attrs).keys():
        a, b = a.rounded(), b.rounded()
    if set(a.groups) != set(b.groups):
        raise InputError(f"b has the groups {', '.join(b.groups)}; expected the same as a, {', '.join(a.groups)}")
    for name in a.groups:
        if (difference := next(_mismatches(a.groups[name], b.groups[name]), None)) is not None:
            raise InputError(f"b: the group {name!r} {difference}; expected two profiles of the same texts and heads")
    return Comparison(a, b, {name: _differences(a.groups[name], b.groups[name]) for name in a.groups})


def _mismatches(a: xr.Dataset, b: xr.Dataset) -> Iterator[str]:
    """The reasons why two groups cannot be compared, the most general first."""
    if a.sizes["text"] != b.sizes["text"]:
        yield f"has {a.sizes['text']} texts in a and {b.sizes['text']} in b"
        return
    for dim in ("layer", "head"):
        if a[dim].values.tolist() != b[dim].values.tolist():
            yield f"has the {dim}s {_brief(a[dim].values)} in a and {_brief(b[dim].values)} in b"
    for length, token in (("n_queries", "query_token"), ("n_keys", "key_token")):
        for text, (n, m) in enumerate(zip(a[length].values, b[length].values, strict=True)):
            what = f"{token.partition('_')[0]} tokens"
            if n != m:
                yield f"has {n} {what} of text {text} in a and {m} in b"
                continue
            in_a, in_b = a[token].values[text, :n], b[token].values[text, :n]
            for at in np.flatnonzero(in_a != in_b):
                yield f"has {in_a[at]!r} in a and {in_b[at]!r} in b among the {what} of text {text}, at {at}"
    if a.attrs["local_window"] != b.attrs["local_window"]:
        yield f"has local_window {a.attrs['local_window']} in a and {b.attrs['local_window']} in b"


def _differences(a: xr.Dataset, b: xr.Dataset) -> xr.Dataset:
    by_head = ("text", "layer", "head")
    shared = [v for v in a.data_vars if v in b and a[v].dims[:3] == by_head == b[v].dims[:3]]
    shared = [v for v in shared if a[v].shape == b[v].shape]
    variables: dict[Any, Any] = {}
    for name in shared:
        in_a, in_b = a[name].values, b[name].values
        with np.errstate(invalid="ignore"):  # at queries without a visible key both are −∞
            difference = np.where(np.isneginf(in_a) & np.isneginf(in_b), 0, in_b - in_a)
        variables[name] = (a[name].dims, difference, a[name].attrs)
    change = 0.5 * np.abs(_shares(b) - _shares(a)).sum(-1)
    variables["change"] = (by_head, change, {"units": "1", "definition": "total variation of the received shares"})
    only = {f"only_in_{x}": [str(v) for v in own.data_vars if v not in shared] for x, own in (("a", a), ("b", b))}
    return xr.Dataset(variables, coords=a.coords, attrs=a.attrs | only)


def _shares(data: xr.Dataset) -> np.ndarray:
    """Share of the weight that each key receives and, as the last entry, that no key receives (a learned sink's).

    The shares add up to 1. If a normalizer's weights add up to more than 1, they are scaled down.
    """
    received = tables.received_share(data)
    share: np.ndarray = received / np.maximum(received.sum(-1, keepdims=True), 1)
    return np.concatenate([share, 1 - share.sum(-1, keepdims=True)], -1)


def _entropies(heads: pd.DataFrame) -> list[str]:
    before, after = heads["entropy_a"].mean(), heads["entropy_b"].mean()
    if abs(after - before) < 0.005:  # nats: smaller than the last digit that is printed
        return [f"Mean entropy stays at {before:.2f} nats."]
    way = "rises" if after > before else "falls"
    changed = f"Mean entropy {way} by {abs(after - before):.2f} nats, from {before:.2f} to {after:.2f}."
    return [] if np.isnan(after - before) else [changed]


def _sinks(a: Findings, b: Findings) -> list[str]:
    """The heads with a sink, as the findings of each profile count them."""
    if a.sink_counts is None or b.sink_counts is None or b.is_too_short:
        return []
    (before, _), (after, _) = a.sink_counts, b.sink_counts
    has = (
        f"{counted(after, 'head')} {'has' if after == 1 else 'have'} an attention sink at the first token in {b.window}"
    )
    if before == after:
        return [f"{has}, as before."] if before else []
    return [f"{has}; {before:,} before."]


def _percent(share: float) -> str:
    digits = 0 if share >= 0.095 or share == 0 else 1 if share >= 0.00095 else 3
    return f"{100 * share:.{digits}f} %"


def _brief(values: np.ndarray) -> str:
    return f"{values[0]}..{values[-1]} ({len(values)})"


# --- what an intervention did -----------------------------------------------------------------------------------------

WORKED = 0.5  # an intervention worked if at most this part of the sinks is left


def effect_of(normalizer: str, before: xr.Dataset, after: xr.Dataset) -> str:
    """Whether a normalizer, put into a model that was trained with another, removed its sinks at the first token.

    Args:
        normalizer: ``"off-by-one"``, ``"sigmoid"`` or ``"softmax"``, in the place of the trained one.
        before: the data set of a group, of the model as trained.
        after: of the same group and texts, with the intervention.

    >>> import qkv
    >>> mini, tokenizer = qkv.load("qkv-mini")
    >>> text = "for name in names: seen.append(name)"
    >>> found = [qkv.profile(mini, text, tokenizer=tokenizer, progress=False)]
    >>> with qkv.edit(mini, qkv.profiler.everywhere(mini, "off-by-one")):
    ...     found.append(qkv.profile(mini, text, tokenizer=tokenizer, probe=False, progress=False))
    >>> said = effect_of("off-by-one", *(profile.data for profile in found))
    >>> "had a sink at the first token in this text of 13 tokens, " in said
    True
    """
    found = Findings(before)
    if found.is_too_short:
        return f"Too short to say whether a head has a sink: {found.window}."
    by_head = [sink_table(data) for data in (before, after)]
    had, has = ((table["alpha_first"] > EPSILON).sum() for table in by_head)
    verdicts = {
        "There was no sink to remove": had == has == 0,
        "It worked": has <= WORKED * had,
        "It helped a little": has < had,
        "It made no difference": has == had,
        "It did not work": True,
    }
    verdict = next(words for words, holds in verdicts.items() if holds)
    parts = [
        f"{verdict}: {counted(had, 'head')} had a sink at {first_token(before)} in {found.window}, {has:,} with it"
    ]
    if (why := _reason(normalizer, before, after, worked=has <= WORKED * had)) and had + has:
        parts.append(why)
    if has >= WORKED * had and has and not found.is_long:
        even = float(by_head[0]["alpha_even"].mean())
        parts.append(f"In a text this short, even attention alone would give a mean weight of {percent(even)}")
    return ". ".join(parts) + "."


def _reason(normalizer: str, before: xr.Dataset, after: xr.Dataset, *, worked: bool) -> str:
    """Why the sinks left or stayed, from the heads that have one with or without the intervention."""
    sinks = np.zeros((before.sizes["layer"], before.sizes["head"]), bool)
    for data in (before, after):
        sinks |= sink_table(data)["alpha_first"].to_numpy().reshape(sinks.shape) > EPSILON
    if normalizer == "off-by-one" and "sink_mass" in after:
        taken = float(np.nanmean(after["sink_mass"].values[:, sinks]))
        if worked:
            return f"In these heads the additional logit of 0 takes {percent(taken)} of a row"
        level = float(np.nanmean(before["lse"].values[:, sinks]))
        return (
            f"In these heads the additional logit of 0 takes only {percent(taken)} of a row: the scores, whose mean "
            f"log-sum-exp is {written(level, 'nats')}, are above it, as the model was not trained with it"
        )
    if normalizer == "sigmoid" and "row_sum" in after and not worked:
        total = float(np.nanmean(after["row_sum"].values[:, sinks]))
        return (
            f"In these heads a row sums to {written(total, '')} on average instead of 1, and the weight is a share "
            "of that sum: the model was not trained with a sigmoid, so the first token still has the largest scores"
        )
    return ""
