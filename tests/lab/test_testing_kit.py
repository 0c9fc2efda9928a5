"""`check_task` and `check_experiment`: built-in ones pass, and one broken object for each law fails."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab_tasks import Counting
from qkv.models import DecoderConfig
from qkv.testing import CheckFailed
from qkv_lab.experiments import experiment
from qkv_lab.experiments.base import Conclusion, Experiment, Results, Setting
from qkv_lab.experiments.evidence import FAILS, Criterion, Effect
from qkv_lab.task import Batch, Measured
from qkv_lab.tasks import (
    Backcopy,
    Caption,
    Copy,
    Coreference,
    Hops,
    Language,
    Lookups,
    Recall,
    Reversal,
    Translation,
    backcopy,
    language,
    names,
)
from qkv_lab.testing import check_experiment, check_task

SMALL: dict[str, Any] = {"d_model": 8, "layers": 1, "heads": 2}
TASKS: list[Any] = [
    Reversal(length=4, model=DecoderConfig(**SMALL)),
    Copy(min_length=3, max_length=4, longest=5, model=DecoderConfig(**SMALL)),
    Recall(min_length=3, max_length=4, symbols=12, model=DecoderConfig(**SMALL, positions="alibi", tied=False)),
    Lookups(second=2, length=5, longest=7, model=DecoderConfig(**SMALL, tied=False)),
    Hops(places=7, hops=2, model=DecoderConfig(**SMALL, tied=False)),
    Coreference(length=6, model=DecoderConfig(**SMALL, tied=False)),
    Translation(architecture="bahdanau", d_model=8, max_words=7, held_out=2),
    Caption(objects=1, held_out=3),
    Language(context=8, model=DecoderConfig(**SMALL)),
    Backcopy(symbols=16, length=9, model=DecoderConfig(**SMALL)),
]


@pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])
def test_built_in_tasks_keep_the_laws(task: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place in (backcopy, language, type(task)):
        for held_out in ("UNSEEN", "CHECKED", "EVALUATED"):
            if hasattr(place, held_out):
                monkeypatch.setattr(place, held_out, 60)
    if isinstance(task, Language):
        corpus = tmp_path / "corpus"
        corpus.mkdir()
        for at in range(20):
            (corpus / f"{at}.txt").write_text(f"text {at}: " + "ab" * at + " the quick brown fox" * 9)
        monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
        task = Language(corpus=str(corpus), context=8, model=task.model)
    check_task(task)


def test_every_built_in_task_is_checked() -> None:
    assert {task.name for task in TASKS} == set(names())


# --- broken tasks -----------------------------------------------------------------------------------------------------


@dataclass
class NotFrozen:
    """As `Counting` in all but what the decorator says."""

    name: ClassVar[str] = "not_frozen"
    model: Any = None
    training = staticmethod(Counting.training)
    build = batch = count = loss = evaluate = check = figures = files = Counting.build


@dataclass(frozen=True)
class Lost(Counting):
    """run.toml cannot hold None where the default is a number."""

    limit: int | None = 3


class GlobalGenerator(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return {**super().batch(step, size, seed), "noise": torch.rand(size)}


class SameSteps(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return super().batch(0, size, seed)


class SameSeeds(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return super().batch(step, size, 0)


class OtherSize(Counting):
    def batch(self, step: int, size: int, seed: int) -> Batch:
        return super().batch(step, size + 1, seed)


class OtherWeights(Counting):
    def build(self) -> nn.Module:
        model = super().build()
        with torch.no_grad():
            next(model.parameters()).add_(random.random())
        return model


class SumOfLosses(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) * self.count(batch)


class OneCount(Counting):
    def count(self, batch: Batch) -> int:
        return 8


class Unused(Counting):
    def build(self) -> nn.Module:
        model = super().build()
        model.unused = nn.Parameter(torch.zeros(1))  # type: ignore[assignment]
        return model


class ZeroGradient(Counting):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        return loss - loss + loss.detach()


class Sampled(Counting):
    def evaluate(self, model: nn.Module) -> Measured:
        return {"loss": float(torch.rand(()))}


class NotJson(Counting):
    def check(self, model: nn.Module) -> Measured:
        return {"by_head": np.float32(1)}


class Trains(Counting):
    def evaluate(self, model: nn.Module) -> Measured:
        next(model.parameters()).mul_(1.01)
        return super().evaluate(model)


class LeavesMode(Counting):
    def check(self, model: nn.Module) -> Measured:
        model.train()
        return super().check(model)


class NotDrawn(Counting):
    def figures(self, model: nn.Module) -> Mapping[str, Any]:
        return {"map": "not a figure"}


class Folder(Counting):
    def files(self) -> Mapping[str, str]:
        return {"notes/one.txt": "a file in a folder"}


BROKEN: list[tuple[Any, str]] = [
    (3, "int"),
    (NotFrozen(), "NotFrozen"),
    (Lost(limit=None), "fields"),
    (GlobalGenerator(), "batch"),
    (SameSteps(), "batch"),
    (SameSeeds(), "batch"),
    (OtherSize(), "batch"),
    (OtherWeights(), "build"),
    (Counting(poison=0), "loss"),
    (Counting(poison=0, poisoned="gradient"), "loss"),
    (SumOfLosses(), "loss"),
    (OneCount(), "loss"),
    (Unused(), "loss"),
    (ZeroGradient(), "loss"),
    (Sampled(), "evaluate"),
    (NotJson(), "check"),
    (Trains(), "evaluate"),
    (LeavesMode(), "check"),
    (NotDrawn(), "figures"),
    (Folder(), "files"),
]


@pytest.mark.parametrize(("task", "where"), BROKEN, ids=[f"{type(x).__name__} {where}" for x, where in BROKEN])
def test_a_task_that_breaks_a_law_is_refused(task: Any, where: str) -> None:
    with pytest.raises(CheckFailed) as raised:
        check_task(task)
    assert where in str(raised.value).partition(":")[0]


def test_the_global_generators_are_restored() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    check_task(Counting())
    assert drawn() == expected


# --- experiments ------------------------------------------------------------------------------------------------------


class Computed(Experiment):
    """A correct experiment without training."""

    name, question = "computed", "Is b more than a?"
    criteria: Any = (Criterion("C900", "2026-11-23", "b minus a", bound=0.0),)

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"a": {"x": 1.0 + seed}, "b": {"x": 2.5 + seed}}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C900": [Effect("", results.differences("b", "a", "measured.x"))]}


class Trained(Computed):
    """A correct experiment with training, in which `a` and `b` are two tasks, and with a computed variant."""

    name = "trained"

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        training = replace(Counting.training(), steps=2, evaluate_every=2, save_every=2, seed=seed)
        return {"a": Setting(Counting(), training), "b": Setting(Counting(modulo=5), training)}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        return {"x": float(setting.task.model.d_model + next(model.parameters())[0, 0])}

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"by hand": {"x": 3.0}}


@pytest.mark.parametrize("made", [Computed(), Trained()], ids=lambda made: made.name)
def test_correct_experiments_pass(made: Any) -> None:
    check_experiment(made)


@pytest.mark.parametrize("name", ["random_scores", "norm_place"])
def test_built_in_experiments_keep_the_laws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for held_out in ("EVALUATED", "CHECKED"):
        monkeypatch.setattr(backcopy, held_out, 8)
    check_experiment(experiment(name))


class NoQuestion(Computed):
    question = "It is more."


class NotDated(Computed):
    criteria = (Criterion("C900", "today", "b minus a", bound=0.0),)


class Twice(Computed):
    claims = ("C900", "C900")


class OneSeedForAll(Trained):
    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        return super().settings(0, quick)


class NotSeeded(Computed):
    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"a": {"x": random.random()}, "b": {"x": 2.0}}


class Raises(Computed):
    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        raise ValueError("not today")


class MissingClaim(Computed):
    criteria = (*Computed.criteria, Criterion("C901", "2026-11-23", "b plus a", bound=0.0))


class NotANumber(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C900": [Effect("", [float("nan")])]}


class OtherVerdict(Computed):
    def conclude(self, results: Results) -> Conclusion:
        found = super().conclude(results)
        return replace(found, verdicts=[replace(found.verdicts[0], holds=FAILS)])


BROKEN_EXPERIMENTS: list[tuple[Any, str]] = [
    (NoQuestion(), "question"),
    (NotDated(), "criteria"),
    (Twice(), "claims"),
    (OneSeedForAll(), "settings"),
    (NotSeeded(), "measure"),
    (Raises(), "quick form"),
    (MissingClaim(), "quick form"),
    (NotANumber(), "effects"),
    (OtherVerdict(), "conclude"),
    (Computed, "got"),
]


@pytest.mark.parametrize(
    ("made", "where"), BROKEN_EXPERIMENTS, ids=[f"{type(x).__name__} {where}" for x, where in BROKEN_EXPERIMENTS]
)
def test_an_experiment_that_breaks_a_law_is_refused(made: Any, where: str) -> None:
    with pytest.raises(CheckFailed) as raised:
        check_experiment(made)
    assert where in str(raised.value).partition(":")[0]
