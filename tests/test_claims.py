"""The ledger of claims: every check still finds what its page says, and every claim is there."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ledger import CLAIMS, Drifted, Verdict, claim, false, holds  # noqa: E402
from ledger.page import PAGES, pages  # noqa: E402
from ledger.settled import load  # noqa: E402
from ledger.trials.__main__ import names  # noqa: E402

load()
SAID = json.loads((PAGES / "verdicts.json").read_text(encoding="utf-8"))


def test_every_claim_of_the_sources_is_there() -> None:
    assert sorted(CLAIMS) == [f"C{i:03}" for i in range(1, 387)]
    assert set(SAID) == set(CLAIMS)


@pytest.mark.slow
@pytest.mark.parametrize("id_", sorted(CLAIMS))
def test_a_check_finds_what_its_page_says(id_: str) -> None:
    """`Drifted` if the condition of a verdict no longer holds; another kind of verdict needs `make claims`."""
    verdict = CLAIMS[id_].check()
    assert verdict.kind == SAID[id_], f"{id_} is now {verdict.kind!r}: {verdict.text}; run `make claims`"
    assert verdict.text.strip().endswith((".", ")", "*")), f"{id_}: {verdict.text}"


def test_a_verdict_needs_its_condition() -> None:
    with pytest.raises(Drifted, match="no longer finds"):
        holds(False, "two is three")
    assert false(True, "two is two").kind == "false"


def test_a_claim_is_entered_once() -> None:
    with pytest.raises(ValueError, match="each id once"):
        claim("C001", "chapter", "1", "again")
    with pytest.raises(ValueError, match="source is 'nobody'"):
        claim("C999", "nobody", "1", "unknown")


def test_pages_are_those_of_the_checks() -> None:
    """Everything but the numbers, which may differ in the last digit from machine to machine."""
    stand_in = {id_: Verdict(SAID[id_], "…") for id_ in CLAIMS}
    for name, text in pages(stand_in).items():
        there = (PAGES / name).read_text(encoding="utf-8").splitlines()
        kept = [line for line in text.splitlines() if line.startswith(("**C", "*", "def ", "    ", "- [C", "| "))]
        missing = [line for line in kept if line not in there]
        assert not missing, f"docs/claims/{name} lacks {missing[:3]}; run `make claims`"


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_trial_runs(name: str) -> None:
    """A few steps give every number that the kept result has."""

    def shape(value: object) -> object:
        return {k: shape(v) for k, v in sorted(value.items())} if isinstance(value, dict) else None

    kept = json.loads((ROOT / "ledger" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    del kept["made"]
    assert set(importlib.import_module(f"ledger.trials.{name}").run(quick=True)) == set(kept)
    assert shape(kept)
