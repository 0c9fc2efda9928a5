"""Checks of an experiment's effects and verdicts, on the results of its quick form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import get_args

from qkv.testing.inputs import calling, fail, shape_of
from qkv_lab.experiments.base import Conclusion, Experiment, Outcome, Results
from qkv_lab.experiments.evidence import Effect, Holds, judge
from qkv_lab.experiments.record import conclusion_fields
from qkv_lab.testing.values import first_difference

QUICK = "called with the results of the quick form"


def check_effects(e: Experiment, results: Results) -> None:
    """Each claim has effects, with one number per seed, of variants that exist."""
    if not e.criteria or type(e).effects is Experiment.effects:
        return  # the experiment has a `conclude` of its own
    found = _effects(e, results, QUICK)
    claims = [c.claim for c in e.criteria]
    for claim in claims:
        if claim not in found:
            fail(e, "effects", f"has no effects for {claim}, expected one or more for each claim")
    if more := [claim for claim in found if claim not in claims]:
        fail(e, "effects", f"has effects for {', '.join(more)}, expected only the claims of the criteria")
    finished = all(len(results.finished(v)) == len(results.variants[v]) for v in results.variants)
    doubled = _effects(e, _with_second_seed(results, results.variants), "called with the results of two seeds")
    for criterion in e.criteria:
        claim = criterion.claim
        for effect, twice in zip(found[claim], doubled[claim], strict=False):
            _check_effect(e, claim, effect, results)
            if finished and not effect.values and not effect.unless:
                fail(e, "effects", f"has no number {_of(claim, effect)}, expected one per seed: do its names exist?")
            if len(effect.values) == 1 and len(twice.values) != 2:
                fail(e, "effects", f"has {len(twice.values)} numbers for two seeds {_of(claim, effect)}, expected 2")
            if criterion.ratio and not effect.premise and any(x <= 0 for x in effect.values):
                fail(e, "effects", f"has a number that is not positive {_of(claim, effect)}, expected ratios")


def _check_effect(e: Experiment, claim: str, effect: Effect, results: Results) -> None:
    for x in effect.values:
        if isinstance(x, bool) or not isinstance(x, int | float) or isnan(x):
            fail(e, "effects", f"has {x!r} {_of(claim, effect)}, expected a number for each seed")
    unknown = [v for v in effect.variants if v not in results.variants]
    if unknown:
        known = ", ".join(results.variants)
        fail(e, "effects", f"has the variants {', '.join(unknown)} {_of(claim, effect)}, expected some of {known}")
    if not effect.variants and len(e.looks) > 1:
        fail(
            e, "effects", f"has no variants {_of(claim, effect)}, expected those that it was measured on: they get "
            "more seeds while the claim is undecided"
        )  # fmt: skip


def _of(claim: str, effect: Effect) -> str:
    return f"for {claim} ({effect.condition})" if effect.condition else f"for {claim}"


def _effects(e: Experiment, results: Results, situation: str) -> Mapping[str, Sequence[Effect]]:
    with calling(e, "effects", situation):
        found = e.effects(results)
    if not isinstance(found, Mapping):
        fail(e, "effects", f"returned {shape_of(found)}, expected a list of effects for each claim")
    for claim, effects in found.items():
        if not isinstance(effects, Sequence) or not effects or not all(isinstance(x, Effect) for x in effects):
            fail(e, "effects", f"returned {effects!r} for {claim}, expected a list of qkv_lab.experiments.Effect")
    return found


def check_verdicts(e: Experiment, results: Results) -> None:
    """One verdict for each claim, the same twice, and as the criteria say."""
    found, again = (_concluded(e, results, QUICK) for _ in range(2))
    wrong = first_difference(conclusion_fields(found), conclusion_fields(again))
    if wrong is not None:
        fail(e, "conclude", f"differs for the same results the second time, expected the same: {wrong}")
    for what in ("title", "paragraph"):
        text = getattr(found, what)
        if not isinstance(text, str) or not text.strip():
            fail(e, "conclude", f"has the {what} {text!r}, expected a sentence")
    for verdict in found.verdicts:
        if verdict.holds not in get_args(Holds):
            expected = ", ".join(map(repr, get_args(Holds)))
            fail(e, "conclude", f"has the verdict {verdict.holds!r} on {verdict.claim}, expected one of {expected}")
    if not e.criteria or type(e).effects is Experiment.effects:
        return
    effects = _effects(e, results, QUICK)
    for criterion, verdict in zip(e.criteria, found.verdicts, strict=True):
        holds = judge(criterion, effects[criterion.claim], results.level).holds
        if verdict.holds != holds:
            fail(
                e, "conclude", f"has the verdict {verdict.holds!r} on {criterion.claim}, expected {holds!r}, which "
                "follows from the effects by the criterion"
            )  # fmt: skip


def _concluded(e: Experiment, results: Results, situation: str) -> Conclusion:
    with calling(e, "conclude", situation):
        found = e.conclude(results)
    if not isinstance(found, Conclusion):
        fail(e, "conclude", f"returned {shape_of(found)}, expected qkv_lab.experiments.Conclusion")
    claims = [v.claim for v in found.verdicts]
    if claims != list(e.claims):
        fail(e, "conclude", f"has verdicts on {claims}, expected one on each of {list(e.claims)}, in this order")
    return found


def check_few_runs(e: Experiment, results: Results, trained: Collection[str]) -> None:
    """The verdicts can be given if some variants have more seeds than others, and if a run diverged."""
    for variant in results.variants:
        only = f"called where only {variant!r} has a second seed, as after a claim was undecided"
        _concluded(e, _with_second_seed(results, [variant]), only)
    for variant in trained:
        both = _with_second_seed(results, results.variants)
        first = both.variants[variant][0]
        failed = [first, Outcome(first.seed + 1, diverged="the loss is nan")]
        _concluded(
            e, replace(both, variants={**both.variants, variant: failed}),
            f"called where one of two runs of {variant!r} diverged",
        )  # fmt: skip


def _with_second_seed(results: Results, variants: Collection[str]) -> Results:
    """The results with a second seed of some variants, whose numbers are those of the first."""
    rows = {
        v: [*outcomes, *(replace(o, seed=o.seed + 1) for o in outcomes if v in variants)]
        for v, outcomes in results.variants.items()
    }
    return replace(results, variants=rows)
