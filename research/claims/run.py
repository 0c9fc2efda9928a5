"""`check` runs the checks of claims."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qkv._packages import require
from qkv._progress import Step
from research.claims.claim import CLAIMS, Claim, Drifted, Verdict, find
from research.claims.results import MissingResult
from research.claims.settled import load

NEEDED = ("transformers",)
"""Optional packages that checks import."""


@dataclass(frozen=True)
class Checked:
    """What the check of a claim found."""

    claim: Claim
    verdict: Verdict | None
    """None if there is an error."""
    error: Drifted | MissingResult | None
    """`Drifted` if what is computed contradicts the verdict, `MissingResult` if the check has nothing to read."""
    seconds: float

    @property
    def drifted(self) -> bool:
        """True if what the check computes contradicts its verdict."""
        return isinstance(self.error, Drifted)


def check(ids: Iterable[str] | None = None, *, progress: Step | None = None) -> dict[str, Checked]:
    """Run the checks of claims, on one thread.

    Args:
        ids: numbers of claims; all if None.
        progress: called after each check, with its number as the note.

    Raises:
        InputError: for an unknown claim, before the first check runs, or if a package that checks need is missing.

    >>> found = check(["C014"])["C014"]
    >>> found.verdict.kind, found.error
    ('holds', None)
    """
    require("the check of a claim", *NEEDED)
    load()
    claims = [find(id_) for id_ in (sorted(CLAIMS) if ids is None else ids)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {}
        for one in claims:
            found[one.id] = _checked(one)
            if progress is not None:
                progress(1, note=one.id)
        return found
    finally:
        torch.set_num_threads(threads)


def _checked(one: Claim) -> Checked:
    start = time.perf_counter()
    verdict, error = None, None
    try:
        verdict = one.check()
    except (Drifted, MissingResult) as raised:
        error = raised
    return Checked(one, verdict, error, time.perf_counter() - start)
