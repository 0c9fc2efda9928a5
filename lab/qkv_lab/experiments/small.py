"""Shared parts of the experiments on small tasks: training a module of one's own, and which variants count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv_lab.experiments.base import Results, Setting
from qkv_lab.experiments.evidence import Effect
from qkv_lab.task import Task, Training

LEARNT = 0.9
"""A variant counts if this share of its runs reached the least value of its metric."""
QUICK: Mapping[str, Any] = {"steps": 4, "batch": 4, "warmup": 1}
"""The training settings of the quick form."""
LEAST = 0.05
"""Smaller differences of accuracies do not count as an effect."""


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
