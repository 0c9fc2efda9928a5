"""Load a language model by name, together with its tokenizer: `load_text_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qkv._packages import check_tested, require
from qkv._untrusted import check_json_files, first_line, load_json
from qkv.errors import InputError, nearest
from qkv.models import checkpoint, pretrained, tensors
from qkv.models.decoder import DecoderLM
from qkv.models.tokenizers import TOKENIZER, ByteTokenizer, FileTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "tokenizer.model"]
WITHOUT_TEXT = {
    "minilm": "an encoder, which cannot generate text",
    "random-gpt2": "whose weights are random",
    "qkv-reversal": "a classifier, which cannot generate text",
    "qkv-translation": "which translates: see qkv.models and docs/trained.md",
    "qkv-caption": "which describes pictures: see qkv.models and docs/trained.md",
}  # built-in models of other commands
CONTEXT_TOKENS = 16  # tokens of the prompt that are decoded with the new ones, which is enough context


@dataclass(frozen=True)
class TextTokenizer:
    """The two functions of a tokenizer that `qkv.models.generation.text_stream` needs."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

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

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; raises `InputError` if there are none, or one is outside the model's vocabulary."""
        if not prompt:
            raise InputError("prompt is empty, expected some text to continue")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # Python decodes a command line that is not UTF-8 to surrogates
            raise InputError("prompt is not UTF-8 text") from error
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise InputError(f"prompt {prompt[:40]!r} has no tokens in the vocabulary of {self.name}")
        if max(ids) >= self.model.vocabulary:
            raise InputError(
                f"prompt: the tokenizer of {self.name} gives token {max(ids)}, expected below {self.model.vocabulary}"
            )
        return ids


def load_text_model(name: str, *, dtype: str = "float32") -> TextModel:
    """Load a `DecoderLM` and its tokenizer.

    Args:
        name: ``"qkv-mini"``, which comes with the package; a folder that `qkv.models.checkpoint.save` wrote (its
            tokenizer is tokenizer.json, or bytes if that file is missing and the vocabulary is 256); a folder with a
            GPT-2 or Llama model of Hugging Face; or the name of such a model on the Hugging Face hub.
        dtype: number format of the weights: float32, bfloat16, float16 or float64.

    Raises:
        InputError: if the model does not exist, is of another kind, or has no tokenizer.

    >>> import tempfile
    >>> from qkv.models.decoder import DecoderConfig
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = checkpoint.save(DecoderLM(DecoderConfig(d_model=32, layers=1, heads=2)), folder)
    ...     loaded = load_text_model(str(saved))
    >>> loaded.encode("Hi!"), loaded.end
    ([72, 105, 33], ())
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    folder = checkpoint.folder_of(name) or Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise InputError(f"model: {name} is a file, expected a folder")
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise InputError(f"model: no folder {name}")
        folder = _of_hub(name)
    config = checkpoint.read_config(folder)
    try:
        loaded = _hugging_face(folder, name, config) if "model_type" in config else _own(folder, name, config)
    except (KeyError, TypeError, AttributeError) as error:  # from sizes that are missing or not numbers
        raise InputError(f"{checkpoint.CONFIG} in {folder} is not a valid configuration ({error!r})") from error
    loaded.model.to(DTYPES[dtype])
    return loaded


# --- of this package --------------------------------------------------------------------------------------------------


def _own(folder: Path, name: str, config: dict[str, Any]) -> TextModel:
    kind = config.get("model")
    if kind in checkpoint.KINDS and kind != "DecoderLM":
        raise InputError(f"model: {name} is {kind}, expected a DecoderLM, the only kind that continues text")
    model = checkpoint.load(folder)
    if not isinstance(model, DecoderLM):
        raise InputError(f"model: {name} is {type(model).__name__}, expected a DecoderLM")
    file = folder / TOKENIZER
    if file.exists():
        return TextModel(model, _from_file(file), name)
    if model.vocabulary != ByteTokenizer.vocab_size:
        raise InputError(
            f"model: no {TOKENIZER} in {name}, and its vocabulary is {model.vocabulary}, "
            f"expected that file, or a vocabulary of {ByteTokenizer.vocab_size} bytes"
        )
    return TextModel(model, TextTokenizer(ByteTokenizer().encode, ByteTokenizer().decode), name)


def _from_file(file: Path) -> TextTokenizer:
    found = FileTokenizer(file)
    return TextTokenizer(found.encode, partial(found.decode, skip_special_tokens=True))


# --- of Hugging Face --------------------------------------------------------------------------------------------------


def _hugging_face(folder: Path, name: str, config: dict[str, Any]) -> TextModel:
    _known(config, name)
    require(f"model: the tokenizer of {name}", "transformers")
    check_tested("transformers")
    tokenizer = _tokenizer(folder, name)
    model = pretrained.from_hugging_face(folder)
    return TextModel(model, tokenizer, name, _ends(folder, config, model.vocabulary))


def _known(config: dict[str, Any], name: str) -> None:
    kind = config.get("model_type")
    if kind not in pretrained.FLAVOURS:
        raise InputError(
            f"model: {name}: model_type is {kind!r}, expected {' or '.join(map(repr, pretrained.FLAVOURS))}"
        )


def _tokenizer(folder: Path, name: str) -> TextTokenizer:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        check_json_files(folder)
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises no narrower kind
        raise InputError(f"model: cannot read the tokenizer of {name} ({first_line(error)})") from error
    if len(found) <= len(found.all_special_tokens):  # empty: transformers found no files
        raise InputError(f"model: no tokenizer in {name}, expected {TOKENIZER} or the files that it is built from")
    return TextTokenizer(
        found.encode, partial(found.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def _ends(folder: Path, config: dict[str, Any], vocabulary: int) -> tuple[int, ...]:
    """The end tokens in generation_config.json, else those in config.json, that are in the vocabulary."""
    found = config.get("eos_token_id")
    file = folder / "generation_config.json"
    if file.exists():
        try:
            generation = load_json(file)
            found = found if generation.get("eos_token_id") is None else generation["eos_token_id"]
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{file.name} in {folder} is not a JSON object ({first_line(error)})") from error
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) for token in tokens):
        raise InputError(f"model: eos_token_id is {found!r}, expected a token or a list of tokens")
    return tuple(token for token in tokens if 0 <= token < vocabulary)


def _of_hub(name: str) -> Path:
    """Download a model from the hub; its configuration comes first, so that no other kind is ever downloaded."""
    if name in WITHOUT_TEXT:
        raise InputError(f"model is {name!r}, {WITHOUT_TEXT[name]}; expected a trained decoder, such as 'qkv-mini'")
    require(f"model {name!r}", "transformers")
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    disable_progress_bars()
    cached = tensors.only_cached(name, ("qkv-mini",))
    try:
        config = huggingface_hub.hf_hub_download(name, checkpoint.CONFIG, local_files_only=cached)
        _known(checkpoint.read_config(Path(config).parent), name)
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=HUB_FILES, ignore_patterns="*/*", local_files_only=cached
            )
        )
    except InputError:
        raise
    except Exception as error:  # the HTTP library raises its own exceptions
        raise InputError(
            f"model: cannot load {name!r} ({first_line(error)}); expected a folder with a model, or the name of a "
            "GPT-2 or Llama on the Hugging Face hub"
        ) from error
