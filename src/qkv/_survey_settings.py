"""The settings of a survey, in front of the profiler because ``qkv survey --help`` loads them without torch.

They are the keywords of `qkv.profiler.survey` and the options of the command.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from tyro.conf import Fixed, FlagCreatePairsOff, Suppress, arg

from qkv.errors import InputError

MOST_SHARDS = 9999
F = TypeVar("F", bound=Callable[..., Any])
Number = Annotated[int, arg(metavar="N")]
MaybeNumber = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
MaybePart = Annotated[str | None, arg(metavar="i/N", help_behavior_hint="")]


@dataclass(frozen=True)
class Settings:
    """How a corpus is surveyed, and by whom.

    Args:
        shards: Number of parts to divide the corpus into. With more shards, less work is lost if you interrupt.
        only_shards: Survey only part i of N, for processes that something else starts: every N-th shard, beginning with
            shard i, counted from 0. Repeat the same command to continue an interrupted part. All parts may share one
            folder; "qkv survey merge DIR …" (in Python, qkv.profiler.surveys.folder.merge_folders) then writes the
            result.
        batch_tokens: Largest number of tokens in a batch, padding included.
        length: Longest sequence, special tokens included; by default the longest that the model can read, at most 512.
        overlap: Number of tokens that each piece of a split text repeats from the piece before it, as context that is
            not measured again; by default an eighth of the length.
        long: What to do with texts longer than the length: split them, or refuse them (they are skipped and counted).
        chat: Read each text as a question to an assistant, as the model's chat template writes it.
        local_window: Keys at most this many tokens from the query count as local.
        dtype: Number format of the weights, if the model is given by name.
        engine: "processes": this process computes the shards, all of them or those of only_shards. "ray": Ray starts
            processes, on the cluster that it finds (RAY_ADDRESS), else on this machine, and repeats shards of lost
            machines (pip install 'qkv[ray]'). Each has as many CPUs as torch has threads here.
        statistics: Custom statistics (`qkv.statistics.Statistic`) over queries: each has means, quantiles and a
            histogram like the built-in ones. Surveys with different statistics cannot be merged.
        name: Name of the model; taken from the model if not given.
        gpus: The GPUs that a task of Ray reserves; None is one if the cluster has any now, and 1 also waits for a
            machine that has one.
    """

    shards: Number = 8
    only_shards: MaybePart = None
    batch_tokens: Number = 4096
    length: MaybeNumber = None
    overlap: MaybeNumber = None
    long: Literal["split", "refuse"] = "split"
    chat: Annotated[bool, FlagCreatePairsOff] = False
    local_window: Number = 8
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    engine: Literal["processes", "ray"] = "processes"
    # no options, or other ones:
    statistics: Annotated[Sequence[Any], Fixed, Suppress] = ()
    name: Annotated[str, Fixed, Suppress] = ""
    gpus: Annotated[Literal[0, 1] | None, Fixed, Suppress] = None

    def check(self) -> None:
        """Raise `InputError` for a setting outside its range."""
        for argument, known in (("long", ("split", "refuse")), ("engine", ("processes", "ray"))):
            if (value := getattr(self, argument)) not in known:
                raise InputError(f"{argument} is {value!r}, expected {known[0]!r} or {known[1]!r}")
        if not 1 <= self.shards <= MOST_SHARDS:
            raise InputError(f"shards is {self.shards}, expected 1 to {MOST_SHARDS}")
        for argument in ("batch_tokens", "length", "local_window"):
            if (value := getattr(self, argument)) is not None and value < 1:
                raise InputError(f"{argument} is {value}, expected at least 1 token")
        if self.gpus is not None and self.engine != "ray":
            raise InputError(
                f"gpus is {self.gpus}, which engine='ray' alone reads; move the model to a device yourself"
            )
        _ = self.numbers

    @property
    def numbers(self) -> range:
        """The numbers of the shards to survey: every shard is in exactly one of 0/N, 1/N, …, (N−1)/N.

        >>> list(Settings(shards=10, only_shards="1/4").numbers), len(Settings(shards=10).numbers)
        ([1, 5, 9], 10)
        """
        if self.only_shards is None:
            return range(self.shards)
        given = f"only_shards is {self.only_shards!r}"
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.only_shards)
        if not match:
            raise InputError(f"{given}, expected i/N with two whole numbers, for example 0/4")
        first, of = int(match[1]), int(match[2])
        if of == 0:
            raise InputError(f"{given}, expected at least one part, for example 0/1")
        if first >= of:
            raise InputError(f"{given}, expected 0/{of} to {of - 1}/{of}: parts are counted from 0")
        if of > self.shards:
            raise InputError(
                f"{given}, but there are {self.shards} shards, too few for {of} parts; expected at most {self.shards} "
                "parts, or more shards"
            )
        return range(first, self.shards, of)


def takes_settings(function: F) -> F:
    """Write the settings into the signature and the docstring of a function that takes them as ``**settings``."""
    signature, types = inspect.signature(function), get_type_hints(Settings)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [
        p.replace(kind=p.KEYWORD_ONLY, annotation=types[p.name])
        for p in inspect.signature(Settings).parameters.values()
    ]
    function.__signature__ = signature.replace(parameters=[*parameters, *own])  # type: ignore[attr-defined]
    assert function.__doc__
    assert Settings.__doc__
    texts = Settings.__doc__.partition("Args:\n")[2].rstrip()
    function.__doc__ = re.sub(r" *settings: .*", lambda _: texts, function.__doc__)
    return function
