"""The teaching models of the lab in every form, small and with large random parameters, and what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conftest import enlarged, rand
from qkv_lab import models
from qkv_lab.models import CaptionerConfig, ClassifierConfig, EncoderDecoderConfig, RNNSeq2SeqConfig

RECURRENT = RNNSeq2SeqConfig(9, 11, d_embedding=5, d_hidden=6, half_width=2, heads=3)
TRANSFORMER = EncoderDecoderConfig(
    11, 13, d_model=12, heads=3, d_hidden=10, layers=2, decoder_layers=3, context=9, dropout=0.0, tied=False
)
CAPTIONER = CaptionerConfig(11, channels=3, d_features=5, convolutions=2, d_embedding=6, d_hidden=7, d_attention=4)
CLASSIFIER = ClassifierConfig(11, classes=5, d_model=12, heads=3, d_hidden=10, layers=2, context=9, dropout=0.0)

RECURRENTS: dict[str, RNNSeq2SeqConfig] = {
    "none": RECURRENT,
    "none, deep gru": replace(RECURRENT, cell="gru", layers=2),
    "bahdanau": replace(RECURRENT, attention="bahdanau"),
    "bahdanau, deep rnn": replace(RECURRENT, attention="bahdanau", cell="rnn", layers=2),
    "bahdanau, one way": replace(RECURRENT, attention="bahdanau", cell="gru", bidirectional=False),
    "multihead": replace(RECURRENT, attention="multihead"),
    "multihead, one way": replace(RECURRENT, attention="multihead", bidirectional=False, layers=2),
    **{  # each score with each kind; each of both with each cell; one of each kind is fed
        f"luong-{score} {kind}": replace(
            RECURRENT, attention=f"luong-{score}", kind=kind, cell=("lstm", "gru", "rnn")[(i - j) % 3],
            input_feeding=(i + j) % 3 == 0, layers=2 if score == kind else 1,
        )
        for i, score in enumerate(("dot", "general", "concat"))
        for j, kind in enumerate(("global", "local-m", "local-p"))
    },
}  # fmt: skip
TRANSFORMERS: dict[str, EncoderDecoderConfig] = {
    "post": TRANSFORMER,
    "pre": replace(TRANSFORMER, place="pre"),
    "learned, tied output": replace(TRANSFORMER, positions="learned", tied=True),
    "rotary, all tied": replace(TRANSFORMER, positions="rotary", tied=True, target_vocab=11, place="pre"),
    "no positions, grouped": replace(TRANSFORMER, positions="none", kv_heads=1, norm="rmsnorm", activation="gelu"),
    "swiglu, no biases": replace(TRANSFORMER, activation="swiglu", bias=False, place="pre", decoder_layers=None),
}
CAPTIONERS: dict[str, CaptionerConfig] = {
    "soft": CAPTIONER,
    "soft, no gate": replace(CAPTIONER, gate=False, convolutions=3, channels=1),
    "hard": replace(CAPTIONER, attention="hard"),
}
DECODERS: dict[str, Any] = {  # each score of Luong et al. once, and each kind
    **{name: x for name, x in RECURRENTS.items() if "luong" not in name or name in (
        "luong-dot global", "luong-general local-m", "luong-concat local-p"
    )}, **TRANSFORMERS, **CAPTIONERS,
}  # fmt: skip
CLASSIFIERS: dict[str, ClassifierConfig] = {
    "mean": CLASSIFIER,
    "first": replace(CLASSIFIER, pool="first"),
    "sinusoidal, post": replace(CLASSIFIER, positions="sinusoidal", place="post"),
    "rotary, grouped": replace(CLASSIFIER, positions="rotary", kv_heads=1, norm="rmsnorm", activation="swiglu"),
    "no positions, no biases": replace(CLASSIFIER, positions="none", bias=False),
}

LENGTHS = (5, 3, 1)
SOURCE = torch.tensor([[3, 5, 8, 1, 2], [4, 7, 6, 0, 0], [8, 0, 0, 0, 0]])
TARGET = torch.tensor([[1, 4, 9, 3], [1, 10, 5, 2], [1, 7, 2, 0]])
LABELS = torch.tensor([4, 0, 2])


def build(config: Any) -> Any:
    """A model in float64 and evaluation mode, with parameters so large that every part matters."""
    return enlarged(getattr(models, type(config).__name__.removesuffix("Config"))(config), 0.5)


def images(config: CaptionerConfig, height: int = 12, width: int = 5) -> Tensor:
    return rand(3, config.channels, height, width, seed=50)


def given(config: Any) -> tuple[Tensor, Tensor]:
    """What a model reads, and what it has to give."""
    if isinstance(config, ClassifierConfig):
        return SOURCE, LABELS
    return images(config) if isinstance(config, CaptionerConfig) else SOURCE, TARGET
