"""Byte tokenizers and byte-level BPE, as the text of a Hugging Face tokenizer.json.

Both encode any text without loss. Their last token is ``<s>``, which can precede a text but never occurs in one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from qkv.errors import InputError
from qkv.models.text import TextTokenizer
from qkv.models.tokenizers import ByteTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS = "<s>"
KINDS = ("bytes", "bpe")
MIN_VOCAB_SIZE = ByteTokenizer.vocab_size + 1
"""The size of the smallest vocabulary: all bytes, and ``<s>``."""


def byte_tokenizer() -> str:
    """The tokenizer.json of bytes: BPE without merges. Each byte is its own token number, and ``<s>`` is 256.

    >>> byte_lengths(byte_tokenizer()).tolist() == 256 * [1] + [0]
    True
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"id": 256, "content": BOS, "special": True, "normalized": False}
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**bos, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {_byte_character(byte): byte for byte in range(256)}, "merges": []},
    }
    return json.dumps(parts, ensure_ascii=False)


def train_bpe(texts: Sequence[str], vocab_size: int) -> str:
    """The tokenizer.json of byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019).

    The result is deterministic. Text is split into words as in GPT-2, so that no token spans two words.

    Args:
        texts: the training texts.
        vocab_size: the number of tokens, ``<s>`` included.

    Raises:
        InputError: if the texts are too small for so many tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise InputError(f"vocab_size is {vocab_size}, expected at least {MIN_VOCAB_SIZE}: all bytes, and {BOS}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([BOS])  # after the training, so that it is the last token
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise InputError(f"vocab_size is {vocab_size}, but the text has only {found} tokens, expected at most {found}")
    return tokenizer.to_str()


def with_bos(tokenizer: str) -> str:
    """The tokenizer.json that prepends ``<s>`` to every text, from one that does not."""
    parts = json.loads(tokenizer)
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    parts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [_bos(parts)], "tokens": [BOS]}},
    }
    return json.dumps(parts, ensure_ascii=False)


def from_json(tokenizer: str) -> TextTokenizer:
    """The tokenizer of a tokenizer.json. It prepends ``<s>`` only if `with_bos` made it.

    Lossless: "<s>" inside a text is encoded as ordinary characters.

    >>> tokenizer = from_json(byte_tokenizer())
    >>> tokenizer.encode("<s>é"), tokenizer.decode([60, 115, 62, 195, 169])
    ([60, 115, 62, 195, 169], '<s>é')
    """
    made = _tokenizer(tokenizer)
    return TextTokenizer(lambda text: list(made.encode(text).ids), made.decode)


def encode_all(tokenizer: str, texts: Sequence[str]) -> Int[np.ndarray, " tokens"]:
    """The tokens of all texts, concatenated."""
    size = len(byte_lengths(tokenizer))
    if size == MIN_VOCAB_SIZE:  # a byte is its own token
        return np.frombuffer("".join(texts).encode(), np.uint8).astype(np.uint16)
    dtype = np.uint16 if size <= 2**16 else np.uint32
    pieces = [np.asarray(x.ids, dtype) for x in _tokenizer(tokenizer).encode_batch_fast(list(texts))]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def byte_lengths(tokenizer: str) -> Int[np.ndarray, " vocab"]:
    """The number of bytes of text in each token; 0 for ``<s>``."""
    parts = json.loads(tokenizer)
    lengths = np.zeros(_bos(parts) + 1, np.int64)
    for token, number in parts["model"]["vocab"].items():
        lengths[number] = len(token)  # byte-level tokenizers write a byte as one character
    lengths[_bos(parts)] = 0
    return lengths


def _bos(parts: dict[str, Any]) -> int:
    """The number of ``<s>``, the last token."""
    return int(parts["added_tokens"][-1]["id"])


def _byte_character(byte: int) -> str:
    """The printable character that stands for a byte in byte-level tokenizers (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + byte - sum(p < byte for p in printable))


def _tokenizer(text: str) -> Tokenizer:
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(text)
    made.encode_special_tokens = True  # a text that contains "<s>" is encoded as three characters
    return made
