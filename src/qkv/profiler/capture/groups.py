"""Classify the attention of a module: self, cross, encoder or decoder attention, or a tower (text, vision, audio)."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from qkv.profiler.capture.inputs import Sequences

_CROSS = re.compile(r"cross|encoder_attn|enc_?dec", re.IGNORECASE)
_SIDE = re.compile(r"(?:^|\.)(encoder|decoder)\.")


def of_transformers(name: str, model: nn.Module) -> str:
    """The group of a module of a Hugging Face model: cross, encoder, decoder; vision, audio, text; or self."""
    if _CROSS.search(name):
        return "cross"
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        side = _SIDE.search(name)  # the outermost: a BERT decoder contains a module called encoder
        return side[1] if side else "decoder"
    towers = [t for t in ("vision", "audio") if getattr(config, f"{t}_config", None) is not None]
    for tower in towers:
        if re.search(f"{tower}|visual" if tower == "vision" else tower, name, re.IGNORECASE):
            return tower
    return "text" if towers else "self"


def of_call(name: str, *, n_queries: int, n_keys: int, causal: bool, two_sided: bool, sequences: Sequences) -> str:
    """The group of a module of any other model: cross, encoder, decoder or self, by the first of these rules.

    1. A module with "cross" in its name is cross.
    2. A causal call is decoder, or self in a model without encoder and decoder that reads one sequence.
    3. A call that is not causal and has different numbers of queries and keys is cross.
    4. With as many queries as keys, a module of the encoder is encoder.
    5. In a model that reads two sequences, modules of the decoder, and modules outside of encoder and decoder, are
       cross. If no modules are called encoder and decoder, the lengths decide: cross if there is a single query or as
       many queries as the second sequence has tokens; else encoder.
    6. Any other module has the name of its side (encoder or decoder), or is self.

    Args:
        name: dotted name of the module.
        n_queries: number of queries of the call.
        n_keys: number of keys of the call.
        causal: True if no query can attend to a later key.
        two_sided: True if the model has modules called encoder and modules called decoder.
        sequences: the sequences that the model reads.
    """
    if _CROSS.search(name):
        return "cross"
    found = _SIDE.search(f"{name}.") if two_sided else None
    side = None if found is None else found[1]
    if causal:
        return "decoder" if side or sequences.two else "self"
    if n_queries != n_keys:
        return "cross"
    if side == "encoder" or not sequences.two:
        return side or "self"
    from_target = n_queries == 1 or sequences.target is None or n_queries == sequences.target.shape[1]
    return "cross" if two_sided or from_target else "encoder"


def is_two_sided(model: nn.Module) -> bool:
    """True if some modules are called encoder and some decoder."""
    sides = {found[1] for name, _ in model.named_modules() if (found := _SIDE.search(f"{name}."))}
    return len(sides) == 2
