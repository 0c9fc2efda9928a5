"""Tokenizers of models of qkv: bytes, and the file tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv._untrusted import read_bytes
from qkv.errors import InputError, nearest, refusing


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


TOKENIZER = "tokenizer.json"
VOCABULARY = "vocabulary.json"


class WordNames:
    """The words of token ids, by input (vocabulary.json): names for figures, for models that read no text.

    >>> names = WordNames({"source": ["<pad>", "cat"], "target": ["<pad>", "chat"]})
    >>> names.decode([1]), names.target.decode([1])
    ('cat', 'chat')
    """

    def __init__(self, words: dict[str, Any]) -> None:
        self.words, *others = (names for names in words.values() if isinstance(names, list))
        self.target: WordNames = type(self)({"target": others[0]}) if others else self

    def decode(self, ids: Sequence[int] | Tensor, **kwargs: Any) -> str:
        return " ".join(self.convert_ids_to_tokens(torch.as_tensor(ids).tolist()))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.words[i] if i < len(self.words) else str(i) for i in ids]


class PairTokenizer(WordNames):
    """The words of a text and of its translation, each with a vocabulary of its own (vocabulary.json).

    A translation begins with ``<start>``. Case and the full stop at the end are ignored.

    >>> pair = PairTokenizer({"source": ["<pad>", "cat"], "target": ["<pad>", "<start>", "chat"]})
    >>> pair("Cat.")["input_ids"], pair.target("chat")["input_ids"]
    (tensor([[1]]), tensor([[1, 2]]))
    """

    def __init__(self, words: dict[str, Any]) -> None:
        super().__init__(words)
        self.begin = ["<start>"] if "target" in words and len(words) == 1 else []

    def __call__(self, text: str, **options: Any) -> dict[str, Tensor]:
        words = [*self.begin, *text.lower().strip().rstrip(".!").split()]
        if unknown := [word for word in words if word not in self.words]:
            raise InputError(
                f"text has the word {unknown[0]!r}, expected words of the model{nearest(unknown[0], self.words)}"
            )
        return {"input_ids": torch.tensor([[self.words.index(word) for word in words]])}


class FileTokenizer:
    """The tokenizer in a tokenizer.json, called as transformers' ``PreTrainedTokenizerFast`` is.

    transformers' own class does the same, but takes two seconds to import.
    """

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        with refusing(f"model: {file} is not a tokenizer ({{}})"):  # tokenizers raises no narrower class
            self.backend_tokenizer = Tokenizer.from_str(read_bytes(file).decode("utf-8"))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens included."""
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without added tokens."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def get_vocab(self) -> dict[str, int]:
        """The id of every token."""
        return dict(self.backend_tokenizer.get_vocab())

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> dict[str, Any]:
        """``input_ids`` and ``attention_mask`` of a text: lists, or tensors (1, n) if `return_tensors` is ``"pt"``."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        if return_tensors is None:
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if return_tensors != "pt":
            raise InputError(f"return_tensors is {return_tensors!r}, expected None or 'pt'")
        tensor = torch.tensor([ids], dtype=torch.long)
        return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        if not isinstance(text, str):
            raise InputError(
                f"text is {type(text).__name__}, expected a str; for batches and padding load the file with "
                "transformers.PreTrainedTokenizerFast(tokenizer_file=…)"
            )
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self,
        ids: int | Sequence[int] | Tensor,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of token ids; spaces stay as the tokenizer's file decodes them."""
        if clean_up_tokenization_spaces:
            raise InputError(
                "clean_up_tokenization_spaces is True, expected False or None; for that setting load the file with "
                "transformers.PreTrainedTokenizerFast(tokenizer_file=…)"
            )
        ids = torch.as_tensor(ids).reshape(-1).tolist()
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Tokens as the vocabulary writes them."""
        return [self.backend_tokenizer.id_to_token(int(i)) for i in ids]
