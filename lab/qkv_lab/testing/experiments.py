"""`check_experiment`: an experiment fulfils the contract of `qkv_lab.experiments.Experiment`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import pairwise
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

from qkv.testing.inputs import CheckFailed, calling, fail, shape_of
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion
from qkv_lab.experiments.registry import REGISTRY
from qkv_lab.experiments.run import key
from qkv_lab.testing.effects import check_effects, check_few_runs, check_verdicts
from qkv_lab.testing.quick_run import check_redrawn, check_repeated, measured_once
from qkv_lab.testing.randomness import restored_generators, set_generators

SEEDS = (0, 1)


def check_experiment(experiment: Experiment) -> None:
    """Check that an experiment fulfils the contract of its base class; for use in your own tests.

    It checks:

    - name, question, ``looks``, and that the criteria of its claims are complete and dated;
    - that ``settings`` gives the same runs twice, the same variants for every seed and in both forms, and in each run
      the seed that it was asked for, so that variants can be compared in pairs;
    - that the quick form runs to its end, twice with the same numbers, which JSON can hold;
    - that ``effects`` gives each claim one number per seed, of variants that exist;
    - that the verdicts are those of the criteria, one for each claim; also if variants have different numbers of seeds
      or a run diverged;
    - that the figure can be drawn, and that verdicts and figure from the saved numbers are the same.

    The quick form is run twice; trained models are kept for the second time. It needs the packages of
    ``pip install 'qkv[train]'``.

    Args:
        experiment: the object.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv_lab.experiments import Criterion, Effect, Experiment
    >>> class Sum(Experiment):
    ...     name, question = "sum", "Is the sum of two dice more than one of them?"
    ...     criteria = (Criterion("MINE-1", "today", "Two dice minus one", bound=0.0),)
    ...     def compute(self, seed, quick):
    ...         return {"one": {"points": 1 + seed % 6}, "two": {"points": 3 + seed % 6}}
    ...     def effects(self, results):
    ...         return {"MINE-1": [Effect("", results.differences("two", "one", "measured.points"), ("one", "two"))]}
    >>> try:
    ...     check_experiment(Sum())
    ... except AssertionError as error:
    ...     print(error)
    Sum.criteria: the criterion of MINE-1 is dated 'today', expected a day such as 2026-11-23
    """
    with restored_generators():
        _check_class(experiment)
        _check_words(experiment)
        _check_criteria(experiment)
        trained = _check_settings(experiment)
        with calling(experiment, "pickle", "called as `qkv experiment --jobs 2` does"):
            pickle.loads(pickle.dumps(experiment))
        with TemporaryDirectory() as folder:
            results = measured_once(experiment, Path(folder))
            check_effects(experiment, results)
            check_verdicts(experiment, results)
            check_few_runs(experiment, results, trained)
            check_repeated(experiment, results, Path(folder))
            check_redrawn(experiment, Path(folder))


def _check_class(e: Experiment) -> None:
    """An object of a subclass that the registry accepts, made without arguments."""
    if not isinstance(e, Experiment):
        raise CheckFailed(
            f"check_experiment: got {shape_of(e)}, expected an object of a class that inherits from "
            "qkv_lab.experiments.Experiment"
        )
    problem = REGISTRY.problem(type(e))
    if problem is not None:
        raise CheckFailed(f"{type(e).__name__} {problem}")
    with calling(e, "__init__", "called without arguments, as `qkv experiment` does"):
        type(e)()


def _check_words(e: Experiment) -> None:
    if not isinstance(e.name, str) or len(e.name.split()) != 1:
        fail(e, "name", f"is {e.name!r}, expected one word, the NAME of: qkv experiment NAME")
    if not isinstance(e.question, str) or not e.question.strip().endswith("?") or "\n" in e.question:
        fail(e, "question", f"is {e.question!r}, expected one line of text that ends with a question mark")
    looks = e.looks
    if not isinstance(looks, tuple) or not looks or not all(isinstance(n, int) for n in looks) or looks[0] < 2:
        fail(e, "looks", f"is {looks!r}, expected numbers of seeds, at least 2, because one seed has no interval")
    if not all(a < b for a, b in pairwise(looks)):
        fail(e, "looks", f"is {looks!r}, expected rising numbers of seeds")
    if not isinstance(e.curves, tuple) or not all(isinstance(name, str) for name in e.curves):
        fail(e, "curves", f"is {e.curves!r}, expected dotted names of metrics, such as ('loss',)")


def _check_criteria(e: Experiment) -> None:
    """Each claim has a criterion with its date, unless the experiment has a conclusion of its own."""
    claims = e.claims
    if isinstance(claims, str) or not isinstance(claims, Sequence) or not claims:
        fail(e, "claims", f"is {claims!r}, expected the numbers of claims, at least one")
    if len(set(claims)) < len(claims):
        fail(e, "claims", f"is {claims!r}, expected each claim once")
    for c in e.criteria:
        if not isinstance(c, Criterion):
            fail(e, "criteria", f"has {shape_of(c)}, expected qkv_lab.experiments.Criterion")
        try:
            date.fromisoformat(c.dated)
        except (TypeError, ValueError):
            fail(e, "criteria", f"the criterion of {c.claim} is dated {c.dated!r}, expected a day such as 2026-11-23")
        if not isinstance(c.effect, str) or not c.effect.strip():
            fail(e, "criteria", f"the criterion of {c.claim} has the effect {c.effect!r}, expected what is measured")
        if not isinstance(c.bound, int | float) or not isfinite(c.bound) or (c.ratio and c.bound <= 0):
            what = "a positive number, because the effect is a ratio" if c.ratio else "a finite number"
            fail(e, "criteria", f"the criterion of {c.claim} has the bound {c.bound!r}, expected {what}")
    own = [c.claim for c in e.criteria]
    if own and list(claims) != own:
        fail(e, "claims", f"is {list(claims)}, but the criteria are of {own}, expected the same")


def _check_settings(e: Experiment) -> dict[str, Setting]:
    """The runs of a seed are the same twice and have that seed; returns those of the quick form with the first seed."""
    variants: list[str] = []
    for quick in (True, False):
        for seed in SEEDS:
            call = f"settings({seed}, quick={quick})"
            set_generators(1)
            first = _settings(e, seed, quick, call)
            set_generators(2)
            again = _settings(e, seed, quick, call)
            if [*first] != [*again] or any(key(first[v]) != key(again[v]) for v in first):
                fail(e, "settings", f"gave other runs for {call} the second time, expected the same")
            if quick and seed == SEEDS[0]:
                variants, found = [*first], first
            if [*first] != variants:
                expected = (
                    f"expected {variants}, as for the first seed of the quick form: variants are compared in pairs"
                )
                fail(e, "settings", f"gave the variants {[*first]} for {call}, {expected}")
    return found


def _settings(e: Experiment, seed: int, quick: bool, call: str) -> dict[str, Setting]:
    with calling(e, "settings", f"called as {call}"):
        made = e.settings(seed, quick)
    if not isinstance(made, Mapping) or not all(isinstance(v, str) for v in made):
        fail(e, "settings", f"returned {shape_of(made)} for {call}, expected runs by the name of their variant")
    for variant, setting in made.items():
        if not isinstance(setting, Setting):
            fail(e, "settings", f"returned {shape_of(setting)} as {variant!r}, expected qkv_lab.experiments.Setting")
        if setting.training.seed != seed:
            fail(
                e, "settings", f"gave {variant!r} the seed {setting.training.seed} for {call}, expected {seed}: runs "
                "with the same seed are compared"
            )  # fmt: skip
        with calling(e, "settings", f"the run {variant!r} of {call}, written as run.toml"):
            key(setting)
    return dict(made)
