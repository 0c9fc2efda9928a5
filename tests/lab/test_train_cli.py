"""`qkv train` and `qkv experiment`: settings by flag and by TOML, lists, results, one sentence for what is wrong."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import refused
from qkv import Attention, InputError
from qkv.cli import commands, main
from qkv_lab import experiments, settings, tasks
from qkv_lab import loop as lab
from qkv_lab.cli.train import Run
from qkv_lab.task import Training
from qkv_lab.tasks.sequences import Reversal


class Asked:
    """What `train` was asked for, instead of training."""

    def __init__(self) -> None:
        self.task: Any = None
        self.training: Any = None
        self.folder: Any = None
        self.options: dict[str, Any] = {}

    def __call__(self, task: Any, training: Training, folder: Path, **options: Any) -> lab.Trained:
        self.task, self.training, self.folder, self.options = task, training, folder, options
        (folder / lab.FIGURES).mkdir(parents=True)
        for name in ("loss.png", "mirror.png"):
            (folder / lab.FIGURES / name).write_bytes(b"")
        (folder / lab.MODEL).mkdir()
        for name, text in task.files().items():
            (folder / lab.MODEL / name).write_text(text)
        evaluation, check = {"loss": 0.25, "lost": None}, {"best": 0.875, "mirrored": [[0.1, 0.9]], "by": {"kind": 3}}
        return lab.Trained(nn.Identity(), folder, [{"step": 7, "evaluation": evaluation, "check": check}])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    monkeypatch.chdir(tmp_path)
    found = Asked()
    monkeypatch.setattr(lab, "train", found)
    return found


def code_of(*arguments: str) -> int | str | None:
    """The exit code, whoever says it."""
    try:
        return main(arguments)
    except SystemExit as done:
        return done.code


# --- settings ---------------------------------------------------------------------------------------------------------


def test_task_with_default_settings(asked: Asked) -> None:
    assert main(["train", "reversal"]) == 0
    assert asked.task == Reversal()
    assert asked.training == Reversal.training()
    assert asked.folder == Path("qkv-runs/reversal")
    assert asked.options == {"progress": True, "tensorboard": False}


def test_flags_change_only_their_settings(asked: Asked) -> None:
    flags = "--length 5 --steps 7 --lr 1e-4 --model.layers 3 --model.d_model 48 --model.no-bias --precision bfloat16"
    assert main(["train", "reversal", *flags.split(), "--tensorboard", "--out", "there"]) == 0
    model = replace(Reversal().model, layers=3, d_model=48, bias=False)
    assert asked.task == Reversal(length=5, model=model)
    assert asked.training == replace(Reversal.training(), steps=7, lr=1e-4, precision="bfloat16")
    assert asked.folder == Path("there")
    assert asked.options["tensorboard"] is True


def test_flags_override_toml_which_overrides_defaults(asked: Asked) -> None:
    Path("x.toml").write_text(
        'task = "reversal"\n[reversal]\nlength = 4\nmodel.layers = 1\n[training]\nlr = 1\nseed = 5\n'
    )
    for where in (["reversal", "--config", "x.toml"], ["--config=x.toml"]):
        out = f"out{len(where)}"
        assert main(["train", *where, "--model.heads", "2", "--seed", "6", "--out", out]) == 0
        assert asked.task == Reversal(length=4, model=replace(Reversal().model, layers=1, heads=2))
        assert asked.training == replace(Reversal.training(), lr=1.0, seed=6)


def test_run_toml_is_accepted_as_config(asked: Asked) -> None:
    task, training = Reversal(length=3, symbols=20), Training(steps=3, decay="none")
    Path("run.toml").write_text(settings.to_toml(task, training))
    assert main(["train", "--config", "run.toml"]) == 0
    assert (asked.task, asked.training) == (task, training)


def test_compositions_are_set_in_code_alone(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "reversal", "--model.attention", "None"]) == 0
    assert asked.task == Reversal()
    assert code_of("train", "reversal", "--model.attention", "Causal()") == 2
    assert "in code alone" in words(capsys.readouterr().err)
    own = replace(Reversal(), model=replace(Reversal().model, attention=Attention()))
    with refused("attention", match=r"run\.toml"):
        settings.to_toml(own, Training())
    Path("x.toml").write_text('task = "reversal"\n[reversal]\nmodel.attention = "Causal()"\n')
    with refused("reversal.model.attention", match="expected Attention"):
        settings.from_toml(Path("x.toml"))


def test_threads(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert main(["train", "reversal", "--threads", "3"]) == 0
    assert threads == [3]


@pytest.mark.parametrize("name", tasks.names())
def test_no_two_settings_share_a_flag(name: str) -> None:
    task = {f.name for f in fields(tasks.task_class(name))}
    training = {f.name for f in fields(Training)}
    run = {f.name for f in fields(Run)} - {"task", "training"}
    assert len(task | training | run) == len(task) + len(training) + len(run)


# --- help and lists ---------------------------------------------------------------------------------------------------


def words(text: str) -> str:
    """Text without boxes and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]|-{3,}", " ", text).split())


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--help") == 0
    said = capsys.readouterr().out
    assert set(commands()) == {
        "profile", "view", "survey", "evict", "ablate", "flow", "map", "generate", "train", "experiment",
        "lab", "check", "claims",
    }  # fmt: skip
    assert set(re.findall(r"^  qkv (\w+)", said, re.MULTILINE)) == set(commands())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_tasks_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("train", *arguments) == 0
    said = words(capsys.readouterr().out)
    for name in tasks.names():
        first = words((tasks.task_class(name).__doc__ or "").strip().splitlines()[0])
        assert f"{name} {first}" in said
    assert "qkv train reversal --help" in said


@pytest.mark.parametrize("name", tasks.names())
def test_help_of_a_task_lists_all_settings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("train", name, "--help") == 0
    said = words(capsys.readouterr().out)
    task = tasks.task_class(name)()
    flags = [f.name for x in (task, Training(), Run) for f in fields(x)]
    if "model" in flags:
        flags += [f"model.{f.name}" for f in fields(task.model)]
    for flag in set(flags) - {"model", "task", "training"}:
        assert f"--{flag.replace('_', '-')}" in said, flag
    assert f"Optimizer steps. (default: {task.training().steps})" in said
    assert ">>>" not in said


def test_help_shows_the_values_of_a_config_file(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.toml").write_text('task = "reversal"\n[training]\nsteps = 77\n')
    assert code_of("train", "--config", "x.toml", "--help") == 0
    assert "Optimizer steps. (default: 77)" in words(capsys.readouterr().out)
    assert asked.task is None


# --- results ----------------------------------------------------------------------------------------------------------


def test_finished_run_prints_metrics_and_paths(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "reversal", "--out", "my run"]) == 0
    said = capsys.readouterr().out
    assert "reversal at step 7" in said
    for row in (r"loss +0\.25\b", r"best +0\.875\b", r"by/kind +3\b"):
        assert re.search(rf"^ *{row}", said, re.MULTILINE), row
    assert "mirrored" not in said
    assert "lost" not in said
    assert "my run/model " in said
    assert "my run/figures: loss.png, mirror.png" in said
    assert "my run/run.toml" in said


@pytest.mark.parametrize(("name", "hint"), [("language", True), ("reversal", False)])
def test_next_commands_are_suggested_for_models_of_text(
    name: str, hint: bool, asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"tokenizer.json": "{}"} if hint else {}
    monkeypatch.setattr(tasks.task_class(name), "files", lambda _: files)
    assert main(["train", name, "--out", "my run"]) == 0
    said = capsys.readouterr().out
    assert ("qkv profile 'my run/model'" in said) == hint
    assert ("qkv generate 'my run/model' \"def \"" in said) == hint


def test_interrupted_run_prints_how_to_continue(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise lab.Interrupted("stopped at step 5; the same command goes on from there")

    monkeypatch.setattr(lab, "train", stopped)
    assert main(["train", "reversal"]) == 130
    assert capsys.readouterr().err == "qkv: stopped at step 5; the same command goes on from there\n"


@pytest.mark.slow
def test_repeated_run_in_the_same_folder_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "train",
        "reversal",
        "--steps",
        "2",
        "--batch",
        "8",
        "--model.d-model",
        "16",
        "--out",
        str(tmp_path / "r"),
    ]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "token_accuracy" in first
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert main([*command, "--seed", "3"]) == 2
    assert re.search(r"^qkv: .*training\.seed: 0, not 3.*\n$", capsys.readouterr().err)


# --- bad input --------------------------------------------------------------------------------------------------------

BAD = {
    "unknown task": (["reversl"], r"task is 'reversl', expected one of .*did you mean 'reversal'\?"),
    "no task": (["--steps", "3"], r"task is missing before --steps, expected one of reversal, "),
    "bad value": (["reversal", "--steps", "0"], "steps is 0, expected at least 1"),
    "no threads": (["reversal", "--threads", "0"], "--threads is 0, expected at least 1"),
    "no file": (["reversal", "--config", "none.toml"], "cannot read none.toml"),
    "not TOML": (["reversal", "--config", "bad.toml"], "bad.toml is not TOML"),
    "another task's file": (
        ["copy", "--config", "x.toml"],
        "x.toml has the settings of the task 'reversal', expected 'copy'",
    ),
    "unknown setting in a file": (["--config", "y.toml"], r"training\.stepps is no setting, .*did you mean 'steps'\?"),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str], sentence: str, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.toml").write_text("task = ")
    Path("x.toml").write_text('task = "reversal"\n')
    Path("y.toml").write_text('task = "reversal"\n[training]\nstepps = 3\n')
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(rf"qkv: [^\n]*{sentence}[^\n]*\n", said.err), said.err
    assert said.out == ""
    assert asked.task is None


FLAGS = {
    "unknown": (["--lenght", "3"], "Unrecognized options: --lenght, 3 Perhaps you meant: --length INT"),
    "unknown of the model": (["--model.layer", "3"], "Perhaps you meant: --model.layers INT"),
    "no value": (["--steps"], "Missing value for argument '--steps'"),
    "no number": (["--steps", "few"], "Error parsing --steps"),
    "no choice": (["--decay", "linear"], "Expected one of ('cosine', 'none')"),
    "bad value of the model": (["--model.layers", "0"], "layers is 0, expected at least 1"),
    "no file": (["--config"], "Missing value for argument '--config'"),
}


@pytest.mark.parametrize(("arguments", "sentence"), FLAGS.values(), ids=FLAGS)
def test_errors_name_the_wrong_flag(
    arguments: list[str], sentence: str, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("train", "reversal", *arguments) == 2
    said = capsys.readouterr()
    assert sentence in words(said.err)
    assert said.out == ""
    assert asked.task is None


# --- experiments ------------------------------------------------------------------------------------------------------


class Question(experiments.base.Experiment):
    """An experiment that is only asked about."""

    claims = ("C001", "C002")

    def __init__(self, name: str) -> None:
        self.name, self.question = name, f"What of {name}?"  # type: ignore[misc]

    def conclude(self, results: Any) -> Any:
        raise NotImplementedError

    def figure(self, results: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Two experiments; what `run` was asked for, instead of running."""
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[Any, ...]] = []

    def known(name: str) -> Question:
        if name not in ("one", "two"):
            raise InputError(f"experiment is {name!r}, expected one of one, two; did you mean 'one'?")
        return Question(name)

    def run(name: str, out: Path, **options: Any) -> experiments.Result:
        calls.append((name, out, options))
        out.mkdir(exist_ok=True)
        verdict = experiments.Verdict("C001", "does not hold", f"[{name}] 0.2, not 0.9")
        return experiments.Result(out / f"{name}.json", out / f"{name}.png", (verdict,), f"All of [{name}].")

    monkeypatch.setattr(experiments, "names", lambda: ("one", "two"))
    monkeypatch.setattr(experiments, "experiment", known)
    monkeypatch.setattr(experiments, "run", run)
    return calls


def test_experiments_are_listed(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment"]) == 0
    said = words(capsys.readouterr().out)
    assert "one What of one? C001, C002" in said
    assert "two What of two? C001, C002" in said
    assert ran == []


def test_experiment_prints_verdicts_and_paths(ran: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "two", "--quick", "--jobs", "3", "--out", "found"]) == 0
    assert ran == [("two", Path("found"), {"quick": True, "seeds": None, "jobs": 3, "progress": True})]
    said = words(capsys.readouterr().out)
    assert "C001 does not hold [two] 0.2, not 0.9" in said
    assert "All of [two]." in said
    assert "found/two.json" in said
    assert "found/two.png" in said
    assert Path("found", "README.md").read_text().startswith("# Experiments")


def test_experiment_takes_a_number_of_seeds(ran: list[Any]) -> None:
    assert main(["experiment", "all", "--jobs", "2", "--seeds", "7"]) == 0
    assert [options["seeds"] for _, _, options in ran] == [7, 7]


@pytest.mark.parametrize(("names", "expected"), [(["all"], "one two"), (["two", "one", "two"], "two one")])
def test_each_experiment_runs_once(names: list[str], expected: str, ran: list[Any]) -> None:
    assert main(["experiment", *names]) == 0
    assert [name for name, *_ in ran] == expected.split()
    assert ran[0][1:] == (Path("qkv-experiments"), {"quick": False, "seeds": None, "jobs": 1, "progress": True})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["two", "on"], "experiment is 'on', .*did you mean 'one'"),
        (["two", "--jobs", "0"], "--jobs is 0, expected"),
        (["two", "--seeds", "1"], "--seeds is 1, expected at least 2"),
    ],
)
def test_bad_arguments_start_no_experiment(
    arguments: list[str], sentence: str, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", *arguments]) == 2
    assert re.fullmatch(rf"qkv: [^\n]*{sentence}[^\n]*\n", capsys.readouterr().err)
    assert ran == []


def test_unknown_experiment_suggests_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    name = experiments.names()[0]
    assert main(["experiment", f"{name}x"]) == 2
    assert f"did you mean {name!r}?" in capsys.readouterr().err
