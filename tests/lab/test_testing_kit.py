"""`check_task` and `check_experiment`: the lab's tasks keep the laws, and one broken object for each law fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from lab_tasks import Counting
from qkv.models import DecoderConfig
from qkv.testing import CheckFailed
from qkv_lab import tasks
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import FAILS, Criterion, Effect, Verdict
from qkv_lab.experiments.results import Results
from qkv_lab.task import Measured
from qkv_lab.tasks import backcopy, language, names
from qkv_lab.testing import check_experiment, check_task

MODEL = DecoderConfig(d_model=8, layers=1, heads=2)
UNTIED = replace(MODEL, tied=False)
TASKS: list[Any] = [
    tasks.Reversal(length=4, model=MODEL),
    tasks.Copy(min_length=3, max_length=4, longest=5, model=MODEL),
    tasks.Recall(min_length=3, max_length=4, symbols=12, gap=2, model=replace(UNTIED, positions="alibi")),
    tasks.Lookups(second=2, length=5, longest=7, model=UNTIED),
    tasks.Hops(places=7, hops=2, model=UNTIED),
    tasks.Coreference(length=6, model=UNTIED),
    tasks.Translation(architecture="bahdanau", d_model=8, max_words=7, held_out=2),
    tasks.Caption(objects=1, held_out=3),
    tasks.Language(context=8, model=MODEL),
    tasks.Backcopy(symbols=16, length=9, unique=50, first="random", model=MODEL),
]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_built_in_tasks_keep_the_laws(task: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other tests of tasks are about what is special to each."""
    for place in (backcopy, language, type(task)):
        for held_out in ("UNSEEN", "CHECKED", "EVALUATED"):
            if hasattr(place, held_out):
                monkeypatch.setattr(place, held_out, 20)
    if isinstance(task, tasks.Language):
        (tmp_path / "corpus").mkdir()
        for at in range(20):
            (tmp_path / "corpus" / f"{at}.txt").write_text(f"text {at}: " + "ab" * at + " the quick brown fox" * 9)
        monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
        task = replace(task, corpus=str(tmp_path / "corpus"))
    check_task(task)


def test_every_built_in_task_is_checked() -> None:
    assert {task.name for task in TASKS} == set(names())


# --- broken objects ---------------------------------------------------------------------------------------------------


def broken(base: type, **entries: Any) -> Any:
    """An object of a class that differs from `base` in these entries."""
    return type(base.__name__, (base,), entries)()


def batches(change: Callable[..., Any]) -> Any:
    """`Counting` whose batch is `change` of its own method, and of step, size and seed."""
    return broken(Counting, batch=lambda self, *given: change(Counting().batch, *given))


def changed(method: str, change: Callable[..., Any]) -> Any:
    """`Counting` with a `method` that returns `change` of what it should, and of the model and further arguments."""
    return broken(Counting, **{
        method: lambda self, *given: change(getattr(Counting, method)(self, *given), *given),
    })  # fmt: skip


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


def moved(value: Any, model: nn.Module) -> Any:
    next(model.parameters()).mul_(1.01)
    return value


def retrained(value: Any, model: nn.Module) -> Any:
    model.train()
    return value


def shifted(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).add_(random.random())
    return model


def with_more(model: nn.Module) -> nn.Module:
    model.unused = nn.Parameter(torch.zeros(1))
    return model


BROKEN: list[tuple[str, Any]] = [  # what the error names before its colon, or a part of the law after it, and the task
    ("frozen dataclass", 3),
    ("NotFrozen", NotFrozen()),
    ("fields: change", Lost(limit=None)),
    ("batch for step", batches(lambda batch, step, size, seed: {**batch(step, size, seed), "noise": torch.rand(size)})),
    ("for every step", batches(lambda batch, step, size, seed: batch(0, size, seed))),
    ("for every seed", batches(lambda batch, step, size, seed: batch(step, size, 0))),
    ("first dimension", batches(lambda batch, step, size, seed: batch(step, size + 1, seed))),
    ("build: gives another", changed("build", shifted)),
    ("loss: is nan", Counting(poison=0)),
    ("no finite gradient", Counting(poison=0, poisoned="gradient")),
    ("mean over count", changed("loss", lambda loss, model, batch: loss * Counting().count(batch))),
    ("mean over count", changed("count", lambda count, batch: 8)),
    ("count: returned", changed("count", lambda count, batch: 0)),
    ("gradient to unused", changed("build", with_more)),
    ("gradient of zero", changed("loss", lambda loss, *_: loss - loss + loss.detach())),
    ("evaluate: returned", changed("evaluate", lambda measured, model: {"loss": float(torch.rand(()))})),
    ("check: written as JSON", changed("check", lambda measured, model: {"by_head": np.float32(1)})),
    ("evaluate: gives another", changed("evaluate", moved)),
    ("check: gives another", changed("check", retrained)),
    ("figures: called", changed("figures", lambda drawn, model: {"map": "not a figure"})),
    ("files: are not", changed("files", lambda files: {"notes/one.txt": "a file in a folder"})),
]  # fmt: skip


@pytest.mark.parametrize(("law", "task"), BROKEN, ids=[law for law, _ in BROKEN])
def test_a_task_that_breaks_a_law_is_refused(law: str, task: Any) -> None:
    with pytest.raises(CheckFailed) as raised:
        check_task(task)
    assert law in str(raised.value)


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


def fails(self: Experiment, results: Results) -> list[Verdict]:
    return [replace(Experiment.conclude(self, results)[0], holds=FAILS)]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("made", [Computed(), Trained()], ids=lambda made: made.name)
def test_correct_experiments_pass(made: Any) -> None:
    check_experiment(made)


SECOND = Criterion("C901", "2026-11-23", "b plus a", bound=0.0)
BROKEN_EXPERIMENTS: list[tuple[str, Any]] = [
    ("question:", {"question": "It is more."}),
    ("criteria:", {"criteria": (replace(Computed.criteria[0], dated="today"),)}),
    ("claims:", {"claims": ("C900", "C900")}),
    ("settings:", {"settings": lambda self, seed, quick: Trained().settings(0, quick)}),
    ("measure:", {"compute": lambda self, seed, quick: {"a": {"x": random.random()}, "b": {"x": 2.0}}}),
    ("quick form:", {"compute": lambda self, seed, quick: {}["not today"]}),
    ("claims:", {"criteria": (*Computed.criteria, SECOND)}),
    ("quick form:", {"criteria": (*Computed.criteria, SECOND), "claims": ("C900", "C901")}),
    ("effects:", {"effects": lambda self, results: {"C900": [Effect("", [float("nan")])]}}),
    ("effects: are of", {"effects": lambda self, results: {"C900": [Effect("", [1.0])], "C901": []}}),
    ("conclude:", {"conclude": fails}),
]


@pytest.mark.parametrize(("law", "entries"), BROKEN_EXPERIMENTS, ids=[law for law, _ in BROKEN_EXPERIMENTS])
def test_an_experiment_that_breaks_a_law_is_refused(
    law: str, entries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, entry in {"figure": lambda self, results: Figure((1, 1)), **entries}.items():
        monkeypatch.setattr(Computed, name, entry)  # a class that pickle finds
    with pytest.raises(CheckFailed) as raised:
        check_experiment(Computed())
    assert f"Computed.{law}" in str(raised.value)
