"""`survey` profiles a corpus of any size shard by shard, here or on Ray, and resumes after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qkv._survey_settings import Settings, takes_settings
from qkv.errors import InputError
from qkv.models.loading import load_if_named
from qkv.profiler.surveys import corpus, on_ray
from qkv.profiler.surveys.corpus import Source
from qkv.profiler.surveys.data import Survey
from qkv.profiler.surveys.folder import Folder
from qkv.profiler.surveys.merging import Incomplete, check_complete, merge_shards
from qkv.profiler.surveys.work import Work

__all__ = ["Incomplete", "Survey", "survey"]


@takes_settings
def survey(
    model: nn.Module | str,
    texts: Source | Sequence[str],
    *,
    tokenizer: Any = None,
    out: str | Path,
    on_batch: Callable[[int, int, int], None] = lambda documents, bytes_, tokens: None,
    **settings: Any,
) -> Survey:
    """Measure where every head of a model attends over a whole corpus: exact sums, in memory independent of its size.

    The corpus is split into shards in a reproducible way. Each finished shard is written atomically to a file. A
    survey that was interrupted, even killed, resumes with the first missing shard, and its result has the same bytes
    as without the interruption. Merging is exact, so the result of several processes is that of a single one (bit for
    bit if all use the same number of threads on the same kind of processor; else up to rounding in the model).

    Args:
        model: as in `qkv.profile`: a model in evaluation mode, or a name. The decoder of an encoder-decoder reads the
            same text as its encoder.
        texts: strings, or a corpus from `qkv.profiler.surveys.corpus.of_files` or, to read it as a stream, from
            `qkv.profiler.surveys.stream.of_addresses`.
        tokenizer: converts text to ids; if `model` is a name, its tokenizer is loaded.
        out: folder of the survey, also at an address such as ``s3://bucket/folder``: ``survey.json`` (settings),
            ``shards/0000.qkv.zip`` and so on, and at the end ``survey.qkv.zip``.
        on_batch: progress callback: numbers of documents, bytes and tokens that were finished since the last call.
        settings: the fields of `Settings`.

    Returns:
        `Survey` of the whole corpus, or of the shards that ``only_shards`` selects.

    Raises:
        InputError: for a folder with a survey of other settings, a corpus without text, a model that cannot be
            observed, a full disk, or an engine that is not installed or cannot be reached.
        Incomplete: if Ray gave up shards; the message names them. The same call again resumes with them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = survey("qkv-mini", ["def f(x): return x", "import os"], out=folder, shards=2)
    >>> found.record["documents"], found.record["tokens"] > 6
    (2, True)
    """
    how = Settings(**settings)
    how.check()
    _refuse_torchrun(how)
    if how.engine == "ray":
        on_ray.check_installed()
    loaded = load_if_named(model, tokenizer, how.name, dtype=how.dtype)
    if loaded.tokenizer is None:
        raise InputError("tokenizer is None, but a survey reads texts; pass tokenizer=…")
    source = texts if isinstance(texts, Source) else corpus.of_texts(texts)
    work = Work.of(loaded.model, source, loaded.tokenizer, replace(how, name=loaded.name))
    folder = Folder(out).open(work.settings)
    if how.only_shards is None:  # no other process writes
        folder.discard_unfinished()
    done = folder.finished()
    todo = [number for number in how.numbers if number not in done]
    if how.engine == "ray":
        on_ray.carry_out(work, todo, folder, torch.get_num_threads(), how.gpus, on_batch)
    else:
        for number in todo:
            folder.write_shard(number, work.shard(number, on_batch))
    check_complete(folder.finished(), how.shards, f"in {folder}", how.numbers)
    result = merge_shards(dict.fromkeys(how.numbers, folder), work.settings)
    if len(how.numbers) == how.shards:
        folder.write_result(result.packed())
    return result


def _refuse_torchrun(settings: Settings) -> None:
    """Raise `InputError` in a process that torchrun started beside others: each would survey the whole corpus."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
    if world > 1 and settings.only_shards is None:
        raise InputError(
            f"WORLD_SIZE is {world}, but processes of torchrun do not divide a survey among them; give each its part "
            "with only_shards='i/N' and merge, or start one process with engine='ray'"
        )
