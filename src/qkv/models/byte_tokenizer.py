"""A tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class ByteTokenizer:
    """UTF-8 bytes as tokens: no files, any text, vocabulary 256.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é"), tokenizer.decode([195, 169])
    ([195, 169], 'é')
    """

    vocab_size = 256
    all_special_tokens: Sequence[str] = ()

    def __call__(self, text: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())], dtype=torch.long)}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int] | torch.Tensor, **kwargs: Any) -> str:
        return bytes(torch.as_tensor(ids).tolist()).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [bytes([i]).decode("latin-1") for i in ids]
