"""`survey` profiles a corpus of any size shard by shard, in one process or many, and resumes after an interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from qkv._files import write_atomically
from qkv._untrusted import first_line, load_json
from qkv.errors import InputError
from qkv.profiler.capture.inputs import positions
from qkv.profiler.capture.models import load
from qkv.profiler.capture.special import Special
from qkv.profiler.data.variables import checked_custom
from qkv.profiler.surveys import accumulators, corpus, shard
from qkv.profiler.surveys.corpus import Corpus, Document
from qkv.profiler.surveys.data import VERSION, Survey, differing
from qkv.profiler.surveys.quantities import QUANTITIES, described, with_current_texts
from qkv.profiler.surveys.ranks import Lost, Ranks, joined
from qkv.statistics import Statistic

__all__ = ["Incomplete", "Survey", "survey"]

SETTINGS, SHARDS, RESULT = "survey.json", "shards", "survey.qkv.zip"
TAKEN = ("module", "queries", "special", "delimiter", "sink_score", "sink_texts")  # columns of `Survey.heads`
LENGTH = 512  # default length of sequences for a model without a limit


class Incomplete(Exception):  # noqa: N818  # named like StopIteration, after the event
    """Raised when a process was lost before its shards were finished; finished shards are kept."""


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
    """Measure where every head of a model attends over a whole corpus: exact sums, in memory independent of its size.

    The corpus is split into shards in a reproducible way. Each finished shard is written atomically to a file. A
    survey that was interrupted, even killed, resumes with the first missing shard, and its result has the same bytes
    as without the interruption. Under ``torchrun`` the processes divide the shards among them, on one machine or
    several, with or without a shared folder. Merging is exact, so the result is that of a single process (bit for bit
    if all processes use the same number of threads on the same kind of processor; else up to rounding in the model).

    Args:
        model: as in `qkv.profile`: a model in evaluation mode, or a name. The decoder of an encoder-decoder reads the
            same text as its encoder.
        texts: from `qkv.profiler.surveys.corpus.of_files`, or strings.
        tokenizer: converts text to ids; if `model` is a name, its tokenizer is loaded.
        out: folder of the survey: ``survey.json`` (settings), ``shards/0000.qkv.zip`` and so on, and at the end
            ``survey.qkv.zip``.
        shards: number of shards, at least one for each process. With more shards, less work is repeated after an
            interruption.
        batch_tokens: largest number of tokens in a batch, padding included.
        length: longest sequence, special tokens included. If None, 512, or less if the model has fewer positions.
        overlap: number of tokens that each piece of a long text repeats from the previous piece, as context; these
            queries count once. An eighth of `length` if None.
        long: "split" texts longer than `length` into pieces, or "refuse" them: they are left out and counted.
        local_window: `local` is the weight on keys at most this many tokens away.
        statistics: custom statistics (`qkv.statistics.Statistic`) over queries: each has means, quantiles and a
            histogram like the built-in ones. Surveys with different statistics cannot be merged.
        dtype: dtype of the weights, if `model` is a name.
        name: name of the model; taken from the model if not given.
        patience: seconds to wait for other processes at the beginning and at the end. It must be longer than a process
            needs for its shards, because a busy process cannot be told from a hung one. (A broken connection is
            noticed at once.)
        on_batch: progress callback: numbers of documents, bytes and tokens that this process finished since the last
            call.

    Returns:
        `Survey`, in every process.

    Raises:
        InputError: for a folder with a survey of other settings, a corpus without text, a model that cannot be
            observed, or a full disk.
        Incomplete: if a process was lost; the message names the missing shards. The same call again resumes with them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = survey("qkv-mini", ["def f(x): return x", "import os"], out=folder, shards=2)
    >>> found.record["documents"], found.record["tokens"] > 6
    (2, True)
    """
    if isinstance(model, str):
        loaded = load(model, dtype=dtype)
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    model = getattr(model, "_orig_mod", model)  # unwrap a compiled model
    if tokenizer is None:
        raise InputError("tokenizer is None, but a survey reads texts; pass tokenizer=…")
    name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    found = texts if isinstance(texts, Corpus) else corpus.of_texts(texts)
    for argument, value in (("batch_tokens", batch_tokens), ("local_window", local_window)):
        if value < 1:
            raise InputError(f"{argument} is {value}, expected at least 1 token")
    statistics = checked_custom(statistics, (*QUANTITIES, *TAKEN), over="query")
    length = _length(model, length)
    definition = _definition(model, tokenizer, name, length, overlap, long, local_window, statistics)
    settings = {"corpus": found.fingerprint, "shards": shards, "batch_tokens": batch_tokens, "definition": definition}
    parts = found.shards(shards)
    surveyor = shard.Surveyor(model, tokenizer, definition, batch_tokens, statistics)
    with joined(patience) as ranks:
        ranks.check_equal("texts or settings", _digest(settings))
        folder = _open(Path(out), settings, ranks)
        done = sorted(set().union(*ranks.all_gather(finished(folder))))
        todo = [i for i in range(shards) if i not in done]
        for i in todo[ranks.rank :: ranks.world]:
            _survey_shard(surveyor, parts[i], i, folder, settings, on_batch)
        return _gathered(folder, settings, ranks)


def _survey_shard(
    surveyor: shard.Surveyor,
    documents: list[Document],
    number: int,
    folder: Path,
    settings: dict[str, Any],
    on_batch: Callable[[int, int, int], None],
) -> None:
    shards = settings["shards"]
    label = f"shard {number} of {shards} of the corpus {settings['corpus'][:12]}"
    part = surveyor.survey(documents, label, on_batch)
    _write(_file(folder, number), part.packed(), f"shard {number}", folder, shards)


def _gathered(folder: Path, settings: dict[str, Any], ranks: Ranks) -> Survey:
    """Gather and merge all shards; rank 0 writes the result, and every process returns it."""
    shards = settings["shards"]
    try:
        ranks.barrier()
        in_first = ranks.broadcast(finished(folder))
        for i in range(shards):
            if i in in_first:
                continue
            local = _file(folder, i)  # without a shared folder, the process that has the file sends it
            sent = ranks.gather(local.read_bytes() if ranks.rank and local.exists() else None)
            data = next((x for x in sent if x is not None), None)
            if ranks.rank == 0 and data is not None:
                _write(_file(folder, i), data, f"shard {i}", folder, shards)
        result = None
        if ranks.rank == 0:
            _check_complete(folder, shards, ranks)
            result = _merged(folder, shards)
            _write(folder / RESULT, result.packed(), "the result", folder, shards)
        packed = ranks.broadcast(None if result is None or ranks.world == 1 else result.packed())
    except Lost as error:
        if ranks.rank == 0:
            _check_complete(folder, shards, ranks)
        raise Incomplete(f"another process was lost ({error}); run the same command again to resume") from error
    if result is not None:
        return result
    local = folder / RESULT
    _write(local, packed, "the result", folder, shards) if not local.exists() else None
    return Survey.load(local)


def _check_complete(folder: Path, shards: int, ranks: Ranks) -> None:
    missing = sorted(set(range(shards)) - finished(folder))
    if missing:
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise Incomplete(
            f"{len(missing)} of {shards} shards are missing ({names}): of {ranks.world} processes some were lost; "
            "run the same command again to resume"
        )


def _merged(folder: Path, shards: int) -> Survey:
    """Merge all shards, always in the same order, so that the sketches are reproducible."""
    result: Survey | None = None
    for i in range(shards):
        try:
            part = Survey.load(_file(folder, i))
        except InputError as error:
            raise InputError(f"{error}; delete it and run the same command again") from error
        result = part if result is None else result.merge(part)
    assert result is not None
    if not result.groups:
        raise InputError(
            f"texts has no text that can be surveyed; left out: {', '.join(sorted(result.record['skipped']))}"
        )
    return result


def _file(folder: Path, shard: int) -> Path:
    return folder / SHARDS / f"{shard:04}.qkv.zip"


def finished(folder: Path) -> set[int]:
    """Numbers of the finished shards in the folder of a survey."""
    return {int(p.name[:4]) for p in (folder / SHARDS).glob("[0-9][0-9][0-9][0-9].qkv.zip")}


def _write(path: Path, data: bytes, what: str, folder: Path, shards: int) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise InputError(
            f"out: cannot write {what} to {path} ({error.strerror}); {len(finished(folder))} of {shards} shards are "
            "finished and kept: run the same command again when there is space on the disk"
        ) from error


def _open(folder: Path, settings: dict[str, Any], ranks: Ranks) -> Path:
    """Create or open the folder of a survey; raises `InputError` if it has a survey with other settings."""
    file = folder / SETTINGS
    try:
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_atomically(file, (json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode())
        before = load_json(file)
        before["definition"]["quantities"] = with_current_texts(before["definition"]["quantities"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"out: cannot use the folder {str(folder)!r} ({first_line(error)})") from error
    found = differing(before, settings)
    if found is not None:
        name, was, now = found
        raise InputError(
            f"out is {str(folder)!r}, which has a survey with other settings: {name} was {was} and is {now}; expected "
            "the same settings, or another folder"
        )
    if ranks.rank == 0:
        for unfinished in (folder / SHARDS).glob(".*.tmp"):  # of a killed process; no other process writes yet
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
    """The settings that must be equal for two surveys to be merged."""
    if long not in ("split", "refuse"):
        raise InputError(f"long is {long!r}, expected 'split' or 'refuse'")
    special = Special.of(tokenizer)
    capacity = length - len(special.before) - len(special.after)
    overlap = min(length // 8, max(capacity - 1, 0)) if overlap is None else overlap
    if capacity < 1:
        raise InputError(f"length is {length}, expected more than the {length - capacity} special tokens")
    if not 0 <= overlap < capacity:
        raise InputError(
            f"overlap is {overlap}, expected 0 to less than {capacity}, the tokens of text in a sequence of {length}"
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
        "shares_of_rows": True,  # missing in older surveys, which do not divide rows and count first queries
        "sink_score": {"queries": accumulators.PREFIX, "threshold": accumulators.SINK_THRESHOLD},
        "sketch": {"kind": "t-digest (Apache DataSketches)", "k": accumulators.CENTROIDS},
        "quantities": described(statistics),
    }


def _fingerprint(model: nn.Module) -> str:
    """SHA-256 of the parameters: names, shapes, dtypes and all bytes of each tensor."""
    state = hashlib.sha256()
    for name, x in model.state_dict().items():
        state.update(f"{name} {type(x).__name__}".encode())
        if isinstance(x, torch.Tensor):
            state.update(f"{tuple(x.shape)} {x.dtype}".encode())
            state.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _configuration(model: nn.Module) -> str:
    """SHA-256 of the model's class and configuration, without entries such as names and paths."""
    config: Any = getattr(model, "config", None)
    entries = config.to_dict() if hasattr(config, "to_dict") else vars(config) if hasattr(config, "__dict__") else {}
    inert = ("name", "path", "transformers_version", "architectures", "_attn_implementation")
    kept = {k: repr(v) for k, v in entries.items() if not any(word in str(k) for word in inert)}
    return _digest({"class": type(model).__qualname__, **kept})


def _rules(tokenizer: Any) -> Any:
    """The rules by which the tokenizer converts a text to ids."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    around = Special.of(tokenizer)
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else type(tokenizer).__name__
    return [backend.to_str() if hasattr(backend, "to_str") else vocabulary, around.before, around.after]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
