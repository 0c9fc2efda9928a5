"""The ledger of claims: every check still finds what its page says, and every claim is there."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from itertools import zip_longest
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
    assert_readable(verdict.text)


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
    """Everything but the verdicts' texts, whose numbers may differ in the last digit from machine to machine."""

    def kept(text: str) -> list[str]:
        """Headings, claims with their verdicts, counts, and code; the errors by id, which by what settled them."""
        lines = text.splitlines()
        there = [x for x in lines if x.startswith(("## ", "**C", "> ", "def ", "    ", "| ")) or " claims: <" in x]
        return there + sorted(x for x in lines if x.startswith("- [C"))

    stand_in = {id_: Verdict(SAID[id_], "…") for id_ in CLAIMS}
    for name, text in pages(stand_in).items():
        there = kept((PAGES / name).read_text(encoding="utf-8"))
        differ = [pair for pair in zip_longest(kept(text), there) if pair[0] != pair[1]]
        assert not differ, f"docs/claims/{name}: expected {differ[0][0]}, found {differ[0][1]}; run `make claims`"


def test_a_page_groups_its_claims_and_links_them() -> None:
    found = {id_: Verdict("holds", "As C001 and [C002](#c002).", ("trial `x`", "[Y](https://y)")) for id_ in CLAIMS}
    lines = pages(found)["chapter.md"].splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[:2] == ["## Section 1", "## Section 2"]
    assert "## Lab 1" in headings
    assert len(headings) == len(set(headings))
    assert lines[6].startswith("142 claims: <span")
    assert "As [C001](chapter.md#c001) and [C002](#c002)." in lines
    assert "Settled with small models: trial `x`. To read: [Y](https://y)." in lines


@pytest.mark.parametrize("id_", sorted(CLAIMS))
def test_a_claim_is_readable_markdown(id_: str) -> None:
    assert_readable(CLAIMS[id_].text)


def assert_readable(text: str) -> None:
    """Nothing looks like HTML outside backticks, emphasis and formulas are closed."""
    plain = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"<[/a-zA-Z]", plain), text
    assert plain.count("$") % 2 == 0, text
    assert len(re.findall(r"(?<!\\)\*", re.sub(r"\$[^$]*\$", "", plain))) % 2 == 0, text
    assert "\n" not in text, text


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_trial_runs(name: str) -> None:
    """A few steps give what the kept result has, by the same names all the way down."""
    kept = json.loads((ROOT / "ledger" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    del kept["made"]
    start = time.process_time()
    quick = json.loads(json.dumps(importlib.import_module(f"ledger.trials.{name}").run(quick=True)))
    assert time.process_time() - start < 10  # 3 s on a quiet machine
    assert_alike(quick, kept, name)


def assert_alike(quick: object, kept: object, at: str) -> None:
    """Of names that are numbers (seeds, steps), and of the entries of a list, the quick run may have fewer."""
    if isinstance(quick, dict) and isinstance(kept, dict):
        extra, missing = set(quick) - set(kept), set(kept) - set(quick)
        assert not extra, f"{at}: the kept result lacks {sorted(extra)}"
        assert not missing or (quick and all(x.isdigit() for x in kept)), f"{at}: the quick run lacks {sorted(missing)}"
        for key, value in quick.items():
            assert_alike(value, kept[key], f"{at}, {key}")
    elif isinstance(quick, list) and isinstance(kept, list):
        assert 0 < len(quick) <= len(kept), f"{at}: {len(quick)} entries, kept {len(kept)}"
        for i, (one, other) in enumerate(zip(quick, kept, strict=False)):
            assert_alike(one, other, f"{at}, {i}")
    else:
        known = {type(x) for x in (quick, kept)} - {type(None)}  # None: never reached, or no number
        assert known <= {int, float} or len(known) == 1, f"{at}: {quick!r}, kept {kept!r}"


def test_a_quick_run_may_have_fewer_seeds_and_no_other_names() -> None:
    kept = {"a": {"0": {"x": 1.0}, "1": {"x": 2.0}}, "curve": [[1, None], [2, 0.5]]}
    assert_alike({"a": {"1": {"x": 3}}, "curve": [[1, 0.25]]}, kept, "it")
    for other, said in (
        ({"a": {"1": {"x": 3}}}, "lacks .'curve'"),
        ({"a": {"0": {"y": 3}}, "curve": [[1, 0.25]]}, "it, a, 0: the kept result lacks"),
        ({"a": {}, "curve": [[1, 0.25]]}, "it, a: the quick run lacks"),
        ({"a": {"0": {"x": "3"}}, "curve": [[1, 0.25]]}, "it, a, 0, x: '3', kept 1.0"),
    ):
        with pytest.raises(AssertionError, match=said):
            assert_alike(other, kept, "it")
