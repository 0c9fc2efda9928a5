"""Which kind of attention a module computes: among the tokens of a text, or from those of one text to another's."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from qkv.profiler.capture.inputs import Sequences

_CROSS = re.compile(r"cross|encoder_attn|enc_?dec", re.IGNORECASE)
_SIDE = re.compile(r"(?:^|\.)(encoder|decoder)\.")


def of_transformers(name: str, model: nn.Module) -> str:
    """Of a Hugging Face model: cross, encoder, decoder; vision, audio, text; or simply self."""
    if _CROSS.search(name):
        return "cross"
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        side = _SIDE.search(name)  # the first: a BERT that decodes has an encoder in it
        return side[1] if side else "decoder"
    towers = [t for t in ("vision", "audio") if getattr(config, f"{t}_config", None) is not None]
    for tower in towers:
        if re.search(f"{tower}|visual" if tower == "vision" else tower, name, re.IGNORECASE):
            return tower
    return "text" if towers else "self"


def of_call(name: str, *, n_queries: int, n_keys: int, causal: bool, two_sided: bool, sequences: Sequences) -> str:
    """Of any other model: cross, encoder, decoder or self, by what can be seen from outside, in this order.

    1. Modules with "cross" in their name are cross.
    2. What is causal looks back at its own text: decoder, or self in a model that has no sides and reads one sequence.
    3. What is not, and has more queries than keys or fewer, looks at something else: cross.
    4. With as many of both, modules of the encoder are encoder.
    5. In a model that reads two sequences, modules of its decoder, and those beside its encoder and decoder, are cross.
       Where nothing is called encoder or decoder, lengths decide: cross if the queries are as many as the second
       sequence has tokens, or a single one; else encoder.
    6. Everything else has the name of its side, or is self.

    Args:
        name: of the module, dotted.
        n_queries: of the call.
        n_keys: of the call.
        causal: whether no query sees a key after it.
        two_sided: whether the model has modules called encoder and modules called decoder.
        sequences: what the model reads.
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
    asks = n_queries == 1 or sequences.target is None or n_queries == sequences.target.shape[1]
    return "cross" if two_sided or asks else "encoder"


def is_two_sided(model: nn.Module) -> bool:
    """Whether some modules are called encoder and some decoder."""
    sides = {found[1] for name, _ in model.named_modules() if (found := _SIDE.search(f"{name}."))}
    return len(sides) == 2
