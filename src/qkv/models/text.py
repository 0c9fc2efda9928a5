"""Decoders that continue text: `load_text_model` gives a `DecoderLM` with what a prompt needs of its tokenizer."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkv.errors import InputError, one_of, refusing
from qkv.models import checkpoint, gguf_files
from qkv.models.decoder import DecoderLM
from qkv.models.loading import DTYPES, as_decoder, chat_tokens, load_causal_lm, load_qkv
from qkv.models.tokenizers import TOKENIZER, VOCABULARY, ByteTokenizer


def is_translator(name: str) -> bool:
    """True for a model of two vocabularies, one for the text that it reads and one for the text that it writes."""
    folder = checkpoint.folder_of(name) or Path(name)
    return os.path.exists(folder / VOCABULARY) and checkpoint.read_config(folder).get("model") != "Captioner"


WITHOUT_TEXT = {
    "minilm": "an encoder, which cannot generate text",
    "random-gpt2": "whose weights are random",
    "qkv-reversal": "which reverses random symbols and reads no text: see docs/trained.md",
    "qkv-caption": "which describes pictures: see qkv.models and docs/trained.md",
}  # built-in models of other commands
CONTEXT_TOKENS = 16  # tokens of the prompt that are decoded with the new ones, which is enough context


@dataclass(frozen=True)
class TextTokenizer:
    """The functions of a tokenizer that `qkv.models.generation.text_stream` and `TextModel` need."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    whole: Any = None
    """The tokenizer that has these functions, for chats and the names of tokens."""

    def after(self, prompt: Sequence[int]) -> TextTokenizer:
        """A tokenizer that decodes tokens as the continuation of `prompt`: some drop a space at the start of a text.

        >>> words = TextTokenizer(str.split, lambda ids: "".join(f" {i}" for i in ids).lstrip())
        >>> words.decode([3]), words.after([1, 2]).decode([3])
        ('3', ' 3')
        """
        tail = list(prompt[-CONTEXT_TOKENS:])
        before = self.decode(tail)

        def decode(ids: list[int]) -> str:
            whole = self.decode([*tail, *ids])
            return whole[len(before) :] if whole.startswith(before) else self.decode(ids)

        return replace(self, decode=decode)


@dataclass(frozen=True)
class TextModel:
    """A language model and its tokenizer; `end` are the tokens that end a text."""

    model: DecoderLM
    tokenizer: TextTokenizer
    name: str
    end: tuple[int, ...] = ()

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """The tokens of a prompt, or of a question to an assistant if `chat`.

        Raises:
            InputError: if there are none, one is outside the model's vocabulary, or there is no chat template.
        """
        if not prompt:
            raise InputError("prompt is empty, expected some text to continue")
        with refusing("prompt is not UTF-8 text"):  # Python decodes a command line that is not UTF-8 to surrogates
            prompt.encode()
        whole = self.tokenizer.whole
        ids = chat_tokens(whole, prompt)["input_ids"][0].tolist() if chat else self.tokenizer.encode(prompt)
        if not ids:
            raise InputError(f"prompt {prompt[:40]!r} has no tokens in the vocabulary of {self.name}")
        if max(ids) >= self.model.vocabulary:
            raise InputError(
                f"prompt: the tokenizer of {self.name} gives token {max(ids)}, expected below {self.model.vocabulary}"
            )
        return ids


def load_text_model(name: str, *, dtype: str = "float32") -> TextModel:
    """Load a `DecoderLM` and its tokenizer, to continue text.

    Args:
        name: ``"qkv-mini"``; a folder that `qkv.models.save` wrote (its tokenizer is tokenizer.json, or bytes if that
            file is missing and the vocabulary is 256); a folder with a GPT-2 or Llama model of Hugging Face, or a GGUF
            file of one, which is converted; ``"smollm2"``; or the name of such a model on the Hugging Face hub.
        dtype: number format of the weights: float32, bfloat16, float16 or float64.

    >>> import tempfile
    >>> from qkv.models.decoder import DecoderConfig
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = checkpoint.save(DecoderLM(DecoderConfig(d_model=32, layers=1, heads=2)), folder)
    ...     loaded = load_text_model(str(saved))
    >>> loaded.encode("Hi!"), loaded.end
    ([72, 105, 33], ())
    """
    one_of("dtype", dtype, DTYPES)
    if name in WITHOUT_TEXT:
        raise InputError(f"model is {name!r}, {WITHOUT_TEXT[name]}; expected a trained decoder, such as 'qkv-mini'")
    folder, ends = checkpoint.folder_of(name) or Path(name).expanduser(), None
    file = gguf_files.find(name)
    if file is None and folder.is_dir() and "model_type" not in checkpoint.read_config(folder):
        loaded = load_qkv(folder, name, DTYPES[dtype])
        model, tokenizer = loaded.model, loaded.tokenizer
    else:
        loaded = load_causal_lm(name, dtype)
        model, tokenizer, name = as_decoder(loaded), loaded.tokenizer, loaded.name
        settings: Any = loaded.model
        ends = settings.generation_config.eos_token_id
        ends = settings.config.eos_token_id if ends is None else ends
    if not isinstance(model, DecoderLM):
        raise InputError(f"model: {name} is {type(model).__name__}, expected a DecoderLM")
    if tokenizer is None:
        raise InputError(
            f"model: no {TOKENIZER} in {name}, and its vocabulary is {model.vocabulary}, expected that file, a GGUF "
            f"file with a tokenizer, or a vocabulary of {ByteTokenizer.vocab_size} bytes"
        )
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return TextModel(model, TextTokenizer(tokenizer.encode, decode, tokenizer), name, _ends(ends, model.vocabulary))


def _ends(found: Any, vocabulary: int) -> tuple[int, ...]:
    """End tokens of a configuration (one, a list, or None) that are in the vocabulary."""
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) for token in tokens):
        raise InputError(f"model: eos_token_id is {found!r}, expected a token or a list of tokens")
    return tuple(token for token in tokens if 0 <= token < vocabulary)
