"""Shared parts of the experiments: the settings of a run, training a module of one's own, and effects of variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Effect
from qkv_lab.experiments.results import Outcome, Results, value_of
from qkv_lab.task import Measured, Task, Training
from qkv_lab.tasks.backcopy import Backcopy

DATED = "2026-11-23"
"""When the criteria were written: before the runs of 10 seeds and more, and after pilots of at most 3 seeds."""
LEARNT = 0.9
"""A model has learnt its task if it gets this share of the answers right, and a variant if this share of its runs has.
Only variants that have learnt the task count as evidence."""
QUICK: Mapping[str, Any] = {"steps": 4, "batch": 4, "warmup": 1}
"""The training settings of the quick form."""
LEAST = 0.05
"""Smaller differences of accuracies, or of weights, do not count as an effect."""


def setting(task: Task, seed: int, quick: bool, **changes: Any) -> Setting:
    """The run of a task with its own training settings and some `changes`; it is evaluated at the end only.

    >>> from qkv_lab.tasks import Reversal
    >>> setting(Reversal(), 3, False, steps=250).training.evaluate_every
    250
    """
    chosen = {**changes, **(QUICK if quick else {})}
    training = replace(task.training(), seed=seed, **chosen)
    every = {name: changes.get(name, training.steps) for name in ("evaluate_every", "save_every")}
    return Setting(task, replace(training, **every))


# --- modules of one's own ---------------------------------------------------------------------------------------------


def fit(model: nn.Module, loss: Callable[[int], Tensor], training: Training) -> list[float]:
    """Train a module with AdamW, as `qkv_lab.train` does, but without a folder; for modules that it cannot save.

    Args:
        model: the module; it is in evaluation mode at the end.
        loss: the mean loss of a step, counted from 0.
        training: the settings; those of evaluations and checkpoints are ignored.

    Returns:
        The loss of every step. Training ends early if it is not finite.

    >>> model = nn.Linear(1, 1)
    >>> losses = fit(model, lambda step: (model(torch.ones(1, 1)) - 2).square().mean(), Training(steps=50, warmup=1))
    >>> len(losses), losses[-1] < losses[0]
    (50, True)
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(training.beta1, training.beta2))
    losses: list[float] = []
    model.train()
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(step)
        of_step = loss(step)
        losses.append(of_step.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        of_step.backward()
        if training.clip:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
    model.eval()
    return losses


Questions = tuple[tuple[Tensor, ...], Tensor]
"""The inputs of a module, and the class of each correct answer."""


def learn(
    model: nn.Module,
    questions: Callable[[], Questions],
    tests: Questions,
    training: Training,
    loss: Callable[..., Tensor] | None = None,
) -> Measured:
    """Train a module that answers questions.

    Args:
        model: the module; called with the inputs of some questions it returns logits (…, classes).
        questions: draws the questions of a step.
        tests: the questions on which it is tested.
        training: the settings.
        loss: the loss of the model on inputs and answers; by default its mean cross-entropy.

    Returns:
        ``accuracy``: the share of correct answers in the test.
    """

    def cross_entropy(model: nn.Module, inputs: tuple[Tensor, ...], answers: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(*inputs).flatten(0, -2), answers.flatten())

    fit(model, lambda _: (loss or cross_entropy)(model, *questions()), training)
    inputs, answers = tests
    with torch.no_grad():
        return {"accuracy": (model(*inputs).argmax(-1) == answers).double().mean().item()}


# --- effects ----------------------------------------------------------------------------------------------------------


def unlearnt(results: Results, name: str, least: float, *variants: str, what: str = "") -> str:
    """Why variants do not count, such as "1 head reached 0.9 in 3 of 10 runs"; an empty text if all do.

    A variant counts if its metric, by its dotted name, is at least `least` in 90 % of its runs.
    """
    for variant in variants:
        runs = results.variants.get(variant, ())
        values = results.values(variant, name)
        count = sum(x >= least for x in values)
        if not runs or count < LEARNT * len(runs):
            return f"{variant} {what or f'reached {least:g}'} in {count} of {len(runs)} runs"
    return ""


def minus(results: Results, a: str, b: str, name: str, condition: str = "", *, unless: str = "") -> Effect:
    """The effect of variant `a` minus variant `b` with the same seed, of an entry by its dotted name."""
    return Effect(condition, results.differences(a, b, name), unless=unless)


# --- sweeps of one run on Bigram-Backcopy -----------------------------------------------------------------------------

TASK = Backcopy()
TRAINING = Training(steps=500, batch=32, lr=1e-2, warmup=100, weight_decay=0.1, evaluate_every=50, save_every=500)
QUICK_TASK: Mapping[str, Any] = {"length": 16}
QUICK_TRAINING: Mapping[str, Any] = {"steps": 4, "batch": 4, "warmup": 2, "evaluate_every": 2, "log_every": 1}

SINK = 0.3
"""A head has a sink if it puts more than this on a key (ε of Gu et al. 2025, arXiv:2410.10781, §3.2)."""
STRONGEST = "Weight of the strongest head on the first token"
ALPHA = "check.sink"
"""The mean weight on the first key by layer and head; `Results.values` takes the strongest head of each run."""
ACCURACY, EXCESS = "evaluation.backcopy_accuracy", "evaluation.excess"
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
        if not quick:
            return Setting(task, training)
        return Setting(replace(task, **QUICK_TASK), replace(training, **QUICK_TRAINING))


class Sweep(Experiment):
    """An experiment that trains variants of one run, of about 10 seconds."""

    variants: ClassVar[Mapping[str, Change]]

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        return {name: change.setting(seed, quick) for name, change in self.variants.items()}


def sink(results: Results, variant: str, condition: str | None = None) -> Effect:
    """The effect of a variant's weight on the first token; it counts if the variant has learnt the task."""
    name = variant if condition is None else condition
    return Effect(name, results.values(variant, ALPHA), unless=not_learnt(results, variant))


def has_sink(results: Results, variant: str = PLAIN) -> Effect:
    """The premise that a variant has a sink."""
    weight = results.values(variant, ALPHA)
    return Effect(f"a weight of {variant} on the first token", weight, bound=SINK, above=True, premise=True)


def difference(results: Results, a: str, b: str, condition: str = "", name: str = ALPHA) -> Effect:
    """The effect of variant `a` minus variant `b` with the same seed; it counts if both have learnt the task."""
    return minus(results, a, b, name, condition, unless=not_learnt(results, a, b))


def learnt(outcome: Outcome) -> bool:
    """Whether a run has learnt the task."""
    return outcome.diverged is None and value_of(outcome, ACCURACY) >= LEARNT


def not_learnt(results: Results, *variants: str) -> str:
    """Why variants do not count, such as "elu learnt its task in 1 of 20 runs"; an empty text if they do."""
    return unlearnt(results, ACCURACY, LEARNT, *variants, what="learnt its task")


def argmax_head(values: Any) -> tuple[int, int]:
    """The layer and head, counted from 0, of the largest number.

    >>> argmax_head([[0.1, 0.2], [0.9, 0.3]])
    (1, 0)
    """
    layer, head = np.unravel_index(np.argmax(values), np.shape(values))
    return int(layer), int(head)


def strongest_head(outcome: Outcome) -> tuple[int, int]:
    """The layer and head with the largest mean weight on the first key."""
    return argmax_head(value_of(outcome, ALPHA))
