"""Tokenizers read from tokenizer.json, against the class of transformers that reads the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import refused
from qkv.models import checkpoint
from qkv.models.tokenizers import FileTokenizer

pytest.importorskip("tokenizers", reason="tokenizer.json is read by tokenizers")


def file() -> Path:
    folder = checkpoint.folder_of("qkv-mini")
    assert folder is not None
    return folder / "tokenizer.json"


@pytest.mark.parametrize("text", ["", "def one(x):\n    return x\n", "é <s> 日本 🙂"])
def test_tokens_and_texts_equal_transformers(text: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its tokenizer is the reference")
    theirs, ours = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file())), FileTokenizer(file())
    ids = ours.encode(text)
    for add in (True, False):
        assert ours(text, add_special_tokens=add) == dict(theirs(text, add_special_tokens=add))
        assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
        assert ours.decode(ids, skip_special_tokens=add) == theirs.decode(ids, skip_special_tokens=add)
    for name, x in ours(text, return_tensors="pt").items():
        assert torch.equal(x, theirs(text, return_tensors="pt")[name])
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert (len(ours), ours.vocab_size, ours.get_vocab()) == (len(theirs), theirs.vocab_size, theirs.get_vocab())
    assert ours.decode(ids[0]) == theirs.decode(ids[0])


def test_bad_files_and_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for argument, call in (
        ("model", lambda: FileTokenizer(tmp_path / "tokenizer.json")),
        ("model", lambda: FileTokenizer(tmp_path / "missing.json")),
        ("return_tensors", lambda: FileTokenizer(file())("a", return_tensors="np")),
        ("text", lambda: FileTokenizer(file())(["a", "b"])),  # type: ignore[arg-type]
    ):
        with refused(argument):
            call()
