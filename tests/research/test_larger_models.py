"""The page that puts published findings about sinks beside our verdicts is up to date and complete."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import research.sinks
from qkv_lab.experiments.evidence import Holds
from research.claims import CLAIMS
from research.claims.claim import KINDS
from research.claims.settled import load

DOCS = Path(__file__).parents[2] / "docs"
SAID = {"holds", "does not hold", "contested", "not tested"}


@pytest.fixture(scope="module")
def made() -> Any:
    spec = importlib.util.spec_from_file_location("make_larger", DOCS / "make_larger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_larger_models_is_up_to_date_with_a_word_for_each_outcome(made: Any) -> None:
    assert set(made.WORDS) >= {*get_args(Holds), *KINDS}
    assert made.page() == (DOCS / "larger-models.md").read_text(encoding="utf-8"), "run docs/make_larger.py"


def test_facts_name_known_claims_and_every_paper(made: Any) -> None:
    load()
    facts = made.FACTS
    findings = [finding for section in facts["sections"] for finding in section["findings"]]
    said: dict[str, str] = {}
    for finding in findings:
        for id_, what in finding["claims"].items():
            assert said.setdefault(id_, what) == what, f"{id_} means something else in another finding"
        assert set(finding) == {"found", "models", "claims", "beyond"}, finding
        assert set(finding["claims"].values()) <= SAID, finding["claims"]
        assert {CLAIMS[id_].source for id_ in finding["claims"]} <= {"chapter"}, "links lead to the chapter's page"
    text = " ".join(str(part) for part in (facts["sections"], facts["others"]))
    assert set(re.findall(r"\{(\w+)\}", text)) == set(facts["papers"])
    arguments = {link for _, link in facts["papers"].values()}
    assert len(arguments) == len(facts["papers"]), "two papers with one link"


def test_entries_that_agree_are_one_and_others_are_named(made: Any) -> None:
    toys = [
        {"name": name, "verdicts": [{"claim": f"C06{i}", "holds": h} for i, h in enumerate(("holds", other))]}
        for name, other in (("a", "holds"), ("b", "cannot be seen here"))
    ]
    found = made.toy_verdicts(toys)
    assert found == {"C060": {"toy": "holds"}, "C061": {"toy (a)": "holds", "toy (b)": "not seen"}}
    told = (("C061", 64, "holds"), ("C061", 512, "undecided"), ("C068", 64, "holds"), ("C068", 512, "holds"))
    verdicts = [{"claim": claim, "tokens": n, "holds": h} for claim, n, h in told]
    found = made.study_verdicts("MiniLM", {"verdicts": verdicts})
    assert found == {"C061": {"MiniLM at 64": "holds", "MiniLM at 512": "undecided"}, "C068": {"MiniLM": "holds"}}


def test_page_follows_a_verdict_that_changes(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    studies = {name: copy.deepcopy(research.sinks.result(name)) for name in ("qkv-mini", "minilm")}
    for verdict in studies["minilm"]["verdicts"]:
        if verdict["claim"] == "C068":
            verdict["holds"] = "does not hold"
    monkeypatch.setattr(made.research.sinks, "result", studies.__getitem__)
    page = made.page()
    rows = [line for line in page.splitlines() if re.search(r"\(claims/chapter.md#c068\) \*\*", line)]
    assert rows
    assert all(re.search(r"\*\*does not hold\*\*: [^*<|]*MiniLM", row) for row in rows), rows
    different = page.split("## Where ours differ")[1]
    assert re.search(r"#c068\) .*\| holds \| does not hold: .*MiniLM", different)
