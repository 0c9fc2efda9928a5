"""The next steps after a finding: the exact command, or the line of Python, that looks closer at a head."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

SHARED = ("tokens", "dtype")  # options that all commands take, with the same meaning
OWN_TEXT = ("ablate", "evict")  # without a text, these commands take one of their own


class Step(NamedTuple):
    """What to do next: its purpose, the command to copy, and the head that it is about."""

    purpose: str
    command: str
    layer: int | None = None
    head: int | None = None


def steps_of(kind: str, data: xr.Dataset, attrs: Mapping[str, Any], group: str, head: pd.Series) -> tuple[Step, ...]:
    """The steps after a finding of one kind, about the head of a row of a table.

    Profiles made by a command get commands; other profiles get Python, in which `model`, `inputs` and `tokenizer` are
    those of `qkv.profile`. Eviction and ablation need a causal language model.
    """
    write = _Commands(attrs["arguments"]) if "arguments" in attrs else _Python()
    at = int(head["layer"]), int(head["head"])
    shown = Step(f"see L{at[0]} · H{at[1]}", write.map(*at, group), *at)
    decoder = bool(data.attrs["causal"]) and group == "self"
    return tuple(step for step in _OF[kind](shown, write, decoder) if step is not None)


def _after_sinks(shown: Step, write: _Commands | _Python, decoder: bool) -> list[Step | None]:
    return [
        shown,
        Step("hide the first token from one head at a time", write.ablate()) if decoder else None,
        Step("evict the first tokens from the cache", write.evict("window", "sinks")) if decoder else None,
    ]


def _after_distance(shown: Step, write: _Commands | _Python, decoder: bool) -> list[Step | None]:
    return [shown, Step("keep only the last keys in the cache", write.evict("window")) if decoder else None]


_OF: dict[str, Callable[[Step, _Commands | _Python, bool], list[Step | None]]] = {
    "sinks": _after_sinks,
    "map": lambda shown, _write, _decoder: [shown],
    "distance": _after_distance,
}


class _Commands:
    """Commands on the model and text of an earlier command, given by its arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments

    def map(self, layer: int, head: int, group: str) -> str:
        of = [] if group in ("self", "decoder") else ["--group", group]
        return self._written("map", "--layer", str(layer), "--head", str(head), *of)

    def ablate(self) -> str:
        return self._written("ablate", "--what", "sinks")

    def evict(self, *policies: str) -> str:
        return self._written("evict", "--policies", ",".join(policies))

    def _written(self, name: str, *options: str) -> str:
        given = self._arguments
        words = ["qkv", name]
        if given["model"] != "qkv-mini" or "text" in given or "file" in given:
            words.append(given["model"])
        if "text" in given:
            words += ["--text", given["text"]] if name == "map" else [given["text"]]
        if "file" in given:
            words += [given["file"]] if name == "map" else ["--file", given["file"]]
        if "target" in given and name not in OWN_TEXT:
            words += ["--target", given["target"]]
        for option in SHARED:
            if option in given:
                words += [f"--{option}", str(given[option])]
        return shlex.join([*words, *options])


class _Python:
    """Lines of Python for a profile that no command made."""

    def map(self, layer: int, head: int, group: str) -> str:
        of = "" if group in ("self", "decoder") else f", group={group!r}"
        return f"profile.plot.map({layer}, {head}{of})"

    def ablate(self) -> str:
        return 'qkv.profiler.ablation(model, inputs, what="sinks", tokenizer=tokenizer)'

    def evict(self, *policies: str) -> str:
        return f"qkv.profiler.eviction(model, inputs, policies={list(policies)!r}, tokenizer=tokenizer)"
