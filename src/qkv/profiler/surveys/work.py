"""The work of a survey as a list of shards: whoever starts the processes, each shard is carried out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from qkv._survey_settings import Settings
from qkv.profiler.data.variables import checked_custom
from qkv.profiler.surveys.accumulators import QUANTITIES
from qkv.profiler.surveys.corpus import Part, Source
from qkv.profiler.surveys.definition import definition_of
from qkv.profiler.surveys.folder import Folder
from qkv.profiler.surveys.shard import Surveyor

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
    def of(
        cls,
        model: nn.Module,
        texts: Source,
        tokenizer: Any,
        settings: Settings,
    ) -> Work:
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

    def carry_out(self, number: int, folder: Folder, on_batch: OnBatch) -> None:
        """Survey one shard and write it to the folder."""
        folder.write_shard(number, self.shard(number, on_batch))

    def on(self, device: str) -> Work:
        """The same work with the model on another device."""
        return replace(self, surveyor=self.surveyor.on(device))


def label(settings: dict[str, Any], number: int) -> str:
    """The name of a shard in the record of a survey."""
    return f"shard {number} of {settings['shards']} of the corpus {settings['corpus'][:12]}"
