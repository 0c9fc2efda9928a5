"""Models that teach: recurrent translation with attention, captions, encoder-decoder and classifier."""

from __future__ import annotations

from qkv_lab.models.captioner import Captioner, CaptionerConfig
from qkv_lab.models.classifier import Classifier, ClassifierConfig
from qkv_lab.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, EncoderDecoderWeights
from qkv_lab.models.seq2seq import RNNSeq2Seq, RNNSeq2SeqConfig

__all__ = [
    "Captioner",
    "CaptionerConfig",
    "Classifier",
    "ClassifierConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderDecoderWeights",
    "RNNSeq2Seq",
    "RNNSeq2SeqConfig",
]
__dir__ = __all__.copy
