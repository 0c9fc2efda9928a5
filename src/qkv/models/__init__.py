"""Models built from `qkv.nn`, each after a paper, with checkpoints, sampling and text generation."""

from __future__ import annotations

from qkv.models.beam import Hypothesis, beam_search
from qkv.models.bundled import folder_of
from qkv.models.byte_tokenizer import ByteTokenizer
from qkv.models.captioner import Captioner, CaptionerConfig
from qkv.models.checkpoint import load, save
from qkv.models.classifier import Classifier, ClassifierConfig
from qkv.models.decoder import DecoderConfig, DecoderLM, DecoderState
from qkv.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, EncoderDecoderWeights
from qkv.models.generation import generate, pad_left, stream, text_stream
from qkv.models.pretrained import from_hugging_face
from qkv.models.sampling import Sampler
from qkv.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

__all__ = [
    "ByteTokenizer",
    "Captioner",
    "CaptionerConfig",
    "Classifier",
    "ClassifierConfig",
    "DecoderConfig",
    "DecoderLM",
    "DecoderState",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderDecoderWeights",
    "Hypothesis",
    "RNNSeq2Seq",
    "RNNSeq2SeqConfig",
    "Sampler",
    "beam_search",
    "folder_of",
    "from_hugging_face",
    "generate",
    "load",
    "pad_left",
    "save",
    "stream",
    "text_stream",
]


def __dir__() -> list[str]:
    return __all__
