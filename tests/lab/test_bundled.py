"""The models that come with the package do what their names say, and their settings rebuild them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from conftest import Command
from qkv import models
from qkv.models import DecoderLM, checkpoint
from qkv.models.loading import SAMPLE, load_model
from qkv.models.text import load_text_model
from qkv.profiler.corpora import default_text
from qkv_lab import grammar, settings, translate
from qkv_lab.loop import sample
from qkv_lab.tasks import names, task_class


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


@torch.no_grad()
def test_accuracy_on_held_out_data_equals_the_result_file() -> None:
    """And the captioner attends to the objects as often as it did."""
    (task, _, said), model = bundled("qkv-caption"), models.load("qkv-caption")
    assert task.evaluate(model)["exact_match"] == pytest.approx(said["evaluation"]["exact_match"], abs=0.02)
    assert task.check(model)["strongest"] == pytest.approx(said["check"]["strongest"], abs=0.01)


@pytest.mark.slow
@torch.no_grad()
def test_mini_has_low_loss_on_python_and_has_sinks() -> None:
    loaded, text = load_text_model("qkv-mini"), default_text("qkv-mini")
    assert isinstance(loaded.model, DecoderLM)
    profile = qkv.profile("qkv-mini", text, probe=False, progress=False)
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


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("words", [
    "map qkv-translation", "map qkv-caption", "flow qkv-reversal", "ablate qkv-reversal",
    "evict qkv-reversal --budgets 6",
])  # fmt: skip
def test_a_command_without_text_runs_on_the_sample_of_a_bundled_model(
    words: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "it runs on a sample of its training data" in command(*words.split()).err
    assert any(tmp_path.rglob("*.png"))


def test_generate_with_a_translator_translates(command: Command) -> None:
    assert (
        command.succeeds("generate", "qkv-translation", "I love deep learning") == "j' aime l' apprentissage profond\n"
    )


@pytest.mark.parametrize("name", [name for name in names() if name != "language"])
def test_the_folder_of_a_run_does_not_open(name: str, tmp_path: Path) -> None:
    """The folder of the run and that of its model, each with the model, inputs and the names of words."""
    task, model = task_class(name)(), task_class(name)().build()
    checkpoint.save(model, tmp_path / "model")
    for file, text in {SAMPLE: sample(task, model), **task.files()}.items():
        (tmp_path / "model" / file).write_text(text, encoding="utf-8")
    loaded = load_model(str(tmp_path))
    assert loaded.sample is not None
    profile = qkv.profile(loaded.model, loaded.sample, tokenizer=loaded.tokenizer, probe=False, progress=False)
    if name == "translation":
        assert set(profile.data["query_token"].values[0]) <= set(grammar.vocabularies()[1]) | {"<start>", "<end>", ""}
