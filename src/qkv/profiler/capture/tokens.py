"""Readable names of the tokens at queries and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qkv import ring
from qkv.profiler.capture.inputs import Sequences
from qkv.profiler.capture.special import Special


class Tokens:
    """The tokens at a group's queries and keys, and their names.

    Args:
        sequences: the sequences that the model reads.
        tokenizer: converts ids to text; names are ids if it is None.
        group: kind of attention.
        processes: the processes of which each has a shard of the sequences (`qkv.ring`).
    """

    def __init__(self, sequences: Sequences, tokenizer: Any, group: str, processes: ProcessGroup | None = None) -> None:
        self.tokenizer = tokenizer
        source, target = sequences.source, sequences.target if sequences.two else sequences.source
        kind = group.partition("-")[0]
        self.queries = target if kind in ("decoder", "cross") else source
        self.keys = target if kind == "decoder" else source
        if processes is not None:
            self.queries, self.keys = (
                None if ids is None else ring.unshard(ids, processes, dim=1) for ids in (self.queries, self.keys)
            )

    def names(self, ids: Tensor | None, item: int, real: np.ndarray) -> list[str]:
        """Names of the real tokens of one batch item: pieces of text, or positions if there are no token ids."""
        if ids is None or ids.shape[1] != len(real):
            return [str(n) for n in range(int(real.sum()))]
        kept = ids[item].cpu().numpy()[real].tolist()
        if self.tokenizer is None:
            return [str(i) for i in kept]
        return [token_text(self.tokenizer, i, piece) for i, piece in zip(kept, self._pieces(kept), strict=True)]

    def _pieces(self, ids: list[int]) -> list[str]:
        return [str(piece) for piece in self.tokenizer.convert_ids_to_tokens(ids)]

    @property
    def special(self) -> list[str]:
        return list(getattr(self.tokenizer, "all_special_tokens", ()) or ())


def special_ids(model: nn.Module, tokenizer: Any) -> set[int]:
    """Ids of special tokens, by the tokenizer and the model's configuration."""
    config = getattr(model, "config", None)
    names = ("pad", "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    known = [getattr(config, name, None) for name in names]
    flat = [i for x in known for i in (x if isinstance(x, list | tuple) else [x])]
    around = Special.of(tokenizer) if callable(tokenizer) else Special()
    declared = getattr(tokenizer, "all_special_ids", ()) or ()
    return {int(i) for i in (*flat, *declared, *around.before, *around.after) if isinstance(i, int)}


def token_text(tokenizer: Any, token: int, piece: str) -> str:
    """The text of a token: markers of byte-level and SentencePiece tokenizers become spaces and characters."""
    if "▁" in piece:
        return piece.replace("▁", " ")
    if ("Ġ" in piece or "Ċ" in piece or not piece.isascii()) and hasattr(tokenizer, "decode"):
        return str(tokenizer.decode([token])) or piece
    return piece
