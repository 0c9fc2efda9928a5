"""The loss of a language model without each head, from Python and from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import hf_models as hf
import qkv
from conftest import Command, refused
from qkv.models import DecoderConfig, DecoderLM
from qkv.profiler import ablation
from qkv.profiler import editing as analysis


def small() -> DecoderLM:
    torch.manual_seed(0)
    model = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=2, heads=4)).eval()
    hf.enliven(model)
    return model


IDS = torch.randint(50, (1, 30), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_loss_without_a_head_is_that_with_its_rows_of_the_output_projection_at_zero() -> None:
    model = small()
    found = ablation(model, IDS, progress=False)
    assert found.table[["layer", "head"]].to_numpy().tolist() == [[a, b] for a in range(2) for b in range(4)]
    weight: Any = model.blocks[1].attention.out_proj.weight
    weight[:, 16:24] = 0  # head 2
    logits = model(IDS)
    want = torch.nn.functional.cross_entropy(logits[0, :-1].double(), IDS[0, 1:]).item()
    row = found.table[(found.table["layer"] == 1) & (found.table["head"] == 2)].iloc[0]
    assert row["nats"] == pytest.approx(want, abs=1e-6)
    assert row["delta_nats"] == pytest.approx(want - found.nats, abs=1e-6)


@pytest.mark.parametrize("name", ["ours", "gemma3"])
def test_losses_are_those_of_models_whose_heads_are_edited_together(name: str) -> None:
    model = small() if name == "ours" else hf.build(name, suffix="ForCausalLM").eval()
    ids = IDS % 30
    found = ablation(model, ids, what="sinks", progress=False)
    layers, heads = range(len(found.layers)), range(found.table["head"].max() + 1)

    def edited(layers: Iterable[int], heads: Iterable[int]) -> float:
        with qkv.edit(model, {(layer, head): qkv.edits.HideFirst() for layer in layers for head in heads}):
            return analysis.next_token_loss(model, ids)

    assert found.table["nats"].tolist() == [edited([layer], [head]) for layer in layers for head in heads]
    assert found.layers["nats"].tolist() == [edited([layer], heads) for layer in layers]
    assert found.all_nats == edited(layers, heads)


def test_interrupted_run_resumes_and_another_model_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, computed, own = small(), [], analysis.next_token_loss

    def counted(*args: Any) -> float:
        computed.append(1)
        if len(computed) == 5:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(analysis, "next_token_loss", counted)
    with pytest.raises(KeyboardInterrupt):
        ablation(model, IDS, folder=tmp_path, progress=False)
    computed.clear()
    monkeypatch.setattr(analysis, "next_token_loss", lambda *args: (computed.append(1), own(*args))[1])
    resumed = ablation(model, IDS, folder=tmp_path, progress=False)
    assert len(computed) == 1 + 11 - 3  # the whole model, and the sets of heads that were not finished
    assert resumed.table.equals(ablation(model, IDS, progress=False).table)
    with torch.no_grad():
        model.embedding.weight[0, 0] += 1
    computed.clear()
    ablation(model, IDS, folder=tmp_path, progress=False)
    assert len(computed) == 1 + 11
    one = ablation(model, IDS, layers=[0], folder=tmp_path, progress=False)
    assert one.all_nats == one.layers["nats"].item(), "the loss without all heads is that of another run's layers"
    (tmp_path / analysis.PROGRESS).write_text("no table")
    with refused("folder"):
        ablation(model, IDS, folder=tmp_path, progress=False)


def test_other_models_and_shapes_are_refused() -> None:
    for ids in (IDS[:, :1], IDS.expand(2, -1)):
        with refused("inputs"):
            ablation(small(), ids, progress=False)
    with refused("what"):
        ablation(small(), IDS, what="tails", progress=False)
    with refused("model", match="no loss on the next token"):
        ablation(hf.build("bert"), IDS, progress=False)


@pytest.mark.usefixtures("undrawn")
def test_command_prints_a_table_and_writes_files(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    shown = command.succeeds("ablate", "qkv-mini", "import os, sys, re", "--layers", 0, "--out", out)
    assert "increase" in shown
    assert len(pd.read_csv(out / "ablation.csv")) == 6
    assert json.loads((out / "ablation.json").read_text())["what"] == "heads"
    assert (out / "ablation.png").exists()
