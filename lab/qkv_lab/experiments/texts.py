"""Experiments: sinks on text, when they emerge, and how they depend on the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from qkv.models import DecoderConfig
from qkv_lab import heads
from qkv_lab.experiments import small
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Outcome, Results
from qkv_lab.experiments.small import DATED, LEAST, PLAIN, SINK, STRONGEST, TASK, TRAINING, Change, Sweep, setting
from qkv_lab.task import Measured
from qkv_lab.tasks.language import Language

UNIQUE = (16, 64, 256, 1024)
FEW, MANY = UNIQUE[-2:]
HALF = ", half the steps"
NO_LIMIT = "no limit"
TEXTS = 16
RANDOM = "random first"


class DataAmount(Sweep):
    """Different numbers of distinct training sequences, repeated to fill the same number of steps."""

    name = "data_amount"
    question = "How many distinct sequences does a sink need, and does diversity matter more than the number of steps?"
    criteria = (
        Criterion("C080", DATED, "Weight of the strongest head on the first token of its own training sequences, with "
                  f"{UNIQUE[0]} distinct ones", SINK, above=False,
                  remark="On held-out sequences, by their number in training: {check.sink}."),
        Criterion("C081", DATED, f"Gain in weight from {MANY // FEW} times as many distinct sequences minus that from "
                  "twice the steps", 0.05),
    )  # fmt: skip

    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{n}": Change(task={"unique": n}) for n in UNIQUE},
        NO_LIMIT: Change(),
        **{f"{n}{HALF}": Change(task={"unique": n}, training={"steps": TRAINING.steps // 2}) for n in (FEW, MANY)},
    }

    def measure(self, model: Any, setting: Setting) -> Measured:
        """On sequences of the training: the strongest head's weight on the first token, and the accuracy of copies."""
        task: Any = setting.task
        batch = task.batch(0, TEXTS, setting.training.seed)
        ids, targets = batch["ids"], batch["targets"]
        copies = task.is_trigger(ids)
        right = (model(ids).argmax(-1) == targets)[copies]
        first = heads.weights(model, ids)["first"][..., 1:].mean((0, 3))
        return {"own_sink": float(first.max()), "own_accuracy": float(right.double().mean())}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """C080 by the fewest sequences, if they are learnt; C081 by more sequences against more steps."""
        fewest, premise = f"{UNIQUE[0]}", small.has_sink(results, NO_LIMIT)
        why = small.unlearnt(results, "measured.own_accuracy", small.LEARNT, fewest, what="learnt it")
        needs = Effect("", results.values(fewest, "measured.own_sink"), unless=why)
        return {"C080": [premise, needs], "C081": [premise, small.difference(results, f"{MANY}{HALF}", f"{FEW}")]}


class FirstToken(Sweep):
    """Training sequences with a fixed or a random first token, tested on changed and random sequences."""

    name = "first_token"
    question = "Does a sink depend on which token is first, and does it form on random tokens?"
    seeds = 20
    criteria = (
        Criterion("C062", DATED, "Weight of the strongest head on the first position", SINK,
                  remark="On average the symbol with the least weight gets {measured.replaced_least of plain}, "
                         "that with the most {measured.replaced_most of plain}."),
        Criterion("C065", DATED, "Weight of the strongest head on the first token, followed by random symbols", SINK),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {
        PLAIN: Change(),
        RANDOM: Change(task={"first": "random"}),
        f"{RANDOM}, 3 × the steps": Change(task={"first": "random"}, training={"steps": 3 * TRAINING.steps}),
    }

    def measure(self, model: Any, setting: Setting) -> Measured:
        """Mean weights on the first token, for the head that has the largest on held-out sequences.

        ``replaced``: with the first token replaced by each symbol; ``random_tokens``: with all tokens but the first
        drawn uniformly.
        """
        task: Any = setting.task
        ids = task.held_out(TEXTS)["ids"]
        layer, head = small.argmax_head(heads.weights(model, ids)["first"][..., 1:].mean((0, 3)))

        def weight(texts: torch.Tensor) -> np.ndarray:
            return np.asarray(heads.weights(model, texts)["first"][:, layer, head, 1:].mean(1))

        changed = ids.repeat(task.symbols, 1)
        changed[:, 0] = torch.arange(task.symbols).repeat_interleave(len(ids))
        noise = torch.randint(task.symbols, ids.shape, generator=torch.Generator().manual_seed(0))
        kept = noise.clone()
        kept[:, 0] = ids[:, 0]
        replaced = weight(changed).reshape(task.symbols, len(ids)).mean(1)
        return {
            "replaced": float(replaced.mean()),
            "replaced_least": float(replaced.min()),
            "replaced_most": float(replaced.max()),
            "random_tokens": float(weight(kept).mean()),
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """C062 for models that always saw <s> first, when it is replaced, and for models that saw any symbol first."""
        premise, why = small.has_sink(results), small.not_learnt(results, PLAIN)
        first = [
            premise,
            Effect("trained with <s> first, which is replaced by every symbol in turn",
                   results.values(PLAIN, "measured.replaced"), unless=why),
            *(small.sink(results, v, f"trained with any symbol first{v.removeprefix(RANDOM)}")
              for v in self.variants if v != PLAIN),
        ]  # fmt: skip
        noise = Effect("", results.values(PLAIN, "measured.random_tokens"), unless=why)
        return {"C062": first, "C065": [premise, noise]}


NEAR = 0.02  # largest difference of initial weights from uniform ones


class Emergence(Sweep):
    """The plain run, with curves over its training."""

    name = "emergence"
    question = "When in training does a sink on the first token form, and does it exist at initialisation?"
    seeds = 20
    criteria = (
        Criterion("C061", DATED, f"{STRONGEST}, at the end of training", SINK),
        Criterion("C063", DATED, f"{STRONGEST}, among {TASK.length} tokens", SINK),
        Criterion("C064", DATED, f"{STRONGEST} at step 0, minus that of uniform rows, without sign", NEAR, above=False),
        Criterion("C079", DATED, f"{STRONGEST} at the end minus half-way", 0.01),
    )
    curves = (
        "loss", "check.sink", "check.value_drain", "check.trigger_previous", "check.other_first",
        "evaluation.excess", "evaluation.backcopy_accuracy",
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {PLAIN: Change()}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the weight on the first key of the head that is strongest at the end, over the steps of training."""
        floor = uniform(int(small.QUICK_TASK["length"]) if results.quick else TASK.length)
        steps, weights = results.curve(PLAIN, small.ALPHA)
        best = map(small.strongest_head, results.finished(PLAIN))
        alpha = np.stack([run[:, layer, head] for run, (layer, head) in zip(weights, best, strict=True)])
        start, half, end = (alpha[:, at] for at in (0, len(steps) // 2, -1))
        why, premise = small.not_learnt(results, PLAIN), small.has_sink(results)

        def effect(values: np.ndarray) -> Effect:
            return Effect("", values.tolist(), unless=why)

        return {
            "C061": [effect(end)],
            "C063": [effect(end)],
            "C064": [premise, effect(np.abs(start - floor))],
            "C079": [premise, effect(end - half)],
        }

    def lines(self, results: Results) -> Lines:
        names = {
            "weight of triggers on the previous token": "check.trigger_previous",
            "weight of others on the first token": "check.other_first",
            "accuracy of copies": small.ACCURACY,
        }
        steps, _ = results.curve(PLAIN, small.ACCURACY)
        found = {what: results.curve(PLAIN, name)[1] for what, name in names.items()}
        return Lines(steps, {what: x.reshape(*x.shape[:2], -1).max(2) for what, x in found.items()}, "step", "share")


def uniform(length: int) -> float:
    """The mean weight of queries 2 … n on the first key if all rows are uniform: (Hₙ − 1) / (n − 1).

    >>> round(uniform(64), 3)
    0.059
    """
    return float(sum(1 / i for i in range(2, length + 1)) / (length - 1))


MODEL = DecoderConfig.gpt2(d_model=64, layers=2, heads=4, attention_bias=False)
"""Learned positions, pre-norm, GELU, a tied output: the chapter's Lab 5 at a smaller size."""
AS_IN_CHAPTER = "<s> first, no warm-up"
"""The chapter's training."""
CONDITIONS: Mapping[str, tuple[str, int]] = {
    AS_IN_CHAPTER: ("fixed", 0),
    "<s> first, 100-step warm-up": ("fixed", 100),
    "any token first, no warm-up": ("random", 0),
}
"""How sequences begin, and the steps over which the learning rate rises."""


class TextSink(Experiment):
    """The chapter's small Transformer on text in bytes: sequences begin with ``<s>`` or anywhere, and the learning rate
    rises at once, as in the chapter, or over 100 steps."""

    name = "text_sink"
    question = "Does a small Transformer that is trained on text develop a sink?"
    criteria = (
        Criterion("C139", DATED, f"{STRONGEST} at the end of training", SINK,
                  remark="Held-out loss in nats per byte: {evaluation.loss}."),
    )  # fmt: skip
    curves = ("check.sink", "evaluation.loss")

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        return {
            condition: setting(
                Language(context=64, model=MODEL, first=first),  # type: ignore[arg-type]
                seed, quick, steps=400, lr=5e-3, warmup=warmup, decay="none", evaluate_every=4 if quick else 100,
            )
            for condition, (first, warmup) in CONDITIONS.items()
        }  # fmt: skip

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C139": [Effect(name, results.values(name, "check.sink")) for name in CONDITIONS]}


class Dropout(Experiment):
    """Language models that can memorise 6,000 bytes of text, with and without dropout."""

    name = "dropout"
    question = "Does dropout in attention prevent overfitting, or make less of it?"
    criteria = (
        Criterion("C179", DATED, "Rise of the held-out loss (nats per byte) after its minimum, trained on 6,000 bytes: "
                  "without dropout minus with 0.3, and what is left with 0.3", LEAST,
                  remark="Mean held-out losses: {evaluation.loss}; on the training text: {measured.train_loss}."),
    )  # fmt: skip
    rates: ClassVar[Mapping[str, float]] = {"no dropout": 0.0, "dropout 0.3": 0.3}
    curves = ("evaluation.loss",)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        task = Language(context=64, tokens=6000, first="random", model=MODEL)
        return {
            name: setting(
                replace(task, model=replace(MODEL, dropout=rate)), seed, quick, steps=500, warmup=20,
                decay="none", weight_decay=0.0, evaluate_every=4 if quick else 100,
            )
            for name, rate in self.rates.items()
        }  # fmt: skip

    @torch.no_grad()
    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """``train_loss``: the loss in nats per byte on windows of the training text, without dropout."""
        batch = setting.task.batch(10**6, 90, setting.training.seed)
        return {"train_loss": float(setting.task.loss(model, batch))}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """Less of it, and none of it, are two readings of the claim."""
        none, some = self.rates
        fewer, left = results.differences(none, some, _rise), list(results.by_seed(some, _rise))
        return {"C179": [Effect("less of it", fewer), Effect("next to none", left, above=False)]}


def _rise(outcome: Outcome) -> float:
    """The held-out loss at the end of training minus its minimum over training."""
    values = outcome.curves["evaluation.loss"]["values"]
    return float(values[-1] - min(values))
