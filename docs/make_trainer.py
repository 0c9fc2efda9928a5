"""Draws docs/figures/trainer.png: a sink that forms while transformers' Trainer trains a GPT-2 on Bigram-Backcopy.

.venv/bin/python docs/make_trainer.py    (about 2 minutes on 2 cores)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from qkv.tracking import AttentionCallback
from qkv_lab.tasks.backcopy import Backcopy

STEPS, BATCH, EVERY = 1500, 32, 25
PANELS = {
    "first_share": "share of the row on the first token",
    "entropy_ratio": "entropy / ln(visible keys)",
    "largest_activation": "largest activation",
}


def trained() -> list[dict[str, float]]:
    """The numbers of each measured step."""
    torch.manual_seed(0)
    task = Backcopy()
    config = GPT2Config(
        vocab_size=task.symbols + 1, n_positions=task.length, n_embd=64, n_layer=1, n_head=1, bos_token_id=None,
        eos_token_id=None, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    rows = torch.cat([task.batch(step, BATCH, 0)["ids"] for step in range(STEPS)])
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    callback = AttentionCallback(every=EVERY)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3,
            warmup_steps=100, weight_decay=0.1, report_to=[], save_strategy="no", use_cpu=True,
            dataloader_pin_memory=False, seed=0,
        )  # fmt: skip
        Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, callbacks=[callback]).train()
    return callback.rows


def main() -> None:
    rows = trained()
    steps = [row["step"] for row in rows]
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.7), constrained_layout=True)
    for ax, (name, title) in zip(axes, PANELS.items(), strict=True):
        ax.plot(steps, [row[name] for row in rows], color="#26748f", lw=1.8)
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_xlabel("step", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.set_ylim(0, None if name == "largest_activation" else 1.02)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    figure.savefig(Path(__file__).parent / "figures" / "trainer.png", dpi=120)


if __name__ == "__main__":
    main()
