"""The loss of a language model without each head, from Python and from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hf_models as hf
import qkv
from conftest import Command, refused
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loading import load_model
from qkv.profiler import ablation
from qkv.profiler.analyses import ablation as analysis


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


class Shared(torch.nn.Module):
    """A block that also reads what the first block has computed inside, if that has run."""

    def __init__(self, block: torch.nn.Module, first: Any, missing: float | None) -> None:
        super().__init__()
        self.block, self.missing = block, missing
        first.attention.register_forward_hook(lambda _, args, out: setattr(self, "inside", out))

    def forward(self, x: torch.Tensor, **named: Any) -> torch.Tensor:
        out: torch.Tensor = self.block(x + self.__dict__.pop("inside", self.missing), **named)
        return out


@pytest.mark.parametrize("what", analysis.REMOVED)
@pytest.mark.parametrize("name", ["ours", "gemma3", "albert-like"])
def test_losses_are_those_of_models_whose_heads_are_edited_together(name: str, what: str) -> None:
    model = small() if name in ("ours", "albert-like") else hf.build(name, suffix="ForCausalLM").eval()
    if name == "albert-like":  # all layers are one module
        model.blocks[1] = model.blocks[0]
    ids = IDS % 30
    found = ablation(model, ids, what=what, progress=False)
    layers, heads = range(len(found.layers)), range(found.table["head"].max() + 1)

    def edited(layers: Iterable[int], heads: Iterable[int]) -> float:
        with qkv.edit(model, {(layer, head): analysis.REMOVED[what] for layer in layers for head in heads}):
            return analysis.next_token_loss(model, ids)

    want = [edited([layer], [head]) for layer in layers for head in heads]
    assert found.table["nats"].tolist() == pytest.approx(want, abs=2e-6)
    assert found.layers["nats"].tolist() == pytest.approx([edited([layer], heads) for layer in layers], abs=2e-6)
    assert found.all_nats == edited(layers, heads)


@pytest.mark.parametrize("missing", [0.0, None], ids=["other numbers", "an error"])
def test_a_model_whose_layers_share_more_than_the_residual_stream_runs_whole(
    monkeypatch: pytest.MonkeyPatch, missing: float | None
) -> None:
    model, batches = small(), list[int]()
    model.blocks[1] = Shared(model.blocks[1], model.blocks[0], missing)
    own = analysis._logits
    monkeypatch.setattr(analysis, "_logits", lambda model, ids: (batches.append(len(ids)), own(model, ids))[1])
    found = ablation(model, IDS, layers=[1], progress=False)
    with qkv.edit(model, {(1, 2): "zero"}):
        assert found.table["nats"][2] == analysis.next_token_loss(model, IDS)
    assert batches == [1, 6, *[1] * 7], "the layer was not computed head by head after its control item differed"


@torch.no_grad()
def test_several_texts_have_an_interval_and_only_counted_tokens_a_loss(tmp_path: Path) -> None:
    model, other, counted = small(), IDS.flip(1), [3, 7, 29]
    both = ablation(model, torch.cat([IDS, other]), layers=[1], counted=counted, folder=tmp_path, progress=False)
    ones = [ablation(model, x, layers=[1], counted=counted, progress=False) for x in (IDS, other)]
    for ids, one in zip((IDS, other), ones, strict=True):
        with qkv.edit(model, {(1, 2): "zero"}):
            logits = model(ids)[0].double()
        want = -torch.stack([logits[at - 1].log_softmax(-1)[ids[0, at]] for at in counted]).mean()
        assert one.table["nats"][2] == pytest.approx(want.item(), abs=1e-6)
        assert one.table["low"].isna().all()
    rises = np.array([one.table["delta_nats"] for one in ones])
    np.testing.assert_allclose(both.table["delta_nats"], rises.mean(0), atol=1e-9)
    np.testing.assert_allclose(both.table["high"], rises.mean(0) + 12.7062 * np.ptp(rises, 0) / 2, rtol=1e-5)
    assert both.nats == pytest.approx(np.mean([one.nats for one in ones]))
    assert (both.attrs["texts"], both.attrs["tokens"], both.attrs["counted"]) == (2, 60, 6)
    again = ablation(model, torch.cat([IDS, other]), layers=[1], counted=counted, folder=tmp_path, progress=False)
    assert again.table.equals(both.table)


def test_interrupted_run_resumes_and_another_model_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, items, own = small(), list[int](), analysis._logits

    def counted(model: Any, ids: torch.Tensor) -> torch.Tensor:
        items.append(len(ids))
        if len(items) == 3:
            raise KeyboardInterrupt
        return own(model, ids)

    monkeypatch.setattr(analysis, "_logits", counted)
    with pytest.raises(KeyboardInterrupt):
        ablation(model, IDS, folder=tmp_path, progress=False)
    resumed = ablation(model, IDS, folder=tmp_path, progress=False)
    assert items[3:] == [1, 6, 1]  # the whole model, the second layer with a control, and all heads
    assert resumed.table.equals(ablation(model, IDS, progress=False).table)
    with torch.no_grad():
        model.embedding.weight[0, 0] += 1
    items[:] = [0] * 3
    one = ablation(model, IDS, layers=[0], folder=tmp_path, progress=False)
    assert items[3:] == [1, 6, 1], "the losses of another model were read"
    assert one.all_nats == pytest.approx(one.layers["nats"].item(), abs=2e-6), "all heads are those of another run"
    (tmp_path / analysis.PROGRESS).write_text("no table")
    with refused("folder"):
        ablation(model, IDS, folder=tmp_path, progress=False)


def test_other_models_and_shapes_are_refused() -> None:
    with refused("inputs"):
        ablation(small(), IDS[:, :1], progress=False)
    for counted in ([], [0], [30]):
        with refused("counted", r"positions from 1 to 29"):
            ablation(small(), IDS, counted=counted, progress=False)
    with refused("what"):
        ablation(small(), IDS, what="tails", progress=False)
    sees_all = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=2, heads=4, prefix=IDS.shape[1]))
    for model in (hf.build("bert"), sees_all):
        with refused("model", match="no loss on the next token"):
            ablation(model, IDS, progress=False)


@pytest.mark.usefixtures("undrawn")
def test_command_prints_a_table_and_writes_files(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    shown = command.succeeds("ablate", "qkv-mini", "import os, sys, re", "--layers", 0, "--out", out)
    assert "increase" in shown
    assert len(pd.read_csv(out / "ablation.csv")) == 6
    assert json.loads((out / "ablation.json").read_text())["what"] == "heads"
    assert (out / "ablation.png").exists()
    (tmp_path / "texts").mkdir()
    for at in range(3):
        (tmp_path / "texts" / f"{at}.py").write_text(f"import os\nfor name in names[{at}:]:\n    print(name)\n" * 3)
    words = ("--layers", 0, "--files", tmp_path / "texts", "--tokens", 12, "--out", tmp_path / "files")
    assert "36 tokens in 3 texts" in command.succeeds("ablate", "qkv-mini", *words)
    table = pd.read_csv(tmp_path / "files" / "ablation.csv")
    assert (table["low"] < table["delta_nats"]).all()
    assert "--files and another text" in command.refuses("ablate", "qkv-mini", "hi", *words)


@pytest.mark.usefixtures("undrawn")
def test_a_teaching_model_is_judged_on_what_its_task_asks_for(tmp_path: Path, command: Command) -> None:
    loaded = load_model("qkv-reversal")
    ids = loaded.sample["ids"]  # type: ignore[index]
    assert torch.equal(ids[0, 7:], ids[0, :6].flip(0))
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(loaded.model(ids)[0, 6:12].double(), ids[0, 7:]).item()
    for command_name, file in (("ablate", "ablation.json"), ("evict", "eviction.json")):
        options = ("--budgets", 6, "--policies", "window") if command_name == "evict" else ()
        command.succeeds(command_name, "qkv-reversal", *options, "--out", tmp_path / command_name)
        found = json.loads((tmp_path / command_name / file).read_text())
        nats = found["nats"] if command_name == "ablate" else found["loss"][0]["nats"]
        assert nats == pytest.approx(want, abs=1e-5)
        assert nats < 0.1
