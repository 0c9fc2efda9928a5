"""Mutation tests of the ledger's checks: a check that cannot fail is found, and the published share is up to date."""

from __future__ import annotations

import ast
import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import qkv
from research.claims import CLAIMS, Verdict, cited, experiment, false, holds, unseen
from research.claims.mutation import CHANGES, PUBLISHED, applicable, computed, instrument, judges, main, mutate, summary
from research.claims.settled import load

load()


def compares() -> Verdict:
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    error = (qkv.attend(q, k, v) - (q @ k.mT / 2).softmax(-1) @ v).abs().max().item()
    return holds(error < 1e-12, f"{error:.1g}.")


def squares(x: float) -> float:
    return torch.tensor(x).pow(2).item()


def computes_in_a_function() -> Verdict:
    return false(squares(3.0) == 9, "Nine.")


def refuses() -> Verdict:
    said = ""
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        said = str(error)
    return holds(said != "", said)


def says_so() -> Verdict:
    return holds(True, f"{squares(3.0):.1f} was never compared.")


def subtracts_a_number_from_itself() -> Verdict:
    x = torch.ones(3)
    return holds((x - x).abs().max().item() < 1e-9, "0.")


def compares_a_call_with_itself() -> Verdict:
    return holds(squares(3.0) == squares(3.0), "Equal.")


def compares_nothing_but_would_break() -> Verdict:
    one, other = torch.ones(2).cumsum(0)
    return holds(one.shape == other.shape, "Two numbers.")


def catches_an_error_and_ignores_it() -> Verdict:
    said = ""
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        said = str(error)
    return holds(said is not None, said)


def would_count_for_ever() -> Verdict:
    left = squares(3.0)
    while left != 0:
        left -= 1
    return holds(squares(2.0) == 4, "Four.")


def fails() -> Verdict:
    return holds(squares(3.0) == 8, "Eight.")


def rests_on_others() -> list[Verdict]:
    return [cited("holds", "Read.", "[it](https://x)"), experiment("C015", "scaling"), unseen("Too large.")]


CAN_FAIL = (compares, computes_in_a_function, refuses)
TAUTOLOGIES = (
    says_so, subtracts_a_number_from_itself, compares_a_call_with_itself, compares_nothing_but_would_break,
    catches_an_error_and_ignores_it,
)  # fmt: skip


@pytest.mark.parametrize("check", [*CAN_FAIL, *TAUTOLOGIES])
def test_only_a_check_that_compares_its_answers_can_fail(check: Callable[[], Verdict]) -> None:
    found = mutate(check)
    assert found.can_fail == (check in CAN_FAIL)
    assert check not in CAN_FAIL or not found.overlooked
    assert found == mutate(check)
    assert check().kind in ("holds", "false"), "it is left as it was"


def test_endless_loop_after_a_wrong_answer_is_stopped_and_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.claims.mutation.SECONDS", 0.1)
    found = mutate(would_count_for_ever)
    assert [site.code for site in found.overlooked] == ["squares(3.0)"]
    assert {site.code for site in found.noticed} == {"squares(2.0)", "torch.tensor(x).pow(2)"}


def test_check_that_fails_with_right_answers_is_an_error() -> None:
    with pytest.raises(AssertionError, match="Eight"):
        mutate(fails)


def test_verdicts_without_a_condition_are_not_computed() -> None:
    assert judges(compares)
    assert not judges(rests_on_others)


def test_places_are_found_where_they_stand_and_only_in_what_a_check_uses() -> None:
    (site,) = (site for site in mutate(compares).noticed if site.code == "qkv.attend(q, k, v)")
    line = inspect.getsource(compares).splitlines()[site.line - compares.__code__.co_firstlineno]
    assert "qkv.attend(q, k, v)" in line
    assert site.kind == "call"
    code = instrument(computes_in_a_function)
    assert [site.code for site in code.sites] == ["torch.tensor(x).pow(2)", "squares(3.0)"]
    names = {x.name for x in ast.parse(inspect.getsource(inspect.getmodule(compares))).body if hasattr(x, "name")}
    assert names & set(code.code.co_names) == {"squares", "computes_in_a_function"}


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    name: str


@dataclass(frozen=True)
class Sizes:
    width: int


ANSWERS = (
    2, 0.5, "nothing visible", torch.arange(6.0).view(2, 3), torch.tensor([True, False]), torch.arange(4).numpy(),
    [1.0, 2.0], {"a": [1, 2], "b": [3]}, {2, 3}, torch.ones(2, 3).shape, torch.arange(3.0).max(0),
    Sums(torch.ones(2), "sums"), Verdict("holds", "Yes."),
)  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_every_answer_has_a_wrong_one_that_is_an_answer(answer: Any) -> None:
    before, names = copy.deepcopy(answer), applicable(answer)
    assert names
    for name in names:
        wrong = CHANGES[name](answer)
        assert type(wrong) is type(answer)
        if isinstance(wrong, torch.Tensor):
            assert wrong.isfinite().all()
            assert wrong.shape != answer.shape or not torch.equal(wrong, answer)
            assert torch.equal(answer, before), "the right one is left unchanged"
        elif not isinstance(wrong, Sums) and not hasattr(wrong, "dtype"):
            assert wrong != answer
            assert str(answer) == str(before)


@pytest.mark.parametrize("value", [True, torch.tensor(True), None, Sizes(3), print, []])
def test_judgements_and_settings_are_no_answers(value: Any) -> None:
    assert not applicable(value)


def test_published_shares_are_of_the_present_checks() -> None:
    """If it fails: `make mutants`."""
    found = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert list(found["by"]) == [c.id for c in computed()]
    assert found["computed"] == len(found["by"])
    assert found["cannot"] == [id_ for id_, x in found["by"].items() if x["noticed"] == 0]
    assert found["can_fail"] == found["computed"] - len(found["cannot"])
    assert found["can_fail"] >= 0.95 * found["computed"]


def test_summary_counts_the_checks_that_can_fail() -> None:
    found = summary({"C001": mutate(computes_in_a_function), "C002": mutate(says_so)})
    assert (found["computed"], found["can_fail"], found["cannot"]) == (2, 1, ["C002"])
    assert found["by"]["C001"] == {"places": 2, "noticed": 2}


def test_command_tells_what_is_noticed_and_refuses_claims_without_a_computed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("research.claims.mutation.computed", lambda: [CLAIMS["C114"]])
    assert main(["C107"]) == 2
    assert "C107" in capsys.readouterr().err
    assert main(["C114"]) == 0
    assert "noticed: line" in capsys.readouterr().out
