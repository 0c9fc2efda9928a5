"""The base class of experiments, and the settings of their runs."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from qkv_lab.experiments.draw import intervals_figure
from qkv_lab.experiments.evidence import Criterion, Effect, Verdict, judge
from qkv_lab.experiments.results import Lines, Results, means_of
from qkv_lab.task import Measured, Task, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Setting:
    """The settings of one run. Experiments share runs with equal settings: each is trained once."""

    task: Task
    training: Training


class Experiment(ABC):
    """A question that is answered by training small models.

    A subclass trains models (`settings` and `measure`), or computes something per seed (`compute`), or both; the two
    kinds of variants have different names. It states its `criteria` and gives their `effects`, from which the verdicts
    follow, or has a `conclude` of its own. Its constructor takes no arguments: worker processes call it.

    >>> import numpy as np
    >>> from qkv_lab.experiments.results import Outcome
    >>> class Coins(Experiment):
    ...     name, question = "coins", "Does a coin show heads more often than not?"
    ...     criteria = (Criterion("C1", "2026-11-23", "Share of heads", bound=0.5),)
    ...     def compute(self, seed, quick):
    ...         return {"coin": {"heads": float(np.random.default_rng(seed).integers(2, size=10).mean())}}
    ...     def effects(self, results):
    ...         return {"C1": [Effect("", results.values("coin", "measured.heads"))]}
    >>> shares = [Outcome(seed, measured=Coins().compute(seed, False)["coin"]) for seed in range(20)]
    >>> Coins().conclude(Results({"coin": shares}))[0].holds
    'undecided'
    """

    name: ClassVar[str]
    question: ClassVar[str]
    criteria: ClassVar[tuple[Criterion, ...]] = ()
    """What decides each of its claims."""
    claims: ClassVar[tuple[str, ...]]
    """The numbers of the claims that it decides, by default those of the `criteria`."""
    curves: ClassVar[tuple[str, ...]] = ()
    """The metrics to keep as curves over steps, by dotted name: ``loss``, ``check.sink``."""

    seeds: ClassVar[int] = 10
    """The number of runs of each variant, fixed before the runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.criteria and "claims" not in cls.__dict__:
            cls.claims = tuple(criterion.claim for criterion in cls.criteria)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """The settings of each variant's run with a seed. The quick form takes seconds and is for tests only."""
        return {}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Extra measurements of a trained model, which is in evaluation mode; gradients are disabled."""
        return {}

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """For each variant that is not trained by the loop of the lab: its measurements with a seed."""
        return {}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """For each claim in `criteria`: its effects, with one number per seed."""
        return {}

    def lines(self, results: Results) -> Lines | None:
        """Numbers over an axis for the figure, such as steps or positions; None if the effects say everything."""
        return None

    def conclude(self, results: Results) -> list[Verdict]:
        """The verdicts. They depend on the numbers alone, by the `criteria`."""
        effects = self.effects(results)
        return [
            judge(one, effects[one.claim], results.level, with_means(results, one.remark), results.unit)
            for one in self.criteria
        ]

    def figure(self, results: Results) -> Figure:
        """The seeds, interval and bound of every effect under the question, and the `lines`."""
        verdicts, effects = self.conclude(results), self.effects(results)
        return intervals_figure(self.question, verdicts, results, effects, self.lines(results))


def with_means(results: Results, remark: str) -> str:
    """The remark with the means of the entries that it names in braces; empty if one has no number."""
    means = {name: means_of(results, name) for name in re.findall(r"{([^}]+)}", remark)}
    return re.sub(r"{([^}]+)}", lambda name: means[name[1]], remark) if all(means.values()) else ""
