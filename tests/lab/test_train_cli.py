"""`qkv train` and `qkv experiment`: settings by flag and by TOML, lists, results, one sentence for what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Command
from qkv_lab import experiments, settings
from qkv_lab import loop as lab
from qkv_lab.task import Training
from qkv_lab.tasks.sequences import Reversal


class Asked:
    """What `train` was asked for, instead of training."""

    task: Any = None

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


def words(text: str) -> str:
    """Text without boxes and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]|-{3,}", " ", text).split())


def ended(command: Command, capsys: pytest.CaptureFixture[str], code: int, *given: object) -> str:
    """What a command printed that tyro ended, as it ends for help and for flags that it cannot read."""
    with pytest.raises(SystemExit) as done:
        command(*given)
    assert done.value.code == code
    return words("".join(capsys.readouterr()))


# --- settings ---------------------------------------------------------------------------------------------------------


def test_flags_change_only_their_settings(asked: Asked, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    command.succeeds("train", "reversal")
    assert (asked.task, asked.training) == (Reversal(), Reversal.training())
    assert asked.folder == Path("qkv-runs/reversal")
    assert asked.options == {"progress": True}
    flags = "--length 5 --steps 7 --lr 1e-4 --model.layers 3 --model.d_model 48 --model.no-bias --precision bfloat16"
    command.succeeds("train", "reversal", *flags.split(), "--out", "there", "--threads", 3)
    assert asked.task == Reversal(length=5, model=replace(Reversal().model, layers=3, d_model=48, bias=False))
    assert asked.training == replace(Reversal.training(), steps=7, lr=1e-4, precision="bfloat16")
    assert (asked.folder, threads) == (Path("there"), [3])


def test_flags_override_toml_which_overrides_defaults(asked: Asked, command: Command) -> None:
    text = 'task = "reversal"\n[reversal]\nlength = 4\nmodel.layers = 1\n[training]\nlr = 1\nseed = 5\n'
    Path("x.toml").write_text(text)
    for where in (["reversal", "--config", "x.toml"], ["--config=x.toml"]):
        command.succeeds("train", *where, "--model.heads", 2, "--seed", 6, "--out", f"out{len(where)}")
        assert asked.task == Reversal(length=4, model=replace(Reversal().model, layers=1, heads=2))
        assert asked.training == replace(Reversal.training(), lr=1.0, seed=6)
    task, training = Reversal(length=3, symbols=20), Training(steps=3, decay="none")
    Path("run.toml").write_text(settings.to_toml(task, training))  # as a run writes it
    command.succeeds("train", "--config", "run.toml", "--out", "again")
    assert (asked.task, asked.training) == (task, training)


# --- experiments ------------------------------------------------------------------------------------------------------


NAMES = experiments.names()[:2]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What `run` was asked for, instead of running; there are two experiments."""
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[Any, ...]] = []

    def run(name: str, out: Path, **options: Any) -> experiments.Result:
        calls.append((name, out, options))
        out.mkdir(exist_ok=True)
        verdict = experiments.Verdict("C001", "does not hold", f"[{name}] 0.2, not 0.9")
        return experiments.Result(out / f"{name}.json", out / f"{name}.png", (verdict,))

    monkeypatch.setattr(experiments, "names", lambda: NAMES)
    monkeypatch.setattr(experiments, "run", run)
    return calls


def test_experiments_are_listed_run_once_and_print_their_verdicts(ran: list[Any], command: Command) -> None:
    one, two = NAMES
    listed = words(command.succeeds("experiment"))
    assert all(name in listed for name in NAMES)
    assert ran == []
    command.succeeds("experiment", two, one, two, "--seeds", 7)
    command.succeeds("experiment", "all")
    assert [name for name, *_ in ran] == [two, one, one, two]
    defaults = {"quick": False, "seeds": None, "jobs": 1, "progress": True}
    assert ran[0][1:] == (Path("qkv-experiments"), defaults | {"seeds": 7})
    said = words(command.succeeds("experiment", two, "--quick", "--jobs", 3, "--out", "found"))
    assert ran[4:] == [(two, Path("found"), defaults | {"quick": True, "jobs": 3})]
    for part in (f"C001 does not hold [{two}] 0.2, not 0.9", f"found/{two}.json"):
        assert part in said
    assert Path("found", "README.md").read_text().startswith("# Experiments")
