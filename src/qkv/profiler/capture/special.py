"""Find the special tokens that a tokenizer puts around a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qkv.errors import InputError


@dataclass(frozen=True)
class Special:
    """Ids of the special tokens that a tokenizer puts before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> Special:
        """Find the special tokens of a tokenizer by encoding a short text with and without them."""
        whole, bare = _ids(tokenizer, "a"), _ids(tokenizer, "a", add_special_tokens=False)
        for at in range(len(whole) - len(bare) + 1):
            if bare and whole[at : at + len(bare)] == bare:
                return cls(tuple(whole[:at]), tuple(whole[at + len(bare) :]))
        raise InputError(f"tokenizer: {type(tokenizer).__name__} does not put its special tokens around the text")


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    return _ids(tokenizer, text, add_special_tokens=False)


def _ids(tokenizer: Any, text: str, **settings: Any) -> list[int]:
    encoded: Mapping[str, Any] = tokenizer(text, **settings)
    ids = encoded["input_ids"]
    ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    return list(ids[0]) if ids and isinstance(ids[0], list) else ids
