"""A sentence about an intervention on the normalizer: whether it removed the sinks at the first token, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qkv.figures.findings import Findings, first_token
from qkv.figures.style import percent, written
from qkv.profiler.data.sinks import EPSILON, sink_table

if TYPE_CHECKING:
    import xarray as xr

WORKED = 0.5  # an intervention worked if at most this part of the sinks is left


def effect_of(normalizer: str, before: xr.Dataset, after: xr.Dataset) -> str:
    """Whether a normalizer, put into a model that was trained with another, removed its sinks at the first token.

    Args:
        normalizer: ``"off-by-one"``, ``"sigmoid"`` or ``"softmax"``, in the place of the trained one.
        before: the data set of a group, of the model as trained.
        after: of the same group and texts, with the intervention.

    >>> import qkv
    >>> mini, tokenizer = qkv.load("qkv-mini")
    >>> found = [qkv.profile(mini, "for name in names:", tokenizer=tokenizer, progress=False)]
    >>> with qkv.profiler.edited(mini, qkv.profiler.everywhere(mini, "off-by-one")):
    ...     found.append(qkv.profile(mini, "for name in names:", tokenizer=tokenizer, probe=False, progress=False))
    >>> said = effect_of("off-by-one", *(profile.data for profile in found))
    >>> "had a sink at the first token in this text of 7 tokens, " in said
    True
    """
    tables = [sink_table(data) for data in (before, after)]
    counts = [int((table["alpha_first"] > EPSILON).sum()) for table in tables]
    had, has = counts
    verdict = (
        "There was no sink to remove"
        if had == has == 0
        else "It worked"
        if has <= WORKED * had
        else "It helped a little"
        if has < had
        else "It made no difference"
        if has == had
        else "It did not work"
    )
    found = Findings(before)
    parts = [f"{verdict}: {_heads(had)} had a sink at {first_token(before)} in {found.window}, {has:,} with it"]
    if (why := _reason(normalizer, before, after, worked=has <= WORKED * had)) and had + has:
        parts.append(why)
    if has >= WORKED * had and has and not found.is_long:
        even = float(tables[0]["alpha_even"].mean())
        parts.append(f"In a text this short, rows of even weights alone have α = {even:.2g}")
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
            f"In these heads a row sums to {written(total, '')} on average instead of 1, and α is a share of that sum: "
            "the model was not trained with a sigmoid, so the first token still has the largest scores"
        )
    return ""


def _heads(number: int) -> str:
    return f"{number:,} head{'' if number == 1 else 's'}"
