"""Experiments and tasks of installed packages, found through entry points: a fake distribution lies on `sys.path`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from conftest import Command, refused
from qkv_lab import experiments, settings, tasks
from qkv_lab.experiments.registry import BUILT_IN
from qkv_lab.tasks.symbols import Symbols

Install = Callable[..., None]

EXPERIMENT = """
from matplotlib.figure import Figure
from qkv_lab.experiments import Experiment, Verdict

class Dice(Experiment):
    name, question, claims = "dice", "Is six more than one?", ("X001",)

    def compute(self, seed, quick):
        return {"one": {"x": 1}, "six": {"x": 6}}

    def conclude(self, results):
        more = results.values("six", "measured.x") > results.values("one", "measured.x")
        return [Verdict("X001", "holds" if more else "does not hold", "6 > 1")]

    def figure(self, results):
        return Figure()

class Misnamed(Dice):
    name = "cards"

"""
TASK = """
from dataclasses import dataclass
from typing import ClassVar
from qkv_lab.tasks import Reversal

@dataclass(frozen=True)
class Echo(Reversal):
    \"\"\"Say it again.\"\"\"
    name: ClassVar[str] = "echo"

@dataclass(frozen=True)
class Reserved(Reversal):
    name: ClassVar[str] = "training"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with these entry points and modules on `sys.path`."""
    modules: list[str] = []

    def put(package: str, entries: Mapping[str, Mapping[str, str]], files: Mapping[str, str] | None = None) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        groups = [
            f"[qkv.{group}]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
            for group, found in entries.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, code in (files or {}).items():
            (folder / f"{module}.py").write_text(code)
            modules.append(module)
        monkeypatch.syspath_prepend(str(folder))

    yield put
    for module in modules:
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("undrawn")
def test_an_experiment_of_an_installed_package_runs_from_the_command_line(
    install: Install, tmp_path: Path, command: Command
) -> None:
    install("dicelab", {"experiments": {"dice": "dicelab:Dice"}}, {"dicelab": EXPERIMENT})
    assert experiments.names() == (*BUILT_IN, "dice")
    assert "dicelab" not in sys.modules, "listing names imports no plugin"
    assert "Is six more than one?" in command.succeeds("experiment")
    command.succeeds("experiment", "dice", "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "dice.json").read_text())["verdicts"][0]["holds"] == "holds"
    assert "## dice" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "out" / "settings.json").write_text("{}")
    assert "## settings" not in experiments.table(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_task_of_an_installed_package_trains_from_the_command_line_and_from_its_settings(
    install: Install, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Symbols, "UNSEEN", 20)
    install("echolab", {"tasks": {"echo": "echolab:Echo"}}, {"echolab": TASK})
    assert tasks.names()[-1] == "echo"
    assert "Say it again." in command.succeeds("train")
    out = tmp_path / "run"
    command.succeeds("train", "echo", "--length", 4, "--steps", 2, "--model.layers", 1, "--out", out)
    assert json.loads((out / "result.json").read_text())["task"] == "echo"
    task, training = settings.from_toml(out / "run.toml")
    assert (task.name, task.length, training.steps) == ("echo", 4, 2)


@pytest.mark.parametrize(
    ("kind", "name", "value", "reason"),
    [
        ("experiment", "dice", "mylab_raises:Dice", "ZeroDivisionError"),
        ("experiment", "dice", "mylab:Misnamed", "the name 'cards'"),
        ("task", "echo", "mytask:dataclass", "is a function"),
        ("task", "training", "mytask:Reserved", "a key of run.toml"),
    ],
)
def test_a_broken_plugin_is_refused_with_the_name_of_its_package(
    install: Install, kind: str, name: str, value: str, reason: str, command: Command
) -> None:
    files = {"mylab": EXPERIMENT, "mylab_raises": "1 / 0", "mytask": TASK}
    install("mypackage", {f"{kind}s": {name: value}}, files)
    load = experiments.experiment if kind == "experiment" else tasks.task_class
    with refused(kind, match=rf"^{kind} '{name}' of the installed package mypackage 1\.2 .*{reason}"):
        load(name)
    shown = command.succeeds("experiment" if kind == "experiment" else "train")  # the list shows the others, and why
    assert "mypackage 1.2" in " ".join(shown.split()), "in a narrow column it is wrapped"
    if kind == "experiment":
        command.refuses("experiment", "all", "--quick")  # before anything is trained


def test_a_name_that_is_taken_is_refused(install: Install) -> None:
    install("one", {"experiments": {"heads": "one:Heads"}, "tasks": {"copy": "one:Copy"}})
    for argument, ask in (("experiment", experiments.names), ("task", tasks.names)):
        with refused(argument, match="built-in"):
            ask()
    assert type(experiments.experiment("heads")).__module__ == "qkv_lab.experiments.architecture"
    assert tasks.task_class("copy").__module__ == "qkv_lab.tasks.sequences"
