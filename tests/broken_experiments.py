"""Experiments that each break one law of their base class, with the message that `check_experiment` must give."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from lab_tasks import Counting
from qkv_lab.experiments import Conclusion, Criterion, Effect, Experiment, Results, Setting, Verdict
from qkv_lab.experiments.evidence import FAILS
from qkv_lab.task import Measured

BROKEN: list[tuple[Any, str]] = []
X = "measured.x"


class Computed(Experiment):
    """A correct experiment without training."""

    name, question = "computed", "Is b more than a?"
    criteria: Any = (Criterion("C900", "2026-11-23", "b minus a", bound=0.0),)

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"a": {"x": 1.0 + seed}, "b": {"x": 2.5 + seed}}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C900": [Effect("", results.differences("b", "a", X), ("a", "b"))]}


class Trained(Computed):
    """A correct experiment with training, in which `a` and `b` are two tasks, and with a computed variant."""

    name = "trained"

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        training = replace(Counting.training(), steps=2, evaluate_every=2, save_every=2, seed=seed)
        return {"a": Setting(Counting(), training), "b": Setting(Counting(modulo=5), training)}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        return {"x": float(setting.task.model.d_model + next(model.parameters())[0, 0])}

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"by hand": {"x": 3.0}}


def broken(message: str) -> Any:
    """Enter an object of the class in `BROKEN`."""

    def enter(cls: type[Any]) -> type[Any]:
        BROKEN.append((cls(), f"{cls.__name__}{message}"))
        return cls

    return enter


def effect(values: Sequence[Any], *variants: str) -> Mapping[str, Sequence[Effect]]:
    return {"C900": [Effect("", values, variants or ("a", "b"))]}


# --- class, words and criteria ----------------------------------------------------------------------------------------

BROKEN += [
    (Computed, "check_experiment: got the class Computed, expected an object of a class that inherits"),
    (3, "check_experiment: got an object of class int"),
]


class Argument(Computed):
    def __init__(self, seeds: int) -> None:
        self.seeds = seeds


class Local(Computed):
    """With an attribute that worker processes cannot receive."""

    def __init__(self) -> None:
        self.function = lambda: 3


BROKEN += [
    (Argument(3), "Argument.__init__: called without arguments, as `qkv experiment` does: raised TypeError"),
    (Local(), "Local.pickle: called as `qkv experiment --jobs 2` does: raised"),
]


@broken(" does not define criteria, effects")
class NoCriteria(Experiment):
    name, question, claims = "no_criteria", "Is it?", ("C900",)


@broken(".name: is 'two words', expected one word")
class TwoWords(Computed):
    name = "two words"


@broken(".question: is 'b is more', expected one line of text that ends with a question mark")
class NoQuestion(Computed):
    question = "b is more"


@broken(r".looks: is \(1, 4\), expected numbers of seeds, at least 2")
class OneSeed(Computed):
    looks = (1, 4)


@broken(r".looks: is \(20, 10\), expected rising")
class Falling(Computed):
    looks = (20, 10)


@broken(".curves: is 'loss', expected dotted names")
class OneCurve(Computed):
    curves: Any = "loss"


@broken(".claims: .* expected each claim once")
class Twice(Computed):
    criteria = 2 * Computed.criteria


@broken(r".claims: is \['C901'\], but the criteria are of \['C900'\]")
class OtherClaims(Computed):
    claims = ("C901",)


@broken(".criteria: the criterion of C900 is dated '', expected a day")
class NotDated(Computed):
    criteria = (replace(Computed.criteria[0], dated=""),)


@broken(".criteria: the criterion of C900 has the effect ' ', expected what is measured")
class NoEffect(Computed):
    criteria = (replace(Computed.criteria[0], effect=" "),)


@broken(".criteria: the criterion of C900 has the bound nan, expected a finite number")
class NoBound(Computed):
    criteria = (replace(Computed.criteria[0], bound=math.nan),)


@broken(".criteria: the criterion of C900 has the bound 0.0, expected a positive number, because the effect is a ratio")
class ZeroRatio(Computed):
    criteria = (replace(Computed.criteria[0], ratio=True),)


# --- settings and measurements ----------------------------------------------------------------------------------------


@broken(r".settings: gave 'a' the seed 0 for settings\(1, quick=True\), expected 1")
class OneSeedForAll(Trained):
    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        return super().settings(0, quick)


@broken(r".settings: gave the variants \['a'\] for settings\(1, quick=True\), expected \['a', 'b'\]")
class Unpaired(Trained):
    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        found = super().settings(seed, quick)
        return found if seed == 0 else {"a": found["a"]}


@broken(r".settings: gave the variants \['a', 'b', 'c'\] for settings\(0, quick=False\)")
class LongerForm(Trained):
    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        found = super().settings(seed, quick)
        return found if quick else {**found, "c": found["a"]}


@broken(".settings: gave other runs for .* the second time")
class RandomSettings(Trained):
    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        found = super().settings(seed, quick)
        a = found["a"]
        return {**found, "a": replace(a, training=replace(a.training, lr=0.1 * random.random()))}


@broken(".settings: returned an object of class Counting as 'a', expected qkv_lab.experiments.Setting")
class OnlyTasks(Trained):
    def settings(self, seed: int, quick: bool) -> Any:
        return {"a": Counting()}


@broken(".compute: has the variants a, as settings, expected other names")
class BothWays(Trained):
    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"a": {"x": 3.0}}


@broken(r".compute: returned an object of class float32 at \['a'\]\['x'\]")
class Float32(Computed):
    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"a": {"x": np.float32(seed)}, "b": {"x": 1.0}}


@broken(".compute: returned an object of class float for 'a', expected numbers by name")
class NoNames(Computed):
    def compute(self, seed: int, quick: bool) -> Any:
        return {"a": 1.0, "b": 2.0}


@broken(r".compute: called as compute\(0, quick=True\): raised ZeroDivisionError")
class Raises(Computed):
    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"a": {"x": 1 / seed}}


@broken(r": measured other numbers with the same seed the second time, .*: \['a'\]\[0\]\['measured'\]\['x'\] is")
class NotSeeded(Computed):
    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"a": {"x": float(torch.rand(()))}, "b": {"x": 2.0}}


@broken(r".measure: returned torch.float32 of shape \(\) at \['x'\]")
class MeasuresTensor(Trained):
    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        return {"x": next(model.parameters())[0, 0]}


@broken(".measure: changed the model, expected it as before: 'model.training'")
class MeasuresTraining(Trained):
    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        model.train()
        return super().measure(model, setting)


@broken(".settings: gave no run, and compute no variant")
class NoVariants(Computed):
    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {}


# --- effects ----------------------------------------------------------------------------------------------------------


@broken(".effects: has no effects for C900")
class MissingClaim(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {}


@broken(".effects: has effects for C901, expected only the claims of the criteria")
class MoreClaims(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {**effect(results.values("a", X)), "C901": super().effects(results)["C900"]}


@broken(r".effects: returned \[\] for C900, expected a list")
class EmptyList(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C900": []}


@broken(".effects: has the variants c for C900, expected some of a, b")
class UnknownVariant(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect(results.values("a", X), "c")


@broken(".effects: has no variants for C900, expected those that it was measured on")
class NoVariantsNamed(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C900": [Effect("", results.values("a", X))]}


@broken(".effects: has no number for C900, expected one per seed")
class Misspelt(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect(results.differences("b", "A", X))


@broken(".effects: has nan for C900")
class NotANumber(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect([math.nan for _ in results.finished("a")])


@broken(".effects: has True for C900")
class Truth(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect([x > 1 for x in results.values("b", X)])


@broken(".effects: has 1 numbers for two seeds for C900, expected 2")
class Pooled(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect([float(np.mean(results.differences("b", "a", X)))])


@broken(".effects: has a number that is not positive for C900, expected ratios")
class NegativeRatio(Computed):
    criteria = (replace(Computed.criteria[0], ratio=True, bound=1.0),)

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect(results.differences("a", "b", X))


@broken(".conclude: called where only 'a' has a second seed, as after a claim was undecided: raised ValueError")
class ByPosition(Computed):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        rows = zip(results.values("a", X), results.values("b", X), strict=True)
        return effect([b - a for a, b in rows])


@broken(".conclude: called where one of two runs of 'a' diverged: raised KeyError")
class CountsDiverged(Trained):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect([outcome.measured["x"] for outcome in results.variants["a"]], "a")


# --- verdicts and figures ---------------------------------------------------------------------------------------------


class Concludes(Computed):
    """The base of experiments with a conclusion of their own."""

    def conclude(self, results: Results) -> Conclusion:
        return self.changed(super().conclude(results))

    def changed(self, found: Conclusion) -> Conclusion:
        raise NotImplementedError


@broken(".conclude: has the verdict 'does not hold' on C900, expected 'undecided', which follows")
class OtherVerdict(Concludes):
    def changed(self, found: Conclusion) -> Conclusion:
        return replace(found, verdicts=[replace(found.verdicts[0], holds=FAILS)])


@broken(".conclude: has the verdict 'yes' on C900, expected one of")
class OwnWord(Concludes):
    def changed(self, found: Conclusion) -> Conclusion:
        return replace(found, verdicts=[replace(found.verdicts[0], holds="yes")])  # type: ignore[arg-type]


@broken(r".conclude: has verdicts on \['C900', 'C901'\], expected one on each of \['C900'\]")
class MoreVerdicts(Concludes):
    def changed(self, found: Conclusion) -> Conclusion:
        return replace(found, verdicts=[*found.verdicts, Verdict("C901", FAILS, "No.")])


@broken(".conclude: has the title '', expected a sentence")
class NoTitle(Concludes):
    def changed(self, found: Conclusion) -> Conclusion:
        return replace(found, title="")


@broken(r".conclude: differs for the same results the second time, expected the same: \['title'\] is")
class RandomTitle(Concludes):
    def changed(self, found: Conclusion) -> Conclusion:
        return replace(found, title=f"{random.random()}")


@broken(".figure: returned an object of class str, expected a matplotlib.figure.Figure")
class NoFigure(Computed):
    def figure(self, results: Results) -> Any:
        return "figure.png"


@broken(".figure: called with the results of the quick form: raised IndexError")
class FigureRaises(Computed):
    def figure(self, results: Results) -> Figure:
        raise IndexError


@broken(".conclude: called with the numbers of the saved results: raised TypeError")
class NotSaved(Computed):
    """NaN is null in the saved results."""

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {**super().compute(seed, quick), "c": {"x": math.nan}}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return effect([float(math.isnan(outcome.measured["x"])) for outcome in results.finished("c")], "c")


@broken(r".conclude: differs for the saved numbers, expected the same verdicts: \['title'\] is 'nan', then 'None'")
class PrintsNan(NotSaved):
    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return Computed.effects(self, results)

    def conclude(self, results: Results) -> Conclusion:
        return replace(super().conclude(results), title=f"{results.variants['c'][0].measured['x']}")
