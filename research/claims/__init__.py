"""The ledger of claims: every claim of the five sources, with the code that checks it.

A check is a function that computes a verdict. If the condition of a verdict no longer holds, the check raises `Drifted`
and the pages are not written. `qkv claims` runs all checks, and with the number of a claim prints its verdict.
The experiments of `qkv.lab` train the models behind a verdict: `qkv experiment`.
"""

from research.claims.claim import CLAIMS, Claim, Drifted, Verdict, claim
from research.claims.settle import cited, experiment, false, holds, only_when, together, unseen

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
    "together",
    "unseen",
]
