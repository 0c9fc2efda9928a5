"""Files of every release still open: `tests/golden` has a small one of each format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from benchmarks.mechanisms.run import load as load_bench
from conftest import refused
from qkv import lab
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.text import load_text_model
from qkv.profiler import Survey
from qkv.profiler.analyses import ablation
from qkv_lab import log, resume, settings, tokens
from qkv_lab.experiments import record
from qkv_lab.tasks import Reversal
from qkv_lab.translation import read_vocabulary
from research.sinks import Study

RELEASES = sorted(path for path in (Path(__file__).parents[1] / "golden").iterdir() if path.is_dir())


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_a_profile_opens_with_its_numbers(golden: Path, tmp_path: Path) -> None:
    profile = qkv.Profile.load(golden / "profile.qkv.zip")
    assert "".join(profile.data["query_token"].values[0]) == "def f(x)"
    assert profile.heads()["entropy"].between(0, np.log(8)).all()
    again = qkv.Profile.load(profile.save(tmp_path / "again.qkv.zip"))
    for name, data in profile.groups.items():
        assert data.identical(again.groups[name])


def test_a_survey_and_its_shards_open(golden: Path) -> None:
    whole = Survey.load(golden / "survey/survey.qkv.zip")
    first, second = (Survey.load(golden / f"survey/shards/{n:04}.qkv.zip") for n in range(2))
    assert whole.record["documents"] == 2
    assert first.merge(second).packed() == whole.packed()
    assert whole.heads()["entropy"].between(0, np.log(31)).all()


def test_a_model_its_tokenizer_and_a_vocabulary_open(golden: Path) -> None:
    loaded = load_text_model(str(golden / "model"))
    assert loaded.encode("Hi!") == [72, 105, 33]
    assert torch.isfinite(qkv.models.load(golden / "model")(torch.tensor([[72, 105, 33]]))).all()
    source, target = read_vocabulary(golden)
    assert (source.numbers(["the"]), target.text([3])) == ([4], ["chat"])


def test_a_run_opens_and_resumes(golden: Path, tmp_path: Path) -> None:
    """A finished run is loaded; without its result it continues from the checkpoint, and gives the same model."""
    folder = Path(shutil.copytree(golden / "run", tmp_path / "run"))
    task, training = settings.from_toml(folder / "run.toml")
    assert task == Reversal(symbols=4, model=DecoderConfig(d_model=8, layers=1, heads=2))
    finished = lab.train(task, training, folder, progress=False, figures=False)
    assert finished.evaluation == log.read(folder / "metrics.jsonl")[-1]["evaluation"]
    (folder / "result.json").unlink()
    resumed = lab.train(task, training, folder, progress=False, figures=False)
    for a, b in zip(finished.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_results_open(golden: Path) -> None:
    assert record.load(golden / "experiment/norm_place.json")["verdicts"][0]["claim"] == "C086"
    assert Study.load(golden / "sinks.json").verdicts
    assert load_bench(golden / "bench.json")["mechanisms"]["causal"]["cells"][32]["ratios"]["sdpa"] > 0
    [key] = {json.loads(line)["key"] for line in (golden / "ablation.jsonl").read_text().splitlines()}
    kept = ablation.Kept(golden / "ablation.jsonl", ("key", "layer", "head"), "nats").rows
    assert {(key, 0, 0), (key, 0, 1)} <= {*kept}
    assert tokens.open_tokens(golden / "tokens.npy").tolist() == list(range(9))
    with np.load(golden / "map.npz") as map_of_a_head:
        assert map_of_a_head["maximum"].shape == map_of_a_head["mean"].shape


def _resume(folder: Path) -> Any:
    model = DecoderLM(DecoderConfig(vocab_size=6, context=13, d_model=8, layers=1, heads=2))
    return resume.load(folder, model, torch.optim.AdamW(model.parameters()))


def test_files_of_a_later_version_are_refused(tmp_path: Path) -> None:
    """The sentence tells to update qkv."""
    folder = Path(shutil.copytree(RELEASES[-1], tmp_path / "files"))
    readers = {
        "model/config.json": ("config.json", lambda f: qkv.models.load(f / "model")),
        "vocabulary.json": ("model", read_vocabulary),
        "experiment/norm_place.json": ("out", lambda f: record.load(f / "experiment/norm_place.json")),
        "bench.json": ("path", lambda f: load_bench(f / "bench.json")),
        "run/checkpoint-00000002/state.json": ("checkpoint", lambda f: _resume(f / "run/checkpoint-00000002")),
    }
    for name, (argument, read) in readers.items():
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 99}))
        with refused(argument, match="version 99, .* update qkv"):
            read(folder)
    run = folder / "run/run.toml"
    run.write_text("format_version = 99\n" + run.read_text())
    with refused("config", match="version 99, .* update qkv"):
        settings.from_toml(run)
