"""`check_task`: a task follows the protocol `qkv_lab.Task`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from qkv.testing.inputs import CheckFailed, calling, fail, shape_of
from qkv_lab import settings
from qkv_lab.task import Task, Training
from qkv_lab.tasks.registry import REGISTRY
from qkv_lab.testing.batches import check_batches, check_gradients, check_loss
from qkv_lab.testing.measured import check_figures, check_files, check_measured
from qkv_lab.testing.randomness import restored_generators, set_generators
from qkv_lab.testing.training import check_training
from qkv_lab.testing.values import changed, state_of


def check_task(task: Task) -> None:
    """Check that a task follows the protocol `qkv_lab.Task`; for use in your own tests.

    It checks:

    - that the task is a frozen dataclass of plain values, which run.toml gives back unchanged;
    - that ``batch`` depends on step, size and seed alone: on no global generator, and not on earlier batches;
    - that ``build`` makes the same model for the same seed of torch;
    - that ``loss`` is finite, and the mean over ``count`` predictions: the loss of a batch is the mean of those of its
      parts, weighted by their counts; and that every parameter receives a gradient;
    - that ``evaluate`` and ``check`` return the same numbers twice, in a form that JSON can hold, and leave the model
      as it is; that ``figures`` can be drawn, and that ``files`` are texts;
    - four steps of training on batches of four: that weights change, that a run which resumes after two steps ends with
      the same weights (exactly on a CPU), and that the saved model is the trained one.

    It takes about six times as long as ``evaluate`` and ``check`` together, so pass a task with a small model and few
    held-out data. It needs the packages of ``pip install 'qkv[train]'``.

    Args:
        task: the object.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from dataclasses import dataclass
    >>> from qkv_lab.tasks import Reversal
    >>> from qkv.models import DecoderConfig
    >>> check_task(Reversal(length=4, model=DecoderConfig(d_model=8, layers=1, heads=2)))
    >>> @dataclass(frozen=True)
    ... class SumOfLosses(Reversal):
    ...     def loss(self, model, batch):
    ...         return super().loss(model, batch) * self.count(batch)
    >>> try:
    ...     check_task(SumOfLosses())
    ... except AssertionError as error:
    ...     print(str(error)[:90])
    SumOfLosses.loss: is not the mean over its count of 30 predictions: the loss of a batch is
    """
    with restored_generators():
        _check_settings(task)
        check_batches(task)
        model = _check_build(task)
        check_loss(task, model)
        check_gradients(task, model)
        check_measured(task, model)
        check_figures(task, model)
        check_files(task)
        check_training(task)


def _check_settings(task: Any) -> None:
    """A frozen dataclass of plain values with a name, training settings, and a form in TOML."""
    cls = type(task)
    if not is_dataclass(type(task)):
        raise CheckFailed(
            f"check_task: got {shape_of(task)}, expected an object of a dataclass with the methods of qkv_lab.Task"
        )
    problem = REGISTRY.problem(cls)
    if problem is not None:
        raise CheckFailed(f"{cls.__name__} {problem}")
    if not isinstance(task.name, str) or len(task.name.split()) != 1:
        fail(task, "name", f"is {task.name!r}, expected one word, the NAME of: qkv train NAME")
    if not cls.__dataclass_params__.frozen:
        raise CheckFailed(f"{cls.__name__}: its fields can be set, expected @dataclass(frozen=True)")
    if isinstance(task.model, type) or not is_dataclass(task.model):
        fail(task, "model", f"is {shape_of(task.model)}, expected a dataclass, the configuration of the model")
    _check_plain(task, task)
    with calling(task, "training", "called on the class"):
        training = cls.training()
    if not isinstance(training, Training):
        fail(task, "training", f"returned {shape_of(training)}, expected qkv_lab.Training")
    with calling(task, "__init__", "called without arguments, as `qkv train` does"):
        default = cls()
    with calling(task, "fields", "written to run.toml and read again"):
        text = settings.to_toml(task, training)
        made = settings.updated(default, settings.parse_toml(text)[task.name])
    if made != task:
        differs = settings.difference(settings.entries_of(made), settings.entries_of(task))
        if not differs:
            fail(
                task, "fields", "are the same in another object, which is not equal: expected a dataclass with eq=True"
            )
        fail(task, "fields", f"change when they are written to run.toml and read again: {'; '.join(differs)}")


def _check_plain(task: object, value: Any, where: str = "") -> None:
    for field in fields(value):
        x, name = getattr(value, field.name), f"{where}{field.name}"
        if is_dataclass(x) and not isinstance(x, type):
            _check_plain(task, x, f"{name}.")
        elif x is not None and type(x) not in (bool, int, float, str):
            expected = "text, a number, True or False, None, or a dataclass of these, which run.toml can hold"
            fail(task, name, f"is {shape_of(x)}, expected {expected}")


def _check_build(task: Task) -> nn.Module:
    """A new model, whose weights depend on the seed of torch alone."""
    states, models = [], []
    for seed, others in ((0, 1), (0, 2), (3, 1)):
        set_generators(others)  # of Python and NumPy: the weights must not depend on them
        torch.manual_seed(seed)
        with calling(task, "build", f"called after torch.manual_seed({seed})"):
            model = replace(task).build()  # type: ignore[type-var]  # a dataclass
        if not isinstance(model, nn.Module):
            fail(task, "build", f"returned {shape_of(model)}, expected a torch.nn.Module")
        models.append(model)
        states.append(state_of(model))
    first, again, other = states
    wrong = changed(first, again)
    if wrong is not None:
        fail(
            task, "build", f"made other weights after torch.manual_seed(0) the second time, expected the same: {wrong}"
        )
    if models[0] is models[1] or changed(first, other) is None:
        fail(task, "build", "made the same weights after torch.manual_seed(0) and (3), expected others: new models")
    if not any(p.requires_grad for p in models[0].parameters()):
        fail(task, "build", "made a model without trained parameters, expected some")
    return models[0]
