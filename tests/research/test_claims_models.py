"""Claims about sinks on toy and trained models: the common verdict, and what is said where models disagree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from research.claims import Verdict, models
from research.claims.models import everywhere
from research.claims.results import result, results_in
from research.claims.settle import common

INTERVAL = {"condition": "", "n": 12, "mean": 0.2, "low": 0.1, "high": 0.3, "bound": 0.5, "above": False}


def studied(outcomes: Mapping[int, str]) -> dict[str, Any]:
    """A study whose verdicts on C068 have these outcomes, by the length of the texts."""
    criterion = {"bound": 0.5, "above": False}
    return {
        "verdicts": [
            {"claim": "C068", "tokens": n, "holds": outcome, "criterion": criterion, "intervals": [INTERVAL]}
            for n, outcome in outcomes.items()
        ]
    }


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The verdict on C068 from made-up outcomes of the experiment and of two studies."""

    def judge(toy: str, mini: Mapping[int, str], minilm: Mapping[int, str]) -> Verdict:
        found = result("mechanism")
        found["verdicts"] = [{"claim": "C068", "holds": toy, "text": "It is drained."}]
        (tmp_path / "mechanism.json").write_text(json.dumps(found), encoding="utf-8")
        studies = {"qkv-mini": studied(mini), "minilm": studied(minilm), "smollm2": studied({})}
        monkeypatch.setattr(models, "study_of", studies.__getitem__)
        with results_in(tmp_path):
            return everywhere("C068")

    return judge


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["holds", "holds"], "holds"),
        (["false", "unseen", "undecided"], "false"),
        (["holds", "false", "undecided"], "only when"),
        (["only when", "holds"], "only when"),
        (["undecided", "unseen"], "undecided"),
        (["unseen"], "unseen"),
    ],
)
def test_models_that_do_not_decide_have_no_influence(kinds: list[str], expected: str) -> None:
    assert common(kinds) == common(reversed(kinds)) == expected


@pytest.mark.parametrize(
    ("toy", "mini", "minilm", "kind", "said"),
    [
        ("holds", {64: "holds", 512: "not seen at this scale"}, {64: "holds", 512: "holds"}, "holds",
         "holds on toy models (`mechanism`), qkv-mini (64 tokens) and MiniLM (64 and 512 tokens)"),
        ("does not hold", {64: "holds"}, {64: "holds", 512: "undecided"}, "only when",
         "does not hold on toy models (`mechanism`); it is undecided on MiniLM (512 tokens)"),
        ("holds", {64: "holds"}, {64: "does not hold"}, "only when", "does not hold on MiniLM (64 tokens)"),
    ],
)  # fmt: skip
def test_common_verdict_names_all_models_and_tells_who_disagrees(
    judged: Any, toy: str, mini: Mapping[int, str], minilm: Mapping[int, str], kind: str, said: str
) -> None:
    verdict = judged(toy, mini, minilm)
    assert verdict.kind == kind
    assert said in verdict.text
    numbers = [finding.number for finding in verdict.findings]
    assert numbers == ["", *(len(mini) + len(minilm)) * ["0.20 (0.10 to 0.30); 12 texts"]]
    assert verdict.by[0] == "[experiment `mechanism`](../experiments/README.md#mechanism)"
