"""The outcomes of the runs of an experiment, and numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from qkv.errors import InputError
from qkv_lab.experiments.evidence import ERROR, number
from qkv_lab.task import Measured


@dataclass(frozen=True)
class Outcome:
    """The measurements of one run."""

    seed: int
    evaluation: Measured = field(default_factory=dict)
    """The task's metrics on held-out data, at the end."""
    check: Measured = field(default_factory=dict)
    """The task's attention check (`Task.check`), at the end."""
    measured: Measured = field(default_factory=dict)
    """The result of `Experiment.measure` or `Experiment.compute`."""
    curves: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    """For each metric in `Experiment.curves`: the ``steps``, and the ``values`` at these steps."""
    diverged: str | None = None
    """The error message if the loss became NaN or infinite; the other fields are empty then."""
    seconds: float | None = field(default=None, compare=False)
    """The processor time of training and measuring, in seconds; None if it is not known."""


@dataclass(frozen=True)
class Lines:
    """Numbers over an axis, which a figure shows above the effects."""

    x: Sequence[Any]
    by_name: Mapping[str, Any]
    """Arrays (seeds, x), of which the mean and its interval are drawn."""
    axis: str
    label: str
    log: bool = False
    """Whether the axis is logarithmic, with powers of 2 as ticks."""


@dataclass(frozen=True)
class Results:
    """The outcomes of all runs by variant, one outcome per seed.

    >>> results = Results({
    ...     "with": [Outcome(0, check={"sink_score": 0.9}), Outcome(1, check={"sink_score": 0.8})],
    ...     "without": [Outcome(0, check={"sink_score": 0.5}), Outcome(1, check={"sink_score": 0.25})],
    ... })
    >>> results.values("with", "check.sink_score")
    [0.9, 0.8]
    >>> [round(x, 2) for x in results.differences("with", "without", "check.sink_score")]
    [0.4, 0.55]
    """

    variants: Mapping[str, Sequence[Outcome]]
    quick: bool = False
    level: float = 1 - ERROR
    """The level of the intervals in verdicts."""
    unit: str = "seed"
    """What each outcome of a variant is of, in the singular."""

    def values(self, variant: str, name: str) -> list[float]:
        """One number per run that did not diverge, by its dotted name: ``check.sink_score``, ``measured.x``.

        If the entry is a nested list, as by layer and head, the number is the maximum over the list.

        Raises:
            InputError: if a run has no entry of that name.
        """
        return list(self.by_seed(variant, name))

    def by_seed(self, variant: str, of: str | Callable[[Outcome], Any]) -> pd.Series:
        """As `values`, or by a function of an outcome, with seeds as the index; empty if there is no such variant.

        The difference of two of them is that of the runs with the same seed, and NaN for all other seeds.
        """
        runs = self.finished(variant)
        found = [float(np.max(value_of(x, of) if isinstance(of, str) else of(x))) for x in runs]
        return pd.Series(found, [x.seed for x in runs], float)

    def across(self, variants: Sequence[str], of: str | Callable[[Outcome], Any]) -> pd.DataFrame:
        """As `by_seed`, of the seeds that finished in all these variants, with variants as columns."""
        return pd.concat({v: self.by_seed(v, of) for v in variants}, axis=1, join="inner").sort_index()

    def differences(self, a: str, b: str, of: str | Callable[[Outcome], Any]) -> list[float]:
        """The values of variant `a` minus those of variant `b`, of the runs with the same seed."""
        return list((self.by_seed(a, of) - self.by_seed(b, of)).dropna())

    def finished(self, variant: str) -> list[Outcome]:
        """The runs of a variant that did not diverge; empty if there is no such variant."""
        return [outcome for outcome in self.variants.get(variant, ()) if outcome.diverged is None]

    def rows(self, variant: str, name: str) -> np.ndarray:
        """The entry of each run, by its dotted name: an array (seeds, …)."""
        return np.array([value_of(outcome, name) for outcome in self.finished(variant)], float)

    def curve(self, variant: str, name: str) -> tuple[list[int], np.ndarray]:
        """The steps of a curve, and its values as an array (seeds, steps, …)."""
        found = [outcome.curves[name] for outcome in self.finished(variant)]
        return list(found[0]["steps"]), np.asarray([c["values"] for c in found], float)

    @property
    def seeds(self) -> int:
        """The largest number of runs in any variant."""
        return max((len(outcomes) for outcomes in self.variants.values()), default=0)

    @property
    def note(self) -> str:
        """The number of seeds or texts, for the line under a figure's title."""
        fewest = min((len(outcomes) for outcomes in self.variants.values()), default=0)
        seeds = f"{self.seeds} {self.unit}{'' if self.seeds == 1 else 's'}"
        if fewest < self.seeds:
            seeds = f"{fewest} to {seeds}"
        return f"Quick form, too short to judge by: {seeds}." if self.quick else f"{seeds}."


def value_of(outcome: Outcome, name: str) -> Any:
    """The entry of an outcome with a dotted name; `InputError` if there is none."""
    value: Any = {"evaluation": outcome.evaluation, "check": outcome.check, "measured": outcome.measured}
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise InputError(
                f"name is {name!r}, expected the dotted name of an entry of the outcome, such as 'check.sink'"
            )
        value = value[part]
    return value


def means_of(results: Results, name: str) -> str:
    """The mean of an entry in each variant that has it, or in one variant, as text; empty if there is no number.

    >>> results = Results({"a": [Outcome(0, check={"x": 1.0}), Outcome(1, check={"x": 2.0})], "b": []})
    >>> means_of(results, "check.x"), means_of(results, "check.x of a")
    ('a: 1.50', '1.50')
    """
    name, _, one = name.partition(" of ")
    found = {}
    for variant in [one] if one else results.variants:
        with suppress(InputError, TypeError):  # no such entry, or None
            found[variant] = results.values(variant, name)
    means = {variant: number(sum(x) / len(x)) for variant, x in found.items() if x}
    return means.get(one, "") if one else "; ".join(f"{variant}: {x}" for variant, x in means.items())
