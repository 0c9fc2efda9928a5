"""Experiments and tasks of installed packages, found through entry points: a fake distribution lies on `sys.path`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from conftest import refused
from qkv import InputError, cli
from qkv_lab import experiments, settings, tasks
from qkv_lab.experiments.registry import BUILT_IN

Install = Callable[..., None]

EXPERIMENT = """
from matplotlib.figure import Figure
from qkv_lab.experiments import Conclusion, Experiment, Verdict

class Dice(Experiment):
    name, question, claims = "dice", "Is six more than one?", ("X001",)

    def compute(self, seed, quick):
        return {"one": {"x": 1}, "six": {"x": 6}}

    def conclude(self, results):
        more = results.values("six", "measured.x") > results.values("one", "measured.x")
        return Conclusion([Verdict("X001", "holds" if more else "does not hold", "6 > 1")], "Six", "Six is more.")

    def figure(self, results):
        return Figure()

class Misnamed(Dice):
    name = "cards"

class Abstract(Experiment):
    name, question, claims = "abstract", "?", ()
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

@dataclass(frozen=True)
class Empty:
    name: ClassVar[str] = "empty"
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


def test_an_experiment_of_an_installed_package_runs_from_the_command_line(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("dicelab", {"experiments": {"dice": "dicelab:Dice"}}, {"dicelab": EXPERIMENT})
    assert experiments.names() == (*BUILT_IN, "dice")
    cli.main(["experiment"])
    assert "Is six more than one?" in capsys.readouterr().out
    out = tmp_path / "out"
    cli.main(["experiment", "dice", "--out", str(out)])
    assert json.loads((out / "dice.json").read_text())["verdicts"][0]["holds"] == "holds"
    assert "## dice" in (out / "README.md").read_text()
    (out / "settings.json").write_text("{}")
    assert "## settings" not in experiments.table(out)


def test_a_task_of_an_installed_package_trains_from_the_command_line_and_from_its_settings(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("echolab", {"tasks": {"echo": "echolab:Echo"}}, {"echolab": TASK})
    assert tasks.names()[-1] == "echo"
    cli.main(["train"])
    assert "Say it again." in capsys.readouterr().out
    out = tmp_path / "run"
    flags = ["--length", "4", "--steps", "2", "--model.layers", "1"]
    cli.main(["train", "echo", *flags, "--out", str(out)])
    assert json.loads((out / "result.json").read_text())["task"] == "echo"
    task, training = settings.from_toml(out / "run.toml")
    assert (task.name, task.length, training.steps) == ("echo", 4, 2)  # type: ignore[attr-defined]


def test_entry_points_are_not_read_for_built_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(**group: str) -> None:
        raise AssertionError("entry points were read")

    monkeypatch.setattr("qkv._registry.entry_points", read)
    assert experiments.experiment("heads").name == "heads"
    assert tasks.task_class("copy").name == "copy"
    with pytest.raises(AssertionError, match="were read"):
        tasks.names()


def test_listing_names_imports_no_plugin(install: Install) -> None:
    install("badlab", {"experiments": {"bad": "badlab:Bad"}}, {"badlab": "raise RuntimeError('imported')"})
    assert "bad" in experiments.names()
    assert "badlab" not in sys.modules


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("dice", "nowhere:Dice", "ModuleNotFoundError: No module named 'nowhere'"),
        ("dice", "mylab:Dicce", "AttributeError: "),
        ("dice", "mylab_raises:Dice", "ZeroDivisionError: division by zero"),
        ("dice", "mylab:Misnamed", "has the name 'cards' in its class, expected 'dice'"),
        ("abstract", "mylab:Abstract", "does not define criteria, effects"),
        ("dice", "mylab:Figure", r"is not a subclass of qkv_lab\.experiments\.Experiment"),
        ("dice", "mylab:Dice.name", "is a str, expected a class"),
    ],
)
def test_a_broken_experiment_names_its_package(
    install: Install, name: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install("mylab", {"experiments": {name: value}}, {"mylab": EXPERIMENT, "mylab_raises": "1 / 0"})
    with pytest.raises(InputError, match=rf"^experiment '{name}' of the installed package mylab 1\.2 .*{reason}"):
        experiments.experiment(name)
    with refused("experiment", match=reason):
        experiments.run(name, "unused", quick=True)
    cli.main(["experiment"])  # the list shows the others, and the reason
    shown = capsys.readouterr().out
    assert "learning_rate" in shown
    assert "mylab 1.2" in " ".join(shown.split()), "in a narrow column it is wrapped"
    assert cli.main(["experiment", "all", "--quick"]) == 2  # before anything is trained


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("echo", "nowhere:Echo", "ModuleNotFoundError"),
        ("echo", "mylab:dataclass", "is a function, expected a class"),
        ("echo", "mylab:ClassVar", "expected a class"),
        (
            "empty",
            "mylab:Empty",
            "does not define training, build, batch, count, loss, evaluate, check, figures, files, m",
        ),
        ("training", "mylab:Reserved", "a key of run.toml"),
    ],
)
def test_a_broken_task_names_its_package(
    install: Install, name: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install("mylab", {"tasks": {name: value}}, {"mylab": TASK})
    with pytest.raises(InputError, match=rf"^task '{name}' of the installed package mylab 1\.2 .*{reason}"):
        tasks.task_class(name)
    cli.main(["train"])
    assert "mylab 1.2" in capsys.readouterr().out


def test_a_name_that_is_built_in_is_refused(install: Install) -> None:
    install("mylab", {"experiments": {"heads": "mylab:Heads"}, "tasks": {"copy": "mylab:Copy"}})
    with refused("experiment", match="built-in"):
        experiments.names()
    with refused("task", match="built-in"):
        tasks.names()
    assert type(experiments.experiment("heads")).__module__ == "qkv_lab.experiments.architecture"
    assert tasks.task_class("copy").__module__ == "qkv_lab.tasks.sequences"


def test_a_name_that_two_packages_register_is_refused(install: Install) -> None:
    install("one", {"experiments": {"dice": "one:Dice"}})
    install("two", {"experiments": {"dice": "two:Dice"}})
    for ask in (experiments.names, lambda: experiments.experiment("dice")):
        with pytest.raises(InputError, match=r"'dice' is registered by one 1\.2 and two 1\.2"):
            ask()


def test_an_unknown_name_lists_those_of_installed_packages(install: Install, tmp_path: Path) -> None:
    install("mylab", {"experiments": {"dice": "mylab:Dice"}, "tasks": {"echo": "mylab:Echo"}})
    with pytest.raises(InputError, match="dropout, dice; did you mean 'dice'"):
        experiments.experiment("dise")
    (tmp_path / "run.toml").write_text('task = "ecco"')
    with pytest.raises(InputError, match="backcopy, echo; did you mean 'echo'"):
        settings.from_toml(tmp_path / "run.toml")
