"""Sentence pairs for translation, and translating with a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from qkv._untrusted import check_version, load_json
from qkv.errors import InputError, nearest, refusing
from qkv.models import Sampler, checkpoint, generate, load
from qkv_lab import grammar
from qkv_lab.grammar import sentence
from qkv_lab.models import EncoderDecoder, RNNSeq2Seq

__all__ = ["START", "greedy", "sentence", "vocabularies"]
__dir__ = __all__.copy


PAD, START, END = 0, 1, 2
SPECIAL = ("<pad>", "<start>", "<end>")
VERSION = 1
"""The version of the vocabulary file; increase it when an older qkv could misread a file that this version writes."""
VOCABULARY = "vocabulary.json"
"""The vocabulary file beside a model: lists of words under ``source`` and ``target``, in the order of their numbers."""


class Vocabulary:
    """Maps words to token numbers and back; the tokens of `SPECIAL` come first.

    >>> Vocabulary(["chat", "le"]).numbers(["le", "chat"])
    [4, 3]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = (*SPECIAL, *words)
        self._number = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, words: Sequence[str]) -> list[int]:
        """The token numbers of words; `InputError` for a word that is not in the vocabulary."""
        try:
            return [self._number[word] for word in words]
        except KeyError as error:
            word = error.args[0]
            raise InputError(f"word {word!r} is not in the vocabulary{nearest(word, self.words)}") from None

    def text(self, numbers: Sequence[int]) -> list[str]:
        """The words of token numbers."""
        return [self.words[i] for i in numbers]


def vocabularies() -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of source and target: all words of the grammar.

    >>> english, french = vocabularies()
    >>> english.text(english.numbers(["the", "cat"]))
    ['the', 'cat']
    """
    source, target = grammar.vocabularies()
    return Vocabulary(source), Vocabulary(target)


class Translation(NamedTuple):
    """A translated sentence with the attention weights of each word."""

    source: list[str]
    target: list[str]
    weights: Float[Tensor, "target source"] | None
    """The weights on the source words with which each target word was predicted: a mean over heads, or None."""


def padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows longest"]:
    """Rows of different lengths as one tensor, padded at the end with `PAD`."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=PAD)


@torch.no_grad()
def greedy(model: nn.Module, source: Int[Tensor, "b s"], longest: int) -> list[list[int]]:
    """Greedy decoding until the end token or `longest` words."""
    if not isinstance(model, RNNSeq2Seq | EncoderDecoder):
        raise InputError(f"model is {type(model).__name__}, expected RNNSeq2Seq or EncoderDecoder")
    begin = source.new_full((len(source), 1), START)
    return generate(
        model, model.start(source), begin, max_new_tokens=longest, sampling=Sampler(temperature=0), end=END
    )  # fmt: skip


@torch.no_grad()
def cross_weights(
    model: nn.Module, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]
) -> Float[Tensor, "layer head b t s"] | None:
    """Cross-attention weights: row t has the weights with which target token t + 1 is predicted; padding has 0.

    A recurrent model has one layer, and one head unless its attention has several. None if the model has no attention.
    """
    if isinstance(model, RNNSeq2Seq):
        if model.attention is None:
            return None
        return model.alignments(source, target, per_head=True).transpose(0, 1)[None].cpu()
    from qkv.runs.run import profile

    found = profile(model, {"source": source, "target": target}, progress=False, probe=False).group("cross")["weights"]
    return torch.from_numpy(found.transpose("layer", "head", "text", "query", "key").values).nan_to_num()


def translate(
    model: nn.Module | str | Path, text: str, vocabulary: tuple[Vocabulary, Vocabulary] | None = None
) -> Translation:
    """Translate a sentence.

    Args:
        model: a model of the task `translation`, the folder that it was saved in, or ``"qkv-translation"``.
        text: words separated by spaces; case and final punctuation are ignored.
        vocabulary: the vocabularies of source and target; read from the folder if None.

    Raises:
        InputError: if a word is not in the vocabulary, or the text has no words.

    >>> " ".join(translate("qkv-translation", "the black cat").target)
    'le chat noir'
    """
    if not isinstance(model, nn.Module):
        folder = checkpoint.folder_of(str(model)) or Path(model)
        vocabulary = vocabulary or read_vocabulary(folder)
        model = load(folder)
    if vocabulary is None:
        raise InputError("vocabulary is None, expected those of source and target if model is not a folder")
    words = text.lower().strip().rstrip(".!").split()
    if not words:
        raise InputError(f"text is {text!r}, expected at least one word")
    device = next(model.parameters()).device
    source = torch.tensor([vocabulary[0].numbers(words)], device=device)
    [found] = greedy(model, source, 2 * len(words) + 10)
    weights = cross_weights(model, source, torch.tensor([[START, *found]], device=device)) if found else None
    seen = None if weights is None else weights.mean((0, 1))[0, : len(found)]
    return Translation(words, vocabulary[1].text(found), seen)


def read_vocabulary(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of source and target in a model's folder, from the file of `vocabulary_file`."""
    file = folder / VOCABULARY
    with (
        refusing(f"model: no {VOCABULARY} in {folder} ({{}})", OSError),
        refusing(f"model: the file {file} is not a vocabulary ({{}})", ValueError, TypeError, KeyError, AttributeError),
    ):
        found = load_json(file)
        check_version(found, VERSION)
        source, target = (Vocabulary(_words(found[half])) for half in ("source", "target"))
        return source, target


def _words(found: Any) -> list[str]:
    """The words after the special tokens; raises ValueError unless they are different strings."""
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ValueError("it is not a list of words")
    if tuple(found[: len(SPECIAL)]) != SPECIAL or len(set(found)) != len(found):
        raise ValueError(f"it does not begin with {', '.join(SPECIAL)}, or has a word twice")
    return found[len(SPECIAL) :]


def vocabulary_file(source: Vocabulary, target: Vocabulary) -> str:
    """The text of the vocabulary file that `read_vocabulary` reads."""
    found = {"format_version": VERSION, "source": source.words, "target": target.words}
    return json.dumps(found, ensure_ascii=False, indent=0) + "\n"
