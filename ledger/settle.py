"""The ways in which a claim is settled. Each verdict but `cited` and `unseen` needs a condition that was computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ledger.claim import Drifted, Verdict

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "docs" / "experiments"
RESULTS = Path(__file__).parent / "results"
SAID = {"holds": "holds", "does not hold": "false", "cannot be seen here": "unseen"}


def _found(condition: bool, kind: str, text: str, by: tuple[str, ...]) -> Verdict:
    if not condition:
        raise Drifted(f"the check no longer finds that: {text}")
    return Verdict(kind, text, by)


def holds(condition: bool, text: str, *by: str) -> Verdict:
    """The claim holds; `text` has the numbers that show it."""
    return _found(bool(condition), "holds", text, by)


def false(condition: bool, text: str, *by: str) -> Verdict:
    """The claim is wrong; `condition` is what contradicts it, `text` the right value and, kindly, why."""
    return _found(bool(condition), "false", text, by)


def only_when(condition: bool, text: str, *by: str) -> Verdict:
    """The claim holds under a condition that it leaves out; `condition` covers both sides of it."""
    return _found(bool(condition), "only when", text, by)


def unseen(text: str, *by: str, unless: bool = False) -> Verdict:
    """What is at hand here cannot decide it; `text` says why, and what would. `unless`: something was seen."""
    if unless:
        raise Drifted(f"something can be seen where the check says: {text}")
    return Verdict("unseen", text, by)


def cited(kind: str, text: str, *links: str) -> Verdict:
    """A fact about publications: there is nothing to compute, `links` are where to read it."""
    if not links or not all("](http" in link for link in links):
        raise Drifted("a cited verdict needs Markdown links")
    return Verdict(kind, text, links)


def experiment(id_: str, name: str, wording: str | None = None) -> Verdict:
    """The computed verdict of `qkv experiment NAME` on a claim, from docs/experiments/NAME.json.

    Where several experiments speak, call this for each and put them together in the check.

    Args:
        id_: the claim's.
        name: of the experiment.
        wording: a sentence that comes before the experiment's own text, if it needs one.
    """
    result: dict[str, Any] = json.loads((EXPERIMENTS / f"{name}.json").read_text(encoding="utf-8"))
    (said,) = [v for v in result["verdicts"] if v["claim"] == id_]
    text = (said["text"] if wording is None else f"{wording} {said['text']}").replace("<s>", "`<s>`")
    return Verdict(SAID[said["holds"]], text, (f"[experiment `{name}`](../experiments/README.md#{name})",))


def trial(name: str) -> dict[str, Any]:
    """The numbers of a trial, as `python -m ledger.trials NAME` left them in ledger/results/NAME.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
