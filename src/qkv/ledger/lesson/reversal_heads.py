"""Checks on steps 3 to 5 of the build-along: what the model learns, where its heads attend, and the analysis."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from qkv.lab import heads
from qkv.lab.tasks.reversal import Reversal
from qkv.ledger import Verdict, claim, false, holds, only_when, trial
from qkv.ledger.trials.lesson_reversal import LENGTH, MIRRORS, sequences
from qkv.models import load

TASK, LOOK, ANALYSIS = "Step 3: reversal", "Step 4: visualise", "Step 5: analysis"
TRIAL = "trial `lesson_reversal`"
N = 2 * LENGTH
"""Positions that the model reads."""


def runs() -> list[dict[str, Any]]:
    return list(trial("lesson_reversal")["seeds"].values())


@cache
def bundled() -> dict[str, Any]:
    """Scores of the heads of `qkv-reversal` on 50 held-out sequences: shares of the predicting queries."""
    task = Reversal()
    weights = heads.maps(load("qkv-reversal"), task.unseen()[:50, :-1])
    query = np.arange(LENGTH, N)
    apart = np.abs(query[:, None] - np.arange(N))
    return {
        "mirrored": heads.share_of_strongest(weights, (query, N - 1 - query)),
        "separator": heads.share_of_strongest(weights, (query[1:], np.full(LENGTH - 1, LENGTH))),
        "token_before": heads.share_of_strongest(weights, (query[1:], query[1:] - 1)),
        "distance": (weights[..., LENGTH:, :] * apart).sum(-1).mean((0, 3)),
    }


def spread(values: list[float], form: str = ".3f") -> str:
    """One number as text, or the range if they differ."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def lessons_analysis(strongest: torch.Tensor) -> float:
    """The share that step 5 reports, from the strongest key of each of a head's 12 queries."""
    right = 0
    for place in range(LENGTH):
        query, key = LENGTH + 1 + place, LENGTH - 1 - place
        right += query < N and int(strongest[query]) == key
    return right / LENGTH


@claim("C214", "lesson", TASK, "100 epochs (4,000 steps, learning rate 3e-4, d 32) are enough to learn reversal.")
def c214() -> Verdict:
    alone = [run["generated"] for run in runs()]
    curve = "epoch, sum of losses, training accuracy, test accuracy"
    half = [next((row[0] for row in run[curve] if row[3] > 0.5), None) for run in runs()]
    return holds(
        min(alone) >= 0.95,
        f"On new sequences, each symbol made from the model's own, {spread(alone, '.1%')} of symbols are right after "
        f"4,000 steps (three seeds; chance is 1/14 = 7.1%). Half are right by epoch {max(half)}, in each run. It "
        "holds at 95% in every run.",
        TRIAL,
    )


@claim("C215", "lesson", TASK, "Heads learn to look at the mirrored position.")
def c215() -> Verdict:
    best = [run["best"] for run in runs()]
    heads = [sum(share >= MIRRORS for layer in run["mirrored"] for share in layer) for run in runs()]
    return holds(
        min(best) >= MIRRORS,
        "In every one of three runs there is a head whose strongest key is the mirrored symbol at "
        f"{spread(best, '.1%')} of the queries that answer; {spread(heads, 'd')} of 8 heads do it at 90% or more, "
        "which is the criterion. The heads were not trained on it.",
        TRIAL,
    )


@claim("C216", "lesson", LOOK, "The plotting function works for any number of layers and heads.")
def c216() -> Verdict:
    one_layer = Figure().subplots(1, 4)
    alone = [[Figure().subplots(1, 1)]]
    alone = [[axes] for axes in alone]  # what its line for one head then makes of it
    return false(
        not hasattr(one_layer, "unsqueeze") and isinstance(alone[0][0], list),
        f"One layer is an AttributeError: the panels are a NumPy array of shape {one_layer.shape}, which has no "
        "`unsqueeze`. One layer with one head ends in a list where a panel should be. `subplots(…, squeeze=False)` "
        "does all of it.",
    )


@claim("C217", "lesson", LOOK, "In the figure rows are layers and columns are heads.")
def c217() -> Verdict:
    shape = Figure().subplots(2, 4).shape
    return holds(shape == (2, 4), f"2 layers × 4 heads make a grid of {shape[0]} × {shape[1]} panels.")


@claim(
    "C218", "lesson", LOOK, "Position SEP + 1 should attend to position seq_len − 1, SEP + 2 to seq_len − 2, and so on."
)
def c218() -> Verdict:
    ids = sequences(500, torch.Generator().manual_seed(0))
    place = torch.arange(LENGTH - 1)
    query, printed = LENGTH + 1 + place, LENGTH - 1 - place
    own = torch.equal(ids[:, printed], ids[:, query])
    mirror = torch.equal(ids[:, N - 1 - query], ids[:, query + 1])
    first = torch.equal(ids[:, LENGTH - 1], ids[:, LENGTH + 1])
    return false(
        own and mirror and first,
        "One query earlier: the separator itself to seq_len − 1, SEP + 1 to seq_len − 2, so that query + key is "
        f"2 · seq_len − 1 = {N - 1}. There stands the symbol to be said next; the printed pairs point at the symbol "
        "that the query already is.",
    )


@claim("C219", "lesson", LOOK, "The pattern is an anti-diagonal.")
def c219() -> Verdict:
    ids, query = sequences(500, torch.Generator().manual_seed(0)), np.arange(LENGTH, N)
    key = [[k for k in range(LENGTH) if torch.equal(ids[:, k], ids[:, q + 1])] for q in query]  # what is said next
    slope, offset = np.polyfit(query, np.array(key)[:, 0], 1)
    return holds(
        all(len(found) == 1 for found in key) and abs(slope + 1) < 1e-9,
        f"Key = {offset:.0f} − query, a line of slope {slope:.0f} (by the printed pairs it is 12 − query: next to it).",
    )


@claim(
    "C220",
    "lesson",
    LOOK,
    "Heads learn different patterns: one might map positions, others watch the separator or the token before.",
)
def c220() -> Verdict:
    kinds = ("mirrored", "separator", "token_before")
    most = {kind: max(share for run in runs() for layer in run[kind] for share in layer) for kind in kinds}
    ours = {kind: bundled()[kind].max() for kind in kinds}
    many = [sum(share >= MIRRORS for layer in run["mirrored"] for share in layer) for run in runs()]
    return false(
        min(many) > 1 and max(found[kind] for found in (most, ours) for kind in kinds[1:]) < 0.5,
        f"They do not divide the work here: {spread(many, 'd')} of 8 heads map positions. The separator is the "
        f"strongest key of {most['separator']:.1%} of the queries after it at most, in any head of three runs, the "
        f"token before of {most['token_before']:.1%}; in `qkv-reversal` of {ours['separator']:.1%} and "
        f"{ours['token_before']:.1%}. A head would count from one half on.",
        TRIAL,
    )


@claim(
    "C221", "lesson", LOOK, "The first layer typically learns simple, local patterns, and the second can compose them."
)
def c221() -> Verdict:
    first, second = ([np.mean(run["distance"][layer]) for run in runs()] for layer in (0, 1))
    ours = bundled()["distance"].mean(1)
    even = np.mean([q / 2 for q in range(LENGTH, N)])
    return false(
        min(first) > even and ours[0] > ours[1],
        f"Its heads look as far as the answer is: the first layer {spread(first, '.2f')} tokens back on average, the "
        f"second {spread(second, '.2f')} (three runs; the mirrored symbol is 6 away on average, and even weights look "
        f"{even:.2f} back, below which it would be local, a measure chosen after the runs). Both do the same thing. "
        f"In `qkv-reversal`, {ours[0]:.1f} and {ours[1]:.1f}, the first layer does it alone.",
        TRIAL,
    )


@claim(
    "C222",
    "lesson",
    ANALYSIS,
    "The analysis reports the share of queries at which a head attends to the right position.",
)
def c222() -> Verdict:
    perfect = torch.tensor([0] * LENGTH + [N - 1 - q for q in range(LENGTH, N)])
    printed = torch.tensor([0] * LENGTH + [min(N - q, LENGTH) for q in range(LENGTH, N)])
    return false(
        lessons_analysis(perfect) == 0 and abs(lessons_analysis(printed) - 5 / 6) < 1e-9,
        f"A head that reverses perfectly gets {lessons_analysis(perfect):.1%}, for the analysis looks one key too far "
        f"to the right, and a head that does what it asks for {lessons_analysis(printed):.1%}: it counts 5 queries and "
        "divides by 6. Right is: query seq_len + p, key seq_len − 1 − p, for p from 0 to 5.",
    )


@claim(
    "C223",
    "lesson",
    ANALYSIS,
    "In a well-trained model at least one head has a high accuracy on the reversal positions.",
)
def c223() -> Verdict:
    best = [run["best"] for run in runs()]
    printed = [max(share for layer in run["by_the_lessons_analysis"] for share in layer) for run in runs()]
    return holds(
        min(best) >= MIRRORS,
        f"With the right pairs the best head has {spread(best, '.1%')} in three runs (90% is the criterion). The "
        f"lesson's own analysis gives the best {spread(printed, '.1%')}: see [C222](#c222).",
        TRIAL,
    )


@claim("C224", "lesson", ANALYSIS, "A head with high accuracy there confirms that attention has learnt the algorithm.")
def c224() -> Verdict:
    full, best, all_ = ([run[k] for run in runs()] for k in ("test_accuracy", "without_best", "without_mirrors"))
    many = [sum(share >= MIRRORS for layer in run["mirrored"] for share in layer) for run in runs()]
    return only_when(
        min(best) > 0.95 and max(all_) < 0.15,
        "If taking such heads away takes the ability away. Without the best one accuracy stays at "
        f"{spread(best, '.1%')} (it was {spread(full, '.1%')}), for others do the same; without all that mirror at 90% "
        f"or more of the queries, {spread(many, 'd')} of 8, it is {spread(all_, '.1%')}, where chance is 7.1%. So "
        "these heads together are needed. The pattern alone is only where to look.",
        TRIAL,
    )
