"""Verdicts: what outcome follows from which intervals, and what each experiment says on its numbers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import refused
from qkv_lab.experiments import experiment
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, UNDECIDED, UNSEEN, Criterion, Effect, confidence, judge
from qkv_lab.experiments.record import load, text_of, verdict_fields
from qkv_lab.experiments.registry import BUILT_IN
from qkv_lab.experiments.results import Outcome, Results, means_of
from qkv_lab.experiments.run import SHIPPED

# --- intervals and criteria -------------------------------------------------------------------------------------------

ABOVE = Criterion("C900", "2026-11-23", "Difference", bound=0.5)
YES, NO, OPEN = (1.0, 1.1, 0.9, 1.0), (0.1, 0.0, 0.2, 0.1), (0.0, 1.0, 0.2, 1.1)


def outcome(*effects: Effect, **changes: Any) -> str:
    return judge(replace(ABOVE, **changes), effects).holds


@pytest.mark.slow
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
    again = json.loads(text_of([verdict_fields(verdict) for verdict in made.conclude(results)]))
    assert again == found["verdicts"]
    assert {v["claim"] for v in found["verdicts"]} == set(made.claims)
    assert not found["quick"]
    assert results.seeds == made.seeds
    assert all(criterion.dated <= found["created"][:10] for criterion in made.criteria)
    for entry in re.findall(r"{([^}]+)}", " ".join(criterion.remark for criterion in made.criteria)):
        assert means_of(results, entry), f"a remark names {entry}, which no run has"
