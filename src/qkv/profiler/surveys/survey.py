"""`survey`: profile a corpus of any size, shard by shard, in one process or many; it goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from qkv._files import write_whole
from qkv.errors import InputError
from qkv.profiler.capture.inputs import positions
from qkv.profiler.capture.models import load
from qkv.profiler.capture.special import Special
from qkv.profiler.data.variables import own_checked
from qkv.profiler.surveys import accumulators, corpus, shard
from qkv.profiler.surveys.corpus import Corpus, Document
from qkv.profiler.surveys.data import VERSION, Survey, differing
from qkv.profiler.surveys.quantities import QUANTITIES, as_today, described
from qkv.profiler.surveys.ranks import Lost, Ranks, joined
from qkv.statistics import Statistic

__all__ = ["Incomplete", "Survey", "survey"]

SETTINGS, SHARDS, RESULT = "survey.json", "shards", "survey.qkv.zip"
TAKEN = ("module", "queries", "special", "delimiter", "sink_score", "sink_texts")  # columns of `Survey.heads`
LENGTH = 512  # of sequences of a model that takes any


class Incomplete(Exception):  # noqa: N818  # as StopIteration: what happened
    """A process was lost before its shards were done; the others are kept."""


def survey(
    model: nn.Module | str,
    texts: Corpus | Sequence[str],
    *,
    tokenizer: Any = None,
    out: str | Path,
    shards: int = 8,
    batch_tokens: int = 4096,
    length: int | None = None,
    overlap: int | None = None,
    long: Literal["split", "refuse"] = "split",
    local_window: int = 8,
    statistics: Sequence[Statistic] = (),
    dtype: str = "float32",
    name: str = "",
    patience: float = 14_400.0,
    on_batch: Callable[[int, int, int], None] = lambda documents, bytes_, tokens: None,
) -> Survey:
    """Where every head of a model attends over a whole corpus: exact sums, in memory that does not grow with it.

    The corpus is cut into shards, always the same ones. A shard that is done is a file, there whole or not at all; a
    survey that was interrupted, even killed, goes on with the first shard that is missing and ends with the very bytes
    of one that was not. Under ``torchrun`` each process takes its share of the shards, on one machine or on many, with
    a shared folder or without, and the result is that of one process: merging is exact. (Bit by bit where every process
    computes with as many threads on a processor of the same kind; else to the rounding of the model itself.)

    Args:
        model: as in `qkv.profile`: a model in evaluation mode, or a name. Of an encoder-decoder, the decoder reads what
            the encoder reads.
        texts: from `qkv.profiler.surveys.corpus.of_files`, or strings.
        tokenizer: for the texts; loaded with the model if that is a name.
        out: folder of the survey: ``survey.json`` (settings), ``shards/0000.qkv.zip`` …, and at the end
            ``survey.qkv.zip``.
        shards: how many parts: the more, the less is done again after an interruption. At least one for each process.
        batch_tokens: how many tokens run through the model at once, padding included.
        length: longest sequence, special tokens included; what the model has positions for if None, or 512.
        overlap: how much of a long text each piece repeats of the one before, as context: those queries count once. An
            eighth of `length` if None.
        long: "split" texts longer than `length` into pieces, or "refuse" them: they are then left out and counted.
        local_window: `local` is the weight on keys at most this many tokens away.
        statistics: your own (`qkv.statistics.Statistic`), of queries: each has means, quantiles and a histogram as the
            built-in ones. Surveys with different ones do not merge.
        dtype: of the weights, if `model` is a name.
        name: of the model; its own if not given.
        patience: seconds to wait for other processes at the beginning and at the end: longer than any shard takes, for
            one that still works cannot be told from one that fell silent. (A broken connection is known at once.)
        on_batch: hears after every batch of this process how many documents, bytes and tokens it finished.

    Returns:
        `Survey`, in every process.

    Raises:
        InputError: for a folder with a survey of other settings, a corpus without text, a model that cannot be
            observed, or a disk that is full.
        Incomplete: if a process was lost: it names the shards that are missing. The same call does those.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = survey("qkv-mini", ["def f(x): return x", "import os"], out=folder, shards=2)
    >>> found.record["documents"], len(found.heads())
    (2, 24)
    """
    if isinstance(model, str):
        loaded = load(model, dtype=dtype)
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    if tokenizer is None:
        raise InputError("a survey reads texts, but there is no tokenizer; pass tokenizer=…")
    name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    found = texts if isinstance(texts, Corpus) else corpus.of_texts(texts)
    for what, value, least in (("batch_tokens", batch_tokens, 1), ("local_window", local_window, 1)):
        if value < least:
            raise InputError(f"{what} is {value}, expected at least {least} token")
    statistics = own_checked(statistics, (*QUANTITIES, *TAKEN), over="query")
    length = _length(model, length)
    definition = _definition(model, tokenizer, name, length, overlap, long, local_window, statistics)
    settings = {"corpus": found.fingerprint, "shards": shards, "batch_tokens": batch_tokens, "definition": definition}
    parts = found.shards(shards)
    reader = shard.Reader(model, tokenizer, definition, batch_tokens, statistics)
    with joined(patience) as ranks:
        ranks.agreed("the corpus or a setting", _digest(settings))
        folder = _open(Path(out), settings, ranks)
        done = sorted(set().union(*ranks.everyone(finished(folder))))
        todo = [i for i in range(shards) if i not in done]
        for i in todo[ranks.rank :: ranks.world]:
            _survey_shard(reader, parts[i], i, folder, settings, on_batch)
        return _together(folder, settings, ranks)


def _survey_shard(
    reader: shard.Reader,
    documents: list[Document],
    number: int,
    folder: Path,
    settings: dict[str, Any],
    on_batch: Callable[[int, int, int], None],
) -> None:
    shards = settings["shards"]
    label = f"shard {number} of {shards} of the corpus {settings['corpus'][:12]}"
    part = reader.survey(documents, label, on_batch)
    _write(_file(folder, number), part.packed(), f"shard {number}", folder, shards)


def _together(folder: Path, settings: dict[str, Any], ranks: Ranks) -> Survey:
    """All shards as one, in every process; rank 0 writes it."""
    shards = settings["shards"]
    try:
        ranks.meet()
        there = ranks.from_first(finished(folder))
        wanted = [i for i in range(shards) if i not in there]
        for i in wanted:  # no shared folder: those who have it send it, one file at a time
            own = _file(folder, i)
            sent = ranks.to_first(own.read_bytes() if ranks.rank and own.exists() else None)
            data = next((x for x in sent if x is not None), None)
            if ranks.rank == 0 and data is not None:
                _write(_file(folder, i), data, f"shard {i}", folder, shards)
        result = None
        if ranks.rank == 0:
            _all_there(folder, shards, ranks)
            result = _merged(folder, shards)
            _write(folder / RESULT, result.packed(), "the result", folder, shards)
        packed = ranks.from_first(None if result is None or ranks.world == 1 else result.packed())
    except Lost as error:
        if ranks.rank == 0:
            _all_there(folder, shards, ranks)
        raise Incomplete(f"another process was lost ({error}); give the same command again to go on") from error
    if result is not None:
        return result
    own = folder / RESULT
    _write(own, packed, "the result", folder, shards) if not own.exists() else None
    return Survey.load(own)


def _all_there(folder: Path, shards: int, ranks: Ranks) -> None:
    missing = sorted(set(range(shards)) - finished(folder))
    if missing:
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise Incomplete(
            f"{len(missing)} of {shards} shards are missing ({names}): of {ranks.world} processes some were lost; "
            "give the same command again to do those"
        )


def _merged(folder: Path, shards: int) -> Survey:
    """Always in the same order, for the sketches' sake."""
    result: Survey | None = None
    for i in range(shards):
        try:
            part = Survey.load(_file(folder, i))
        except InputError as error:
            raise InputError(f"{error}; delete it and give the same command again") from error
        result = part if result is None else result.merge(part)
    assert result is not None
    if not result.groups:
        raise InputError(f"corpus: every text was left out: {', '.join(sorted(result.record['skipped']))}")
    return result


def _file(folder: Path, shard: int) -> Path:
    return folder / SHARDS / f"{shard:04}.qkv.zip"


def finished(folder: Path) -> set[int]:
    """Shards of the survey in a folder that are done."""
    return {int(p.name[:4]) for p in (folder / SHARDS).glob("[0-9][0-9][0-9][0-9].qkv.zip")}


def _write(path: Path, data: bytes, what: str, folder: Path, shards: int) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise InputError(
            f"cannot write {what} to {path} ({error.strerror}); {len(finished(folder))} of {shards} shards are done "
            "and kept: give the same command again when there is room"
        ) from error


def _open(folder: Path, settings: dict[str, Any], ranks: Ranks) -> Path:
    """The folder, made if it is not there; one with a survey of other settings is refused."""
    file = folder / SETTINGS
    try:
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_whole(file, (json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode())
        before = json.loads(file.read_text(encoding="utf-8"))
        before["definition"]["quantities"] = as_today(before["definition"]["quantities"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"out: cannot use the folder {str(folder)!r} ({error})") from error
    found = differing(before, settings)
    if found is not None:
        name, was, now = found
        raise InputError(
            f"out: {str(folder)!r} holds a survey with other settings: {name} was {was} and is {now}; expected the "
            "same, or another folder"
        )
    if ranks.rank == 0:
        for unfinished in (folder / SHARDS).glob(".*.tmp"):  # of a process that was killed; nobody writes yet
            with suppress(OSError):
                unfinished.unlink()
    return folder


def _length(model: nn.Module, length: int | None) -> int:
    limit = positions(model)
    if length is not None and length < 1:
        raise InputError(f"length is {length}, expected at least 1 token")
    if length is not None and limit is not None and length > limit:
        raise InputError(f"length is {length:,}, but {type(model).__name__} takes {limit:,} tokens")
    return length or min(limit or LENGTH, LENGTH)


def _definition(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    length: int,
    overlap: int | None,
    long: str,
    local_window: int,
    statistics: Sequence[Statistic] = (),
) -> dict[str, Any]:
    """Everything that must be the same for two surveys to say the same thing."""
    if long not in ("split", "refuse"):
        raise InputError(f"long is {long!r}, expected 'split' or 'refuse'")
    special = Special.of(tokenizer)
    room = length - len(special.before) - len(special.after)
    overlap = min(length // 8, max(room - 1, 0)) if overlap is None else overlap
    if room < 1 or not 0 <= overlap < room:
        raise InputError(
            f"length is {length} and overlap {overlap}, expected an overlap from 0 to less than the {max(room, 0)} "
            "tokens of text in a sequence"
        )
    return {
        "version": VERSION,
        "model": name,
        "weights": _fingerprint(model),
        "configuration": _configuration(model),
        "dtype": str(next((p.dtype for p in model.parameters()), "unknown")).removeprefix("torch."),
        "tokenizer": _digest(_rules(tokenizer)),
        "vocabulary": shard.vocabulary(model, tokenizer),
        "length": length,
        "overlap": overlap,
        "long": long,
        "local_window": local_window,
        "sink_score": {"queries": accumulators.PREFIX, "threshold": accumulators.SINK_THRESHOLD},
        "sketch": {"kind": "t-digest (Apache DataSketches)", "k": accumulators.CENTROIDS},
        "quantities": described(statistics),
    }


def _fingerprint(model: nn.Module) -> str:
    """Of the weights: names, shapes, and all bytes of each tensor."""
    state = hashlib.sha256()
    for name, x in model.state_dict().items():
        state.update(f"{name} {type(x).__name__}".encode())
        if isinstance(x, torch.Tensor):
            state.update(f"{tuple(x.shape)} {x.dtype}".encode())
            state.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _configuration(model: nn.Module) -> str:
    """Of what decides what the model makes of its weights, but for names and places."""
    config: Any = getattr(model, "config", None)
    said = config.to_dict() if hasattr(config, "to_dict") else vars(config) if hasattr(config, "__dict__") else {}
    inert = ("name", "path", "transformers_version", "architectures", "_attn_implementation")
    kept = {k: repr(v) for k, v in said.items() if not any(word in str(k) for word in inert)}
    return _digest({"class": type(model).__qualname__, **kept})


def _rules(tokenizer: Any) -> Any:
    """What decides which ids a text becomes."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    around = Special.of(tokenizer)
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else type(tokenizer).__name__
    return [backend.to_str() if hasattr(backend, "to_str") else vocabulary, around.before, around.after]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
