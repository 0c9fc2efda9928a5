"""The training loop: exact resumption and errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

from conftest import refused
from forked import Forked
from lab_tasks import Counting, train_until, weights
from qkv import models
from qkv_lab import Diverged, log, resume, train
from qkv_lab.task import Training

TRAINING = Counting.training()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    return train(Counting(), TRAINING, tmp_path_factory.mktemp("whole"), progress=False).folder


def assert_same_weights(a: Path, b: Path) -> None:
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    for name, x in one.items():
        assert torch.equal(x, two[name]), name


def test_run_writes_settings_metrics_model_figures_and_result(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} == {
        "run.toml", "metrics.jsonl", "model", "figures", "result.json", "checkpoint-00000008", "checkpoint-00000012",
    }  # fmt: skip
    lines = log.read(whole / "metrics.jsonl")
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, 13))
    assert [x["step"] for x in lines if "evaluation" in x] == [0, 6, 12]
    assert lines[-1]["check"] == {"nothing": [[0.5, None]]}  # JSON has no NaN
    assert {p.name for p in (whole / "figures").iterdir()} == {"loss.png", "empty.png"}
    assert (whole / "model" / "note.txt").read_text() == "seven"
    result = json.loads((whole / "result.json").read_text())
    assert result["evaluation"]["loss"] < lines[0]["evaluation"]["loss"]
    assert result["parameters"] == sum(p.numel() for p in models.load(whole / "model").parameters())


def test_finished_run_is_loaded_and_not_trained_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv_lab.loop._step", None)
    again = train(Counting(), TRAINING, whole, progress=False)
    assert again.evaluation == json.loads((whole / "result.json").read_text())["evaluation"]
    state = again.model.state_dict()
    assert all(torch.equal(state[name], x) for name, x in weights(whole).items())


def started(folder: Path, step: int) -> Forked:
    """A process that trains in ``run``, has done `step` steps, and waits."""
    process = Forked(train_until, folder / "run", step, folder=folder)
    process.has_said(f"{step}\n")
    return process


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 7])
def test_killed_run_resumes_to_the_same_weights(whole: Path, tmp_path: Path, step: int) -> None:
    process, folder = started(tmp_path, step), tmp_path / "run"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    assert [p.name for p in resume.checkpoints(folder)] == ([] if step < 4 else ["checkpoint-00000004"])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "los')  # a line that was cut short
    train(Counting(), TRAINING, folder, progress=False)
    assert_same_weights(whole, folder)
    steps = [x["step"] for x in log.read(folder / "metrics.jsonl") if "loss" in x]
    assert steps == list(range(1, 13))


@pytest.mark.slow
def test_interrupt_saves_a_checkpoint_and_says_how_to_resume(whole: Path, tmp_path: Path) -> None:
    process, folder = started(tmp_path, 5), tmp_path / "run"
    os.kill(process.pid, signal.SIGINT)
    (tmp_path / "go on").touch()
    assert process.wait() != 0
    assert "Interrupted: stopped at step 5 after saving a checkpoint" in process.errors
    assert resume.checkpoints(folder)[-1].name == "checkpoint-00000005"
    train(Counting(), TRAINING, folder, progress=False)
    assert_same_weights(whole, folder)


@pytest.mark.slow
def test_gradient_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    """Without dropout, which differs between parts of a batch."""
    quiet = Counting(model=replace(Counting().model, dropout=0.0))
    one, four = (
        weights(train(quiet, replace(TRAINING, steps=3, accumulate=n), tmp_path / str(n), progress=False).folder)
        for n in (1, 4)
    )
    for name, x in one.items():
        torch.testing.assert_close(x, four[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("poison", "poisoned", "kept", "said"), [
    (10, "loss", "checkpoint-00000008", "the loss is nan at step 11"),
    (7, "gradient", "checkpoint-00000004", "the norm of the gradient is nan at step 8"),  # the step of a checkpoint
])  # fmt: skip
def test_nan_stops_the_run_and_keeps_earlier_checkpoints(
    tmp_path: Path, poison: int, poisoned: str, kept: str, said: str
) -> None:
    with pytest.raises(Diverged, match=rf"^lr is .*: {said}; {kept}"):
        train(Counting(poison=poison, poisoned=poisoned), TRAINING, tmp_path, progress=False)
    assert resume.checkpoints(tmp_path)[-1].name == kept
    assert not (tmp_path / "result.json").exists()


def test_damaged_checkpoint_is_rejected_and_an_earlier_one_resumes(whole: Path, tmp_path: Path) -> None:
    """And one of another model."""
    with pytest.raises(Diverged):
        train(Counting(poison=8), TRAINING, tmp_path, progress=False)
    settings, newest = tmp_path / "run.toml", resume.checkpoints(tmp_path)[-1]
    text = settings.read_text().replace("poison = 8\n", "")  # a run with eight steps and two checkpoints
    settings.write_text(text.replace("d_model = 16", "d_model = 32"))
    other = Counting(model=replace(Counting().model, d_model=32))
    with refused("checkpoint", match=r"embedding.weight is \(7, 16\), expected \(7, 32\)"):
        train(other, TRAINING, tmp_path, progress=False)
    settings.write_text(text)
    data = bytearray((newest / "state.safetensors").read_bytes())
    data[-5] ^= 1
    for damaged, said in ((data, r"damaged.*remove it to resume from checkpoint-00000004"), (data[:100], "be read")):
        (newest / "state.safetensors").write_bytes(damaged)
        with refused("checkpoint", match=said):
            train(Counting(), TRAINING, tmp_path, progress=False)
    shutil.rmtree(newest)
    assert_same_weights(whole, train(Counting(), TRAINING, tmp_path, progress=False).folder)


def test_full_disk_error_names_the_last_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    write = mock.Mock(side_effect=[mock.DEFAULT, full], wraps=safetensors.torch.save_file)
    monkeypatch.setattr(safetensors.torch, "save_file", write)
    with refused("folder", match=r"step 8 .*No space left on device\).*checkpoint-00000004"):
        train(Counting(), TRAINING, tmp_path, progress=False)
    assert not list(tmp_path.glob(".*part"))


def test_bfloat16_keeps_float32_weights(tmp_path: Path) -> None:
    logged: list[int] = []
    trained = train(Counting(), replace(TRAINING, precision="bfloat16"), tmp_path, progress=False, figures=False,
                    log=lambda numbers, step: logged.append(step))  # fmt: skip
    assert logged == [x["step"] for x in trained.metrics]
    assert {x.dtype for x in weights(trained.folder).values()} == {torch.float32}
    losses = [x["loss"] for x in trained.metrics if "loss" in x]
    assert losses[-1] < losses[0]


def test_learning_rate_follows_warmup_and_cosine() -> None:
    training = Training(steps=100, warmup=10, lr=1.0, floor=0.1)
    rates = [training.lr_at(i) for i in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 < rates[-1] < 0.11
    assert Training(decay="none", warmup=0, lr=2.0).lr_at(500) == 2.0
