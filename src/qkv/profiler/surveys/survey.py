"""`survey` profiles a corpus of any size shard by shard, here or on Ray, and resumes after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qkv._packages import require
from qkv._survey_settings import Settings, takes_settings
from qkv.errors import InputError, renamed
from qkv.models.loading import load_if_named, rendered_chat
from qkv.profiler.capture.inputs import Special, positions
from qkv.profiler.capture.probes import weights_hash
from qkv.profiler.data.tables import SINK_THRESHOLD
from qkv.profiler.data.variables import checked_custom
from qkv.profiler.surveys import accumulators, corpus, on_ray
from qkv.profiler.surveys.accumulators import PREFIX, QUANTITIES
from qkv.profiler.surveys.corpus import Corpus
from qkv.profiler.surveys.data import VERSION, Survey
from qkv.profiler.surveys.folder import Folder, check_complete, merge_shards
from qkv.profiler.surveys.surveyor import OnBatch, Surveyor, capacity_of, vocabulary


@takes_settings
def survey(
    model: nn.Module | str,
    texts: Corpus | Sequence[str],
    *,
    tokenizer: Any = None,
    out: str | Path,
    on_batch: OnBatch = lambda documents, bytes_, tokens: None,
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
        texts: strings, or a corpus of files and folders, from `qkv.profiler.surveys.corpus.of_addresses`.
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
        require("engine='ray'", "ray")
    loaded = load_if_named(model, tokenizer, how.name, dtype=how.dtype)
    if loaded.tokenizer is None:
        raise InputError("tokenizer is None, but a survey reads texts; pass tokenizer=…")
    if getattr(loaded.tokenizer, "target", loaded.tokenizer) is not loaded.tokenizer:
        raise InputError(f"model {type(loaded.model).__name__} reads pairs of texts, expected one that reads one text")
    if how.chat:
        with renamed(question="chat"):
            rendered_chat(loaded.tokenizer, "")
    source = texts if isinstance(texts, Corpus) else corpus.of_texts(texts)
    statistics = checked_custom(how.statistics, (*QUANTITIES, *TAKEN), over="query")
    definition = definition_of(loaded.model, loaded.tokenizer, replace(how, name=loaded.name, statistics=statistics))
    kept = {
        "corpus": source.fingerprint, "shards": how.shards, "batch_tokens": how.batch_tokens, "definition": definition,
    }  # fmt: skip
    surveyor = Surveyor(loaded.model, loaded.tokenizer, source.shards(how.shards), kept, statistics)
    folder = Folder(out).open(kept)
    if how.only_shards is None:  # no other process writes
        folder.discard_unfinished()
    done = folder.finished()
    todo = [number for number in how.numbers if number not in done]
    if how.engine == "ray":
        on_ray.carry_out(surveyor, todo, folder, torch.get_num_threads(), how.gpus, on_batch)
    else:
        for number in todo:
            folder.write_shard(number, surveyor.shard(number, on_batch))
    check_complete(folder.finished(), how.shards, f"in {folder}", how.numbers)
    result = merge_shards(dict.fromkeys(how.numbers, folder), kept)
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


TAKEN = ("module", "queries", "special", "delimiter", "sink_score", "sink_texts")  # columns of `Survey.heads`
LENGTH = 512
"""The longest sequence of a model without a limit, if none is given."""


def definition_of(model: nn.Module, tokenizer: Any, settings: Settings) -> dict[str, Any]:
    """The settings that must be equal for two surveys to be merged, and what they depend on."""
    limit = positions(model)
    if settings.length is not None and limit is not None and settings.length > limit:
        raise InputError(f"length is {settings.length:,}, but {type(model).__name__} takes {limit:,} tokens")
    length = settings.length or min(limit or LENGTH, LENGTH)
    _, overlap = capacity_of(Special.of(tokenizer), length, settings.overlap)
    return {
        "version": VERSION,
        "model": settings.name,
        "weights": weights_hash(model),
        "configuration": _configuration(model),
        "dtype": str(next((p.dtype for p in model.parameters()), "unknown")).removeprefix("torch."),
        "tokenizer": digest(_rules(tokenizer)),
        "vocabulary": vocabulary(model, tokenizer),
        "length": length,
        "overlap": overlap,
        "long": settings.long,
        "local_window": settings.local_window,
        **({"chat": True} if settings.chat else {}),
        "shares_of_rows": True,
        "sink_score": {"queries": PREFIX, "threshold": SINK_THRESHOLD},
        "sketch": {"kind": "t-digest (Apache DataSketches)", "k": accumulators.CENTROIDS},
        "quantities": accumulators.described(settings.statistics),
    }


def _configuration(model: nn.Module) -> str:
    """SHA-256 of the model's class and configuration, without entries such as names and paths."""
    config: Any = getattr(model, "config", None)
    entries = config.to_dict() if hasattr(config, "to_dict") else vars(config) if hasattr(config, "__dict__") else {}
    inert = ("name", "path", "transformers_version", "architectures", "_attn_implementation")
    kept = {k: repr(v) for k, v in entries.items() if not any(word in str(k) for word in inert)}
    return digest({"class": type(model).__qualname__, **kept})


def _rules(tokenizer: Any) -> Any:
    """The rules by which the tokenizer converts a text to ids."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    around = Special.of(tokenizer)
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else type(tokenizer).__name__
    return [backend.to_str() if hasattr(backend, "to_str") else vocabulary, around.before, around.after]


def digest(value: Any) -> str:
    """SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
