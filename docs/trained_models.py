"""The page and the figures of the trained models that come with the package, from the models themselves."""

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
from qkv.lab import draw, log, settings, translate
from qkv.models import bundled
from qkv.profiler.texts import default_text

SENTENCES = ("I love deep learning", "the black cat sat on the mat", "the old woman does not eat the red apples")
PROMPT = 'def read(self, path):\n    """'
SHORT = 64
"""Tokens of a text on which sinks are measured (T of Gu et al. 2025)."""


def page(experiments: str) -> str:
    """What they are and can do; `experiments` is the way from the page to the experiments' README."""
    lines = [
        "# Trained models",
        "",
        "Made by `make figures` from the models beside it; do not edit. Each folder holds the model, `run.toml` (all",
        "settings), `metrics.jsonl` (its log) and `result.json`. Open one with `qkv.models.load(NAME)`. To train all",
        "of them again: `make models`; one:",
        "",
        "    qkv train --config src/qkv/models/trained/qkv-mini/run.toml --out qkv-mini --threads 1",
    ]
    for name, what in bundled.NAMES.items():
        result = _result(name)
        lines += ["", f"## {name}", "", f"{what[0].upper()}{what[1:]}. {_size(name, result)}", ""]
        lines += _SAID[name](result)
    return ("\n".join(lines) + "\n").replace("EXPERIMENTS", experiments)


def figures(folder: Path) -> None:
    """Heads of the reversal model, alignments of the translation model, and how the sinks of qkv-mini came."""
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
        f"While qkv-mini learns, its strongest head comes to put {alpha[-1].max():.0%} on the first of 512 tokens",
        "Held-out text of Python's standard library. Left: bits a byte. Right: weight on <s>, mean over the queries of "
        "whole windows of 512 tokens; a line for each head, coloured by layer.",
        columns=2, width=7.6, height=2.9,
    )  # fmt: skip
    left.plot(steps, [x["evaluation"]["bits_per_byte"] for x in lines], color=draw.COLOURS[0], linewidth=1.6)
    left.set(xlabel="step", ylabel="bits a byte, held out", ylim=(0, None))
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
    short, whole = (sink.isel(query=slice(1, n)).mean("query").values for n in (SHORT, None))
    order = [divmod(int(i), short.shape[1]) for i in short.ravel().argsort()[::-1]]
    found = result["evaluation"]
    rows = [f"| {layer}.{head} | {short[layer, head]:.0%} | {whole[layer, head]:.0%} |" for layer, head in order[:8]]
    return [
        f"On held-out text of Python 3.11's standard library: {found['loss']:.3f} nats a token, "
        f"{found['bits_per_byte']:.3f} bits a byte. On the first {SHORT} tokens of the program that `qkv profile` "
        f"reads by default {int((short > 0.3).sum())} of its {short.size} heads put more than 30 % on `<s>`; "
        f"the longer the text, the more share it (all {profile.data.sizes['query']} tokens: last column). "
        "What it loses without that token: [experiment mini](EXPERIMENTS#mini).",
        "",
        f"| layer.head | on the first token, {SHORT} tokens | whole program |",
        "|---|---:|---:|",
        *rows,
        "",
        'A prompt of two lines, and how `qkv generate qkv-mini "…" --seed 0 --tokens 90` goes on:',
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
        f"On unseen sequences {found['token_accuracy']:.1%} of tokens are right, generated one after another. Head "
        f"{check['best_layer']}.{check['best_head']}: the mirrored position is the strongest key of "
        f"{check['best']:.1%} of queries. Without all heads of which that is true of 95 %: "
        f"{check['without_mirrors']:.1%} of tokens right.",
    ]


def _translation(result: dict[str, Any]) -> list[str]:
    found, check = result["evaluation"], result["check"]
    rows = [f"| {s} | {' '.join(translate('qkv-translation', s).target)} |" for s in SENTENCES]
    return [
        f"Of unseen sentences {found['exact_match']:.1%} come out word for word (BLEU {found['bleu']:.1f}); the "
        f"strongest English word is a true counterpart of {check['best_accuracy']:.1%} of the French (alignment error "
        f'rate {check["best_aer"]:.3f}). `qkv.lab.translate("qkv-translation", "…")`:',
        "",
        "| | |",
        "|---|---|",
        *rows,
    ]


def _caption(result: dict[str, Any]) -> list[str]:
    found, check = result["evaluation"], result["check"]
    return [
        f"Of held-out scenes, whose descriptions never occur in training, {found['exact_match']:.1%} of the captions "
        "come out word for word. While a colour or shape is named, the strongest cell of the grid shows that object in "
        f"{check['strongest']:.1%} of cases, and {check['mass']:.0%} of the weight lies on cells that do "
        f"({check['mass_at_colours']:.0%} at colours, {check['mass_at_shapes']:.0%} at shapes; by chance "
        f"{check['chance']:.0%}).",
    ]


_SAID = {"qkv-mini": _mini, "qkv-reversal": _reversal, "qkv-translation": _translation, "qkv-caption": _caption}


def _folder(name: str) -> Path:
    found = bundled.folder_of(name)
    assert found is not None
    return found


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_folder(name) / "result.json").read_text())
    return found


def _size(name: str, result: dict[str, Any]) -> str:
    weights = (_folder(name) / "model.safetensors").stat().st_size
    return f"{result['parameters']:,} parameters, {weights / 1e6:.1f} MB, {result['step']:,} steps."
