"""The training loop: exact resumption and errors."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import refused
from forked import Forked
from lab_tasks import Counting, train_slowly, weights
from qkv import models
from qkv.errors import InputError
from qkv_lab import Diverged, Interrupted, log, resume, train
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
    assert all(
        torch.equal(x, weights(whole)[name]) for name, x in again.model.state_dict().items() if name in weights(whole)
    )


def test_same_seed_gives_same_weights_and_another_seed_others(whole: Path, tmp_path: Path) -> None:
    assert_same_weights(whole, train(Counting(), TRAINING, tmp_path / "again", progress=False).folder)
    other = train(Counting(), replace(TRAINING, seed=1), tmp_path / "other", progress=False).folder
    assert any(not torch.equal(x, weights(other)[name]) for name, x in weights(whole).items())


def started(folder: Path, pause: float = 0.05) -> Forked:
    """A process that trains in ``run``, prints the number of each step, and then waits for `pause` seconds."""
    return Forked(train_slowly, folder / "run", pause, folder=folder)


def wait_for_step(process: Forked, step: int) -> None:
    while f"{step}\n" not in process.out:
        assert process.running, process.errors
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 7])
def test_killed_run_resumes_to_the_same_weights(whole: Path, tmp_path: Path, step: int) -> None:
    process, folder = started(tmp_path), tmp_path / "run"
    wait_for_step(process, step)
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
    process, folder = started(tmp_path, 0.1), tmp_path / "run"
    wait_for_step(process, 5)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() != 0
    said = "Interrupted: stopped at step 5 after saving a checkpoint; run the same command again to resume"
    assert said in process.errors
    assert resume.checkpoints(folder)[-1].name == "checkpoint-00000005"
    train(Counting(), TRAINING, folder, progress=False)
    assert_same_weights(whole, folder)


def test_interrupted_is_a_keyboard_interrupt() -> None:
    assert issubclass(Interrupted, KeyboardInterrupt)


def quiet() -> Counting:
    """The task without dropout, which differs between parts of a batch."""
    return Counting(model=replace(Counting().model, dropout=0.0))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without dropout, in one process and with whole batches."""
    return train(quiet(), TRAINING, tmp_path_factory.mktemp("alone"), progress=False).folder


def test_gradient_accumulation_gives_the_gradient_of_the_whole_batch(alone: Path, tmp_path: Path) -> None:
    four = train(quiet(), replace(TRAINING, accumulate=4), tmp_path / "four", progress=False).folder
    for name, x in weights(alone).items():
        torch.testing.assert_close(x, weights(four)[name], rtol=2e-4, atol=2e-5)


def test_processes_of_torchrun_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("WORLD_SIZE"):
        train(quiet(), TRAINING, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_nan_loss_stops_the_run_and_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"^lr is .*: the loss is nan at step 11; checkpoint-00000008 is the last checkpoint"
    ):
        train(Counting(poison=10), TRAINING, tmp_path, progress=False)
    assert resume.checkpoints(tmp_path)[-1].name == "checkpoint-00000008"
    assert not (tmp_path / "result.json").exists()


def test_nan_gradient_stops_the_run_before_a_checkpoint_is_saved(tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"^lr is .*: the norm of the gradient is nan at step 8; checkpoint-00000004 is the last"
    ):
        train(Counting(poison=7, poisoned="gradient"), TRAINING, tmp_path, progress=False)
    assert [p.name for p in resume.checkpoints(tmp_path)] == ["checkpoint-00000004"]


def test_folder_with_other_settings_is_rejected(whole: Path) -> None:
    with pytest.raises(InputError, match=r"^folder: .*training\.lr: 0\.003, not 0\.1"):
        train(Counting(), replace(TRAINING, lr=0.1), whole, progress=False)


def unfinished_run(folder: Path) -> None:
    """A run with eight steps and two checkpoints."""
    with pytest.raises(Diverged):
        train(Counting(poison=8), TRAINING, folder, progress=False)
    settings = folder / "run.toml"
    settings.write_text(settings.read_text().replace("poison = 8\n", ""))


def test_damaged_checkpoint_is_rejected_and_an_earlier_one_resumes(whole: Path, tmp_path: Path) -> None:
    unfinished_run(tmp_path)
    newest = resume.checkpoints(tmp_path)[-1]
    data = bytearray((newest / "state.safetensors").read_bytes())
    data[-5] ^= 1
    (newest / "state.safetensors").write_bytes(data)
    with pytest.raises(
        InputError, match=r"checkpoint-00000008 is damaged.*remove it to resume from checkpoint-00000004"
    ):
        train(Counting(), TRAINING, tmp_path, progress=False)
    (newest / "state.safetensors").write_bytes(data[:100])
    with refused("checkpoint", match="cannot be read"):
        train(Counting(), TRAINING, tmp_path, progress=False)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert_same_weights(whole, train(Counting(), TRAINING, tmp_path, progress=False).folder)


def test_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    unfinished_run(tmp_path)
    settings = tmp_path / "run.toml"
    settings.write_text(settings.read_text().replace("d_model = 16", "d_model = 32"))
    other = Counting(model=replace(Counting().model, d_model=32))
    with pytest.raises(InputError, match=r"of another model: embedding.weight is \(7, 16\), expected \(7, 32\)"):
        train(other, TRAINING, tmp_path, progress=False)


def test_full_disk_error_names_the_last_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    write, calls = safetensors.torch.save_file, []

    def full(tensors: object, path: Path) -> None:
        calls.append(path)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(
        InputError, match=r"step 8 .*No space left on device\); the last complete one is checkpoint-00000004"
    ):
        train(Counting(), TRAINING, tmp_path, progress=False)
    assert not list(tmp_path.glob(".*part"))


def test_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("folder", match="cannot write"):
        train(Counting(), TRAINING, tmp_path / "file" / "run", progress=False)


def test_batch_must_be_a_multiple_of_the_micro_batches(tmp_path: Path) -> None:
    with refused("batch"):
        train(Counting(), replace(TRAINING, accumulate=3), tmp_path, progress=False)


def test_a_batch_that_does_not_fit_in_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with refused("batch", match="memory"):
        train(Counting(), replace(TRAINING, batch=2**40), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_bfloat16_keeps_float32_weights(tmp_path: Path) -> None:
    trained = train(Counting(), replace(TRAINING, precision="bfloat16"), tmp_path, progress=False)
    assert {x.dtype for x in weights(trained.folder).values()} == {torch.float32}
    losses = [x["loss"] for x in trained.metrics if "loss" in x]
    assert losses[-1] < losses[0]


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(Counting(), TRAINING, tmp_path, progress=False, tensorboard=True)
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_learning_rate_follows_warmup_and_cosine() -> None:
    training = Training(steps=100, warmup=10, lr=1.0, floor=0.1)
    rates = [training.lr_at(i) for i in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.11
    assert Training(decay="none", warmup=0, lr=2.0).lr_at(500) == 2.0


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("lr", -1.0), ("beta2", 1.5), ("lr", float("nan"))])
def test_training_settings_out_of_range_are_rejected(name: str, value: float) -> None:
    with refused(name):
        replace(TRAINING, **{name: value})
