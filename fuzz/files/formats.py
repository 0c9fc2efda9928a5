"""Every format that qkv opens: small valid files, and the function that opens them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import qkv
from benchmarks.mechanisms import run as bench
from qkv.models import DecoderConfig, DecoderLM, loading
from qkv.models.text import load_text_model
from qkv.profiler import Survey
from qkv.profiler.analyses import ablation
from qkv_lab import log, resume, settings, tokens
from qkv_lab.experiments import record
from qkv_lab.experiments.run import read_part
from qkv_lab.translation import read_vocabulary
from research.sinks import Study

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "0.1.0"


@dataclass(frozen=True)
class Format:
    """One kind of file or folder."""

    files: tuple[str, ...]
    """The files that are damaged."""
    open: Callable[[Path], Any]
    """Opens the files in a folder."""
    content: Callable[[Any], Any] | None = None
    """What has to be equal if the format has checksums; None if it has none."""


def _profile(found: qkv.Profile) -> Any:
    return {name: data.to_dict() for name, data in (found.groups | found.residual).items()}, found.attrs


def _resume(folder: Path) -> Any:
    model = DecoderLM(DecoderConfig(vocab_size=6, context=13, d_model=8, layers=1, heads=2))
    optimizer = torch.optim.AdamW(model.parameters())
    return resume.load(folder / "run" / "checkpoint-00000002", model, optimizer)


def _ablation(folder: Path) -> Any:
    return ablation.Kept(folder / ablation.PROGRESS, ("key", "layer", "head"), "nats").rows


MODEL = ("config.json", "model.safetensors")
INDEX = "model.safetensors.index.json"
FORMATS: dict[str, Format] = {
    "profile": Format(("profile.qkv.zip",), lambda f: qkv.Profile.load(f / "profile.qkv.zip"), _profile),
    "survey": Format(
        ("survey/survey.qkv.zip",), lambda f: Survey.load(f / "survey/survey.qkv.zip"), lambda x: x.packed()
    ),
    "model": Format(tuple(f"model/{name}" for name in MODEL), lambda f: qkv.models.load(f / "model")),
    "text model": Format(
        (*(f"model/{name}" for name in MODEL), "model/tokenizer.json"), lambda f: load_text_model(str(f / "model"))
    ),
    "GPT-2": Format(tuple(f"gpt2/{name}" for name in (*MODEL, INDEX)), lambda f: qkv.models.load(f / "gpt2")),
    "GPT-2 text": Format(
        ("gpt2/config.json", "gpt2/generation_config.json", "gpt2/tokenizer.json", "gpt2/tokenizer_config.json"),
        lambda f: load_text_model(str(f / "gpt2")),
    ),
    "transformers": Format(
        (*(f"gpt2/{name}" for name in MODEL), "gpt2/tokenizer.json", "gpt2/tokenizer_config.json"),
        lambda f: loading.load_model(str(f / "gpt2"), head=None),
    ),
    "vocabulary": Format(("vocabulary.json",), read_vocabulary),
    "run.toml": Format(("run/run.toml",), lambda f: settings.from_toml(f / "run/run.toml")),
    "checkpoint": Format(("run/checkpoint-00000002/state.json", "run/checkpoint-00000002/state.safetensors"), _resume),
    "metrics": Format(("run/metrics.jsonl",), lambda f: log.read(f / "run/metrics.jsonl")),
    "experiment": Format(("experiment/norm_place.json",), lambda f: record.load(f / "experiment/norm_place.json")),
    "unfinished experiment": Format(("experiment/x.json.part",), lambda f: read_part(f / "experiment/x.json.part")),
    "study": Format(("sinks.json",), lambda f: Study.load(f / "sinks.json")),
    "ablation": Format(("ablation.jsonl",), _ablation),
    "bench": Format(("bench.json",), lambda f: bench.load(f / "bench.json")),
    "tokens": Format(("tokens.npy",), lambda f: tokens.open_tokens(f / "tokens.npy")),
}

HAS_GGUF = importlib.util.find_spec("gguf") is not None
if HAS_GGUF:
    FORMATS |= {
        "GGUF": Format(("tiny.gguf",), lambda f: loading.load_model(str(f / "tiny.gguf"))),
        "GGUF text": Format(("tiny.gguf",), lambda f: load_text_model(str(f / "tiny.gguf"))),
    }


def write(folder: Path) -> None:
    """Write the valid files of all formats."""
    shutil.copytree(GOLDEN, folder, dirs_exist_ok=True)
    if HAS_GGUF:
        from fuzz.files.gguf_model import tiny_llama, write_gguf

        write_gguf(folder / "tiny.gguf", tiny_llama())
    (folder / "gpt2").mkdir()
    d, layers, vocabulary, context = 8, 1, 257, 16
    shapes = {"wte.weight": (vocabulary, d), "wpe.weight": (context, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    for layer in range(layers):
        shapes |= {
            f"h.{layer}.{name}": shape
            for name, shape in {
                "ln_1.weight": (d,), "ln_1.bias": (d,), "ln_2.weight": (d,), "ln_2.bias": (d,),
                "attn.c_attn.weight": (d, 3 * d), "attn.c_attn.bias": (3 * d,), "attn.c_proj.weight": (d, d),
                "attn.c_proj.bias": (d,), "mlp.c_fc.weight": (d, 4 * d), "mlp.c_fc.bias": (4 * d,),
                "mlp.c_proj.weight": (4 * d, d), "mlp.c_proj.bias": (d,),
            }.items()
        }  # fmt: skip
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "gpt2" / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": vocabulary, "n_positions": context,
        "n_embd": d, "n_layer": layers, "n_head": 2, "bos_token_id": 256, "eos_token_id": 256,
    }  # fmt: skip
    (folder / "gpt2" / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "gpt2" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    (folder / "gpt2" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    rows = json.loads((folder / "experiment" / "norm_place.json").read_text())["variants"]
    runs = {variant: row["results"][0] for variant, row in rows.items()}
    (folder / "experiment" / "x.json.part").write_text(json.dumps({"seeds": {"0": runs}}))
    shutil.copy(GOLDEN / "model" / "tokenizer.json", folder / "gpt2" / "tokenizer.json")
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<s>"}
    (folder / "gpt2" / "tokenizer_config.json").write_text(json.dumps(known, indent=1))
