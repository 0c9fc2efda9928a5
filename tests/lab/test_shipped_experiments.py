"""The results of experiments in the package: complete, by the present criteria, and the same as on the page."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from qkv_lab.experiments.base import Outcome, Results, means_of
from qkv_lab.experiments.page import table
from qkv_lab.experiments.record import load
from qkv_lab.experiments.registry import BUILT_IN, experiment
from qkv_lab.experiments.run import SHIPPED

DOCS = Path(__file__).parents[2] / "docs" / "experiments"


@pytest.mark.parametrize("name", BUILT_IN)
def test_shipped_result_is_by_the_present_criteria(name: str) -> None:
    """Criteria are dated before the runs; for another result run `make experiments`."""
    made, found = experiment(name), load(SHIPPED / f"{name}.json")
    verdicts = {v["claim"]: v for v in found["verdicts"]}
    assert set(verdicts) == set(made.claims)
    assert not found["quick"]
    assert max(len(x["results"]) for x in found["variants"].values()) == made.seeds
    for criterion in made.criteria:
        present = {key: value for key, value in asdict(criterion).items() if value is not None}
        assert verdicts[criterion.claim]["criterion"] == present
        assert criterion.dated <= found["created"][:10]
    results = Results({v: [Outcome(**row) for row in x["results"]] for v, x in found["variants"].items()})
    for entry in re.findall(r"{([^}]+)}", " ".join(made.remarks.values())):
        assert means_of(results, entry), f"a remark names {entry}, which no run has"


def test_page_of_experiments_is_up_to_date() -> None:
    assert (DOCS / "README.md").read_text(encoding="utf-8") == table(SHIPPED)


def test_every_experiment_has_a_figure() -> None:
    assert {file.stem for file in DOCS.glob("*.png")} == set(BUILT_IN)
