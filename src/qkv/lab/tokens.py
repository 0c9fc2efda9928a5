"""Corpora as tokens in memory-mapped files, made once: `prepare`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from qkv._progress import say, spinner
from qkv.errors import InputError
from qkv.lab import corpora, tokenizers
from qkv.lab.corpora import keep
from qkv.models.config import one_of

VERSION = 1
"""Of what is in the files: another one makes them again."""
BETWEEN = "\n\n"
"""What stands between documents."""
DTYPES = ("<u2", "<u4")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A corpus as tokens, and its tokenizer."""

    train: Integer[np.ndarray, " train"]
    held_out: Integer[np.ndarray, " held_out"]
    tokenizer: str
    """What tokenizer.json says; it does not put ``<s>`` anywhere: see `qkv.lab.tokenizers.starting`."""
    vocab_size: int
    """Tokens, ``<s>`` included."""

    @property
    def bos(self) -> int:
        """The token ``<s>``, which is nowhere in the text."""
        return self.vocab_size - 1


def prepare(corpus: str, tokenizer: str = "bytes", vocab_size: int = 2048) -> Prepared:
    """The tokens of a corpus, from the cache if its text and the tokenizer are as they were.

    BPE is trained on what is not held out. Several processes may do this at once.

    Args:
        corpus: a name that `qkv.lab.corpora.load` knows.
        tokenizer: ``"bytes"``, 257 tokens, or ``"bpe"``.
        vocab_size: tokens of BPE, ``<s>`` included.

    Raises:
        InputError: as `load` and `train_bpe`; for a damaged token file; if the cache cannot be written.

    >>> prepare("library").bos  # doctest: +SKIP
    256
    """
    one_of("tokenizer", tokenizer, tokenizers.KINDS)
    found = corpora.load(corpus)
    size = tokenizers.SMALLEST if tokenizer == "bytes" else vocab_size
    asked = {"version": VERSION, "corpus": found.fingerprint, "tokenizer": tokenizer, "vocab_size": size}
    settings = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    folder = corpora.cache_folder() / "tokens" / settings[:20]
    file, train, held_out = (folder / name for name in ("tokenizer.json", "train.bin", "held_out.bin"))
    if not (file.exists() and _sidecar(train).exists() and _sidecar(held_out).exists()):
        with _status(found):
            parts = found.split()
            if not all(parts):
                raise InputError(f"corpus: {corpus} is too small to hold some of it out, expected more text")
            made = tokenizers.byte_tokenizer() if tokenizer == "bytes" else tokenizers.train_bpe(parts[0], size)
            keep(file, made.encode())
            for path, documents in zip((train, held_out), parts, strict=True):
                spaced = [x + BETWEEN for x in documents[:-1]] + documents[-1:]
                write_tokens(path, tokenizers.encode_all(made, spaced), size, settings)
    made = file.read_text(encoding="utf-8")
    return Prepared(open_tokens(train, settings), open_tokens(held_out, settings), made, size)


def write_tokens(path: Path, tokens: Integer[np.ndarray, " n"], vocab_size: int, settings: str) -> None:
    """Tokens as they are in memory, little-endian, and a JSON file beside them that says how to read them.

    Each file is whole or not there, the JSON file last.
    """
    dtype = DTYPES[0] if vocab_size <= 2**16 else DTYPES[1]
    keep(path, tokens.astype(dtype).tobytes())
    described = {"count": len(tokens), "dtype": dtype, "vocab_size": vocab_size, "settings": settings}
    keep(_sidecar(path), (json.dumps(described, indent=1) + "\n").encode())


def open_tokens(path: Path, settings: str) -> Integer[np.ndarray, " n"]:
    """The tokens of a file that `write_tokens` wrote, mapped into memory, read-only.

    Raises:
        InputError: if a file is missing, short, or of other settings.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(Path(folder, "x.bin"), np.array([5, 6, 7]), 257, "bytes")
    ...     open_tokens(Path(folder, "x.bin"), "bytes").tolist()
    [5, 6, 7]
    """
    try:
        described = json.loads(_sidecar(path).read_text(encoding="utf-8"))
        count, dtype, length = int(described["count"]), described["dtype"], path.stat().st_size
        if dtype not in DTYPES or described["settings"] != settings or count < 1:
            raise InputError(f"{_sidecar(path)} does not describe these tokens; {_again(path)}")
    except OSError as error:
        raise InputError(f"cannot read {error.filename} ({error.strerror}); {_again(path)}") from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{_sidecar(path)} is damaged ({error}); {_again(path)}") from error
    expected = count * np.dtype(dtype).itemsize
    if length != expected:
        raise InputError(f"{path} has {length:,} bytes, expected {expected:,}; {_again(path)}")
    return np.memmap(path, dtype, "r")


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def _again(path: Path) -> str:
    return f"delete {path.parent}, and it is made again"


@contextmanager
def _status(corpus: corpora.Corpus) -> Iterator[None]:
    """A spinner while a corpus is tokenized, and a remark on the files that were skipped."""
    if corpus.skipped:
        say(f"{corpus.name}: skipped {corpus.skipped:,} files that are not UTF-8 text")
    with spinner(f"tokenizing {corpus.name}, once"):
        yield
