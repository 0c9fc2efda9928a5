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


def test_page_of_larger_models_is_up_to_date(made: Any) -> None:
    assert made.page() == (DOCS / "larger-models.md").read_text(encoding="utf-8"), "run docs/make_larger.py"


def test_every_outcome_of_an_experiment_and_of_the_ledger_has_a_word(made: Any) -> None:
    assert set(made.WORDS) >= {*get_args(Holds), *KINDS}


def test_facts_name_known_claims_and_every_paper(made: Any) -> None:
    load()
    facts = made.FACTS
    findings = [finding for section in facts["sections"] for finding in section["findings"]]
    for finding in findings:
        assert set(finding) == {"found", "models", "claims", "beyond"}, finding
        assert set(finding["claims"].values()) <= SAID, finding["claims"]
        assert {CLAIMS[id_].source for id_ in finding["claims"]} <= {"chapter"}, "links lead to the chapter's page"
    text = " ".join(str(part) for part in (facts["sections"], facts["others"]))
    assert set(re.findall(r"\{(\w+)\}", text)) == set(facts["papers"])
    arguments = {link for _, link in facts["papers"].values()}
    assert len(arguments) == len(facts["papers"]), "two papers with one link"


def test_a_claim_means_the_same_in_every_finding(made: Any) -> None:
    said: dict[str, str] = {}
    for section in made.FACTS["sections"]:
        for finding in section["findings"]:
            for id_, what in finding["claims"].items():
                assert said.setdefault(id_, what) == what, id_


def test_toy_experiments_that_agree_are_one_entry_and_others_are_named(made: Any) -> None:
    def result(name: str, *holds: str) -> dict[str, Any]:
        verdicts = [{"claim": f"C06{i}", "holds": h} for i, h in enumerate(holds)]
        return {"name": name, "verdicts": verdicts}

    found = made.toy_verdicts([result("a", "holds", "holds"), result("b", "holds", "cannot be seen here")])
    assert found == {"C060": {"toy": "holds"}, "C061": {"toy (a)": "holds", "toy (b)": "not seen"}}


def test_verdict_on_a_model_names_the_length_only_if_it_matters(made: Any) -> None:
    verdicts = [
        {"claim": "C061", "tokens": 64, "holds": "holds"},
        {"claim": "C061", "tokens": 512, "holds": "undecided"},
        {"claim": "C068", "tokens": 64, "holds": "holds"},
        {"claim": "C068", "tokens": 512, "holds": "holds"},
    ]
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
