"""The page that puts published findings about sinks beside our verdicts is up to date and complete."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest

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
