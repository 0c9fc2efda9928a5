"""Tokenizes a corpus once and caches the tokens in memory-mapped files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from qkv._progress import say, spinner
from qkv._untrusted import check_version, load_json
from qkv.errors import InputError
from qkv.models.config import one_of
from qkv.profiler import corpora
from qkv.profiler.corpora import write_cached
from qkv_lab import tokenizers

VERSION = 1
"""The version of the file format; files of another version are written again."""
BETWEEN = "\n\n"
"""The text between two documents."""
DTYPES = ("<u2", "<u4")


@dataclass(frozen=True, eq=False)
class Prepared:
    """The tokens of a corpus, and the tokenizer that made them."""

    train: Integer[np.ndarray, " train"]
    held_out: Integer[np.ndarray, " held_out"]
    tokenizer: str
    """The text of tokenizer.json. It does not prepend ``<s>``: see `qkv_lab.tokenizers.with_bos`."""
    vocab_size: int
    """The number of tokens, ``<s>`` included."""

    @property
    def bos(self) -> int:
        """The number of the token ``<s>``, which never occurs in the text."""
        return self.vocab_size - 1


def prepare(corpus: str, tokenizer: str = "bytes", vocab_size: int = 2048) -> Prepared:
    """The tokens of a corpus, from the cache if its text and the tokenizer have not changed.

    BPE is trained on the training documents only. Several processes may call this at once.

    Args:
        corpus: a name for `qkv.profiler.corpora.load`.
        tokenizer: ``"bytes"``, 257 tokens, or ``"bpe"``.
        vocab_size: the number of BPE tokens, ``<s>`` included.

    Raises:
        InputError: as `qkv.profiler.corpora.load` and `qkv_lab.tokenizers.train_bpe`; for a damaged token file; if the
            cache cannot be written.

    >>> prepare("library").bos  # doctest: +SKIP
    256
    """
    one_of("tokenizer", tokenizer, tokenizers.KINDS)
    found = corpora.load(corpus)
    size = tokenizers.MIN_VOCAB_SIZE if tokenizer == "bytes" else vocab_size
    described = {"version": VERSION, "corpus": found.fingerprint, "tokenizer": tokenizer, "vocab_size": size}
    settings = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    folder = corpora.cache_folder() / "tokens" / settings[:20]
    file, train, held_out = (folder / name for name in ("tokenizer.json", "train.bin", "held_out.bin"))
    if not (file.exists() and _sidecar(train).exists() and _sidecar(held_out).exists()):
        with _status(found):
            parts = found.split()
            if not all(parts):
                raise InputError(
                    f"corpus is {corpus!r}, which is too small to hold out a part of it, expected more text"
                )
            made = tokenizers.byte_tokenizer() if tokenizer == "bytes" else tokenizers.train_bpe(parts[0], size)
            write_cached(file, made.encode())
            for path, documents in zip((train, held_out), parts, strict=True):
                spaced = [x + BETWEEN for x in documents[:-1]] + documents[-1:]
                write_tokens(path, tokenizers.encode_all(made, spaced), size, settings)
    made = file.read_text(encoding="utf-8")
    return Prepared(open_tokens(train, settings), open_tokens(held_out, settings), made, size)


def prepare_more(names: Sequence[str], corpus: str, main: Prepared) -> Integer[np.ndarray, " n"]:
    """The tokens of further corpora, by the tokenizer of a main one, from the cache if no text has changed.

    Documents that share a passage with a held-out text of the main corpus are left out.

    Args:
        names: names for `qkv.profiler.corpora.load`.
        corpus: the name of the main corpus.
        main: its tokens.

    Raises:
        InputError: as `prepare`, and if nothing is left.
    """
    held_out = corpora.load(corpus).split()[1]
    made = [corpora.load(name) for name in names]
    parts = [main.tokenizer, *held_out, *(x.fingerprint for x in made)]
    settings = hashlib.sha256(json.dumps([VERSION, corpora.PASSAGE, corpora.LINE, *parts]).encode()).hexdigest()
    path = corpora.cache_folder() / "tokens" / settings[:20] / "more.bin"
    if not _sidecar(path).exists():
        found = list[str]()
        for one in made:
            with _status(one):
                found += corpora.without_passages(one.documents, held_out)
        if not found:
            raise InputError(f"more is {', '.join(names)!r}, which repeats the held-out text of {corpus!r}")
        with spinner(f"tokenizing {', '.join(names)}, once"):
            tokens = tokenizers.encode_all(main.tokenizer, [x + BETWEEN for x in found])
        write_tokens(path, tokens, main.vocab_size, settings)
    return open_tokens(path, settings)


def write_tokens(path: Path, tokens: Integer[np.ndarray, " n"], vocab_size: int, settings: str) -> None:
    """Write tokens as little-endian integers, and beside them a JSON file with their number and type.

    Both files are written atomically, the JSON file last.
    """
    dtype = DTYPES[0] if vocab_size <= 2**16 else DTYPES[1]
    write_cached(path, tokens.astype(dtype).tobytes())
    described = {
        "format_version": VERSION,
        "count": len(tokens),
        "dtype": dtype,
        "vocab_size": vocab_size,
        "settings": settings,
    }
    write_cached(_sidecar(path), (json.dumps(described, indent=1) + "\n").encode())


def open_tokens(path: Path, settings: str) -> Integer[np.ndarray, " n"]:
    """The tokens in a file of `write_tokens`, as a read-only memory map.

    Raises:
        InputError: if a file is missing or truncated, or was written with other settings.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(Path(folder, "x.bin"), np.array([5, 6, 7]), 257, "bytes")
    ...     open_tokens(Path(folder, "x.bin"), "bytes").tolist()
    [5, 6, 7]
    """
    try:
        described = load_json(_sidecar(path))
        check_version(described, VERSION)
        count, dtype, length = described["count"], described["dtype"], path.stat().st_size
        if dtype not in DTYPES or described["settings"] != settings or type(count) is not int or count < 1:
            raise InputError(f"corpus: the file {_sidecar(path)} does not describe these tokens; {_hint(path)}")
    except OSError as error:
        raise InputError(f"corpus: cannot read {error.filename} ({error.strerror}); {_hint(path)}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"corpus: the file {_sidecar(path)} is damaged ({error}); {_hint(path)}") from error
    expected = count * np.dtype(dtype).itemsize
    if length != expected:
        raise InputError(f"corpus: the file {path} has {length:,} bytes, expected {expected:,}; {_hint(path)}")
    return np.memmap(path, dtype, "r")


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def _hint(path: Path) -> str:
    return f"delete {path.parent} to make it again"


@contextmanager
def _status(corpus: corpora.Corpus) -> Iterator[None]:
    """A spinner while a corpus is tokenized, and a remark on the files that were skipped."""
    if corpus.skipped:
        say(f"{corpus.name}: skipped {corpus.skipped:,} files that are not UTF-8 text")
    with spinner(f"tokenizing {corpus.name}, once"):
        yield
