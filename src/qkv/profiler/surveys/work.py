"""The work of a survey as a list of shards, and its definition: the settings that surveys to be merged must share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qkv._survey_settings import Settings
from qkv.errors import InputError
from qkv.profiler.capture.inputs import Special, positions
from qkv.profiler.data.tables import SINK_THRESHOLD
from qkv.profiler.data.variables import checked_custom
from qkv.profiler.surveys import accumulators, shard
from qkv.profiler.surveys.accumulators import QUANTITIES
from qkv.profiler.surveys.corpus import Part, Source
from qkv.profiler.surveys.data import VERSION
from qkv.profiler.surveys.shard import Surveyor

LENGTH = 512
"""The longest sequence of a model without a limit, if none is given."""


def definition_of(model: nn.Module, tokenizer: Any, settings: Settings) -> dict[str, Any]:
    """The settings that must be equal for two surveys to be merged, and what they depend on."""
    limit = positions(model)
    if settings.length is not None and limit is not None and settings.length > limit:
        raise InputError(f"length is {settings.length:,}, but {type(model).__name__} takes {limit:,} tokens")
    length = settings.length or min(limit or LENGTH, LENGTH)
    _, overlap = shard.capacity_of(Special.of(tokenizer), length, settings.overlap)
    return {
        "version": VERSION,
        "model": settings.name,
        "weights": _fingerprint(model),
        "configuration": _configuration(model),
        "dtype": str(next((p.dtype for p in model.parameters()), "unknown")).removeprefix("torch."),
        "tokenizer": digest(_rules(tokenizer)),
        "vocabulary": shard.vocabulary(model, tokenizer),
        "length": length,
        "overlap": overlap,
        "long": settings.long,
        "local_window": settings.local_window,
        "shares_of_rows": True,
        "sink_score": {"queries": accumulators.PREFIX, "threshold": SINK_THRESHOLD},
        "sketch": {"kind": "t-digest (Apache DataSketches)", "k": accumulators.CENTROIDS},
        "quantities": accumulators.described(settings.statistics),
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


TAKEN = ("module", "queries", "special", "delimiter", "sink_score", "sink_texts")  # columns of `Survey.heads`
OnBatch = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Work:
    """A survey, ready to be carried out: any process that has it can carry out any shard, any number of times.

    A shard depends on nothing but the model, the texts and the settings, so it is the same file whoever computes it.
    """

    surveyor: Surveyor
    parts: Sequence[Part]
    """The texts of each shard."""
    settings: dict[str, Any]
    """Everything that determines the shards, as it is written to the folder of the survey."""

    @classmethod
    def of(cls, model: nn.Module, texts: Source, tokenizer: Any, settings: Settings) -> Work:
        """The work of a survey with these settings."""
        statistics = checked_custom(settings.statistics, (*QUANTITIES, *TAKEN), over="query")
        definition = definition_of(model, tokenizer, replace(settings, statistics=statistics))
        kept = {
            "corpus": texts.fingerprint, "shards": settings.shards, "batch_tokens": settings.batch_tokens,
            "definition": definition,
        }  # fmt: skip
        surveyor = Surveyor(model, tokenizer, definition, settings.batch_tokens, statistics)
        return cls(surveyor, texts.shards(settings.shards), kept)

    def shard(self, number: int, on_batch: OnBatch) -> bytes:
        """Survey one shard: its file."""
        return self.surveyor.survey(self.parts[number].chunks(), label(self.settings, number), on_batch).packed()

    def on(self, device: str) -> Work:
        """The same work with the model on another device."""
        return replace(self, surveyor=self.surveyor.on(device))


def label(settings: dict[str, Any], number: int) -> str:
    """The name of a shard in the record of a survey."""
    return f"shard {number} of {settings['shards']} of the corpus {settings['corpus'][:12]}"
