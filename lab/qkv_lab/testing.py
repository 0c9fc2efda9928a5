"""`check_task` and `check_experiment`: a task or an experiment of your own keeps the laws of the lab."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.testing import CheckFailed
from qkv.testing.laws import calling, fail
from qkv_lab import log, loop, resume, settings
from qkv_lab.experiments.base import Experiment
from qkv_lab.experiments.record import key, load, results_in
from qkv_lab.experiments.registry import REGISTRY as EXPERIMENTS
from qkv_lab.experiments.results import Results
from qkv_lab.experiments.run import redraw, run
from qkv_lab.task import Batch, Task
from qkv_lab.tasks import REGISTRY as TASKS

__all__ = ["check_experiment", "check_task"]

SIZE = 5
"""Sequences in a batch; odd, so that its parts differ in size."""
TOLERANCE = 1000 * torch.finfo(torch.float32).eps
"""Of losses in float32, relative to 1 or to the loss."""
__dir__ = __all__.copy


def check_task(task: Task) -> None:
    """Check that a task keeps the laws of the protocol `qkv_lab.Task`.

    - It is a frozen dataclass that run.toml gives back unchanged.
    - ``batch`` depends on step, size and seed alone, and ``build`` on torch's seed alone.
    - ``loss`` is finite, the mean over ``count`` predictions, and has a gradient for every trained parameter.
    - ``evaluate`` and ``check`` return the same twice, in a form that JSON can hold, and leave the model as it is.
    - ``figures`` can be drawn, and ``files`` are texts.
    - A run of four steps learns, and one that resumes after two steps ends with the same weights and metrics.

    It takes about six times as long as ``evaluate`` and ``check`` together: pass a task with a small model.

    Raises:
        CheckFailed: an `AssertionError` whose message names the class, the method and the law.

    >>> from dataclasses import dataclass
    >>> from qkv.models import DecoderConfig
    >>> from qkv_lab.tasks import Reversal
    >>> small = DecoderConfig(d_model=8, layers=1, heads=2)
    >>> check_task(Reversal(length=4, model=small))
    >>> @dataclass(frozen=True)
    ... class SumOfLosses(Reversal):
    ...     def loss(self, model, batch):
    ...         return super().loss(model, batch) * self.count(batch)
    >>> try:
    ...     check_task(SumOfLosses(length=4, model=small))
    ... except AssertionError as error:
    ...     print(error)
    SumOfLosses.loss: is not the mean over count: of a batch, expected that of its parts, weighted by their counts
    """
    with _restored_generators():
        _check_fields(task)
        _check_batches(task)
        torch.manual_seed(0)
        model = task.build()
        torch.manual_seed(0)
        _same(task, "build", "weights after the same seed of torch", _state(model), _state(task.build()))
        _check_loss(task, model)
        _check_measured(task, model.eval())
        _check_training(task)


def _check_fields(task: Any) -> None:
    cls: Any = type(task)
    if not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
        raise CheckFailed(f"{cls.__name__}: got {task!r}, expected an object of a frozen dataclass")
    if problem := TASKS.problem(cls):
        raise CheckFailed(f"{cls.__name__} {problem}")
    with calling(task, "fields", "written to run.toml and read again"):
        text = settings.to_toml(task, cls.training())
        if settings.updated(cls(), tomllib.loads(text)[task.name]) != task:
            fail(task, "fields", "change when they are written to run.toml and read again")


def _check_batches(task: Task) -> None:
    def batch(step: int, seed: int = 0) -> dict[str, Tensor]:
        with calling(task, "batch", f"called for step {step}"):
            made = {name: x.clone() for name, x in task.batch(step, SIZE, seed).items()}
        if any(len(x) != SIZE for x in made.values()):
            fail(task, "batch", f"has another first dimension than its size, {SIZE}")
        return made

    _set_generators(1)
    first = {step: batch(step) for step in (0, 1, 5)}
    _set_generators(2)
    for step in (5, 0, 1):
        _same(task, "batch", f"batch for step {step} in another order", first[step], batch(step))
    if all(_equal(first[0], other) for other in (first[1], first[5])):
        fail(task, "batch", "is the same for every step, expected others")
    if all(_equal(first[0], batch(0, seed)) for seed in (1, 2)):
        fail(task, "batch", "is the same for every seed, expected others")


def _check_loss(task: Task, model: nn.Module) -> None:
    def counted(batch: Batch) -> tuple[int, float]:
        with calling(task, "loss", "called in evaluation mode"), torch.no_grad():
            count, loss = task.count(batch), task.loss(model.eval(), batch)
        if not isinstance(count, int) or count < 1:
            fail(task, "count", f"returned {count!r}, expected an int, at least 1")
        if loss.ndim or not bool(loss.isfinite()):
            fail(task, "loss", f"is {loss}, expected one finite number")
        return count, loss.item()

    batch = task.batch(0, SIZE, 0)
    count, loss = counted(batch)
    cut = {name: x.tensor_split(2) for name, x in batch.items()}
    parts = [counted({name: x[i] for name, x in cut.items()}) for i in range(2)]
    mean = sum(n * x for n, x in parts) / sum(n for n, _ in parts)
    if sum(n for n, _ in parts) != count or not abs(loss - mean) <= TOLERANCE * max(1.0, abs(mean)):
        fail(
            task, "loss", "is not the mean over count: of a batch, expected that of its parts, weighted by their counts"
        )
    with calling(task, "loss", "differentiated"):
        task.loss(model.train(), batch).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, gradient in gradients.items():
        if gradient is None or not bool(gradient.isfinite().all()):
            fail(task, "loss", f"gives no finite gradient to {name}, expected one for each trained parameter")
    if not any(bool(gradient.any()) for gradient in gradients.values() if gradient is not None):
        fail(task, "loss", "has a gradient of zero for every parameter")
    model.zero_grad()


def _check_measured(task: Task, model: nn.Module) -> None:
    before = _state(model)
    for method in ("evaluate", "check"):
        made = []
        for seed in (1, 2):
            _set_generators(seed)
            with calling(task, method, "called for a new model"), torch.no_grad():
                made.append(getattr(task, method)(model))
            _same(task, method, "model after it", before, _state(model))
        if _json(task, method, made[0]) != _json(task, method, made[1]):
            fail(task, method, "returned other numbers for the same model the second time")
    with calling(task, "figures", "called for a new model"), torch.no_grad():
        for figure in task.figures(model).values():
            figure.savefig(BytesIO(), format="png", dpi=40)
    _same(task, "figures", "model after it", before, _state(model))
    with calling(task, "files", "called"):
        if not all(isinstance(text, str) and Path(name).name == name for name, text in task.files().items()):
            fail(task, "files", "are not texts by the name of a file")


def _check_training(task: Task) -> None:
    """Four steps of training, and the last two again from the checkpoint."""
    training = replace(
        task.training(), steps=4, batch=4, accumulate=1, warmup=1, precision="float32", log_every=1,
        evaluate_every=4, save_every=2,
    )  # fmt: skip

    def train(folder: Path) -> loop.Trained:
        with calling(task, "training", "trained for four steps"):
            return loop.train(replace(task), training, folder, progress=False, figures=False)  # type: ignore[type-var]

    with TemporaryDirectory() as temporary:
        whole, resumed = Path(temporary, "whole"), Path(temporary, "resumed")
        trained = train(whole)
        torch.manual_seed(training.seed)
        if _equal(_state(task.build()), _state(trained.model)):
            fail(task, "training", "changed no weight in four steps")
        saved = train(whole).model  # loaded, not trained
        with torch.no_grad():
            if _json(task, "evaluate", task.evaluate(saved)) != _json(task, "evaluate", trained.evaluation):
                fail(task, "build", "does not follow from configuration and weights: the saved model has other metrics")
        resumed.mkdir()
        for file in (settings.RUN, log.METRICS):
            shutil.copy(whole / file, resumed / file)
        first = resume.checkpoints(whole)[0]
        shutil.copytree(first, resumed / first.name)
        _set_generators(2)
        _same(task, "training", "weights of a resumed run", _state(trained.model), _state(train(resumed).model))


def check_experiment(experiment: Experiment) -> None:
    """Check that an experiment keeps the laws of `qkv_lab.experiments.Experiment`.

    - Name, question and criteria are there; each criterion has a date, and each claim one criterion.
    - ``settings`` gives the same runs twice, with the seed that it was asked for.
    - The quick form runs to its end, twice with the same numbers, which JSON can hold.
    - ``effects`` gives each claim one finite number per seed.
    - The verdicts are those of the criteria, and the same from the saved numbers; the figure can be drawn.

    Raises:
        CheckFailed: an `AssertionError` whose message names the class, the method and the law.

    >>> from qkv_lab.experiments import Criterion, Effect, Experiment
    >>> class Sum(Experiment):
    ...     name, question = "sum", "Is the sum of two dice more than one of them?"
    ...     criteria = (Criterion("MINE-1", "today", "Two dice minus one", bound=0.0),)
    ...     def compute(self, seed, quick):
    ...         return {"one": {"points": 1 + seed % 6}, "two": {"points": 3 + seed % 6}}
    ...     def effects(self, results):
    ...         return {"MINE-1": [Effect("", results.differences("two", "one", "measured.points"))]}
    >>> try:
    ...     check_experiment(Sum())
    ... except AssertionError as error:
    ...     print(error)
    Sum.criteria: the criterion of MINE-1 is dated 'today', expected a day such as 2026-11-23
    """
    e = experiment
    if not isinstance(e, Experiment):
        raise CheckFailed(f"got {e!r}, expected an object of a class that inherits from qkv_lab.experiments.Experiment")
    if problem := EXPERIMENTS.problem(type(e)):
        raise CheckFailed(f"{type(e).__name__} {problem}")
    with _restored_generators(), TemporaryDirectory() as folder:
        _check_criteria(e)
        with calling(e, "pickle", "called as `qkv experiment --jobs 2` does"):
            pickle.loads(pickle.dumps(e))
        for seed in (0, 1):
            with calling(e, "settings", f"called for seed {seed}"):
                runs = [{v: key(s) for v, s in e.settings(seed, True).items()} for _ in range(2)]
            if runs[0] != runs[1] or any(s.training.seed != seed for s in e.settings(seed, True).values()):
                fail(e, "settings", f"are other runs the second time, or do not have the seed {seed}")
        first, again = (_quick(e, Path(folder), generators) for generators in (1, 2))
        if _json(e, "measure", _numbers(first)) != _json(e, "measure", _numbers(again)):
            fail(e, "measure", "or compute gave other numbers with the same seed the second time")
        _check_verdicts(e, first)
        file = Path(folder, f"{e.name}.json")
        before = json.loads(file.read_text(encoding="utf-8"))["verdicts"]
        redraw(e, folder)
        if json.loads(file.read_text(encoding="utf-8"))["verdicts"] != before:
            fail(e, "conclude", "has other verdicts for the saved numbers")


def _check_criteria(e: Experiment) -> None:
    if len(e.name.split()) != 1 or not e.question.strip().endswith("?"):
        fail(e, "question", f"is {e.question!r} of {e.name!r}, expected one word as the name, and a question")
    if not e.claims or len(set(e.claims)) < len(e.claims):
        fail(e, "claims", f"is {e.claims!r}, expected each claim once, and at least one")
    for c in e.criteria:
        try:
            date.fromisoformat(c.dated)
        except ValueError:
            fail(e, "criteria", f"the criterion of {c.claim} is dated {c.dated!r}, expected a day such as 2026-11-23")
    if e.criteria and [c.claim for c in e.criteria] != list(e.claims):
        fail(e, "claims", f"is {list(e.claims)}, expected those of the criteria")


def _quick(e: Experiment, folder: Path, generators: int) -> Results:
    """The results of the quick form; trained models are kept for the next call."""
    _set_generators(generators)
    with calling(e, "quick form", "run to its end"):
        run(e, folder, quick=True, progress=False)
        return results_in(load(folder / f"{e.name}.json"))


def _numbers(results: Results) -> dict[str, Any]:
    return {v: [asdict(o) | {"seconds": None} for o in outcomes] for v, outcomes in results.variants.items()}


def _check_verdicts(e: Experiment, results: Results) -> None:
    if not e.criteria or type(e).effects is Experiment.effects:
        return  # the experiment has a `conclude` of its own
    with calling(e, "effects", "called with the results of the quick form"):
        effects, found, expected = e.effects(results), e.conclude(results), Experiment.conclude(e, results)
    if set(effects) != set(e.claims) or not all(effects.values()):
        fail(e, "effects", f"are of {sorted(effects)}, expected one or more for each of {list(e.claims)}")
    for claim, some in effects.items():
        if not np.isfinite(np.concatenate([np.asarray(one.values, float) for one in some])).all():
            fail(e, "effects", f"has no finite number for {claim}")
    said, right = ({v.claim: v.holds for v in verdicts} for verdicts in (found, expected))
    if said != right:
        fail(e, "conclude", f"says {said}, expected {right} by the criteria")


# --- what both need ---------------------------------------------------------------------------------------------------


def _json(thing: object, method: str, made: object) -> str:
    with calling(thing, method, "written as JSON"):
        return json.dumps(log.finite(made))


def _state(model: nn.Module) -> dict[str, Tensor]:
    """All that a measurement must leave as it is: weights, buffers, the mode and the hooks of each module."""
    found = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        found[f"{name} mode"] = torch.tensor([module.training, hooks])
    return found


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a if not name.endswith(" mode"))


def _same(thing: object, method: str, what: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    for name in a:
        if name.endswith(" mode") and method == "training":
            continue
        if name not in b or not torch.equal(a[name], b[name]):
            fail(thing, method, f"gives another {what}, expected the same: {name!r} differs")


def _set_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def _restored_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
