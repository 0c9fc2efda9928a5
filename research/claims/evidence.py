"""How a verdict from training was reached: intervals, seeds, budget, and the command that repeats it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkv_lab.experiments.evidence import Interval, shown
from qkv_lab.experiments.record import seconds_in
from research.claims.claim import Verdict
from research.claims.results import result

LINK = re.compile(r"\[experiment `(\w+)`\]")
"""The entry in `Verdict.by` that refers to an experiment."""


@dataclass(frozen=True)
class Evidence:
    """What an experiment spent on a claim, and what came out."""

    experiment: str
    intervals: tuple[Interval, ...]
    """The intervals that decided the claim; empty if the check reads the numbers of the runs itself."""
    level: float | None
    """The level of the intervals; None if there are none."""
    seeds: tuple[int, int]
    """The smallest and the largest number of runs of a variant."""
    runs: int
    """The number of all runs of the experiment."""
    seconds: float
    """Their processor time in seconds; 0 if it was not recorded."""
    command: str
    """The command that repeats the experiment."""

    def __str__(self) -> str:
        """One sentence without the command.

        >>> str(evidence_of("C084", Verdict("holds", "", ("[experiment `window`](x)",)))[0]).split(":")[0]
        'Experiment `window`'
        """
        parts = []
        if self.intervals:
            parts.append(f"{100 * (self.level or 0):.3g} % intervals {'; '.join(map(_told, self.intervals))}")
        few, many = self.seeds
        parts.append(f"{few} seeds" if few == many else f"{few} to {many} seeds")
        parts.append(f"{self.runs} runs" + (f", {_duration(self.seconds)} of processor time" if self.seconds else ""))
        return f"Experiment `{self.experiment}`: {', '.join(parts)}."


def evidence_of(id_: str, verdict: Verdict) -> list[Evidence]:
    """The experiments of the lab behind a verdict, in the order of its links; empty if it depends on none."""
    names = dict.fromkeys(name for by in verdict.by for name in LINK.findall(by))
    return [_of(name, id_) for name in names]


def interval(fields: Mapping[str, Any]) -> Interval:
    """An interval from its entry in a JSON file, where numbers that are not finite are null."""
    unknown = {"mean": math.nan, "low": -math.inf, "high": math.inf}
    finite: dict[str, Any] = {name: unknown[name] if x is None else x for name, x in fields.items()}
    return Interval(**finite)


def _of(name: str, id_: str) -> Evidence:
    found = result(name)
    intervals = [one for v in found["verdicts"] if v["claim"] == id_ for one in v.get("intervals", ())]
    sizes = [len(variant["results"]) for variant in found["variants"].values()]
    return Evidence(
        name,
        tuple(map(interval, intervals)),
        found.get("level") if intervals else None,
        (min(sizes), max(sizes)),
        sum(sizes),
        seconds_in(found),
        found.get("command", f"qkv experiment {name}"),
    )


def _told(one: Interval) -> str:
    number = f"{one.condition} {shown(one)}".strip()
    return f"{number}, n = {one.n}" + (f" (not counted: {one.unless})" if one.unless else "")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
