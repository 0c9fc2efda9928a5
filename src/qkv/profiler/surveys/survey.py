"""`survey` profiles a corpus of any size shard by shard, in one process or many, and resumes after an interruption."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from qkv.errors import InputError
from qkv.profiler.capture.models import load
from qkv.profiler.surveys import corpus, on_ray
from qkv.profiler.surveys.corpus import Source
from qkv.profiler.surveys.data import Survey
from qkv.profiler.surveys.definition import digest
from qkv.profiler.surveys.folder import Folder
from qkv.profiler.surveys.merging import Incomplete, check_complete, merge_shards
from qkv.profiler.surveys.ranks import Lost, Ranks, joined
from qkv.profiler.surveys.work import Work, selected
from qkv.statistics import Statistic

__all__ = ["Incomplete", "Survey", "survey"]


def survey(
    model: nn.Module | str,
    texts: Source | Sequence[str],
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
    only_shards: str | None = None,
    engine: Literal["processes", "ray"] = "processes",
    gpus: Literal[0, 1] | None = None,
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
        texts: strings, or a corpus from `qkv.profiler.surveys.corpus.of_files` or, to read it as a stream, from
            `qkv.profiler.surveys.stream.of_addresses`.
        tokenizer: converts text to ids; if `model` is a name, its tokenizer is loaded.
        out: folder of the survey, also at an address such as ``s3://bucket/folder``: ``survey.json`` (settings),
            ``shards/0000.qkv.zip`` and so on, and at the end ``survey.qkv.zip``.
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
        only_shards: ``"i/N"`` surveys only every N-th shard, beginning with shard i (counted from 0), and returns the
            survey of these. `qkv.profiler.surveys.merging.merge_folders` writes ``survey.qkv.zip`` once all N parts
            are finished. For processes that do not know each other, such as the tasks of a Slurm array.
        engine: who starts the processes. "processes": you do, with ``torchrun`` or `only_shards`, and this is one of
            them. "ray": Ray does, on the cluster that it finds, else on this machine. Each shard is a task with as many
            CPUs as torch has threads here; Ray repeats it if its machine is lost.
        gpus: the GPUs that a task of Ray reserves; None is one if the cluster has any now, and 1 also waits for a
            machine that has one.
        patience: seconds to wait for other processes at the beginning and at the end. It must be longer than a process
            needs for its shards, because a busy process cannot be told from a hung one. (A broken connection is
            noticed at once.)
        on_batch: progress callback: numbers of documents, bytes and tokens that this process finished since the last
            call.

    Returns:
        `Survey`, in every process: of the whole corpus, or of the shards that `only_shards` selects.

    Raises:
        InputError: for a folder with a survey of other settings, a corpus without text, a model that cannot be
            observed, a full disk, or an engine that is not installed or cannot be reached.
        Incomplete: if a process was lost; the message names the missing shards. The same call again resumes with them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = survey("qkv-mini", ["def f(x): return x", "import os"], out=folder, shards=2)
    >>> found.record["documents"], found.record["tokens"] > 6
    (2, True)
    """
    if engine not in ("processes", "ray"):
        raise InputError(f"engine is {engine!r}, expected 'processes' or 'ray'")
    if engine == "ray":
        on_ray.check_installed()
    elif gpus is not None:
        raise InputError(f"gpus is {gpus}, which engine='ray' alone reads; move the model to a device yourself")
    if isinstance(model, str):
        loaded = load(model, dtype=dtype)
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    model = getattr(model, "_orig_mod", model)  # unwrap a compiled model
    if tokenizer is None:
        raise InputError("tokenizer is None, but a survey reads texts; pass tokenizer=…")
    name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    found = texts if isinstance(texts, Source) else corpus.of_texts(texts)
    work = Work.of(
        model,
        found,
        tokenizer,
        name=name,
        shards=shards,
        batch_tokens=batch_tokens,
        length=length,
        overlap=overlap,
        long=long,
        local_window=local_window,
        statistics=statistics,
    )
    numbers = selected(shards, only_shards)
    with joined(patience) as ranks:
        if engine == "ray" and ranks.world > 1:
            raise InputError(f"engine is 'ray', but this is one of {ranks.world} processes of torchrun; start it alone")
        ranks.check_equal("texts or settings", digest(work.settings))
        folder = Folder(out).open(work.settings)
        if ranks.rank == 0 and only_shards is None:  # no other process writes yet
            folder.discard_unfinished()
        done = set().union(*ranks.all_gather(folder.finished()))
        todo = [number for number in numbers if number not in done]
        if engine == "ray":
            on_ray.carry_out(work, todo, folder, torch.get_num_threads(), gpus, on_batch)
        else:
            for number in todo[ranks.rank :: ranks.world]:
                work.carry_out(number, folder, on_batch)
        return _gathered(work, numbers, folder, ranks)


def _gathered(work: Work, numbers: Sequence[int], folder: Folder, ranks: Ranks) -> Survey:
    """Gather and merge shards; rank 0 writes the result if these are all, and every process returns it."""
    shards = work.settings["shards"]
    try:
        ranks.barrier()
        in_first = ranks.broadcast(folder.finished())
        for number in numbers:
            if number in in_first:
                continue
            # without a shared folder, the process that has the file sends it
            sent = ranks.gather(folder.shard_bytes(number) if ranks.rank else None)
            data = next((x for x in sent if x is not None), None)
            if ranks.rank == 0 and data is not None:
                folder.write_shard(number, data)
        result = None
        if ranks.rank == 0:
            check_complete(folder.finished(), shards, f"in {folder}", numbers)
            result = merge_shards(dict.fromkeys(numbers, folder), work.settings)
            if len(numbers) == shards:
                folder.write_result(result.packed())
        packed = ranks.broadcast(None if result is None or ranks.world == 1 else result.packed())
    except Lost as error:
        if ranks.rank == 0:
            check_complete(folder.finished(), shards, f"in {folder} because {error}", numbers)
        raise Incomplete(f"{error}; run the same command again to resume") from error
    if result is not None:
        return result
    if len(numbers) == shards and folder.result() is None:
        folder.write_result(packed)
    return Survey.load(io.BytesIO(packed))
