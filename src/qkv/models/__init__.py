"""Models built from `qkv.nn`, each after a paper, with checkpoints, sampling and text generation.

It imports layers and caches. Read `decoder.py` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkv._packages import from_lab
from qkv.models.checkpoint import folder_of, save
from qkv.models.decoder import DecoderConfig, DecoderLM, DecoderState
from qkv.models.generation import Hypothesis, Sampler, beam_search, generate, pad_left, stream, text_stream
from qkv.models.loading import load_own as load
from qkv.models.tokenizers import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "DecoderConfig",
    "DecoderLM",
    "DecoderState",
    "Hypothesis",
    "Sampler",
    "beam_search",
    "folder_of",
    "generate",
    "load",
    "pad_left",
    "save",
    "stream",
    "text_stream",
]


TEACHING = (
    "Captioner", "CaptionerConfig", "Classifier", "ClassifierConfig", "EncoderDecoder", "EncoderDecoderConfig",
    "EncoderDecoderWeights", "RNNSeq2Seq", "RNNSeq2SeqConfig",
)  # fmt: skip
"""Names of this package that are in the distribution qkv-lab."""


if not TYPE_CHECKING:  # to a type checker, a module with `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name in TEACHING:
            return from_lab(f"qkv.models.{name}", "qkv_lab.models", name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__dir__ = __all__.copy
