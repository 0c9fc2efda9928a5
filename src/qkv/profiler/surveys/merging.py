"""Merge the shards of a survey, from one folder or several: the same bytes, whoever computed them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qkv.errors import InputError, renamed
from qkv.profiler.surveys.data import Survey, differing
from qkv.profiler.surveys.folder import Folder


class Incomplete(Exception):  # noqa: N818  # named like StopIteration, after the event
    """Raised when shards of a survey are missing; finished shards are kept."""


def merge_folders(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Survey:
    """Merge the shards that several processes wrote to one folder or several.

    The result has the same bytes as the survey of a single process. Shards are only read.

    Args:
        folders: folders of the same survey: same model, corpus and settings. Together they have every shard once.
        out: folder for ``survey.qkv.zip``; by default the first of `folders`.

    >>> import tempfile
    >>> from qkv.profiler import survey
    >>> with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
    ...     for folder, part in ((a, "0/2"), (b, "1/2")):
    ...         _ = survey("qkv-mini", ["import os", "import sys"], out=folder, shards=2, only_shards=part)
    ...     merge_folders([a, b])
    Survey('qkv-mini', 2 documents, 6 tokens)
    """
    sources = [Folder(address) for address in folders]
    if not sources:
        raise InputError("folders is empty, expected at least one folder of a survey")
    settings = _common_settings(sources)
    where: dict[int, Folder] = {}
    for folder in sources:
        for number in sorted(folder.finished()):
            if number in where:
                raise InputError(
                    f"folders have shard {number} twice, in {where[number].address!r} and in {folder.address!r}; name "
                    "each folder once, or delete one of the two copies"
                )
            where[number] = folder
    check_complete(where, settings["shards"], f"in {', '.join(repr(f.address) for f in sources)}")
    result = merge_shards({number: where[number] for number in range(settings["shards"])}, settings)
    target = sources[0] if out is None else Folder(out).open(settings)
    target.write_result(result.packed())
    return result


def merge_shards(where: Mapping[int, Folder], settings: dict[str, Any]) -> Survey:
    """Merge shards, given the folder of each, in the order of their numbers, so that the sketches are reproducible."""
    result: Survey | None = None
    for number in sorted(where):
        part = where[number].shard(number)
        if part.record["shards"] != [label(settings, number)] or differing(part.definition, settings["definition"]):
            raise InputError(
                f"out is {where[number].address!r}, whose file of shard {number} belongs to another survey "
                f"({', '.join(part.record['shards'])}); delete it and run the same command again"
            )
        result = part if result is None else result.merge(part)
    assert result is not None
    if not result.groups and len(where) == settings["shards"]:
        raise InputError(
            f"texts has no text that can be surveyed; left out: {', '.join(sorted(result.record['skipped']))}"
        )
    return result


def check_complete(finished: Iterable[int], shards: int, where: str, numbers: Iterable[int] | None = None) -> None:
    """Raise `Incomplete` if any of `numbers` (by default all shards) is not finished; `where` ends the sentence."""
    missing = sorted({*(range(shards) if numbers is None else numbers)} - {*finished})
    if missing:
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise Incomplete(
            f"{len(missing)} of {shards} shards are missing ({names}) {where}; run the command of the survey again: it "
            f"computes missing shards only (--only-shards {missing[0]}/{shards} computes the first)"
        )


def _common_settings(folders: Sequence[Folder]) -> dict[str, Any]:
    first: dict[str, Any] | None = None
    for folder in folders:
        with renamed(out="folders"):
            settings = folder.settings()
        if settings is None:
            raise InputError(
                f"folders has {folder.address!r}, which has no survey, expected folders written by qkv survey"
            )
        difference = None if first is None else differing(first, settings)
        if difference is not None:
            name, one, other = difference
            raise InputError(
                f"folders has surveys that differ: {name} is {one} in {folders[0].address!r} and {other} in "
                f"{folder.address!r}; expected the same model, corpus and settings"
            )
        first = settings if first is None else first
    assert first is not None
    return first


def label(settings: dict[str, Any], number: int) -> str:
    """The name of a shard in the record of a survey."""
    return f"shard {number} of {settings['shards']} of the corpus {settings['corpus'][:12]}"
