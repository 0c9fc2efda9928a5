"""Texts as token ids: n-gram statistics, byte-pair encoding, and corpora on disk.

Both encode any text without loss. Their last token is ``<s>``, which can precede a text but never occurs in one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int, Integer

from qkv._progress import say, spinner
from qkv.errors import InputError, one_of, refusing
from qkv.models.text import TextTokenizer
from qkv.models.tokenizers import ByteTokenizer
from qkv.profiler import corpora
from qkv.profiler.corpora import write_cached
from qkv.profiler.surveys.corpus import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer


HELD_OUT = 0.05
"""The share of a corpus that is held out."""
MIN_WHOLE_SHARE = 0.5
"""If whole documents reach less than this part of the held-out share, the end of every document is held out."""
PASSAGE, LINE = 3, 20
"""A passage is so many lines in a row of at least so many characters each, not counting indentation and blank lines."""


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """The training documents and the held-out ones, which are about 5 % of the text.

    Whole documents are held out if enough of them are small. Otherwise, as for a single book, the last 5 % of each
    document is held out.

    >>> train, held_out = split(["0123456789" * 10])
    >>> held_out
    ['56789']
    """
    budget = HELD_OUT * sum(map(len, documents))
    train, held_out, length = list[str](), list[str](), 0
    for document in documents:
        fits = length + len(document) <= budget
        length += len(document) if fits else 0
        (held_out if fits else train).append(document)
    if length >= MIN_WHOLE_SHARE * budget:
        return train, held_out
    cuts = [len(document) - round(HELD_OUT * len(document)) for document in documents]
    parts = [(document[:cut], document[cut:]) for document, cut in zip(documents, cuts, strict=True)]
    return [start for start, _ in parts if start], [end for _, end in parts if end]


def without_passages(documents: Sequence[str], of: Sequence[str]) -> list[str]:
    """The documents that share no passage with other texts: no `PASSAGE` consecutive lines.

    Such documents are copies, or adapted copies, as of a module of the standard library in a package.

    >>> book = "the first long line of a book\\n" "the second long line of it\\n" "and the third one, also long\\n"
    >>> without_passages(["x = 1\\n" + book, "y = 2\\n"], of=[book])
    ['y = 2\\n']
    """
    taken = {passage for text in of for passage in _passages(text)}
    return [document for document in documents if taken.isdisjoint(_passages(document))]


def _passages(text: str) -> Iterator[tuple[str, ...]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for at in range(len(lines) - PASSAGE + 1):
        found = tuple(lines[at : at + PASSAGE])
        if min(map(len, found)) >= LINE:
            yield found


@dataclass(frozen=True)
class Baselines:
    """Mean cross-entropies of held-out tokens, in nats per token."""

    unigram: float
    """By the frequency of each token in the training text, with add-one smoothing."""
    bigram: float
    """By the token before, interpolated with the unigram by Witten and Bell's weights."""


def baselines(
    train: Integer[np.ndarray, " tokens"], texts: Int[np.ndarray, "texts width"], vocab_size: int
) -> Baselines:
    """The losses of a unigram and a bigram model on all tokens of some texts but the first of each.

    The unigram has add-one smoothing: P(b) = (c(b) + 1) / (tokens + vocab_size). The bigram is interpolated with it
    (Witten & Bell 1991): P(b | a) = (c(a, b) + t(a) · P(b)) / (c(a) + t(a)), where t(a) is the number of different
    tokens that follow a. After a token that the training text lacks it is the unigram.

    Args:
        train: the training text.
        texts: the texts to predict; the first token of each is context only.
        vocab_size: the number of different tokens.

    >>> train = np.array([0, 1, 0, 1, 0, 2])
    >>> found = baselines(train, np.array([[0, 1, 0]]), vocab_size=4)
    >>> round(found.unigram, 3), round(found.bigram, 3)
    (1.06, 0.439)
    """
    from scipy.sparse import csr_matrix

    if texts.ndim != 2 or texts.shape[1] < 2:
        raise InputError(f"texts has shape {texts.shape}, expected (texts, width) with at least 2 tokens in each")
    for name, ids in (("train", train), ("texts", texts)):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise InputError(f"{name} has tokens {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}")
    before, after = (x.ravel().astype(np.int64) for x in (texts[:, :-1], texts[:, 1:]))
    unigram = (np.bincount(train, minlength=vocab_size) + 1) / (len(train) + vocab_size)
    single = unigram[after]
    ids = train.astype(np.int64)
    counts = csr_matrix((np.ones(max(0, len(ids) - 1)), (ids[:-1], ids[1:])), (vocab_size, vocab_size))
    total, types = counts.sum(1).A1[before], np.diff(counts.indptr)[before]
    seen = np.asarray(counts[before, after]).ravel()
    mixed = np.where(total > 0, (seen + types * single) / np.maximum(total + types, 1), single)
    return Baselines(float(-np.log(single).mean()), float(-np.log(mixed).mean()))


BOS = "<s>"
KINDS = ("bytes", "bpe")
MIN_VOCAB_SIZE = ByteTokenizer.vocab_size + 1
"""The size of the smallest vocabulary: all bytes, and ``<s>``."""


def byte_tokenizer() -> str:
    """The tokenizer.json of bytes: BPE without merges. Each byte is its own token number, and ``<s>`` is 256.

    >>> byte_lengths(byte_tokenizer()).tolist() == 256 * [1] + [0]
    True
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({_byte_character(byte): byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS])
    return tokenizer.to_str()


def train_bpe(texts: Sequence[str], vocab_size: int) -> str:
    """The tokenizer.json of byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019).

    The result is deterministic. Text is split into words as in GPT-2, so that no token spans two words.

    Args:
        texts: the training texts.
        vocab_size: the number of tokens, ``<s>`` included.
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


VERSION = 2
"""The version of the files in the cache; files of another version are made again."""
BETWEEN = "\n\n"
"""The text between two documents."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """The tokens of a corpus, and the tokenizer that made them."""

    train: Integer[np.ndarray, " train"]
    held_out: Integer[np.ndarray, " held_out"]
    tokenizer: str
    """The text of tokenizer.json. It does not prepend ``<s>``: see `qkv_lab.tokens.with_bos`."""
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

    >>> prepare("library").bos  # doctest: +SKIP
    256
    """
    one_of("tokenizer", tokenizer, KINDS)
    found = corpora.load(corpus)
    size = MIN_VOCAB_SIZE if tokenizer == "bytes" else vocab_size
    folder = _cache("prepared", found.fingerprint, tokenizer, size)
    file, train, held_out = (folder / name for name in ("tokenizer.json", "train.npy", "held_out.npy"))
    if not all(path.exists() for path in (file, train, held_out)):
        with _status(found):
            parts = split(found.texts)
            if not all(parts):
                raise InputError(
                    f"corpus is {corpus!r}, which is too small to hold out a part of it, expected more text"
                )
            made = byte_tokenizer() if tokenizer == "bytes" else train_bpe(parts[0], size)
            write_cached(file, made.encode())
            for path, documents in zip((train, held_out), parts, strict=True):
                write_tokens(path, encode_all(made, [x + BETWEEN for x in documents[:-1]] + documents[-1:]))
    return Prepared(open_tokens(train), open_tokens(held_out), file.read_text(encoding="utf-8"), size)


def prepare_more(names: Sequence[str], corpus: str, main: Prepared) -> Integer[np.ndarray, " n"]:
    """The tokens of further corpora, by the tokenizer of a main one, from the cache if no text has changed.

    Documents that share a passage with a held-out text of the main corpus are left out.

    Args:
        names: names for `qkv.profiler.corpora.load`.
        corpus: the name of the main corpus.
        main: its tokens.
    """
    held_out = split(corpora.load(corpus).texts)[1]
    made = [corpora.load(name) for name in names]
    path = _cache(PASSAGE, LINE, main.tokenizer, *held_out, *(x.fingerprint for x in made)) / "more.npy"
    if not path.exists():
        found = list[str]()
        for one in made:
            with _status(one):
                found += without_passages(one.texts, held_out)
        if not found:
            raise InputError(f"more is {', '.join(names)!r}, which repeats the held-out text of {corpus!r}")
        with spinner(f"tokenizing {', '.join(names)}, once"):
            write_tokens(path, encode_all(main.tokenizer, [x + BETWEEN for x in found]))
    return open_tokens(path)


def _cache(*settings: str | int) -> Path:
    """The folder in the cache for tokens that depend on these settings."""
    digest = hashlib.sha256(json.dumps([VERSION, *settings]).encode()).hexdigest()
    return corpora.cache_folder() / "tokens" / digest[:20]


def write_tokens(path: Path, tokens: Integer[np.ndarray, " n"]) -> None:
    """Write tokens atomically as an .npy file."""
    file = BytesIO()
    np.save(file, tokens)
    write_cached(path, file.getbuffer())


def open_tokens(path: Path) -> Integer[np.ndarray, " n"]:
    """The tokens in a file of `write_tokens`, as a read-only memory map.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(Path(folder, "x.npy"), np.array([5, 6, 7], np.uint16))
    ...     open_tokens(Path(folder, "x.npy")).tolist()
    [5, 6, 7]
    """
    with refusing(f"corpus: cannot read {path} ({{}}); delete {path.parent} to make it again"):
        found = np.lib.format.open_memmap(path, "r")
        if found.ndim != 1 or found.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"{found.dtype} of shape {found.shape}, expected tokens")
    return found


@contextmanager
def _status(corpus: Corpus) -> Iterator[None]:
    """A spinner while a corpus is tokenized, and a remark on the documents that were left out."""
    if skipped := [one.reason for one in corpus.documents if one.reason is not None]:
        say(f"{corpus.name}: left out {len(skipped):,} documents: {', '.join(sorted(set(skipped)))}")
    with spinner(f"tokenizing {corpus.name}, once"):
        yield
