"""Checks of a task's measurements of a model, its figures and its files."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import PurePath

import torch
from torch import nn

from qkv.models.checkpoint import CONFIG, WEIGHTS
from qkv.testing.inputs import calling, fail, shape_of
from qkv_lab.task import Measured, Task
from qkv_lab.testing.randomness import set_generators
from qkv_lab.testing.values import changed, check_entries, first_difference, state_of


@torch.no_grad()
def check_measured(task: Task, model: nn.Module) -> None:
    """``evaluate`` and ``check`` return the same twice, which JSON can hold, and leave the model as it is."""
    model.eval()
    for method in ("evaluate", "check"):
        before = state_of(model)
        made: list[Measured] = []
        for seed in (1, 2):
            set_generators(seed)
            with calling(task, method, "called for a new model"):
                made.append(getattr(task, method)(model))
            _check_unchanged(task, method, before, model)
        check_entries(task, method, made[0])
        wrong = first_difference(made[0], made[1])
        if wrong is not None:
            fail(task, method, f"returned other numbers for the same model the second time, expected the same: {wrong}")


@torch.no_grad()
def check_figures(task: Task, model: nn.Module) -> None:
    """``figures`` returns matplotlib figures that can be drawn, and leaves the model as it is."""
    from matplotlib.figure import Figure

    model.eval()
    before = state_of(model)
    with calling(task, "figures", "called for a new model"):
        made = task.figures(model)
    _check_unchanged(task, "figures", before, model)
    if not isinstance(made, Mapping):
        fail(task, "figures", f"returned {shape_of(made)}, expected figures by name")
    for name, figure in made.items():
        _check_file_name(task, "figures", name, taken={"loss"})
        if not isinstance(figure, Figure):
            fail(task, "figures", f"returned {shape_of(figure)} as {name!r}, expected a matplotlib.figure.Figure")
        with calling(task, "figures", f"drawn: {name!r}"):
            figure.savefig(BytesIO(), format="png", dpi=40)


def check_files(task: Task) -> None:
    """``files`` returns the same texts twice."""
    made = []
    for _ in range(2):
        with calling(task, "files", "called"):
            made.append(task.files())
    if not isinstance(made[0], Mapping):
        fail(task, "files", f"returned {shape_of(made[0])}, expected texts by name")
    for name, text in made[0].items():
        _check_file_name(task, "files", name, taken={CONFIG, WEIGHTS})
        if not isinstance(text, str):
            fail(task, "files", f"returned {shape_of(text)} as {name!r}, expected text")
    if made[0] != made[1]:
        fail(task, "files", "returned other texts the second time, expected the same")


def _check_file_name(task: Task, method: str, name: object, taken: set[str]) -> None:
    if not isinstance(name, str) or not name or PurePath(name).name != name:
        fail(task, method, f"has the name {name!r}, expected the name of a file, without folders")
    if name in taken:
        fail(task, method, f"has the name {name!r}, which the lab writes itself, expected another name")


def _check_unchanged(task: Task, method: str, before: dict[str, torch.Tensor], model: nn.Module) -> None:
    wrong = changed(before, state_of(model))
    if wrong is not None:
        fail(task, method, f"changed the model, expected it as before: {wrong}")
