"""Verdicts: what outcome follows from which intervals, and what each experiment says on its numbers."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import refused
from qkv_lab.experiments import architecture, associations, experiment
from qkv_lab.experiments.base import Outcome, Results, means_of
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, UNDECIDED, UNSEEN, Criterion, Effect, confidence, judge
from qkv_lab.experiments.record import conclusion_fields, load, text_of
from qkv_lab.experiments.registry import BUILT_IN
from qkv_lab.experiments.run import SHIPPED

# --- intervals and criteria -------------------------------------------------------------------------------------------

ABOVE = Criterion("C900", "2026-11-23", "Difference", bound=0.5)
YES, NO, OPEN = (1.0, 1.1, 0.9, 1.0), (0.1, 0.0, 0.2, 0.1), (0.0, 1.0, 0.2, 1.1)


def outcome(*effects: Effect, **changes: Any) -> str:
    return judge(replace(ABOVE, **changes), effects).holds


def test_interval_covers_the_mean_as_often_as_its_level_says() -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (500, 6))
    for level in (0.8, 0.95):
        ends = [confidence(row.tolist(), level)[1:] for row in draws]
        assert np.mean([low < 3.0 < high for low, high in ends]) == pytest.approx(level, abs=0.03)
    assert confidence([2.0]) == (2.0, -math.inf, math.inf)
    assert confidence([2.0, 2.0]) == (2.0, 2.0, 2.0)
    with refused("values"):
        confidence([])


def test_one_effect_decides_by_the_side_of_its_whole_interval() -> None:
    assert [outcome(Effect("", values)) for values in (YES, NO, OPEN)] == [HOLDS, FAILS, UNDECIDED]
    assert [outcome(Effect("", values), above=False) for values in (YES, NO)] == [FAILS, HOLDS]
    assert outcome(Effect("", YES[:1])) == UNDECIDED  # one seed has no interval
    assert outcome(Effect("", YES, bound=2.0)) == FAILS


@pytest.mark.parametrize(
    ("both", "conditions", "parts"),
    [
        ((YES, YES), HOLDS, HOLDS), ((NO, NO), FAILS, FAILS), ((YES, NO), ONLY, FAILS), ((NO, OPEN), UNDECIDED, FAILS),
        ((OPEN, YES), UNDECIDED, UNDECIDED), ((OPEN, OPEN), UNDECIDED, UNDECIDED),
    ],
)  # fmt: skip
def test_conditions_and_parts_of_a_claim_are_combined_differently(both: Any, conditions: str, parts: str) -> None:
    for one, other in (both, both[::-1]):
        assert outcome(Effect("a", one), Effect("b", other)) == conditions
        assert outcome(Effect("a", one), Effect("b", other), parts=True) == parts


def test_premises_decide_only_whether_the_claim_can_be_seen() -> None:
    for values, expected in ((YES, HOLDS), (NO, UNSEEN), (OPEN, UNDECIDED)):
        assert outcome(Effect("there is a sink", values, premise=True), Effect("", YES)) == expected
    assert outcome(Effect("there is a sink", YES, premise=True), Effect("", NO)) == FAILS


def test_effects_that_do_not_count_are_named_and_change_nothing() -> None:
    found = judge(ABOVE, [Effect("a", YES), Effect("b", NO, unless="b learnt its task in 0 of 4 runs")])
    assert found.holds == HOLDS
    assert "b (b learnt its task in 0 of 4 runs)" in found.text
    assert outcome(Effect("a", YES, unless="it failed")) == outcome(Effect("a", ())) == UNSEEN


def test_ratios_have_geometric_means() -> None:
    ratio = Criterion("C900", "2026-11-23", "Ratio", bound=1.5, ratio=True)
    (found,) = judge(ratio, [Effect("", (1.0, 4.0, 2.0))]).intervals
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(4 / found.high)


ROUNDED = st.floats(-5, 5).map(lambda x: round(x, 3))


@given(st.lists(ROUNDED, min_size=2, max_size=12), ROUNDED, st.booleans())
def test_outcome_does_not_depend_on_origin_or_sign(values: list[float], shift: float, above: bool) -> None:
    plain = outcome(Effect("", values), bound=0.25, above=above)
    moved = outcome(Effect("", [x + shift for x in values]), bound=0.25 + shift, above=above)
    flipped = outcome(Effect("", [-x for x in values]), bound=-0.25, above=not above)
    _, low, high = confidence(values)
    if min(abs(low - 0.25), abs(high - 0.25)) > 1e-6:
        assert plain == moved == flipped


# --- experiments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_shipped_numbers_give_the_shipped_verdicts(name: str) -> None:
    """Criteria are dated before the runs; for another result run `make experiments`."""
    made, found = experiment(name), load(SHIPPED / f"{name}.json")
    results = Results({v: [Outcome(**row) for row in x["results"]] for v, x in found["variants"].items()},
                      level=found["level"])  # fmt: skip
    again = json.loads(text_of(conclusion_fields(made.conclude(results))))
    assert again == {entry: found[entry] for entry in again}
    assert {v["claim"] for v in found["verdicts"]} == set(made.claims)
    assert not found["quick"]
    assert results.seeds == made.seeds
    assert all(criterion.dated <= found["created"][:10] for criterion in made.criteria)
    for entry in re.findall(r"{([^}]+)}", " ".join(made.remarks.values())):
        assert means_of(results, entry), f"a remark names {entry}, which no run has"


Variants = Mapping[str, Sequence[Outcome]]


def runs(name: str, alphas: float | Mapping[str, float] = 0.5, failing: Collection[str] = (), check: Any = None,
         curves: Mapping[str, Any] | None = None, **measured: Any) -> Variants:  # fmt: skip
    """Four runs of each variant of a sweep; `alphas` are the weights on the first token, of all or by variant.

    Each model has two heads, of which the second has the stronger sink. Those in `failing` have not learnt the task.
    """
    found = {}
    for variant in experiment(name).settings(0, True):
        accuracy = 0.5 if variant in failing else 1.0
        alpha = alphas if isinstance(alphas, float) else alphas[variant]
        found[variant] = [
            Outcome(seed, {"backcopy_accuracy": accuracy, "excess": 0.1},
                    {"sink": [[a / 2, a]], "value_drain": [[0.9, 0.1]], "massive": [4.0], **(check or {})},
                    measured, (curves or {}).get(variant, {}))
            for seed, a in enumerate(alpha + shift for shift in (-0.01, 0.0, 0.01, 0.02))
        ]  # fmt: skip
    return found


def four(**entries: Any) -> list[Outcome]:
    """Four outcomes; each number is about the given one. `evaluation__loss` is the entry ``evaluation.loss``."""
    found = []
    for seed in range(4):
        of: dict[str, dict[str, Any]] = {"evaluation": {}, "check": {}, "measured": {}}
        for name, value in entries.items():
            kind, entry = name.split("__")
            of[kind][entry] = value + seed / 1000 if isinstance(value, float) else value
        found.append(Outcome(seed, **of))
    return found


def rates(plain: Sequence[float], biased: Sequence[float], steps: Sequence[int] = (100, 200, 300)) -> Variants:
    """Losses at the high rates without and with a key bias; those at other rates do not jump."""
    curves = {f"{rate:g}": {"loss": {"steps": steps, "values": plain}} for rate in architecture.UNSTABLE}
    curves |= {f"key bias, {rate}": {"loss": {"steps": steps, "values": biased}} for rate in curves}
    return runs("learning_rate", curves=curves)


def mechanisms(alpha: float = 0.6, peaks: int = 2, massive: float = 2000.0) -> Variants:
    heads = {"key_cosine": [[0.0, 0.5]], "key_cosine_others": [[0.9, 0.1]], "massive": [massive]}
    return runs("mechanism", alpha, check=heads, peaks=peaks, without_peaks=0.1, nearest=0.99)


def mixed(sink: float = 0.9, heavy: float | None = 0.05) -> Variants:
    far = {"sink kept": 0.01, "sink hidden": 0.05, "untrained": 0.01}
    return {"trained": four(evaluation__backcopy_accuracy=1.0, measured__far=far, measured__sink=sink,
                            measured__added_heavy=heavy, measured__added_light=0.2)}  # fmt: skip


def unmasked(leak: float = 0.05, accuracy: float = 0.99) -> Variants:
    found = {}
    for task, kind in itertools.product(("text", "copying", "reversal"), ("masked", "unmasked")):
        written, read = (accuracy, 2.0) if kind == "masked" else (0.07, 3.5)
        found[f"{task}, {kind}"] = four(evaluation__unigram_loss=3.1, evaluation__token_accuracy=written,
                                        measured__training_loss=leak, measured__writing_loss=read)  # fmt: skip
    return found | {f"own key {kind}": four(measured__loss=2.0) for kind in ("visible", "masked")}


def relative(accuracy: float) -> Variants:
    found = {}
    for kind, early in {"learned": 0.5, "sinusoidal": 0.5, "t5": 0.9, "rotary": 0.9}.items():
        over = {"evaluation.accuracy": {"steps": [0, 25, 50], "values": [0.0, early, accuracy]}}
        plain = four(evaluation__accuracy=accuracy, evaluation__longer_accuracy=early)
        found[kind] = [replace(one, curves=over) for one in plain]
    return found


def lost(variant: str, *losses: float | None) -> Variants:
    return {variant: four(measured__losses=list(losses), measured__frequencies=3.1)}


POST = "post, 3 × the steps"
NORMS = {"pre": 0.8, "post": 0.1, POST: 0.1}
DECAYS = {"0": 0.3, "0.1": 0.9, "0.5": 0.9, "1": 0.5, "2": 0.1, "plain, rate 0.01": 0.8}
CALM, JUMP = (2.0, 1.9, 2.1), (2.0, 1.9, 2.6)
AMOUNTS = {"own_sink": 0.1, "own_accuracy": 1.0}
FIRST = {"replaced": 0.1, "replaced_least": 0.0, "replaced_most": 0.9, "random_tokens": 0.6}

CASES: list[tuple[str, Variants, dict[str, str]]] = [
    ("norm_place", runs("norm_place", NORMS), {"C086": ONLY}),
    ("norm_place", runs("norm_place", NORMS, ["post", POST]), {"C086": HOLDS}),
    ("norm_place", runs("norm_place", NORMS, NORMS), {"C086": UNSEEN}),
    ("weight_decay", runs("weight_decay", DECAYS), {"C082": ONLY}),
    ("weight_decay", runs("weight_decay", DECAYS, ["2"]), {"C082": HOLDS}),
    ("weight_decay", runs("weight_decay", DECAYS, ["0"]), {"C082": UNSEEN}),
    ("learning_rate", rates(JUMP, CALM), {"C100": HOLDS}),
    ("learning_rate", rates(JUMP, JUMP), {"C100": FAILS}),
    ("learning_rate", rates(CALM, CALM), {"C100": UNSEEN}),  # no run fails without it
    ("learning_rate", rates((2.0, 4.0, 2.1), CALM, steps=(10, 50, 200)), {"C100": UNSEEN}),  # an early jump is none
    ("data_amount", runs("data_amount", **AMOUNTS), {"C080": HOLDS}),
    ("data_amount", runs("data_amount", 0.2, **AMOUNTS), {"C080": UNSEEN, "C081": UNSEEN}),
    ("data_amount", runs("data_amount", **{**AMOUNTS, "own_accuracy": 0.5}), {"C080": UNSEEN}),
    ("first_token", runs("first_token", 0.2, **FIRST), {"C062": UNSEEN, "C065": UNSEEN}),
    ("first_token", runs("first_token", **FIRST), {"C062": ONLY, "C065": HOLDS}),
    ("prefix", runs("prefix", prefix_first=0.1, prefix_rest=0.6), {"C083": HOLDS}),
    ("prefix", runs("prefix", prefix_first=0.1, prefix_rest=0.1), {"C083": UNSEEN}),
    ("window", runs("window", first=0.1, oldest=0.6), {"C084": FAILS}),
    ("window", runs("window", first=0.1, oldest=0.1), {"C084": UNSEEN}),
    ("mechanism", mechanisms(), dict.fromkeys(experiment("mechanism").claims, HOLDS)),
    ("mechanism", mechanisms(0.2), dict.fromkeys({*experiment("mechanism").claims} - {"C067"}, UNSEEN)),
    ("mechanism", mechanisms(peaks=0), {"C073": UNSEEN}),
    ("mechanism", mechanisms(massive=4.0), {"C067": UNSEEN}),
    ("overmixing", mixed(), {"C074": HOLDS, "C076": HOLDS, "C077": HOLDS}),
    ("overmixing", mixed(sink=0.1), {"C074": UNSEEN, "C076": UNSEEN, "C077": UNSEEN}),
    ("overmixing", mixed(heavy=None), {"C074": HOLDS, "C076": UNSEEN, "C077": HOLDS}),  # no resting rows
    ("coreference", {associations.READER: four(evaluation__accuracy=0.5, check__best=0.97)}, {"C006": UNSEEN}),
    ("hard_attention", {v: four(measured__accuracy=0.3) for v in associations.HardAttention.ways}, {"C365": UNSEEN}),
    ("no_mask", unmasked(), {"C158": HOLDS, "C199": FAILS, "C200": HOLDS}),
    ("no_mask", unmasked(leak=1.5), {"C200": UNSEEN}),
    ("no_mask", unmasked(accuracy=0.5), {"C158": HOLDS}),  # by the text alone
    ("relative_positions", relative(1.0), {"C374": HOLDS}),
    ("relative_positions", relative(0.5), {"C374": UNSEEN}),
    ("blocks", lost("both", 2.9, 4.5, None) | lost("no residuals", 2.9, 4.5, None) | lost("no norms", None, None, None),
     {"C050": FAILS, "C051": HOLDS}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "variants", "expected"), CASES, ids=[f"{x[0]} {i}" for i, x in enumerate(CASES)])
def test_runs_without_a_sink_and_runs_that_did_not_learn_do_not_count(
    name: str, variants: Variants, expected: dict[str, str]
) -> None:
    found = experiment(name).conclude(Results(variants)).verdicts
    assert not [verdict.text for verdict in found if "nan" in verdict.text]
    assert {v.claim: v.holds for v in found if v.claim in expected} == expected


def test_only_a_lower_peak_is_judged_in_models_without_a_sink() -> None:
    made = experiment("normalizers")
    plain = runs("normalizers", 0.1, first=0.1, second=0.1, int8_error=0.01)
    found = {v.claim: v.holds for v in made.conclude(Results(plain)).verdicts}
    assert {claim for claim, holds in found.items() if holds != UNSEEN} == {"C378"}
