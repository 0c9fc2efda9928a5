"""The ledger of claims: it is complete, and every check still gives the verdict on its page."""

from __future__ import annotations

import importlib
import json
import re
import time
from itertools import zip_longest

import pytest

from qkv.ledger import CLAIMS, Drifted, Verdict, claim, false, holds
from qkv.ledger.page import PAGES, pages
from qkv.ledger.settle import RESULTS
from qkv.ledger.settled import load
from qkv.ledger.trials.__main__ import names

load()
PUBLISHED = json.loads((PAGES / "verdicts.json").read_text(encoding="utf-8"))


def test_ledger_has_every_claim_of_the_sources() -> None:
    assert sorted(CLAIMS) == [f"C{i:03}" for i in range(1, 387)]
    assert set(PUBLISHED) == set(CLAIMS)


@pytest.mark.slow
@pytest.mark.parametrize("id_", sorted(CLAIMS))
def test_check_gives_the_verdict_on_its_page(id_: str) -> None:
    """Raises `Drifted` if the condition of a verdict no longer holds; for a changed verdict run `make claims`."""
    verdict = CLAIMS[id_].check()
    assert verdict.kind == PUBLISHED[id_], f"{id_} is now {verdict.kind!r}: {verdict.text}; run `make claims`"
    assert verdict.text.strip().endswith((".", ")", "*")), f"{id_}: {verdict.text}"
    assert_readable(verdict.text)


def test_verdict_whose_condition_fails_raises_drifted() -> None:
    with pytest.raises(Drifted, match="no longer finds"):
        holds(False, "two is three")
    assert false(True, "two is two").kind == "false"


def test_claim_ids_are_unique_and_sources_known() -> None:
    with pytest.raises(ValueError, match="each id once"):
        claim("C001", "chapter", "1", "again")
    with pytest.raises(ValueError, match="source is 'nobody'"):
        claim("C999", "nobody", "1", "unknown")


def test_pages_are_up_to_date() -> None:
    """Except for the texts of verdicts, whose numbers may differ in the last digit between machines."""

    def compared(text: str) -> list[str]:
        """Headings, claims with their verdicts, counts and code; the list of errors sorted by id."""
        lines = text.splitlines()
        found = [x for x in lines if x.startswith(("## ", "**C", "> ", "def ", "    ", "| ")) or " claims: <" in x]
        return found + sorted(x for x in lines if x.startswith("- [C"))

    stand_in = {id_: Verdict(PUBLISHED[id_], "…") for id_ in CLAIMS}
    for name, text in pages(stand_in).items():
        page = compared((PAGES / name).read_text(encoding="utf-8"))
        differ = [pair for pair in zip_longest(compared(text), page) if pair[0] != pair[1]]
        assert not differ, f"docs/claims/{name}: expected {differ[0][0]}, found {differ[0][1]}; run `make claims`"


def test_page_groups_and_links_its_claims() -> None:
    found = {id_: Verdict("holds", "As C001 and [C002](#c002).", ("trial `x`", "[Y](https://y)")) for id_ in CLAIMS}
    lines = pages(found)["chapter.md"].splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[:2] == ["## Section 1", "## Section 2"]
    assert "## Lab 1" in headings
    assert len(headings) == len(set(headings))
    assert lines[6].startswith("142 claims: <span")
    assert "As [C001](chapter.md#c001) and [C002](#c002)." in lines
    assert "Settled with small models: trial `x`. To read: [Y](https://y)." in lines


def test_claims_are_valid_markdown() -> None:
    for one in CLAIMS.values():
        assert_readable(one.text)


def assert_readable(text: str) -> None:
    """No HTML outside of backticks; emphasis and formulas are closed."""
    plain = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"<[/a-zA-Z]", plain), text
    assert plain.count("$") % 2 == 0, text
    assert len(re.findall(r"(?<!\\)\*", re.sub(r"\$[^$]*\$", "", plain))) % 2 == 0, text
    assert "\n" not in text, text


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_quick_trial_has_the_structure_of_its_result(name: str) -> None:
    """A quick run has the same nested names as the committed result."""
    committed = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    del committed["made"]
    start = time.process_time()
    quick = json.loads(json.dumps(importlib.import_module(f"qkv.ledger.trials.{name}").run(quick=True)))
    assert time.process_time() - start < 10  # 3 s on a quiet machine
    assert_same_structure(quick, committed, name)


def assert_same_structure(quick: object, committed: object, at: str) -> None:
    """Both have the same nested names; the quick run may have fewer numeric names (seeds, steps) and list entries."""
    if isinstance(quick, dict) and isinstance(committed, dict):
        extra, missing = set(quick) - set(committed), set(committed) - set(quick)
        assert not extra, f"{at}: the committed result lacks {sorted(extra)}"
        assert not missing or (quick and all(x.isdigit() for x in committed)), (
            f"{at}: the quick run lacks {sorted(missing)}"
        )
        for key, value in quick.items():
            assert_same_structure(value, committed[key], f"{at}, {key}")
    elif isinstance(quick, list) and isinstance(committed, list):
        assert 0 < len(quick) <= len(committed), f"{at}: {len(quick)} entries, committed {len(committed)}"
        for i, (one, other) in enumerate(zip(quick, committed, strict=False)):
            assert_same_structure(one, other, f"{at}, {i}")
    else:
        known = {type(x) for x in (quick, committed)} - {type(None)}  # None: never reached, or NaN
        assert known <= {int, float} or len(known) == 1, f"{at}: {quick!r}, committed {committed!r}"


def test_quick_run_may_have_fewer_seeds_but_no_other_names() -> None:
    committed = {"a": {"0": {"x": 1.0}, "1": {"x": 2.0}}, "curve": [[1, None], [2, 0.5]]}
    assert_same_structure({"a": {"1": {"x": 3}}, "curve": [[1, 0.25]]}, committed, "it")
    for other, said in (
        ({"a": {"1": {"x": 3}}}, "lacks .'curve'"),
        ({"a": {"0": {"y": 3}}, "curve": [[1, 0.25]]}, "it, a, 0: the committed result lacks"),
        ({"a": {}, "curve": [[1, 0.25]]}, "it, a: the quick run lacks"),
        ({"a": {"0": {"x": "3"}}, "curve": [[1, 0.25]]}, "it, a, 0, x: '3', committed 1.0"),
    ):
        with pytest.raises(AssertionError, match=said):
            assert_same_structure(other, committed, "it")
