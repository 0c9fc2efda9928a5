"""Verdicts from intervals: their coverage, and what outcome follows from which intervals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import refused
from qkv_lab.experiments.evidence import (
    FAILS,
    HOLDS,
    ONLY,
    UNDECIDED,
    UNSEEN,
    Criterion,
    Effect,
    confidence,
    judge,
    number,
)

ABOVE = Criterion("C900", "2026-11-23", "Difference", bound=0.5)
YES, NO, OPEN = (1.0, 1.1, 0.9, 1.0), (0.1, 0.0, 0.2, 0.1), (0.0, 1.0, 0.2, 1.1)


def outcome(*effects: Effect, **changes: Any) -> str:
    from dataclasses import replace

    return judge(replace(ABOVE, **changes), effects).holds


def test_interval_covers_the_mean_as_often_as_its_level_says() -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (2000, 6))
    for level in (0.8, 0.95):
        ends = [confidence(row.tolist(), level)[1:] for row in draws]
        assert np.mean([low < 3.0 < high for low, high in ends]) == pytest.approx(level, abs=0.02)


def test_interval_of_one_value_is_infinite_and_of_none_refused() -> None:
    assert confidence([2.0]) == (2.0, -math.inf, math.inf)
    assert confidence([2.0, 2.0]) == (2.0, 2.0, 2.0)
    with refused("values"):
        confidence([])


def test_one_effect_decides_by_the_side_of_its_whole_interval() -> None:
    assert outcome(Effect("", YES)) == HOLDS
    assert outcome(Effect("", NO)) == FAILS
    assert outcome(Effect("", OPEN)) == UNDECIDED
    assert outcome(Effect("", NO), above=False) == HOLDS
    assert outcome(Effect("", YES), above=False) == FAILS
    assert outcome(Effect("", YES[:1])) == UNDECIDED  # one seed has no interval
    assert outcome(Effect("", YES, bound=2.0)) == FAILS


@pytest.mark.parametrize("first", [YES, NO, OPEN])
@pytest.mark.parametrize("second", [YES, NO, OPEN])
def test_conditions_and_parts_of_a_claim_are_combined_differently(first: Any, second: Any) -> None:
    both = {first, second}
    found = outcome(Effect("a", first), Effect("b", second))
    parts = outcome(Effect("a", first), Effect("b", second), parts=True)
    if both == {YES}:
        assert found == parts == HOLDS
    elif both == {NO}:
        assert found == parts == FAILS
    elif both == {YES, NO}:
        assert (found, parts) == (ONLY, FAILS)
    elif NO in both:
        assert (found, parts) == (UNDECIDED, FAILS)
    else:
        assert found == parts == UNDECIDED


def test_premises_come_first_and_decide_only_whether_the_claim_can_be_seen() -> None:
    for values, expected in ((YES, HOLDS), (NO, UNSEEN), (OPEN, UNDECIDED)):
        premise = Effect("there is a sink", values, premise=True)
        assert outcome(premise, Effect("", YES)) == expected
    assert outcome(Effect("there is a sink", YES, premise=True), Effect("", NO)) == FAILS


def test_effects_that_do_not_count_are_named_and_change_nothing() -> None:
    found = judge(ABOVE, [Effect("a", YES), Effect("b", NO, unless="b learnt its task in 0 of 4 runs")])
    assert found.holds == HOLDS
    assert "Not counted: b (b learnt its task in 0 of 4 runs)" in found.text
    assert "4 seeds" in found.text
    assert outcome(Effect("a", YES, unless="it failed")) == UNSEEN
    assert outcome(Effect("a", ())) == UNSEEN


def test_ratios_have_geometric_means() -> None:
    ratio = Criterion("C900", "2026-11-23", "Ratio", bound=1.5, ratio=True)
    (found,) = judge(ratio, [Effect("", (1.0, 4.0, 2.0))]).intervals
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(4 / found.high)


@given(
    st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=12),
    st.floats(-3, 3).map(lambda x: round(x, 3)),
    st.booleans(),
)
def test_outcome_does_not_depend_on_origin_or_sign(values: list[float], shift: float, above: bool) -> None:
    plain = outcome(Effect("", values), bound=0.25, above=above)
    moved = outcome(Effect("", [x + shift for x in values]), bound=0.25 + shift, above=above)
    flipped = outcome(Effect("", [-x for x in values]), bound=-0.25, above=not above)
    _, low, high = confidence(values)
    if min(abs(low - 0.25), abs(high - 0.25)) > 1e-6:
        assert plain == moved == flipped


def test_a_wider_level_never_turns_undecided_into_a_verdict() -> None:
    draws = np.random.default_rng(1).normal(0.7, 0.5, (200, 5)).tolist()
    for row, (low, high) in itertools.product(draws, [(0.8, 0.95), (0.95, 0.99)]):
        narrow, wide = (judge(ABOVE, [Effect("", row)], level).holds for level in (low, high))
        assert wide in (narrow, UNDECIDED)


def test_numbers_in_sentences() -> None:
    assert [number(x) for x in (0.5, -0.25, 12.345, 0.012345, math.inf, math.nan)] == [
        "0.50", "-0.25", "12.35", "0.012", "∞", "none",
    ]  # fmt: skip
