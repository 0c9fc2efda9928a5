"""What an experiment is: a question, the runs that answer it, and verdicts that are computed from what they show."""

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
    """One run. Runs with equal settings are trained once, whatever experiments ask for them."""

    task: Task
    training: Training


@dataclass(frozen=True)
class Verdict:
    """What the results say about one claim of the sources."""

    claim: str
    """Its number in the list of claims: C078."""
    holds: Holds
    text: str
    """The numbers it rests on, in a sentence."""


@dataclass(frozen=True)
class Conclusion:
    """What an experiment found."""

    verdicts: Sequence[Verdict]
    title: str
    """The finding, in one sentence: the title of the figure."""
    paragraph: str


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    seed: int
    evaluation: Measured = field(default_factory=dict)
    """The task's metrics on held-out data, at the end."""
    check: Measured = field(default_factory=dict)
    """The task's look at the attention, at the end."""
    measured: Measured = field(default_factory=dict)
    """What the experiment measured of the trained model, or computed without one."""
    curves: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    """For each entry of the metrics that the experiment asks for: ``steps``, and ``values`` at these."""
    diverged: str | None = None
    """Why there is nothing else: the loss became NaN or infinite."""


@dataclass(frozen=True)
class Results:
    """What came of all runs, by variant, one for each seed.

    >>> results = Results({"with": [Outcome(0, check={"sink_score": 0.9}), Outcome(1, check={"sink_score": 0.8})]})
    >>> results.values("with", "check.sink_score")
    [0.9, 0.8]
    """

    variants: Mapping[str, Sequence[Outcome]]
    quick: bool = False

    def values(self, variant: str, name: str) -> list[float]:
        """A number of each run that did not diverge, by its dotted name: ``check.sink_score``, ``measured.x``.

        Of nested lists, as those by layer and head, it is the largest number in them.

        Raises:
            InputError: if a run has no such number.
        """
        return [float(np.max(look(outcome, name))) for outcome in self.finished(variant)]

    def by_variant(self, name: str) -> dict[str, list[float]]:
        """`values` of every variant that has a run which did not diverge."""
        return {variant: self.values(variant, name) for variant in self.variants if self.finished(variant)}

    def finished(self, variant: str) -> list[Outcome]:
        """The runs of a variant that did not diverge."""
        return [outcome for outcome in self.variants[variant] if outcome.diverged is None]

    def curve(self, variant: str, name: str) -> tuple[list[int], np.ndarray]:
        """Steps, and the values at them of each run: (seeds, steps, …)."""
        found = [outcome.curves[name] for outcome in self.finished(variant)]
        return list(found[0]["steps"]), np.asarray([c["values"] for c in found], float)

    @property
    def seeds(self) -> int:
        """The most runs that any variant has."""
        return max((len(outcomes) for outcomes in self.variants.values()), default=0)

    @property
    def note(self) -> str:
        """How many seeds, for the line under a figure's title."""
        seeds = f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
        return f"Quick form, too short to judge by: {seeds}." if self.quick else f"{seeds}."


def look(outcome: Outcome, name: str) -> Any:
    """An entry of an outcome, by its dotted name."""
    value: Any = {"evaluation": outcome.evaluation, "check": outcome.check, "measured": outcome.measured}
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise InputError(f"a run has no {name!r}, expected a dotted name of what was measured")
        value = value[part]
    return value


class Experiment(ABC):
    """A question put to small models.

    A subclass trains models (`settings` and `measure`), or computes something without training (`compute`), or both;
    variants of both have different names. It needs no arguments, so that other processes can make it, too.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    claims: ClassVar[tuple[str, ...]]
    """Numbers of the claims that it gives verdicts on, one for each."""
    curves: ClassVar[tuple[str, ...]] = ()
    """Entries of a run's metrics to keep over steps, by dotted name: ``loss``, ``check.sink``."""

    def settings(self, quick: bool) -> Mapping[str, Sequence[Setting]]:
        """Variants by name, with a run for each seed. The quick form takes seconds, and is for tests only."""
        return {}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """What to know of a trained model besides its own evaluation and check; evaluation mode, no gradients."""
        return {}

    def compute(self, quick: bool) -> Mapping[str, Sequence[Measured]]:
        """What needs no training: variants by name, with what was measured for each seed from 0."""
        return {}

    @abstractmethod
    def conclude(self, results: Results) -> Conclusion:
        """Verdicts and their summary, from the numbers alone and by criteria that the texts state."""

    @abstractmethod
    def figure(self, results: Results) -> Figure:
        """The finding as a picture; its title is that of the conclusion."""


# --- criteria ---------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> float:
    """From the least to the most over seeds."""
    return max(values) - min(values)


def larger(a: Sequence[float], b: Sequence[float], least: float = 0.0) -> bool:
    """Whether a is larger than b: its mean, by more than the larger spread over seeds and by more than `least`.

    >>> larger([0.9, 0.8], [0.5, 0.6]), larger([0.9, 0.5], [0.5, 0.6])
    (True, False)
    """
    return float(np.mean(a) - np.mean(b)) > max(spread(a), spread(b), least)


def judged(yes: bool, seen: bool = True) -> Holds:
    """`HOLDS` or `FAILS`; `UNSEEN` if what the claim is about is not there at all.

    >>> judged(True), judged(False), judged(True, seen=False)
    ('holds', 'does not hold', 'cannot be seen here')
    """
    return UNSEEN if not seen else HOLDS if yes else FAILS


def said(values: Sequence[float], digits: int = 2) -> str:
    """Mean, with the range over seeds if there is more than one.

    >>> said([0.75, 0.85]), said([0.5])
    ('0.80 (0.75–0.85)', '0.50')
    """
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"
