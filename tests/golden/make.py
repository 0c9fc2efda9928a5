"""Write a small file of each format that qkv saves: ``python tests/golden/make.py VERSION``, before a release.

The files of a release are never written again: `tests/docs/test_golden.py` opens those of every release.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import qkv
from benchmarks.mechanisms.run import bench, save
from qkv import lab, sinks
from qkv.cli import main
from qkv.models import ByteTokenizer, DecoderConfig, DecoderLM
from qkv.profiler.surveys.survey import survey
from qkv_lab import experiments, tokens
from qkv_lab.tasks import Reversal
from qkv_lab.translation import Vocabulary, vocabulary_file

TEXT = "def f(x): return x + 1"


def write(folder: Path) -> None:
    """Write all files."""
    torch.manual_seed(0)
    model = DecoderLM(DecoderConfig(d_model=8, layers=1, heads=2, context=32)).eval()
    tokenizer = ByteTokenizer()

    profile = qkv.profile(model, TEXT[:8], tokenizer=tokenizer, probe=False, progress=False)
    profile.save(folder / "profile.qkv.zip")

    survey(model, [TEXT, "import os"], tokenizer=tokenizer, out=folder / "survey", shards=2, name="tiny")

    models = folder / "model"
    qkv.models.save(model, models)
    (models / "tokenizer.json").write_text(tokens.byte_tokenizer(), encoding="utf-8")

    words = Vocabulary(["cat", "the"]), Vocabulary(["chat", "le"])
    (folder / "vocabulary.json").write_text(vocabulary_file(*words), encoding="utf-8")

    task = Reversal(symbols=4, model=DecoderConfig(d_model=8, layers=1, heads=2))
    training = lab.Training(steps=2, batch=4, save_every=1, evaluate_every=2)
    lab.train(task, training, folder / "run", progress=False, figures=False)
    shutil.rmtree(folder / "run" / "checkpoint-00000001")

    experiments.run("norm_place", folder / "experiment", quick=True, progress=False)
    shutil.rmtree(folder / "experiment" / "runs")
    (folder / "experiment" / "norm_place.png").unlink()

    study(folder / "sinks.json")
    qkv.profiler.ablation(model, TEXT, tokenizer=tokenizer, folder=folder, progress=False, name="tiny").save(folder)
    save(bench(["causal"], lengths=[32], memory=[], heads=1, threads=1, seconds=0.01), folder / "bench.json")
    tokens.write_tokens(folder / "tokens.npy", torch.arange(9).numpy().astype("uint16"))
    main(["map", "qkv-mini", TEXT, "--size", "8", "--data", "--out", str(folder / "map.png")])
    (folder / "map.png").unlink()


def study(file: Path) -> None:
    """The sinks of a tiny model, with numbers of 3 digits."""
    torch.manual_seed(1)
    model: nn.Module = DecoderLM(DecoderConfig(d_model=8, layers=2, heads=2)).eval()
    found = sinks.study(model, torch.randint(256, (16, 64)), progress=False, name="tiny")
    made = json.loads(json.dumps(found.as_dict()), parse_float=lambda text: float(f"{float(text):.3g}"))
    file.write_text(json.dumps(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = Path(__file__).parent / sys.argv[1]
    target.mkdir()
    write(target)
