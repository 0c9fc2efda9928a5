"""`check` runs the checks of claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from qkv._packages import require
from qkv._progress import Step
from qkv_lab.cli.claims import numbers
from research.claims.claim import CLAIMS, Claim, Drifted
from research.claims.evidence import evidence_of
from research.claims.results import MissingResult
from research.claims.settled import load

NEEDED = ("transformers",)
"""Optional packages that checks import."""


def check(ids: Iterable[str] | None = None, *, progress: Step | None = None) -> list[dict[str, Any]]:
    """Run the checks of claims, on one thread.

    Args:
        ids: numbers of claims; all if None.
        progress: called after each check, with its number as the note.

    Returns:
        What claims.json says of each claim. Without a verdict, its ``state`` is "drifted" if what is computed
        contradicts it, and "not checked" if there is no result to read.

    Raises:
        InputError: for an unknown claim, before the first check runs, or if a package that checks need is missing.

    >>> check(["C014"])[0]["verdict"]
    'holds'
    """
    require("the check of a claim", *NEEDED)
    load()
    chosen = sorted(CLAIMS) if ids is None else numbers(ids, CLAIMS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = []
        for id_ in chosen:
            found.append(_entry(CLAIMS[id_]))
            if progress is not None:
                progress(1, note=id_)
        return found
    finally:
        torch.set_num_threads(threads)


def _entry(one: Claim) -> dict[str, Any]:
    stated = {"claim": one.id, "source": one.source, "section": one.section, "text": one.text}
    try:
        verdict = one.check()
    except (Drifted, MissingResult) as error:
        state = "drifted" if isinstance(error, Drifted) else "not checked"
        return {**stated, "verdict": None, "because": str(error), "state": state}
    return {
        **stated,
        "verdict": verdict.kind,
        "because": verdict.text,
        "links": list(verdict.by),
        "models": [asdict(finding) for finding in verdict.findings],
        "evidence": [{"summary": str(x), **asdict(x)} for x in evidence_of(one.id, verdict)],
    }
