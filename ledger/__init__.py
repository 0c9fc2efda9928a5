"""The ledger of claims: every claim of the five sources, with the check that settles it.

A check is a function that computes; its verdict is what it computed, and a check whose condition no longer holds stops
the making of the page. `python -m ledger` runs all checks and writes docs/claims; `python -m ledger C014` runs one and
prints it; `python -m ledger.trials NAME` trains the small models behind a verdict again.
"""

from ledger.claim import CLAIMS, Claim, Drifted, Verdict, claim
from ledger.settle import cited, experiment, false, holds, only_when, trial, unseen

__all__ = [
    "CLAIMS",
    "Claim",
    "Drifted",
    "Verdict",
    "cited",
    "claim",
    "experiment",
    "false",
    "holds",
    "only_when",
    "trial",
    "unseen",
]
