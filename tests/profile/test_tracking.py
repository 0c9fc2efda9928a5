"""Attention numbers of training steps, in a loop of one's own, in transformers' Trainer and in Lightning."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import qkv
from conftest import refused
from qkv.models import DecoderConfig, DecoderLM
from qkv.tracking import AttentionCallback, CSVLog, LightningAttentionCallback, Tracker
from qkv.tracking import tracker as tracking

TOKENS = torch.arange(16 * 12).view(16, 12) * 29 % 97
TEXTS = [{"input_ids": ids, "labels": ids} for ids in TOKENS]


def decoder(**settings: Any) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(DecoderConfig(**{"vocab_size": 50, "d_model": 32, "layers": 1, "heads": 4} | settings))


def trained(folder: Path, *callbacks: Any, **settings: Any) -> dict[str, Tensor]:
    options: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 0, "dataloader_pin_memory": False,
    }  # fmt: skip
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, attention_dropout=0.2, **sizes, **none))
    arguments = TrainingArguments(output_dir=str(folder), **options | settings)
    Trainer(model=model, args=arguments, train_dataset=TEXTS, callbacks=list(callbacks)).train()  # type: ignore[arg-type]
    return model.state_dict()


@pytest.mark.filterwarnings("ignore")
def test_trainer_learns_the_same_weights_and_writes_a_row_for_each_measured_step(tmp_path: Path) -> None:
    want = trained(tmp_path / "plain")
    for checkpointing in (False, True):
        callback = AttentionCallback(every=2)
        out = tmp_path / str(checkpointing)
        got = trained(out, callback, gradient_checkpointing=checkpointing)
        assert all(torch.equal(got[name], want[name]) for name in want)
        check_rows(out, callback)


def check_rows(out: Path, callback: AttentionCallback) -> None:
    with (out / "attention.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 2]
    assert set(rows[0]) == {"step", *tracking.NUMBERS}
    assert [float(row["entropy_ratio"]) for row in rows] == [row["entropy_ratio"] for row in callback.rows]
    assert callback.tracker is not None
    assert callback.tracker.profile is not None
    assert callback.tracker.profile.data.sizes["text"] == 2  # of the first of the accumulated forwards


def test_numbers_are_those_of_a_profile_and_hidden_states() -> None:
    model = decoder(layers=2)
    for p in model.parameters():
        p.data.mul_(4)
    ids = torch.randint(50, (2, 20))
    tracker = Tracker(model)
    tracker.begin(0)
    model(ids)
    row = tracker.end(0)
    assert row is not None
    want = qkv.profile(model, ids, progress=False, probe=False)
    sinks, heads = want.sinks(), want.heads()
    assert row["sink_rate"] == pytest.approx((sinks["alpha_first"] > 0.3).mean())
    assert row["first_share"] == pytest.approx(sinks["share_first"].mean(), rel=1e-5)
    assert row["entropy_ratio"] == pytest.approx(heads["entropy_ratio"].mean(), rel=1e-5)
    (states,) = want.residual.values()
    assert row["largest_activation"] == pytest.approx(states["largest"].values.max(), rel=1e-5)


def test_dead_and_uniform_heads_are_told_apart_in_a_log_of_another_library() -> None:
    logged: list[Any] = []

    def log(data: dict[str, float], step: int | None = None) -> None:  # as wandb.log and trackio.log
        logged.append((step, data))

    model = decoder(normalizer="off_by_one")
    tracker = Tracker(model, every=2, log=log)
    for step in range(3):
        tracker.begin(step)
        with torch.no_grad():
            model(torch.randint(50, (1, 30)))
        tracker.end(step)
    assert [step for step, _ in logged] == [0, 2]
    for _, data in logged:
        assert set(data) == {*tracking.NUMBERS}
        assert (data["uniform_heads"], data["dead_heads"]) == (1.0, 0.0)


def test_a_step_that_fails_leaves_no_hooks() -> None:
    def fail(module: nn.Module, *_: Any) -> None:
        raise RuntimeError("lost")

    model = decoder()
    own = model.register_forward_hook(fail)
    tracker = Tracker(model)
    tracker.begin(0)
    with pytest.raises(RuntimeError, match="lost"):
        model(torch.zeros(1, 4, dtype=torch.long))
    tracker.close()
    own.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_csv_of_a_resumed_training_continues(tmp_path: Path) -> None:
    file = tmp_path / "new" / "attention.csv"
    for steps in ([0, 10, 20], [10, 20, 30]):
        log = CSVLog(file)
        for step in steps:
            log({"sink_rate": step / 100 + len(steps)}, step=step)
    with file.open() as lines:
        assert [int(row["step"]) for row in csv.DictReader(lines)] == [0, 10, 20, 30]
    file.write_text("a,b\n1,2\n")
    with refused("file"):
        CSVLog(file)({}, step=0)


def test_lightning_callback_measures_batches_or_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a stand-in for Lightning, which calls the same methods in the same order."""
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with refused("LightningAttentionCallback", match="pip install lightning"):
        LightningAttentionCallback()
    module = ModuleType("pytorch_lightning")
    module.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", module)
    callback = LightningAttentionCallback(every=2)
    assert isinstance(callback, module.Callback)
    trainer: Any = ModuleType("trainer")
    trainer.log_dir, trainer.is_global_zero = str(tmp_path), True
    model = decoder()
    callback.on_train_start(trainer, model)
    for batch in range(3):
        callback.on_train_batch_start(trainer, model, None, batch)
        model.loss(torch.randint(50, (2, 9))).backward()
        callback.on_train_batch_end(trainer, model, None, None, batch)
    callback.on_train_end(trainer, model)
    assert [row["step"] for row in callback.tracker.rows] == [0, 2]
    assert (tmp_path / "attention.csv").exists()


def test_bad_settings_are_refused() -> None:
    for kind in (lambda: Tracker(nn.Linear(1, 1), every=0), lambda: AttentionCallback(every=0)):
        with refused("every"):
            kind()
