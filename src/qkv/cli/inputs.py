"""Inputs of the commands that run a model: a text, a file, the bundled passage, or the first tokens of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv._files import write_atomically
from qkv.cli.files import read
from qkv.errors import InputError, renamed

if TYPE_CHECKING:
    from qkv.profiler.capture.models import Loaded
    from qkv.statistics import Statistic

SHORT_TEXT = 160  # characters of a text that is repeated in commands


def numbers(text: str) -> list[int]:
    """Parse 0,3,8-11 as a list of numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bad = not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 8
        if bad or (dash and int(last) < int(first)):
            raise InputError(f"--layers is {text!r}, expected numbers and ranges such as 0,3,8-11")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def statistics_of(names: str | None) -> list[Statistic]:
    """The statistics of installed packages with these names, separated by commas."""
    from qkv.statistics.base import STATISTICS

    return [STATISTICS.load(name.strip())() for name in names.split(",")] if names else []


def text_of(model: str, text: str | None, file: Path | None, tokens: int | None, *, least: int = 1) -> str:
    """The user's text or file; else the bundled passage, or enough of Python's standard library for `tokens`."""
    from qkv.profiler import corpora

    if text is not None and file is not None:
        raise InputError("text and --file are both given, expected one of them")
    if tokens is not None and tokens < least:
        raise InputError(f"--tokens is {tokens}, expected at least {least}")
    if file is not None:
        return read(file)
    if text is not None:
        return text
    return corpora.default_text(model) if tokens is None else corpora.library_text(16 * tokens + 1024)


def preset_text(name: str, text: str | None, file: Path | None) -> str:
    """The bundled text with a name, if no other text is given."""
    from qkv.profiler import corpora

    if text is not None or file is not None:
        raise InputError(f"--preset ({name}) and {'text' if file is None else '--file'} are both given, expected one")
    with renamed(preset="--preset"):
        return corpora.preset(name)


def arguments_of(
    model: str,
    passage: str,
    out: Path | None,
    *,
    text: str | None,
    file: Path | None,
    tokens: int | None,
    target: str | None,
    dtype: str,
) -> dict[str, Any] | None:
    """The model and text of a command, from which `qkv.profiler.data.findings` writes the next commands.

    A text that came from standard input, or that is long, is written to text.txt in the folder `out`; without a folder
    the commands cannot be written, and the result is None.
    """
    given: dict[str, Any] = {"model": model, "tokens": tokens, "target": target}
    if dtype != "float32":
        given["dtype"] = dtype
    if str(file) == "-" or (text is not None and (len(text) > SHORT_TEXT or text.startswith("-"))):
        if out is None:
            return None
        given["file"] = str(out / "text.txt")
        write_atomically(out / "text.txt", passage.encode("utf-8", "replace"))
    else:
        given |= {"text": text, "file": None if file is None else str(file)}
    return {name: value for name, value in given.items() if value is not None}


def load_inputs(
    name: str, passage: str, tokens: int | None, dtype: str, *, head: bool | None = False
) -> tuple[Loaded, Any]:
    """Load a model, and return it with its inputs: the passage, or the first `tokens` tokens of it."""
    from qkv._progress import spinner
    from qkv.profiler.capture import models

    with spinner(f"loading {name}"):
        loaded = models.load(name, dtype=dtype, tokens=tokens or len(passage.encode()), head=head)
    return loaded, passage if tokens is None else first_tokens(loaded, passage, tokens)


def first_tokens(loaded: Loaded, text: str, tokens: int) -> dict[str, Any]:
    """The first tokens of a text as a batch for the model; `InputError` if the text has fewer."""
    if loaded.tokenizer is None:
        raise InputError("--tokens needs a tokenizer, but this model has none")
    batch = loaded.tokenizer(text, return_tensors="pt")
    found = batch["input_ids"].shape[1]
    if found < tokens:
        raise InputError(f"--tokens is {tokens:,}, but the text has {found:,}")
    return {k: v[:, :tokens] for k, v in batch.items() if k in ("input_ids", "attention_mask")}
