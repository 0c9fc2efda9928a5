"""The models that come with the package do what their names say, and their settings rebuild them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import qkv
from qkv import models
from qkv.models import DecoderLM, checkpoint
from qkv.models.loading import load_text_model
from qkv.profiler.corpora import default_text
from qkv_lab import settings, translate


def bundled(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """The task and the training of a model, and its result file."""
    folder = checkpoint.folder_of(name)
    assert folder is not None
    assert (folder / "metrics.jsonl").exists()
    return *settings.from_toml(folder / "run.toml"), json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", checkpoint.NAMES)
def test_every_model_has_settings_metrics_and_result(name: str) -> None:
    task, training, result = bundled(name)
    model = models.load(name)
    assert result["step"] == training.steps
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    if task.name != "language":  # its vocabulary needs the corpus
        assert type(model)(model.config).state_dict().keys() == task.build().state_dict().keys()
        assert task.build().config == model.config
    assert checkpoint.folder_of(f"../{name}") is None


def test_translation_model_translates_and_aligns() -> None:
    for english, french in {
        "I love deep learning": "j' aime l' apprentissage profond",
        "the black cat sat on the mat": "le chat noir était assis sur le tapis",
        "the old woman does not eat the red apples": "la vieille femme ne mange pas les pommes rouges",
    }.items():
        assert " ".join(translate("qkv-translation", english).target) == french
    source, target, weights = translate("qkv-translation", "the black cat does not eat")
    assert target == ["le", "chat", "noir", "ne", "mange", "pas"]
    assert weights is not None
    strongest = weights.argmax(-1).flatten().tolist()
    assert [source[strongest[t]] for t in (1, 2)] == ["cat", "black"]


@pytest.mark.parametrize("name", ["qkv-caption", pytest.param("qkv-translation", marks=pytest.mark.slow)])
@torch.no_grad()
def test_accuracy_on_held_out_data_equals_the_result_file(name: str) -> None:
    """And the captioner attends to the objects as often as it did."""
    (task, _, said), model = bundled(name), models.load(name)
    assert task.evaluate(model)["exact_match"] == pytest.approx(said["evaluation"]["exact_match"], abs=0.02)
    if name == "qkv-caption":
        assert task.check(model)["strongest"] == pytest.approx(said["check"]["strongest"], abs=0.01)


@pytest.mark.slow
@torch.no_grad()
def test_mini_has_low_loss_on_python_and_has_sinks() -> None:
    loaded, text = load_text_model("qkv-mini"), default_text("qkv-mini")
    assert isinstance(loaded.model, DecoderLM)
    profile = qkv.profile("qkv-mini", text, progress=False)
    assert profile.data["key_token"].values[0, 0] == "<s>"
    alpha = profile.data["sink"].isel(query=slice(1, 64)).mean(("text", "query"))  # T = 64: Gu et al.
    assert float(alpha.max()) > 0.3
    ids = torch.tensor([loaded.encode(text)])
    order = torch.randperm(ids.shape[1] - 1, generator=torch.Generator().manual_seed(0))
    here, there = (float(loaded.model.loss(x)) for x in (ids, torch.cat([ids[:, :1], ids[:, 1:][:, order]], 1)))
    assert here < 3.3
    assert there > here + 2
    started = loaded.encode("import os\nimport sys\n\nclass Stack:\n    def __init__(self")
    following = int(loaded.model(torch.tensor([started]))[0, -1].argmax())
    assert loaded.tokenizer.decode([following]).startswith((",", "):"))
