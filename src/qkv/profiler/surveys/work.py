"""The work of a survey as a list of shards: whoever starts the processes, each shard is carried out here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from qkv.errors import InputError
from qkv.profiler.data.variables import checked_custom
from qkv.profiler.surveys.corpus import Part, Source
from qkv.profiler.surveys.definition import definition_of, length_of
from qkv.profiler.surveys.folder import Folder
from qkv.profiler.surveys.quantities import QUANTITIES
from qkv.profiler.surveys.shard import Surveyor
from qkv.statistics import Statistic

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
        *,
        name: str,
        shards: int,
        batch_tokens: int,
        length: int | None,
        overlap: int | None,
        long: Literal["split", "refuse"],
        local_window: int,
        statistics: Sequence[Statistic],
    ) -> Work:
        """The work of a survey with these settings; see `qkv.profiler.survey`.

        Raises:
            InputError: if the settings do not fit together, or do not fit the model.
        """
        for argument, value in (("batch_tokens", batch_tokens), ("local_window", local_window)):
            if value < 1:
                raise InputError(f"{argument} is {value}, expected at least 1 token")
        statistics = checked_custom(statistics, (*QUANTITIES, *TAKEN), over="query")
        length = length_of(model, length)
        definition = definition_of(model, tokenizer, name, length, overlap, long, local_window, statistics)
        settings = {
            "corpus": texts.fingerprint, "shards": shards, "batch_tokens": batch_tokens, "definition": definition,
        }  # fmt: skip
        surveyor = Surveyor(model, tokenizer, definition, batch_tokens, statistics)
        return cls(surveyor, texts.shards(shards), settings)

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


def selected(shards: int, only: str | None) -> range:
    """The numbers of the shards that ``"i/N"`` selects: every N-th, beginning with i. All of them if it is None.

    Every shard is in exactly one of 0/N, 1/N, …, (N−1)/N.

    Raises:
        InputError: if `only` is not of this form, or selects no shard.

    >>> list(selected(10, "1/4")), len(selected(10, None))
    ([1, 5, 9], 10)
    """
    if only is None:
        return range(shards)
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", only)
    if not found:
        raise InputError(f"only_shards is {only!r}, expected i/N with two whole numbers, for example 0/4")
    first, of = int(found[1]), int(found[2])
    if not first < of:
        raise InputError(
            f"only_shards is {only!r}, expected 0/{of} to {of - 1}/{of}: parts are counted from 0"
            if of
            else f"only_shards is {only!r}, expected at least one part, for example 0/1"
        )
    if of > shards:
        raise InputError(
            f"only_shards is {only!r}, but there are {shards} shards, too few for {of} parts; expected at most "
            f"{shards} parts, or more shards"
        )
    return range(first, shards, of)
