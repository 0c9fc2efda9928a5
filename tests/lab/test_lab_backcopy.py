"""Bigram-Backcopy: triggers, transition probabilities, deterministic batches, and the sink of a trained model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.models import DecoderConfig
from qkv_lab.tasks import backcopy
from qkv_lab.tasks.backcopy import Backcopy


def sequences(task: Backcopy, *, step: int = 0, size: int = 200, seed: int = 0) -> Tensor:
    """All tokens of a batch, (size, length + 1)."""
    batch = task.batch(step, size, seed)
    return torch.cat([batch["ids"], batch["targets"][:, -1:]], 1)


SMALL = DecoderConfig(layers=1, heads=2, d_model=16)


@pytest.mark.parametrize(
    "changes", [{}, {"first": "random"}, {"symbols": 11, "triggers": 5, "length": 30}, {"triggers": 0}, {"unique": 7}]
)
def test_token_after_a_trigger_repeats_the_one_before(changes: dict[str, Any]) -> None:
    task = Backcopy(**changes)
    for made in (sequences(task), task.held_out(50)["ids"]):
        start = 1 if task.first == "fixed" else 0
        assert bool((made[:, :start] == task.symbols).all())
        assert bool((made[:, start:] < task.symbols).all())
        assert not bool(task.is_trigger(made[:, start]).any())
        triggers = 0
        for row in made.tolist():
            for before, at, after in zip(row, row[1:], row[2:], strict=False):
                if 1 <= at <= task.triggers:
                    assert after == before < task.symbols
                    triggers += 1
        assert (triggers > 0) == (task.triggers > 0)


def rows_of(task: Backcopy, steps: int, size: int, seed: int = 0) -> set[tuple[int, ...]]:
    return {tuple(row) for step in range(steps) for row in sequences(task, step=step, size=size, seed=seed).tolist()}


def test_held_out_sequences_are_never_trained_on_and_unique_limits_those_that_are() -> None:
    """With short sequences of few symbols, which soon repeat."""
    task = Backcopy(symbols=8, triggers=2, length=8)
    batch = task.held_out(300)
    held = {tuple(row) for row in torch.cat([batch["ids"], batch["targets"][:, -1:]], 1).tolist()}
    trained = rows_of(task, 20, 500)
    assert len(trained) < 10_000, "there are too many different sequences: this test would always pass"
    assert len(held) > 200
    assert not held & trained
    few = Backcopy(unique=10)
    assert len(rows_of(few, 5, 64)) == 10
    assert not rows_of(few, 5, 64) & rows_of(few, 5, 64, seed=1)
    assert len(rows_of(Backcopy(symbols=8, length=8, unique=500), 1, 20_000)) == 500
    assert torch.equal(Backcopy().held_out(9)["ids"], Backcopy(unique=3).held_out(9)["ids"])


def test_tokens_inside_a_prefix_are_not_targets() -> None:
    task = Backcopy(model=replace(SMALL, prefix=5), length=12)
    batch = task.batch(0, 3, 0)
    assert bool((batch["targets"][:, :4] == -100).all())
    assert task.count(batch) == 3 * 8
    assert torch.equal(batch["targets"][:, 4:-1], batch["ids"][:, 5:])
    model = task.build().eval()
    logits = model(batch["ids"])[:, 4:].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, batch["targets"][:, 4:].flatten())
    assert task.loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


class Oracle(nn.Module):
    """A model that predicts with the true probabilities."""

    def __init__(self, task: Backcopy) -> None:
        super().__init__()
        self.task, self.weight = task, nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        probabilities = torch.as_tensor(backcopy._chain(self.task.symbols, self.task.triggers).probabilities).float()
        copied = nn.functional.one_hot(ids.roll(1, 1), self.task.symbols + 1).float() * 1e9
        drawn = nn.functional.pad(probabilities.clamp(min=1e-30).log()[ids], (0, 1), value=-1e9)
        return torch.where(self.task.is_trigger(ids)[..., None], copied, drawn)


@pytest.mark.parametrize("first", ["fixed", "random"])
def test_true_probabilities_have_no_excess_loss(first: Any) -> None:
    task = Backcopy(first=first)
    found = task.evaluate(Oracle(task))
    assert found["backcopy_accuracy"] == 1
    assert [found[name] for name in ("excess", "bigram_excess", "backcopy_loss")] == pytest.approx([0] * 3, abs=1e-5)
    batch = task.held_out(backcopy.EVALUATED)
    trigger, p = task.is_trigger(batch["ids"]).numpy(), backcopy._chain(64, 3).probabilities
    rows = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)
    assert found["entropy"] == pytest.approx(np.where(trigger, 0, rows[batch["ids"].numpy()]).mean(), rel=0.02)


@torch.no_grad()
def test_check_averages_weights_over_triggers_and_other_queries() -> None:
    task = Backcopy(model=replace(SMALL, layers=2), length=20)
    model = task.build().eval()
    ids = task.held_out(backcopy.CHECKED)["ids"]
    data = qkv.profile(model, ids, progress=False, map_tokens=32).data
    weights, triggers = torch.as_tensor(data["weights"].values), task.is_trigger(ids)
    found: dict[str, Any] = {"trigger_previous": [], "trigger_first": [], "other_first": []}
    for b, row in enumerate(triggers.tolist()):
        for i, trigger in enumerate(row):
            if trigger:
                found["trigger_previous"].append(weights[b, :, :, i, i - 1])
                found["trigger_first"].append(weights[b, :, :, i, 0])
            elif i:
                found["other_first"].append(weights[b, :, :, i, 0])
    checked = task.check(model)
    for name, rows in found.items():
        torch.testing.assert_close(torch.tensor(checked[name]), torch.stack(rows).mean(0), rtol=1e-4, atol=1e-6)
    assert "sink_score" in checked
