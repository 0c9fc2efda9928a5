"""Tokenizers are lossless; token files match the corpus, are made once, and are rejected when damaged."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refused
from qkv.profiler import corpora
from qkv_lab import tokens
from qkv_lab.tokens import baselines, open_tokens, prepare, split, write_tokens

WORDS = ["def the self.head(x):\n    return x\n", "class Tail:\n    body = 'the self'\n", "été <s> 🙂\r\n"]
BPE, BYTES = tokens.train_bpe(WORDS, 270), tokens.byte_tokenizer()
MADE = {tokenizer: tokens.from_json(tokenizer) for tokenizer in (BPE, BYTES)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 60 small documents, and an empty cache."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for i in range(60):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i} says <s> é{i * i}\n" + "the same words " * 5)
    return tmp_path / "texts"


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
@settings(max_examples=50)
@given(
    text=st.text(st.characters(codec="utf-8")) | st.sampled_from(["", "<s>", " <s>a</s>", "\u0120\u010a", "a  \t\n"])
)
def test_any_text_is_decoded_unchanged_and_never_contains_bos(tokenizer: str, text: str) -> None:
    made = MADE[tokenizer]
    ids = made.encode(text)
    lengths = tokens.byte_lengths(tokenizer)
    assert made.decode(ids) == text
    assert len(lengths) - 1 not in ids
    assert lengths[ids].sum() == len(text.encode())
    assert tokens.encode_all(tokenizer, [text, text]).tolist() == ids + ids


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_transformers_reads_tokenizer_json_which_prepends_bos(tokenizer: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    started = tokens.with_bos(tokenizer)
    (tmp_path / "tokenizer.json").write_text(started, encoding="utf-8")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    bos = len(tokens.byte_lengths(tokenizer)) - 1
    text = "def the self.head é 🙂 . , ' s n't <b>"
    ids = theirs(text)["input_ids"]
    assert ids == tokens.from_json(started).encode(text) == [bos, *tokens.from_json(tokenizer).encode(text)]
    assert theirs.convert_ids_to_tokens([bos]) == ["<s>"]
    assert theirs.decode(ids, skip_special_tokens=True) == tokens.from_json(started).decode(ids) == text


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_written_tokens_are_read_back_as_a_memory_map(dtype: type, tmp_path: Path) -> None:
    tokens = np.array([0, 1, 256, 7], dtype)
    write_tokens(tmp_path / "x.npy", tokens)
    found = open_tokens(tmp_path / "x.npy")
    assert (found.tolist(), found.dtype) == (tokens.tolist(), dtype)
    assert isinstance(found, np.memmap)
    assert not found.flags.writeable


def test_damaged_token_files_are_refused_and_made_again(tmp_path: Path) -> None:
    file, tokens = tmp_path / "x.npy", np.arange(5, dtype=np.uint16)
    for says, damage in (
        ("No such file", lambda: file.unlink(missing_ok=True)),
        ("cannot read", lambda: file.write_bytes(file.read_bytes()[:-1])),
        ("cannot read", lambda: file.write_bytes(file.read_bytes()[:20])),
        ("expected tokens", lambda: write_tokens(file, np.arange(5.0))),
        ("expected tokens", lambda: write_tokens(file, tokens[None])),
    ):
        damage()
        with refused("corpus", match=f"{says}.*delete .* to make it again"):
            open_tokens(file)
        write_tokens(file, tokens)
        assert len(open_tokens(file)) == 5


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_prepared_tokens_decode_to_the_corpus(tokenizer: str, folder: Path) -> None:
    prepared = prepare(str(folder), tokenizer, 300)
    assert prepared.vocab_size == (257 if tokenizer == "bytes" else 300)
    decode = tokens.from_json(prepared.tokenizer).decode
    train, held_out = split(corpora.load(str(folder)).texts)
    assert decode(prepared.train.tolist()) == "\n\n".join(train)
    assert decode(prepared.held_out.tolist()) == "\n\n".join(held_out)
    assert prepared.bos not in prepared.train
    of_train = BYTES if tokenizer == "bytes" else tokens.train_bpe(train, 300)
    assert prepared.tokenizer == of_train, "the held-out text has no part in it"


def test_tokens_are_cached_until_text_or_settings_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(str(folder), "bpe", 300)

    def never(*_: object) -> str:
        raise AssertionError("made again")

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "train_bpe", never)
        patch.setattr(tokens, "encode_all", never)
        again = prepare(str(folder), "bpe", 300)
        assert again.train.tolist() == prepared.train.tolist()
        assert again.tokenizer == prepared.tokenizer
        with pytest.raises(AssertionError, match="made again"):
            prepare(str(folder), "bpe", 301)
        (folder / "0.txt").write_text("something else")
        with pytest.raises(AssertionError, match="made again"):
            prepare(str(folder), "bpe", 300)
    assert prepare(str(folder), "bpe", 300).train.tolist() != prepared.train.tolist()


def test_losses_are_those_of_the_formulas_token_by_token() -> None:
    generator = np.random.default_rng(0)
    train, texts = generator.integers(0, 5, 200).astype(np.uint16), generator.integers(0, 7, (3, 11))
    single, pairs = Counter(train.tolist()), Counter(pairwise(train.tolist()))
    unigram, bigram = [], []
    for row in texts.tolist():
        for a, b in pairwise(row):
            p = (single[b] + 1) / (200 + 7)
            followers = [pair for pair in pairs if pair[0] == a]
            count = sum(pairs[pair] for pair in followers)
            q = (pairs[a, b] + len(followers) * p) / (count + len(followers)) if followers else p
            unigram.append(-log(p))
            bigram.append(-log(q))
    found = baselines(train, texts, 7)
    assert (found.unigram, found.bigram) == pytest.approx((np.mean(unigram), np.mean(bigram)))
