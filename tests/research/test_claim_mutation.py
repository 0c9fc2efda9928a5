"""Mutation tests of the ledger's checks: a check that cannot fail is found, and the published share is up to date."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import qkv
from research.claims import CLAIMS, Verdict, false, holds
from research.claims.mutation import PUBLISHED, computed, main, mutate
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


def test_published_shares_are_of_the_present_checks() -> None:
    """If it fails: `make mutants`."""
    found = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert list(found["by"]) == [c.id for c in computed()]
    assert found["computed"] == len(found["by"])
    assert found["cannot"] == [id_ for id_, x in found["by"].items() if x["noticed"] == 0]
    assert found["can_fail"] == found["computed"] - len(found["cannot"])
    assert found["can_fail"] >= 0.95 * found["computed"]


def test_command_tells_what_is_noticed_and_refuses_claims_without_a_computed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("research.claims.mutation.computed", lambda: [CLAIMS["C114"]])
    assert main(["C107"]) == 2
    assert "C107" in capsys.readouterr().err
    assert main(["C114"]) == 0
    assert "noticed: line" in capsys.readouterr().out
