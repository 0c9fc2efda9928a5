"""Functions that make verdicts. All except `cited` and `unseen` need a condition that the check computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkv.lab.experiments.estimate import SHIPPED
from qkv.ledger.claim import Drifted, Verdict

ROOT = Path(__file__).parents[3]
"""The checkout, whose benchmarks/results some checks read."""
RESULTS = Path(__file__).parent / "results"
KIND_OF = {"holds": "holds", "does not hold": "false", "cannot be seen here": "unseen"}


def _verdict(condition: bool, kind: str, text: str, by: tuple[str, ...]) -> Verdict:
    if not condition:
        raise Drifted(f"the check no longer finds that: {text}")
    return Verdict(kind, text, by)


def holds(condition: bool, text: str, *by: str) -> Verdict:
    """The claim holds; `text` states the numbers."""
    return _verdict(bool(condition), "holds", text, by)


def false(condition: bool, text: str, *by: str) -> Verdict:
    """The claim is false; `condition` is the computed contradiction, `text` the correct value and the likely reason."""
    return _verdict(bool(condition), "false", text, by)


def only_when(condition: bool, text: str, *by: str) -> Verdict:
    """The claim holds only under a condition that it does not state; `condition` tests it with and without that."""
    return _verdict(bool(condition), "only when", text, by)


def unseen(text: str, *by: str, unless: bool = False) -> Verdict:
    """The claim cannot be decided here; `text` says why, and what would decide it. Raises `Drifted` if `unless`."""
    if unless:
        raise Drifted(f"the claim can be decided now, but the check says: {text}")
    return Verdict("unseen", text, by)


def cited(kind: str, text: str, *links: str) -> Verdict:
    """A verdict on a fact about publications, which needs no computation; `links` are the sources."""
    if not links or not all("](http" in link for link in links):
        raise Drifted("a cited verdict needs Markdown links")
    return Verdict(kind, text, links)


def experiment(id_: str, name: str, wording: str | None = None) -> Verdict:
    """The computed verdict of `qkv experiment NAME` on a claim, from the results that come with the package.

    If several experiments cover a claim, the check calls this for each and combines the verdicts.

    Args:
        id_: the number of the claim.
        name: the name of the experiment.
        wording: a sentence to put before the experiment's own text, or None.
    """
    result: dict[str, Any] = json.loads((SHIPPED / f"{name}.json").read_text(encoding="utf-8"))
    (verdict,) = [v for v in result["verdicts"] if v["claim"] == id_]
    text = (verdict["text"] if wording is None else f"{wording} {verdict['text']}").replace("<s>", "`<s>`")
    return Verdict(KIND_OF[verdict["holds"]], text, (f"[experiment `{name}`](../experiments/README.md#{name})",))


def trial(name: str) -> dict[str, Any]:
    """The results of a trial, from results/NAME.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
