"""Experiments: streaming with sinks, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import nn

from qkv.cache import Cache, Full, Sinks, Sliding
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loss import token_loss
from qkv_lab.experiments.base import Experiment, Lines, Outcome, Results, Setting, value_of
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.small import setting, unlearnt
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.backcopy import Backcopy

TASK = Backcopy()
TRAINING = Training(steps=500, batch=32, lr=1e-2, warmup=100, weight_decay=0.1, evaluate_every=50, save_every=500)
QUICK_TASK: Mapping[str, Any] = {"length": 16}
QUICK_TRAINING: Mapping[str, Any] = {"steps": 4, "batch": 4, "warmup": 2, "evaluate_every": 2, "log_every": 1}

SINK = 0.3
"""A head has a sink if it puts more than this on a key (ε of Gu et al. 2025, arXiv:2410.10781, §3.2)."""
LEARNT = 0.9
"""A run has learnt the task if the model gets this share of the copies right, and a variant if this share of its runs
has. Only variants that have learnt the task count as evidence."""
DATED = "2026-11-23"
"""When the criteria were written: before the runs of 10 seeds and more, and after pilots of at most 3 seeds."""
STRONGEST = "Weight of the strongest head on the first token"
LESS = 0.05
"""Smaller differences of weight do not count as an effect."""
ALPHA = "check.sink"
"""The mean weight on the first key by layer and head; `Results.values` takes the strongest head of each run."""
ACCURACY = "evaluation.backcopy_accuracy"
EXCESS = "evaluation.excess"
PLAIN = "plain"
"""The variant without changes, whose runs all experiments share."""


@dataclass(frozen=True)
class Change:
    """The settings in which a variant differs from the plain run."""

    task: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, seed: int, quick: bool) -> Setting:
        """The settings of the run with this seed. Quick runs override the sequence length and the number of steps."""
        task = replace(TASK, **{**self.task, "model": replace(TASK.model, **self.model)})
        training = replace(TRAINING, **{**self.training, "seed": seed})
        return (
            Setting(replace(task, **QUICK_TASK), replace(training, **QUICK_TRAINING))
            if quick
            else Setting(task, training)
        )


def decoder_and_task(model: nn.Module, setting: Setting) -> tuple[DecoderLM, Backcopy]:
    """The model and the task of a run, with their types narrowed."""
    assert isinstance(model, DecoderLM)
    assert isinstance(setting.task, Backcopy)
    return model, setting.task


class Sweep(Experiment):
    """An experiment that trains variants of one run, of about 10 seconds."""

    variants: ClassVar[Mapping[str, Change]]

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        return {name: change.setting(seed, quick) for name, change in self.variants.items()}


# --- evidence ---------------------------------------------------------------------------------------------------------


def sink(results: Results, variant: str, condition: str | None = None, **own: Any) -> Effect:
    """The effect of a variant's weight on the first token; it counts if the variant has learnt the task."""
    values = results.values(variant, ALPHA)
    name = variant if condition is None else condition
    return Effect(name, values, unless=not_learnt(results, variant), **own)


def has_sink(results: Results, variant: str = PLAIN) -> Effect:
    """The premise that a variant has a sink."""
    return Effect(
        f"a weight of {variant} on the first token", results.values(variant, ALPHA), bound=SINK,
        above=True, premise=True,
    )  # fmt: skip


def difference(results: Results, a: str, b: str, condition: str = "", name: str = ALPHA, **own: Any) -> Effect:
    """The effect of variant `a` minus variant `b` with the same seed; it counts if both have learnt the task."""
    return Effect(condition, results.differences(a, b, name), unless=not_learnt(results, a, b), **own)


def learnt(outcome: Outcome) -> bool:
    """Whether a run has learnt the task."""
    return outcome.diverged is None and value_of(outcome, ACCURACY) >= LEARNT


def not_learnt(results: Results, *variants: str) -> str:
    """Why variants do not count, such as "elu learnt its task in 1 of 20 runs"; an empty text if they do."""
    return unlearnt(results, ACCURACY, LEARNT, *variants, what="learnt its task")


def strongest_head(outcome: Outcome) -> tuple[int, int]:
    """The layer and head with the largest mean weight on the first key."""
    return argmax_head(value_of(outcome, ALPHA))


def argmax_head(values: Any) -> tuple[int, int]:
    """The layer and head, counted from 0, of the largest number.

    >>> argmax_head([[0.1, 0.2], [0.9, 0.3]])
    (1, 0)
    """
    layer, head = np.unravel_index(np.argmax(values), np.shape(values))
    return int(layer), int(head)


def at_strongest_head(name: str) -> Callable[[Outcome], float]:
    """The value of a measure by layer and head at the strongest head of a run."""
    return lambda outcome: value_of(outcome, name)[strongest_head(outcome)[0]][strongest_head(outcome)[1]]


def alpha_over_steps(results: Results, variant: str) -> tuple[list[int], np.ndarray]:
    """The steps, and the weight on the first key (seeds, steps) of the head that is strongest at the end."""
    steps, values = results.curve(variant, ALPHA)
    best = [strongest_head(o) for o in results.finished(variant)]
    return steps, np.stack([run[:, layer, head] for run, (layer, head) in zip(values, best, strict=True)])


BUDGET, KEPT = 4, 1  # cache size in keys, and the number of first keys that StreamingLLM never evicts
TRAINED, LENGTH = 64, 128  # tokens per text in training and in the test
TEXTS = 256
BUCKET = 8  # positions per point in the figure
LEAST = 0.01  # nats; smaller rises of the loss are ignored
CACHES: dict[str, Callable[[], Cache]] = {
    "all keys": lambda: Full(LENGTH),
    "last keys": lambda: Sliding(BUDGET),
    "first + last": lambda: Sinks(KEPT, BUDGET - KEPT),
}
ALL, WINDOW, SINKS = CACHES
LEARNED, KEY = "learned sink", "key bias"


class Streaming(Experiment):
    """Bigram-Backcopy with rotary positions, evaluated beyond its training length with three kinds of caches."""

    name = "streaming"
    question = "How much does the loss rise when the first token is evicted, and does keeping this token avoid it?"
    criteria = (
        Criterion("C101", DATED, f"Rise of the loss (nats) when a cache of {BUDGET} keys evicts the first token, "
                  "without a sink of the model's own minus with", LEAST),
    )  # fmt: skip
    remarks: ClassVar[Mapping[str, str]] = {
        "C101": "Losses from the 64 tokens of training up to 128, with all keys: {measured.beyond.all keys of plain}; "
                "with the last 4: {measured.beyond.last keys of plain}; with the first and the last 3: "
                "{measured.beyond.first + last of plain} (StreamingLLM, Xiao et al. 2024).",
    }  # fmt: skip

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """Models with plain softmax, with a learned sink logit, and with a learned key whose value is 0."""
        own: dict[str, dict[str, Any]] = {PLAIN: {}, LEARNED: {"sink": True}, KEY: {"key_bias": True}}
        return {variant: _setting(seed, quick, **parts) for variant, parts in own.items()}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """The loss in nats by position for each cache, and its means over two spans.

        ``inside`` is the span after the first token was evicted, up to the training length; ``beyond`` is everything
        after the training length.
        """
        assert isinstance(model, DecoderLM)
        assert isinstance(setting.task, Backcopy)
        batch = replace(setting.task, length=LENGTH).held_out(TEXTS)
        ids = torch.cat([batch["ids"], batch["targets"][:, -1:]], 1)
        nats = {name: token_loss(model, ids, make).mean(0).numpy() for name, make in CACHES.items()}
        return {
            "nats": {name: x.reshape(-1, BUCKET).mean(1).tolist() for name, x in nats.items()},
            "inside": {name: float(x[BUDGET:TRAINED].mean()) for name, x in nats.items()},
            "beyond": {name: float(x[TRAINED:].mean()) for name, x in nats.items()},
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        plain = rise(results, PLAIN, WINDOW)
        found = [
            Effect("the rise without a sink of the model's own", list(plain), bound=LEAST,
                   above=True, premise=True)
        ]  # fmt: skip
        for variant in (LEARNED, KEY):
            found.append(
                Effect(variant, list((plain - rise(results, variant, WINDOW)).dropna()),
                       unless=not_learnt(results, PLAIN, variant))
            )  # fmt: skip
        return {"C101": found}

    def lines(self, results: Results) -> Lines:
        nats = {name: np.array([o.measured["nats"][name] for o in results.finished(PLAIN)]) for name in CACHES}
        x = [BUCKET * (i + 0.5) for i in range(LENGTH // BUCKET)]
        found = {name: nats[name] - nats[ALL] for name in (WINDOW, SINKS)}
        return Lines(x, found, "position (tokens)", f"rise over all keys, {PLAIN} (nats)")


def rise(results: Results, variant: str, cache: str) -> pd.Series:
    """The rise of the loss over that of the full cache, in nats, for each seed, within the training length."""
    one, all_ = (results.by_seed(variant, f"measured.inside.{name}") for name in (cache, ALL))
    return one - all_


def _setting(seed: int, quick: bool, **parts: Any) -> Setting:
    """A run with a high learning rate and strong weight decay, so that the head depends strongly on its sink."""
    task = Backcopy(
        length=TRAINED, model=DecoderConfig(layers=1, heads=1, d_model=64, positions="rotary", **parts)
    )  # fmt: skip
    return setting(task, seed, quick, steps=800, lr=1e-2, weight_decay=1.0)
