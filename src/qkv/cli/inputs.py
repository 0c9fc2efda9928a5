"""What commands run a model on: a text given, a file, the bundled passage, so many tokens of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkv.cli.files import read
from qkv.errors import InputError


def numbers(text: str) -> list[int]:
    """0,3,8-11 as a list of numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bad = not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 8
        if bad or (dash and int(last) < int(first)):
            raise InputError(f"--layers is {text!r}, expected numbers and ranges such as 0,3,8-11")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def given_text(model: str, text: str | None, file: Path | None, tokens: int | None) -> str:
    from qkv.profiler import texts

    if file is not None:
        return read(file)
    if text is not None:
        return text
    return texts.default_text(model) if tokens is None else texts.library_text(16 * tokens + 1024)


def first_tokens(loaded: Any, text: str, tokens: int) -> dict[str, Any]:
    if loaded.tokenizer is None:
        raise InputError("--tokens needs a tokenizer, and this model has none")
    batch = loaded.tokenizer(text, return_tensors="pt")
    found = batch["input_ids"].shape[1]
    if found < tokens:
        raise InputError(f"--tokens is {tokens:,}, but the text has {found:,}")
    return {k: v[:, :tokens] for k, v in batch.items() if k in ("input_ids", "attention_mask")}
