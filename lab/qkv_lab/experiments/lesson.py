"""Experiment that repeats a lesson's build-along: a model of 26,672 parameters learns to reverse six symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from qkv_lab import heads, settings
from qkv_lab.experiments.base import Results, Setting
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect
from qkv_lab.experiments.sinks import DATED
from qkv_lab.experiments.small import Small, means_of
from qkv_lab.task import Measured
from qkv_lab.tasks.reversal import MIRRORS, Reversal

MODEL = "the lesson's model"
PATTERN = 0.9
"""A head attends to a position if that is its strongest key at this share of the queries."""
HALF = 0.5
CHECKED = 100


class Lesson(Small):
    """The lesson's model, learning rate and number of steps.

    Two things differ from the lesson: every batch has new sequences, and the initial weights are those of GPT-2 (the
    lesson's embeddings have a standard deviation of 1).
    """

    name = "lesson"
    question = "What do the heads of a lesson's small model learn, and does its analysis find it?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "The lesson's model writes what its training accuracy says",
        FAILS: "The lesson's model writes worse than its training accuracy says",
    }
    criteria = (
        Criterion("C213", DATED, "Share of symbols predicted in the last batches of training minus that written by "
                  "itself on new sequences (absolute difference)", 0.01, above=False),
        Criterion("C214", DATED, "Share of symbols that the model writes correctly on new sequences after 4,000 steps",
                  0.95),
        Criterion("C215", DATED, "Share of the answering queries whose strongest key is the mirrored position, in the "
                  "head with the largest", PATTERN),
        Criterion("C220", DATED, "Share of the queries after the separator whose strongest key is the separator or "
                  "the token before, in the head with the largest", HALF),
        Criterion("C221", DATED, "Mean distance (tokens) to which the first layer attends minus that of even weights",
                  0.0, above=False),
        Criterion("C223", DATED, "Share of the answering queries whose strongest key is the mirrored position, in the "
                  "head with the largest", PATTERN),
        Criterion("C224", DATED, "Loss of accuracy when heads with the mirrored position as strongest key are "
                  "ablated", HALF),
    )  # fmt: skip
    looks: ClassVar[tuple[int, ...]] = (10, 20)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """The configuration `lesson` of the package, `qkv train --config lesson`."""
        task, training = settings.from_toml(Path("lesson"))
        training = replace(training, seed=seed, evaluate_every=4000, save_every=4000)
        return {MODEL: Setting(task, replace(training, steps=4, batch=4) if quick else training)}

    @torch.no_grad()
    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """``trained``: accuracy with the true symbols as input, on batches of training; and shares of strongest keys.

        ``separator`` and ``token_before``: by layer and head, shares of the queries after the separator. ``distance``:
        by layer, the mean distance of a query's attention; ``even``: that of even weights. ``mirrors``: the number of
        heads with the mirrored position as their strongest key at 90 % of the answering queries.
        """
        task = setting.task
        assert isinstance(task, Reversal)
        n = task.length
        last = [task.batch(setting.training.steps - 1 - i, 128, setting.training.seed)["ids"] for i in range(4)]
        ids = torch.cat(last)
        said = model(ids[:, :-1])[:, n:].argmax(-1)
        weights = heads.maps(model, task.unseen()[:CHECKED, :-1])
        query = np.arange(n, 2 * n)
        apart = np.abs(query[:, None] - np.arange(2 * n))
        after = query[1:]
        return {
            "trained": float((said == ids[:, n + 1 :]).double().mean()),
            "separator": heads.share_of_strongest(weights, (after, np.full(n - 1, n))).tolist(),
            "token_before": heads.share_of_strongest(weights, (after, after - 1)).tolist(),
            "distance": (weights[..., n:, :] * apart).sum(-1).mean((0, 2, 3)).tolist(),
            "even": float(query.mean() / 2),
            "mirrors": int((heads.share_of_strongest(weights, task.mirror()) >= PATTERN).sum()),
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """All are of the same runs."""
        runs, of = results.finished(MODEL), (MODEL,)
        wrote = results.values(MODEL, "evaluation.token_accuracy")
        trained = results.values(MODEL, "measured.trained")
        other = [max(np.max(o.measured["separator"]), np.max(o.measured["token_before"])) for o in runs]
        first = [o.measured["distance"][0] - o.measured["even"] for o in runs]
        mirrored = [Effect("", results.values(MODEL, "check.best"), of)]
        without = {
            "that head alone": results.values(MODEL, "check.without_best"),
            f"all heads at {MIRRORS:.0%}": results.values(MODEL, "check.without_mirrors"),
        }
        return {
            "C213": [Effect("", [abs(a - b) for a, b in zip(trained, wrote, strict=True)], of)],
            "C214": [Effect("", wrote, of)],
            "C215": mirrored,
            "C220": [Effect("", [float(x) for x in other], of)],
            "C221": [Effect("", [float(x) for x in first], of)],
            "C223": mirrored,
            "C224": [
                Effect(name, [a - b for a, b in zip(wrote, left, strict=True)], of) for name, left in without.items()
            ],
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """How many heads do the same."""
        mirrors = [o.measured["mirrors"] for o in results.finished(MODEL)]
        layers = np.mean([o.measured["distance"] for o in results.finished(MODEL)], 0) if mirrors else []
        many = " to ".join(str(x) for x in sorted({min(mirrors), max(mirrors)})) if mirrors else "0"
        far = ", ".join(f"{x:.2f}" for x in layers)
        left = means_of(results, [MODEL], "check.without_mirrors").removeprefix(f"{MODEL}: ")
        return {
            "C215": f"{many} of 8 heads do this at {PATTERN:.0%} of the queries.",
            "C220": f"{many} of 8 heads attend to the mirrored position.",
            "C221": f"Mean distances by layer: {far}; the mirrored symbol is 6 tokens back on average.",
            "C224": f"Chance is {1 / 14:.2f}; without all such heads the accuracy is {left}.",
        }
