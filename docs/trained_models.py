"""Writes the page and the figures of the bundled trained models, for `make figures`."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import qkv
from qkv import models
from qkv.cli import main
from qkv.models import checkpoint
from qkv.positions import Rotary
from qkv.profiler.corpora import default_text
from qkv_lab import draw, log, settings, translate

SENTENCES = ("I love deep learning", "the black cat sat on the mat", "the old woman does not eat the red apples")
PROMPT = 'def read(self, path):\n    """'
SHORT = 64
"""Tokens of a text on which sinks are measured (T of Gu et al. 2025)."""


def page(sinks: str) -> str:
    """The page of the bundled models; `sinks` is the path from the page to that of studies of sinks."""
    lines = [
        "# Trained models",
        "",
        "Made by `make figures` from the models beside it; do not edit. Each folder holds the model, `run.toml` (all",
        "settings), `metrics.jsonl` (its log) and `result.json`. Open one with `qkv.models.load(NAME)`. To train all",
        "of them again: `make models`; one:",
        "",
        "    qkv train --config src/qkv/models/trained/qkv-mini/run.toml --out qkv-mini --threads 1",
    ]
    for name, what in checkpoint.NAMES.items():
        result = _result(name)
        lines += ["", f"## {name}", "", f"{what[0].upper()}{what[1:]}. {_size(name, result)}", ""]
        lines += _SAID[name](result)
    return ("\n".join(lines) + "\n").replace("SINKS", sinks)


def figures(folder: Path) -> None:
    """Heads of the reversal model, alignments of the translation model, and sinks of qkv-mini during training."""
    with torch.no_grad():
        for name, picture in (("qkv-reversal", "mirror"), ("qkv-translation", "alignment")):
            task, _ = settings.from_toml(_folder(name) / "run.toml")
            made = task.figures(models.load(name))[picture]
            draw.save_figure(made, folder / f"lab-{name.removeprefix('qkv-')}.png")
    draw.save_figure(training_of_mini(), folder / "lab-mini.png")


def training_of_mini() -> Figure:
    """Held-out loss, and weight on the first token of every head, over training."""
    lines = [x for x in log.read(_folder("qkv-mini") / "metrics.jsonl") if "evaluation" in x]
    steps = [x["step"] for x in lines]
    alpha = np.array([x["check"]["sink"] for x in lines])
    figure, (left, right) = draw.panels(
        f"At the end of training the strongest head of qkv-mini puts {alpha[-1].max():.0%} on the first of 512 tokens",
        "Held-out text of Python's standard library. Left: bits per byte. Right: weight on <s>, mean over the queries "
        "of whole windows of 512 tokens; a line for each head, coloured by layer.",
        columns=2, width=7.6, height=2.9,
    )  # fmt: skip
    left.plot(steps, [x["evaluation"]["bits_per_byte"] for x in lines], color=draw.COLOURS[0], linewidth=1.6)
    left.set(xlabel="step", ylabel="bits per byte, held out", ylim=(0, None))
    for layer in range(alpha.shape[1]):
        for head in range(alpha.shape[2]):
            label = f"layer {layer}" if head == 0 else None
            right.plot(steps, alpha[:, layer, head], color=draw.COLOURS[layer], linewidth=1.1, label=label)
    right.set(xlabel="step", ylabel="weight on the first token", ylim=(0, None))
    right.legend(frameon=False, fontsize=7.5)
    return figure


def _mini(result: dict[str, Any]) -> list[str]:
    profile = qkv.profile("qkv-mini", default_text("qkv-mini"), progress=False)
    sink = profile.data["sink"].isel(text=0)
    short, whole = (sink.isel(query=slice(n)).mean("query").values for n in (SHORT, None))  # α of Gu et al. 2025
    order = [divmod(int(i), short.shape[1]) for i in short.ravel().argsort()[::-1]]
    found = result["evaluation"]
    task, _ = settings.from_toml(_folder("qkv-mini") / "run.toml")
    more = [name.strip().removeprefix("package:") for name in task.more.split(",")]
    rows = [f"| {layer}.{head} | {short[layer, head]:.0%} | {whole[layer, head]:.0%} |" for layer, head in order[:8]]
    windows = np.array(result["check"]["sink"])
    rotary = qkv.models.load("qkv-mini").blocks[0].attention.rotary
    assert isinstance(rotary, Rotary)
    lengths = 2 * np.pi / rotary.scaling.frequencies(rotary.dim, rotary.base, task.context)
    turning = lengths < task.context
    return [
        f"Half of its training sequences are from Python's standard library, and half from {len(more)} installed "
        f"packages ({', '.join(more)}), without their files that share a passage with the held-out text.",
        "",
        f"Its rotary positions turn {turning.sum()} of the {len(lengths)} pairs of dimensions of a head, by "
        f"wavelengths of {lengths[turning].min():.0f} to {lengths[turning].max():.0f} tokens. The others hardly turn "
        "within a context: what queries and keys have in common there counts at every distance. Such partial rotary "
        "positions are those of GPT-NeoX ([Black et al. 2022](https://arxiv.org/abs/2204.06745), §2.1.1); here they "
        "are made by Llama 3's scaling, with a large factor.",
        "",
        f"On held-out text of Python 3.11's standard library: {found['loss']:.3f} nats per token, "
        f"{found['bits_per_byte']:.3f} bits per byte. Over its whole context, windows of {task.context} held-out "
        f"tokens, {int((windows > 0.3).sum())} of its {short.size} heads put more than 30 % of their weight on `<s>`. "
        f"On the first {SHORT} tokens of the program that `qkv profile` reads by default, "
        f"{int((short > 0.3).sum())} do (table; all {profile.data.sizes['query']} tokens: last column). "
        "`research.sinks` measures the loss [without that token](SINKS).",
        "",
        f"| layer.head | on the first token, {SHORT} tokens | whole program |",
        "|---|---:|---:|",
        *rows,
        "",
        'A prompt of two lines, continued by `qkv generate qkv-mini "…" --seed 0 --tokens 90`:',
        "",
        "```text",
        *_generated().splitlines(),
        "```",
    ]


def _generated() -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        main(["generate", "qkv-mini", PROMPT, "--seed", "0", "--tokens", "90"])
    return said.getvalue().rstrip()


def _reversal(result: dict[str, Any]) -> list[str]:
    found, check = result["evaluation"], result["check"]
    return [
        f"On unseen sequences {found['token_accuracy']:.1%} of tokens are generated correctly. In head "
        f"{check['best_layer']}.{check['best_head']} the mirrored position is the strongest key of "
        f"{check['best']:.1%} of queries. Without all heads for which this holds for at least 95 % of queries, "
        f"{check['without_mirrors']:.1%} of tokens are correct."
    ]


def _translation(result: dict[str, Any]) -> list[str]:
    found, check = result["evaluation"], result["check"]
    rows = [f"| {s} | {' '.join(translate('qkv-translation', s).target)} |" for s in SENTENCES]
    return [
        f"{found['exact_match']:.1%} of unseen sentences are translated exactly (BLEU {found['bleu']:.1f}). The "
        f"English word with the most weight is correct for {check['best_accuracy']:.1%} of the French words (alignment "
        f'error rate {check["best_aer"]:.3f}). `qkv_lab.translate("qkv-translation", "…")`:',
        "",
        "| | |",
        "|---|---|",
        *rows,
    ]


def _caption(result: dict[str, Any]) -> list[str]:
    found, check = result["evaluation"], result["check"]
    return [
        f"{found['exact_match']:.1%} of the captions of held-out scenes are exact; no description of these scenes "
        "occurs in training. When a colour or shape is named, the grid cell with the most weight shows that object in "
        f"{check['strongest']:.1%} of cases, and {check['mass']:.0%} of the weight lies on cells that show it "
        f"({check['mass_at_colours']:.0%} at colours, {check['mass_at_shapes']:.0%} at shapes; by chance "
        f"{check['chance']:.0%})."
    ]


_SAID = {"qkv-mini": _mini, "qkv-reversal": _reversal, "qkv-translation": _translation, "qkv-caption": _caption}


def _folder(name: str) -> Path:
    found = checkpoint.folder_of(name)
    assert found is not None
    return found


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_folder(name) / "result.json").read_text())
    return found


def _size(name: str, result: dict[str, Any]) -> str:
    weights = (_folder(name) / "model.safetensors").stat().st_size
    return f"{result['parameters']:,} parameters, {weights / 1e6:.1f} MB, {result['step']:,} steps."
