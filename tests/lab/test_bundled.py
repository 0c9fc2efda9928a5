"""The models that come with the package do what their names say, and their settings rebuild them."""

from __future__ import annotations

import json

import pytest
import torch

import qkv
from qkv import models
from qkv.models import DecoderLM, checkpoint
from qkv.models.loading import load_model, load_text_model
from qkv.profiler.corpora import default_text
from qkv_lab import settings, translate
from qkv_lab.tasks.sequences import Reversal
from qkv_lab.tasks.translation import Translation

FILES = {"config.json", "model.safetensors", "run.toml", "metrics.jsonl", "result.json"}
MOST = 20e6


@pytest.mark.parametrize("name", checkpoint.NAMES)
def test_every_model_has_settings_metrics_and_result(name: str) -> None:
    folder = checkpoint.folder_of(name)
    assert folder is not None
    assert {p.name for p in folder.iterdir()} >= FILES
    task, training = settings.from_toml(folder / "run.toml")
    model = models.load(folder)
    result = json.loads((folder / "result.json").read_text())
    assert result["step"] == training.steps
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    if task.name != "language":  # its vocabulary needs the corpus
        assert type(model)(model.config).state_dict().keys() == task.build().state_dict().keys()
        assert task.build().config == model.config  # type: ignore[union-attr]


def test_all_models_together_are_small() -> None:
    sizes = [p.stat().st_size for name in checkpoint.NAMES for p in checkpoint.folder_of(name).iterdir()]  # type: ignore[union-attr]
    assert 0 < sum(sizes) < MOST


def test_folder_of_an_unknown_name_is_none() -> None:
    assert checkpoint.folder_of("../qkv-mini") is None


@torch.no_grad()
def test_reversal_heads_attend_to_the_mirrored_position() -> None:
    task, model = Reversal(), models.load("qkv-reversal")
    assert task.evaluate(model)["token_accuracy"] >= 0.99
    assert task.check(model)["best"] >= 0.95


def test_translation_model_translates_the_demonstration_sentences() -> None:
    for english, french in {
        "I love deep learning": "j' aime l' apprentissage profond",
        "the black cat sleeps": "le chat noir dort",
        "the black cat sat on the mat": "le chat noir était assis sur le tapis",
        "the old woman does not eat the red apples": "la vieille femme ne mange pas les pommes rouges",
    }.items():
        assert " ".join(translate("qkv-translation", english).target) == french


def test_translation_model_translates_and_aligns() -> None:
    source, target, weights = translate("qkv-translation", "the black cat does not eat")
    assert target == ["le", "chat", "noir", "ne", "mange", "pas"]
    assert weights is not None
    strongest = weights.argmax(-1).flatten().tolist()
    assert [source[strongest[t]] for t in (1, 2)] == ["cat", "black"]


@torch.no_grad()
def test_captioner_describes_held_out_scenes_and_attends_to_the_objects() -> None:
    folder = checkpoint.folder_of("qkv-caption")
    assert folder is not None
    task, _ = settings.from_toml(folder / "run.toml")
    model, said = models.load("qkv-caption"), json.loads((folder / "result.json").read_text())
    assert task.evaluate(model)["exact_match"] == pytest.approx(said["evaluation"]["exact_match"], abs=0.01)
    assert task.check(model)["strongest"] == pytest.approx(said["check"]["strongest"], abs=0.01)


@pytest.mark.slow
@torch.no_grad()
def test_translation_accuracy_equals_its_result_file() -> None:
    folder = checkpoint.folder_of("qkv-translation")
    assert folder is not None
    task, _ = settings.from_toml(folder / "run.toml")
    assert isinstance(task, Translation)
    said = json.loads((folder / "result.json").read_text())["evaluation"]
    assert task.evaluate(models.load(folder))["exact_match"] == pytest.approx(said["exact_match"], abs=0.02)


def test_mini_has_low_loss_on_python_and_has_sinks() -> None:
    loaded = load_model("qkv-mini")
    assert isinstance(loaded.model, DecoderLM)
    profile = qkv.profile("qkv-mini", default_text("qkv-mini"), progress=False)
    assert profile.data["key_token"].values[0, 0] == "<s>"
    alpha = profile.data["sink"].isel(query=slice(1, 64)).mean(("text", "query"))  # T = 64: Gu et al.
    assert float(alpha.max()) > 0.3
    ids = loaded.tokenizer(default_text("qkv-mini"), return_tensors="pt")["input_ids"]
    shuffled = torch.cat([ids[:, :1], ids[:, 1:][:, torch.randperm(ids.shape[1] - 1)]], 1)
    with torch.no_grad():
        here, there = (float(loaded.model.loss(x)) for x in (ids, shuffled))
    assert here < 3.3
    assert there > here + 2


def test_mini_continues_python_code() -> None:
    mini = load_text_model("qkv-mini")
    ids = mini.encode("import os\nimport sys\n\nclass Stack:\n    def __init__(self")
    with torch.no_grad():
        logits = mini.model(torch.tensor([ids]))[0, -1]
    assert mini.tokenizer.decode([int(logits.argmax())]).startswith((",", "):"))
