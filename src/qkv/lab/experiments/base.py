"""The base class of experiments, and the records they use: settings of runs, outcomes, verdicts, conclusions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import nn

from qkv.errors import InputError
from qkv.lab.task import Measured, Task, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Holds = Literal["holds", "does not hold", "cannot be seen here"]
HOLDS: Holds = "holds"
FAILS: Holds = "does not hold"
UNSEEN: Holds = "cannot be seen here"


@dataclass(frozen=True)
class Setting:
    """The settings of one run. Experiments share runs with equal settings: each is trained once."""

    task: Task
    training: Training


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim of the sources."""

    claim: str
    """Its number in the list of claims: C078."""
    holds: Holds
    text: str
    """One or two sentences with the numbers and the criterion."""


@dataclass(frozen=True)
class Conclusion:
    """The verdicts of an experiment, with a title for its figure and a summary."""

    verdicts: Sequence[Verdict]
    title: str
    """The finding, in one sentence: the title of the figure."""
    paragraph: str


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


@dataclass(frozen=True)
class Results:
    """The outcomes of all runs by variant, one outcome per seed.

    >>> results = Results({"with": [Outcome(0, check={"sink_score": 0.9}), Outcome(1, check={"sink_score": 0.8})]})
    >>> results.values("with", "check.sink_score")
    [0.9, 0.8]
    """

    variants: Mapping[str, Sequence[Outcome]]
    quick: bool = False

    def values(self, variant: str, name: str) -> list[float]:
        """One number per run that did not diverge, by its dotted name: ``check.sink_score``, ``measured.x``.

        If the entry is a nested list, as by layer and head, the number is the maximum over the list.

        Raises:
            InputError: if a run has no entry of that name.
        """
        return [float(np.max(value_of(outcome, name))) for outcome in self.finished(variant)]

    def by_variant(self, name: str) -> dict[str, list[float]]:
        """`values` of every variant with at least one run that did not diverge."""
        return {variant: self.values(variant, name) for variant in self.variants if self.finished(variant)}

    def finished(self, variant: str) -> list[Outcome]:
        """The runs of a variant that did not diverge."""
        return [outcome for outcome in self.variants[variant] if outcome.diverged is None]

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
        """The number of seeds, for the line under a figure's title."""
        seeds = f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
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


class Experiment(ABC):
    """A question that is answered by training small models.

    A subclass trains models (`settings` and `measure`), or computes something without training (`compute`), or both.
    The two kinds of variants have different names. Its constructor takes no arguments: worker processes call it.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    claims: ClassVar[tuple[str, ...]]
    """The numbers of the claims that it decides; `conclude` returns one verdict for each."""
    curves: ClassVar[tuple[str, ...]] = ()
    """The metrics to keep as curves over steps, by dotted name: ``loss``, ``check.sink``."""

    def settings(self, quick: bool) -> Mapping[str, Sequence[Setting]]:
        """The settings of each variant's runs, one per seed. The quick form takes seconds and is for tests only."""
        return {}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Extra measurements of a trained model, which is in evaluation mode; gradients are disabled."""
        return {}

    def compute(self, quick: bool) -> Mapping[str, Sequence[Measured]]:
        """Measurements that need no training: for each variant, one per seed, from seed 0 on."""
        return {}

    @abstractmethod
    def conclude(self, results: Results) -> Conclusion:
        """The verdicts and their summary. They depend on the numbers alone, by criteria that the texts state."""

    @abstractmethod
    def figure(self, results: Results) -> Figure:
        """The figure of the results, under the title of the conclusion."""


# --- criteria ---------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> float:
    """The range over seeds: largest minus smallest value."""
    return max(values) - min(values)


def larger(a: Sequence[float], b: Sequence[float], least: float = 0.0) -> bool:
    """True if mean(a) − mean(b) is more than `least` and more than the larger of the two ranges over seeds.

    >>> larger([0.9, 0.8], [0.5, 0.6]), larger([0.9, 0.5], [0.5, 0.6])
    (True, False)
    """
    return float(np.mean(a) - np.mean(b)) > max(spread(a), spread(b), least)


def holds_if(condition: bool, seen: bool = True) -> Holds:
    """`HOLDS` or `FAILS` by a condition; `UNSEEN` if the effect that the claim is about did not occur (not `seen`).

    >>> holds_if(True), holds_if(False), holds_if(True, seen=False)
    ('holds', 'does not hold', 'cannot be seen here')
    """
    return UNSEEN if not seen else HOLDS if condition else FAILS


def summary(values: Sequence[float], digits: int = 2) -> str:
    """The mean as text, with the range over seeds if there is more than one.

    >>> summary([0.75, 0.85]), summary([0.5])
    ('0.80 (0.75–0.85)', '0.50')
    """
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"
